"""Tests for pool/watchdog.py."""

import pytest

from headrace.pool.watchdog import Watchdog


def looks(watchdog: Watchdog, from_s: float, until_s: float, *, is_loading: bool = False) -> float | None:
    """Look every second; return when it was found to hang."""
    now_s = from_s
    while now_s < until_s:
        now_s += 1
        if watchdog.is_hanging(now_s, is_loading=is_loading):
            return now_s
    return None


def started() -> Watchdog:
    watchdog = Watchdog(hang_timeout_s=30, load_timeout_s=600, interval_s=1)
    watchdog.start(100)
    return watchdog


@pytest.mark.parametrize(("is_loading", "found_s"), [(False, 131), (True, 701)])
def test_silence_is_a_hang(is_loading: bool, found_s: float):
    """After its limit, which is longer while loading."""
    assert looks(started(), 100, 1000, is_loading=is_loading) == found_s


def test_a_sign_of_life_counts_from_when_it_was_given():
    """Old news is no news."""
    watchdog = started()
    assert looks(watchdog, 100, 125) is None
    watchdog.note_sign(110)
    watchdog.note_sign(105)
    assert looks(watchdog, 125, 200) == 141


def test_time_in_which_nobody_looked_does_not_count():
    """A process that was held up itself kills nobody for it."""
    watchdog = started()
    assert looks(watchdog, 100, 110) is None
    assert looks(watchdog, 500, 519) is None
    assert looks(watchdog, 519, 600) == 522
