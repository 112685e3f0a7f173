"""What `headrace doctor` finds out about the port, and about a server that runs."""

import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from .client import ClientError, connect_blocking
from .doctor_checks import Finding

_ASK_TIMEOUT_S = 2.0
_LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp (net/tcp_states.h)."""


def check_port(host: str, port: int) -> tuple[Finding, bool]:
    """Return whether a server could listen there, and whether a Headrace server already does."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
        return Finding("ok", "port", f"{host}:{port} is free"), False
    except socket.gaierror:
        return Finding(
            "fail", "port", f"{host} is no address", "give --host an address of this machine"
        ), False
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            what = f"{host}:{port} can't be used: {os.strerror(error.errno or 0)}"
            return Finding(
                "fail", "port", what, "choose another --host or --port (ports below 1024 need root)"
            ), False
    by = _holder(port)
    if _is_headrace(host, port):
        return Finding("ok", "port", f"{host}:{port}: a Headrace server runs there{by}"), True
    advice = "end that program, or choose another --port"
    return Finding("fail", "port", f"{host}:{port} is taken{by}", advice), False


def check_server(url: str, token: str | None) -> list[Finding]:
    """Return how a running server is."""
    try:
        with connect_blocking(url, token=token or None) as client:
            latency_ms = 1000 * client.ping()
            models, server = client.models(), client.hello["server"]
    except ClientError as error:
        advice = (
            "give its token in HEADRACE_TOKEN"
            if error.code == "unauthorized"
            else "headrace serve starts one"
        )
        return [Finding("fail", "server", f"{url}: {error.message}", advice)]
    findings = [Finding("ok", "server", f"{url}: {server}, answers in {latency_ms:.1f} ms")]
    for model in models:
        text = f"{model['name']} is {model['state']}"
        if model["state"] == "ready":
            findings.append(Finding("ok", "server", text))
        elif model["state"] == "failed":
            findings.append(
                Finding("fail", "server", text, "the server's log says why; headrace doctor --model looks")
            )
        else:
            findings.append(Finding("warn", "server", text, "its requests wait until it is ready"))
    return findings


def _is_headrace(host: str, port: int) -> bool:
    """Ask the program at a port for its health, as a Headrace server answers it."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    name = f"[{target}]" if ":" in target else target
    request = f"GET /healthz HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n"
    try:
        with socket.create_connection((target, port), timeout=_ASK_TIMEOUT_S) as connection:
            connection.sendall(request.encode())
            answer = b""
            while len(answer) < 4096 and (data := connection.recv(4096)):
                answer += data
    except OSError:
        return False
    return b" 200 " in answer.partition(b"\r\n")[0] and b"headrace" in answer.lower()


def _holder(port: int) -> str:
    """Return who listens at a port, for a person; nothing where the system does not say."""
    found = _holder_from_proc(port) if sys.platform == "linux" else _holder_from_lsof(port)
    return f" by {found}" if found else ""


def _holder_from_proc(port: int) -> str | None:
    """Find the process by its socket's inode (proc(5)); others' processes cannot be seen without root."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        except OSError:
            continue
        inodes |= {row[9] for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) in wanted for link in (process / "fd").iterdir()):
                command = (
                    (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
                return f"process {process.name} ({_short(command)})"
        except OSError:
            continue
    return "another user's process" if wanted else None


def _holder_from_lsof(port: int) -> str | None:
    try:
        listing = subprocess.run(
            ["lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-Fpc"],
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^p(\d+)\nc(.+)$", listing, re.MULTILINE)
    return f"process {found[1]} ({_short(found[2])})" if found else None


def _short(command: str) -> str:
    return command if len(command) <= 80 else f"{command[:77]}…"
