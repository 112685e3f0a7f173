"""Tests for pool/router.py."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


LOADS = st.lists(
    st.builds(
        WorkerLoad,
        name=st.uuids().map(str),
        is_ready=st.booleans(),
        num_requests=st.integers(0, 6),
        num_tokens=st.integers(0, 5000),
        num_cached_tokens=st.integers(0, 3000),
    ),
    max_size=6,
)


@given(LOADS)
def test_nobody_else_would_be_better(loads):
    """The chosen one is able, and no able one has less to do, what it has read before taken off."""
    able = [load for load in loads if load.is_ready and load.num_requests < 4]
    name = choose_worker(loads, max_in_flight=4)
    if not able:
        assert name is None
        return
    chosen = next(load for load in loads if load.name == name)
    assert chosen in able
    assert all(
        chosen.num_tokens - chosen.num_cached_tokens <= load.num_tokens - load.num_cached_tokens
        for load in able
    )


@given(LOADS, st.integers(1, 1000))
def test_a_longer_cached_prefix_never_drives_a_request_away(loads, more):
    """Who was chosen is chosen still if it has read more of the prompt."""
    name = choose_worker(loads, max_in_flight=4)
    better = [
        replace(load, num_cached_tokens=load.num_cached_tokens + more) if load.name == name else load
        for load in loads
    ]
    assert choose_worker(better, max_in_flight=4) == name


def test_a_conversation_goes_back_while_that_is_worth_more():
    """A prefix is worth as many tokens of other work as it has itself."""
    for num_tokens, chosen in ((900, "b"), (1100, "a")):
        loads = [WorkerLoad("a", True, 0, 0), WorkerLoad("b", True, 1, num_tokens, 1000)]
        assert choose_worker(loads, max_in_flight=4) == chosen
