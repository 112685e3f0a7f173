"""Tests for pool/line.py."""

import random

from hypothesis import given
from hypothesis import strategies as st
from pool_helpers import Recorder, frame

from headrace.pool.line import Line
from headrace.pool.request import Request
from headrace.protocol.frames import RequestId


def make(rid: str, client: str = "", tenant: str = "") -> Request:
    options = frame().options.resolve(model="words", max_tokens=5, temperature=0, seed=1)
    return Request(RequestId(rid), frame(), options, Recorder(), tenant=tenant, accepted_s=0.0, client=client)


def serve_all(line: Line) -> list[str]:
    order = []
    while (request := line.first_fresh) is not None:
        line.serve(request)
        order.append(request.rid)
    return order


def test_clients_take_turns():
    """One of each in turn, each client's own in order, whoever sent how many."""
    line = Line()
    positions = [line.push(make(f"{client}{i}", client)) for client in "aaab" for i in range(1)]
    assert positions == [0, 1, 2, 1]
    assert [request.rid for request in line] == ["a0", "b0", "a0", "a0"]
    assert serve_all(line) == ["a0", "b0", "a0", "a0"]
    assert len(line) == 0


def test_the_same_client_name_of_another_tenant_is_another_client():
    """Names of clients mean something within a tenant only."""
    line = Line()
    for rid, tenant in (("a", "t"), ("b", "t"), ("c", "u")):
        line.push(make(rid, "x", tenant))
    assert serve_all(line) == ["a", "c", "b"]


def test_a_client_that_was_served_goes_behind_those_that_wait():
    """A turn is lost by being served, not by coming back."""
    line = Line()
    for rid, client in (("a0", "a"), ("a1", "a"), ("b0", "b")):
        line.push(make(rid, client))
    assert line.first_fresh is not None
    line.serve(line.first_fresh)
    assert line.push(make("c0", "c")) == 2
    assert serve_all(line) == ["b0", "a1", "c0"]


def test_those_that_lost_their_engine_come_first():
    """Ahead of all others, in the order in which they came back."""
    line = Line()
    line.push(make("a"))
    for rid in ("x", "y"):
        request = make(rid)
        request.is_recovering = True
        line.push(request)
    assert [request.rid for request in line] == ["x", "y", "a"]
    assert (len(line), line.num_fresh, line.num_recovering) == (3, 1, 2)
    assert not line.remove(line.recovering[0])
    assert [request.rid for request in line] == ["y", "a"]


@given(st.lists(st.sampled_from("abcd"), max_size=30), st.randoms(use_true_random=False))
def test_is_served_in_the_order_that_it_tells(clients: list[str], rng: random.Random):
    """Iterating tells the order; a place is told right when it is given; removing keeps the rest in order."""
    line, waiting = Line(), {}
    for index, client in enumerate(clients):
        request = make(f"r{index}", client)
        position = line.push(request)
        waiting[request.rid] = request
        assert [r.rid for r in line].index(request.rid) == position
        if rng.random() < 0.3:
            gone = rng.choice(list(waiting))
            assert line.remove(waiting.pop(gone))
    order = [request.rid for request in line]
    assert sorted(order) == sorted(waiting)
    assert serve_all(line) == order
