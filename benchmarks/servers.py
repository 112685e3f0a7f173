"""Servers for the benchmarks: each starts as a user would start it, and is stopped again."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

READY_TIMEOUT_S = 300


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(
    command: list[str], ready_url: str, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until its ready page answers 200, and stop it at the end."""
    process = subprocess.Popen(
        command, env={**os.environ, **(env or {})}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_ready(process, ready_url)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def running_socket(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until somebody listens on its port, and stop it at the end."""
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} exited with {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{process.args!r} was not ready within {READY_TIMEOUT_S} s")


@contextmanager
def headrace_process(*flags: str) -> Iterator[tuple[str, int]]:
    """Run `headrace serve`; yield its WebSocket URL and the id of the gateway's process."""
    port = free_port()
    command = [sys.executable, "-m", "headrace", "serve", "--port", str(port), *flags]
    with running(command, f"http://127.0.0.1:{port}/readyz") as process:
        yield f"ws://127.0.0.1:{port}/v1/stream", process.pid


@contextmanager
def headrace(*flags: str) -> Iterator[str]:
    """Run `headrace serve`; yield its WebSocket URL."""
    with headrace_process(*flags) as (url, _):
        yield url


def _processes() -> list[tuple[int, int, int, str]]:
    """Return the id, the parent's id, the resident KiB and the command of every process."""
    command = ["ps", "-o", "pid=,ppid=,rss=,args=", "-A"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = (line.split(None, 3) for line in listing.stdout.splitlines())
    return [(int(row[0]), int(row[1]), int(row[2]), row[3]) for row in rows if len(row) == 4]


def engine_pids(gateway_pid: int) -> list[int]:
    """Return the engine processes of a gateway's process. Python's resource tracker is a child as well."""
    return [
        pid
        for pid, parent, _, command in _processes()
        if parent == gateway_pid and "resource_tracker" not in command and "spawn_main" in command
    ]


def resident_bytes(pids: Sequence[int]) -> int:
    """Return the resident memory of processes together; those that are gone have none."""
    return sum(rss << 10 for pid, _, rss, _ in _processes() if pid in pids)


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used (Linux; elsewhere not a number)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def mlx_lm_server(model: Path, env: dict[str, str]) -> Iterator[str]:
    """Run `mlx_lm.server` on a model folder; yield the URL of its chat completions."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port)]
    with running(command, f"http://127.0.0.1:{port}/health", {**env, "HF_HUB_OFFLINE": "1"}):
        yield f"http://127.0.0.1:{port}/v1/chat/completions"


def machine() -> dict[str, object]:
    """Return facts about this machine, for the head of a result."""
    import platform
    from importlib.metadata import version

    return {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("mlx", "mlx-lm", "websockets", "headrace")},
    }


def save(result: object, path: Path | None) -> None:
    """Write a result as JSON, if somebody asked for it."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


class CountingServer:
    """A running `counting_server.py`; ``with CountingServer(token_delay_ms=1.0) as server``."""

    def __init__(self, **options: object) -> None:
        command = [sys.executable, str(Path(__file__).parent / "counting_server.py"), json.dumps(options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = self._line()

    def __enter__(self) -> CountingServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def counters(self) -> dict[str, int]:
        """Return the server's counters."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        result: dict[str, int] = json.loads(self._line())
        return result

    def memory_mib(self) -> dict[str, float]:
        """Return the resident memory of the gateway's process and of its engine processes, in MiB."""
        own = self.process.pid
        gateway, engines = resident_bytes([own]), resident_bytes(engine_pids(own))
        return {"gateway": round(gateway / 2**20, 1), "engines": round(engines / 2**20, 1)}
