"""What the tests of the command line share: a scripted server as a process, and commands as processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

DEADLINE_S = 30.0


@contextmanager
def scripted_server(*flags: str) -> Iterator[str]:
    """Run `headrace serve --engine scripted` on a free port; yield its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", "--engine", "scripted", "--port", "0", *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        yield next(word for word in words if word.startswith("ws://"))
    finally:
        process.kill()
        process.communicate()


def run(*arguments: str, text: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "COLUMNS": "120", **environment},
    )
