"""Lets the tests of this folder import their helpers, and holds them to leave nothing behind."""

import multiprocessing
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail a test that leaves a child process or a channel's thread."""
    yield
    deadline_s = time.monotonic() + 5

    def left() -> list[str]:
        threads = [t.name for t in threading.enumerate() if t.name.startswith(("read ", "write "))]
        return threads + [process.name for process in multiprocessing.active_children()]

    while left() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert left() == []
