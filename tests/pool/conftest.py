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

    def there() -> set[str]:
        threads = [
            f"{t.name} {t.ident}" for t in threading.enumerate() if t.name.startswith(("read ", "write "))
        ]
        return {*threads, *(f"{child.name} {child.pid}" for child in multiprocessing.active_children())}

    before = there()
    yield
    deadline_s = time.monotonic() + 5
    while there() - before and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert there() - before == set()
