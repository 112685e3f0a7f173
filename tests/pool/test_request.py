"""Tests for pool/request.py."""

import pytest
from pool_helpers import Recorder, chat_frame, frame

from headrace.pool.request import TRANSITIONS, Request, RequestEvent, RequestState, engine_died
from headrace.protocol.errors import IllegalTransition
from headrace.protocol.frames import RequestFrame, RequestId
from headrace.protocol.messages import CancelReason, Delta, Progress
from headrace.protocol.options import CompletionInput
from headrace.protocol.stream import end_without_engine


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


def test_another_engine_goes_on_where_the_first_one_was():
    """Tokens and credit that are left, no second echo, and what the first engine told counts."""
    request = make_request(frame(window=5, echo=True))
    request.apply(RequestEvent.DISPATCH)
    request.dispatched_s = 6.0
    assert request.submit_message(6.0).credit == 5
    request.deliver(Progress(request.rid, "prefill", 40, 100, 30, prompt_tokens=100))
    request.deliver(Delta(request.rid, "echo", 0), 7.0)
    request.deliver(Delta(request.rid, "ab", 2, tokens=[7, 8]), 8.0)
    request.lose_engine()
    assert request.state is RequestState.QUEUED
    again = request.submit_message(9.0)
    assert (again.generated, again.credit, again.options.echo) == ([7, 8], 3, False)
    request.apply(RequestEvent.DISPATCH)
    request.deliver(Progress(request.rid, "prefill", 1, 2, 99, prompt_tokens=100))
    request.deliver(Delta(request.rid, "c", 1, tokens=[9]), 11.0)
    end = end_without_engine(
        request.rid,
        request.options,
        status="completed",
        reason="",
        error=None,
        prompt_tokens=100,
        cached_tokens=99,
        completion_tokens=3,
    )
    settled = request.settled(end, 12.0)
    assert settled.usage == {**end.usage, "cached_tokens": 30}
    assert settled.timings == {
        "queue_ms": 1000,
        "score_ms": None,
        "prefill_ms": None,
        "ttft_ms": 3000,
        "decode_ms": 4000,
        "tokens_per_s": 0.5,
    }


def test_an_engine_that_did_not_come_to_it_knows_less_than_the_pool():
    """Cancelled in its line: the prompt's length and no speed of a single token."""
    request = make_request()
    request.apply(RequestEvent.DISPATCH)
    request.dispatched_s = 6.0
    request.deliver(Progress(request.rid, "prefill", 40, 100, 30, prompt_tokens=100))
    request.deliver(Delta(request.rid, "a", 1, tokens=[7]), 7.0)
    request.lose_engine()
    request.apply(RequestEvent.DISPATCH)
    end = end_without_engine(
        request.rid, request.options, status="cancelled", reason="client", error=None, completion_tokens=1
    )
    settled = request.settled(end, 12.0)
    assert settled.usage == {
        "prompt_tokens": 100,
        "cached_tokens": 30,
        "completion_tokens": 1,
        "total_tokens": 101,
    }
    assert settled.timings["tokens_per_s"] is None
    report = settled.specprefill
    assert (report["prompt_tokens"], report["uncached_tokens"], report["kept_tokens"]) == (100, 70, 70)


@pytest.mark.parametrize("is_thinned", [True, False])
def test_another_engine_is_told_how_the_prompt_was_read(is_thinned: bool):
    """A prompt that was read densely, if only in the end, must not be thinned with half of its answer."""
    request = make_request()
    request.apply(RequestEvent.DISPATCH)
    request.deliver(Progress(request.rid, "score", 0, 100, 0, prompt_tokens=100))
    assert not request.submit_message(6.0).stays_dense, "no tokens yet: the next one decides anew"
    request.deliver(Delta(request.rid, "a", 1, tokens=[7], is_thinned=is_thinned), 7.0)
    assert request.submit_message(8.0).stays_dense == (not is_thinned)


def test_an_engine_that_dies_before_the_first_token_leaves_no_trace():
    """The next one tells the whole story."""
    request = make_request()
    request.apply(RequestEvent.DISPATCH)
    request.lose_engine()
    request.apply(RequestEvent.DISPATCH)
    end = end_without_engine(request.rid, request.options, status="completed", reason="", error=None)
    assert request.settled(end, 12.0) is end


def test_without_credit_it_needs_no_engine():
    """It waits in the pool until its client allows more."""
    request = make_request(frame(window=2))
    request.apply(RequestEvent.DISPATCH)
    request.submit_message(6.0)
    request.deliver(Delta(request.rid, "ab", 2, tokens=[7, 8]), 8.0)
    assert request.is_paused
    request.lose_engine()
    assert request.state is RequestState.PARKED
    assert request.record.tokens_here == 0, "it has made none in its next engine"


def test_without_the_ids_of_its_tokens_it_cannot_go_on():
    """An engine that does not tell them has its requests end with it."""
    request = make_request()
    assert request.can_recover
    request.deliver(Delta(request.rid, "ab", 2), 8.0)
    assert not request.can_recover


def test_the_submit_message_says_whose_limit_it_is():
    """An engine may lower a limit that the client did not set."""
    assert make_request().submit_message(5.5).max_tokens_is_default
    assert make_request().submit_message(5.5).queue_ms == 500
    assert not make_request(frame(max_tokens=3)).submit_message(5.5).max_tokens_is_default
