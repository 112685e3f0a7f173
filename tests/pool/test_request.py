"""Tests for pool/request.py."""

import pytest
from pool_helpers import Recorder, chat_frame, frame

from headrace.pool.request import TRANSITIONS, Request, RequestEvent, RequestState, engine_died
from headrace.protocol.errors import IllegalTransition
from headrace.protocol.frames import RequestFrame, RequestId
from headrace.protocol.messages import CancelReason, Delta, Progress
from headrace.protocol.options import CompletionInput


def make_request(source: RequestFrame | None = None, sink: Recorder | None = None) -> Request:
    source = source or frame()
    options = source.options.resolve(model="words", max_tokens=10, temperature=0, seed=1)
    return Request(RequestId("r1"), source, options, sink or Recorder(), tenant="t", accepted_s=5.0)


def test_nothing_follows_the_end():
    """A request that has ended can't do anything more, an end least of all."""
    assert all(state is not RequestState.ENDED for state, _ in TRANSITIONS)
    request = make_request()
    request.apply(RequestEvent.END)
    with pytest.raises(IllegalTransition):
        request.apply(RequestEvent.END)
    assert request.state is RequestState.ENDED


def test_an_end_without_an_engine_counts_what_was_delivered():
    """Usage is what the client got; the wait is what the queue took."""
    request = make_request()
    request.dispatched_s = 5.25
    request.deliver(Progress(request.rid, "prefill", 40, 100, 30, prompt_tokens=100))
    request.deliver(Delta(request.rid, "a", 1))
    request.deliver(Delta(request.rid, "bc", 2))
    end = request.failed_end(engine_died(1), now_s=9.0)
    assert end.usage == {
        "prompt_tokens": 100,
        "cached_tokens": 30,
        "completion_tokens": 3,
        "total_tokens": 103,
    }
    assert end.timings["queue_ms"] == 250


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("client", None),
        ("connection_lost", None),
        ("deadline", "deadline_exceeded"),
        ("shutdown", "shutting_down"),
        ("slow_consumer", "slow_consumer"),
    ],
)
def test_cancelled_ends_say_why(reason: CancelReason, code: str | None):
    """Each reason has its error; those that the client wanted have none."""
    end = make_request().cancelled_end(reason, now_s=6.0)
    assert (end.status, end.reason) == ("cancelled", reason)
    assert (end.error and end.error["code"]) == code


@pytest.mark.parametrize(
    ("source", "num_tokens"),
    [
        (frame("x" * 400), 110),
        (RequestFrame(frame().id, CompletionInput(prompt=[1] * 30), frame().options), 40),
        (chat_frame("x" * 100, "y" * 100), 60),
    ],
)
def test_estimates_what_a_request_will_cost(source: RequestFrame, num_tokens: int):
    """Prompt tokens, guessed from the text where it is text, and the most that it may generate."""
    assert make_request(source).estimated_tokens == num_tokens


def test_the_submit_message_says_whose_limit_it_is():
    """An engine may lower a limit that the client did not set."""
    assert make_request().submit_message(5.5).max_tokens_is_default
    assert make_request().submit_message(5.5).queue_ms == 500
    assert not make_request(frame(max_tokens=3)).submit_message(5.5).max_tokens_is_default
