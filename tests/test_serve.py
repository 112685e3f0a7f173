"""`headrace serve` as a process: its one line, its errors, its signals."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect, unix_connect

DEADLINE_S = 20.0


class Server:
    """A running `headrace serve --engine scripted`."""

    def __init__(self, *flags: str, **environment: str) -> None:
        command = [sys.executable, "-m", "headrace", "serve", "--engine", "scripted", "--port", "0", *flags]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.ready_line = self.lines.get(timeout=DEADLINE_S)
        self.url = next((word for word in self.ready_line.split() if word.startswith("ws://")), "")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))
        self.lines.put("")

    def children(self) -> list[int]:
        """Return the ids of the server's child processes (Linux and macOS)."""
        listing = subprocess.run(["ps", "-o", "pid=,ppid=", "-A"], capture_output=True, text=True, check=True)
        rows = [line.split() for line in listing.stdout.splitlines()]
        return [int(pid) for pid, parent in rows if int(parent) == self.process.pid]

    def stop(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def server() -> Iterator[Server]:
    """A server whose tokens take 5 ms, and which drains for half a second."""
    server = Server("--scripted-token-delay-ms", "5", "--drain-timeout", "0.5", "--max-in-flight", "64")
    yield server
    server.stop()


def receive_type(client: ClientConnection, kind: str) -> dict[str, Any]:
    """Return the next frame of a type."""
    while (frame := json.loads(client.recv(timeout=DEADLINE_S)))["type"] != kind:
        pass
    return dict(frame)


def start_streams(client: ClientConnection, count: int) -> None:
    """Start endless streams, and wait until they run."""
    for number in range(count):
        frame = {"type": "completion", "id": str(number), "prompt": "x", "max_tokens": 100_000}
        client.send(json.dumps(frame))
    for _ in range(count):
        receive_type(client, "accepted")
    receive_type(client, "delta")


def is_alive(pid: int) -> bool:
    """Return whether a process is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_all_gone(pids: list[int]) -> None:
    """Wait for the end of processes."""
    until_s = time.monotonic() + DEADLINE_S
    while any(is_alive(pid) for pid in pids) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not any(is_alive(pid) for pid in pids)


def serve_and_fail(*flags: str) -> tuple[int, list[str]]:
    """Run a server that must not start; return its exit code and the lines of its stderr."""
    command = [sys.executable, "-m", "headrace", "serve", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.returncode, result.stderr.splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_cancels(server: Server, number: signal.Signals) -> None:
    """Goaway, a `done` for each running stream, 1012, exit 0 in time; no process is left."""
    assert server.ready_line == f"Headrace is ready: {server.url} (model scripted)"
    children = server.children()
    with connect(server.url, proxy=None) as client:
        start_streams(client, 50)
        server.process.send_signal(number)
        started_s = time.monotonic()
        assert receive_type(client, "goaway")["deadline_ms"] == 500
        ended = {}
        while len(ended) < 50:
            done = receive_type(client, "done")
            assert done["id"] not in ended
            ended[done["id"]] = (done["status"], done["reason"])
        assert set(ended.values()) == {("cancelled", "shutdown")}
        with pytest.raises(ConnectionClosed):
            client.recv(timeout=DEADLINE_S)
        assert client.close_code == 1012
    assert server.process.wait(DEADLINE_S) == 0
    assert time.monotonic() - started_s < 0.5 + 2, "the promise is 1 s; a busy machine gets 2"
    assert server.lines.get(timeout=DEADLINE_S) == "", "stdout has one line and no more"
    assert server.process.stderr is not None
    assert "stopping: 50 requests may end within 0.5 s" in server.process.stderr.read()
    assert_all_gone(children)


def test_a_second_signal_means_now() -> None:
    """However long the drain timeout is; the engine process goes too."""
    server = Server("--scripted-token-delay-ms", "5", "--drain-timeout", "600")
    children = server.children()
    try:
        with connect(server.url, proxy=None) as client:
            start_streams(client, 3)
            server.process.terminate()
            receive_type(client, "goaway")
            started_s = time.monotonic()
            server.process.terminate()
            assert server.process.wait(DEADLINE_S) != 0
            assert time.monotonic() - started_s < 2
        assert_all_gone(children)
    finally:
        server.stop()


def test_a_taken_port_is_one_line() -> None:
    """Naming it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, lines = serve_and_fail("--engine", "scripted", "--port", port)
    assert code == 1
    assert lines[-1] == f"headrace: 127.0.0.1:{port} is taken: choose another --port"


def test_a_broken_model_is_one_line() -> None:
    """With what the engine said of it."""
    code, lines = serve_and_fail("--engine", "scripted", "--model", "fault:permanent", "--port", "0")
    assert code == 1
    assert lines[-1] == "headrace: fault:permanent/0: this model never loads: name another"
    assert sum("never loads" in line for line in lines) == 1


def test_bad_flags_are_named(tmp_path: Path) -> None:
    """On the command line and in the file."""
    path = tmp_path / "headrace.toml"
    path.write_text("max-inflight = 4\n")
    for flags, named in ((["--port", "99999"], "--port"), (["--config", str(path)], "max-inflight in")):
        code, (line,) = serve_and_fail(*flags)
        assert code == 2
        assert named in line
    code, lines = serve_and_fail("--no-such-flag")
    assert code == 2
    assert "--no-such-flag" in "".join(lines)


def test_the_token_of_the_environment_is_asked_for() -> None:
    """And not shown anywhere; without one, a host beyond loopback gets a warning."""
    server = Server("--host", "0.0.0.0", HEADRACE_TOKEN="hush-hush")
    url = server.url.replace("0.0.0.0", "127.0.0.1")
    try:
        with connect(url, proxy=None) as client:
            assert json.loads(client.recv(timeout=DEADLINE_S))["code"] == "unauthorized"
        with connect(url, proxy=None, additional_headers={"Authorization": "Bearer hush-hush"}) as client:
            assert json.loads(client.recv(timeout=DEADLINE_S))["type"] == "hello"
        server.process.terminate()
        _, stderr = server.process.communicate(timeout=DEADLINE_S)
        assert "hush" not in stderr
        assert "warning" not in stderr
    finally:
        server.stop()
    server = Server("--host", "0.0.0.0", HEADRACE_TOKEN="")
    server.process.terminate()
    _, stderr = server.process.communicate(timeout=DEADLINE_S)
    assert "warning: 0.0.0.0 is reachable from other machines, and there is no token" in stderr


def test_a_unix_socket_with_a_token_file(tmp_path: Path) -> None:
    """Without TCP; the file is gone afterwards, and no token is on stderr."""
    path, tokens = tmp_path / "s", tmp_path / "tokens.toml"
    tokens.write_text('[[token]]\nname = "alice"\ntoken = "hush-hush"\nmax_in_flight = 1\n')
    server = Server("--no-tcp", "--unix", str(path), "--token-file", str(tokens), "--host", "0.0.0.0")
    try:
        assert f"ws+unix://{path}:/v1/stream" in server.ready_line
        assert path.stat().st_mode & 0o777 == 0o600
        right = {"Authorization": "Bearer hush-hush"}
        for headers, kind in (({}, "error"), ({"Authorization": "Bearer hush"}, "error"), (right, "hello")):
            with unix_connect(str(path), "ws://localhost/v1/stream", additional_headers=headers) as client:
                assert json.loads(client.recv(timeout=DEADLINE_S))["type"] == kind
        server.process.terminate()
        _, stderr = server.process.communicate(timeout=DEADLINE_S)
        assert server.process.returncode == 0
        assert "hush" not in stderr
        assert "warning" not in stderr
        assert not path.exists()
    finally:
        server.stop()


def test_what_it_cannot_listen_on_is_one_line(tmp_path: Path) -> None:
    """A certificate that isn't there, a file that is no socket, a token file with a mistake."""
    taken, tokens = tmp_path / "file", tmp_path / "tokens.toml"
    taken.write_text("mine")
    tokens.write_text('[[token]]\nname = "alice"\ntoken = "hush-hush"\nlimit = 1\n')
    for flags, code, line in (
        (["--tls-cert", "nowhere.pem"], 1, "certificate or key nowhere.pem: No such file or directory"),
        (["--unix", str(taken)], 1, f"cannot listen on --unix {taken}: File exists"),
        (["--token-file", str(tokens)], 2, f"--token-file {tokens}: token.0.limit: there is no such field"),
    ):
        returned, lines = serve_and_fail("--engine", "scripted", "--port", "0", *flags)
        assert (returned, len(lines)) == (code, 1)
        assert line in lines[0]
    assert taken.read_text() == "mine"


def test_version() -> None:
    """One line."""
    result = subprocess.run([sys.executable, "-m", "headrace", "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout.split()[0]) == (0, "headrace")
