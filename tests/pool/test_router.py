"""Tests for pool/router.py."""

import pytest

from headrace.pool.router import WorkerLoad, choose_worker


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ([], None),
        ([("a", False, 0, 0)], None),
        ([("a", True, 4, 0)], None),
        ([("a", True, 0, 0), ("b", True, 0, 0)], "a"),
        ([("a", True, 1, 900), ("b", True, 3, 800)], "b"),
        ([("a", True, 2, 800), ("b", True, 1, 800)], "b"),
        ([("a", False, 0, 0), ("b", True, 3, 9000)], "b"),
        ([("a", True, 4, 10), ("b", True, 3, 9000)], "b"),
    ],
)
def test_chooses_the_worker_with_the_least_to_do(loads, chosen):
    """Ready, with room, fewest tokens, then fewest requests, then the first."""
    assert choose_worker([WorkerLoad(*load) for load in loads], max_in_flight=4) == chosen
