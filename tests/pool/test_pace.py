"""Tests for pool/pace.py."""

from headrace.pool.pace import RETRY_AFTER_MAX_MS, RETRY_AFTER_MIN_MS, RETRY_AFTER_UNKNOWN_MS, Pace


def test_a_place_is_free_when_the_next_request_ends():
    """The more run at a time, the sooner one ends; within bounds."""
    pace = Pace()
    assert pace.retry_after_ms(4, is_ready=True, loads_s=[]) == RETRY_AFTER_UNKNOWN_MS
    pace.note_run(8.0)
    assert pace.retry_after_ms(4, is_ready=True, loads_s=[]) == 2000
    assert pace.retry_after_ms(0, is_ready=True, loads_s=[]) == 8000
    assert pace.retry_after_ms(1000, is_ready=True, loads_s=[]) == RETRY_AFTER_MIN_MS
    pace.note_run(3.0)
    assert pace.retry_after_ms(1, is_ready=True, loads_s=[]) == 7000


def test_a_model_that_is_being_loaded_takes_as_long_as_last_time():
    """Nothing ends before it is there."""
    pace = Pace()
    assert pace.retry_after_ms(0, is_ready=False, loads_s=[]) == RETRY_AFTER_UNKNOWN_MS
    assert pace.retry_after_ms(0, is_ready=False, loads_s=[12.5, 3]) == 12_500
    assert pace.retry_after_ms(0, is_ready=False, loads_s=[600]) == RETRY_AFTER_MAX_MS
