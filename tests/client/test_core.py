"""The client's rules, without sockets: literal frames in, literal frames out."""

import json
import logging
from typing import Any

import pytest

from headrace.client import ClientError, ConnectionLost, FlowConfig, ProtocolError, TextDelta, Unauthorized
from headrace.client.core import Answer, ClientCore, CoreState
from headrace.client.stream_core import RequestState, StreamCore
from headrace.client.testing import _hello

ACCEPTED = {"type": "accepted", "rid": "r-1", "queue_position": 0, "options": {}}


def opened(*features: str, **flow: Any) -> ClientCore:
    """Return a core that has had its hello."""
    core = ClientCore(FlowConfig(**flow))
    core.receive(json.dumps({**_hello(), "features": list(features)}))
    return core


def sent(core: ClientCore) -> list[dict[str, Any]]:
    """Return all that the core wants to send."""
    frames = []
    while (data := core.next_frame()) is not None:
        frames.append(json.loads(data))
    return frames


def running(core: ClientCore, **fields: Any) -> StreamCore:
    """Return a request that runs."""
    stream = core.start({"type": "completion", "prompt": "x"})
    sent(core)
    core.receive(json.dumps({**ACCEPTED, "id": stream.id, **fields}))
    return stream


def delta(seq: int, text: str = "a", n: int = 1, frame_id: str = "c1") -> str:
    """Return a delta frame."""
    return json.dumps({"type": "delta", "id": frame_id, "seq": seq, "text": text, "n": n})


def done(seq: int, frame_id: str = "c1", **fields: Any) -> str:
    """Return a last frame."""
    frame = {
        "type": "done", "id": frame_id, "seq": seq, "status": "completed", "finish_reason": "stop",
        "reason": None, "error": None, "usage": {}, "timings": {}, "specprefill": {},
    }  # fmt: skip
    return json.dumps({**frame, **fields})


def test_nothing_is_asked_for_that_the_server_does_not_offer() -> None:
    """No `window`, no `detach`; with the features, both; what the caller says wins."""
    plain, able = opened(), opened("credit", "resume", window_tokens=32)
    for core in (plain, able):
        core.start({"type": "completion", "prompt": "x"})
    assert sent(plain) == [{"type": "completion", "id": "c1", "prompt": "x"}]
    assert sent(able) == [
        {"type": "completion", "id": "c1", "prompt": "x", "detach": True, "window": 32},
    ]
    able.start({"type": "completion", "prompt": "x", "window": 5, "detach": False})
    able.start({"type": "completion", "prompt": "x", "stream": False})
    first, second = sent(able)
    assert (first["window"], first["detach"]) == (5, False)
    assert "window" not in second


def test_credit_is_given_for_what_was_read() -> None:
    """In halves of the window."""
    core = opened("credit", window_tokens=4)
    stream = running(core)
    stream.take()
    for seq in range(3):
        core.receive(delta(seq))
    assert not sent(core)
    assert stream.take() == TextDelta("aaa", 3)
    core.note_read(stream)
    core.note_read(stream)
    assert sent(core) == [{"type": "credit", "id": "c1", "tokens": 3}]


def test_credit_that_was_lost_with_the_connection_is_given_again() -> None:
    """Or the stream would wait for ever."""
    core = opened("credit", "resume", window_tokens=4)
    stream = running(core, resume_token="t1")
    for seq in range(4):
        core.receive(delta(seq))
    stream.drop_unread()
    core.note_read(stream)
    assert sent(core) == [{"type": "credit", "id": "c1", "tokens": 4}]
    core.lost()
    core.receive(json.dumps({**_hello(), "features": ["credit", "resume"]}))
    assert [frame["type"] for frame in sent(core)] == ["resume"]
    core.receive('{"type": "resumed", "id": "c1", "rid": "r-1", "next_seq": 4}')
    assert sent(core) == [{"type": "credit", "id": "c1", "tokens": 4}]
    core.note_read(stream)
    assert not sent(core)


def test_unknown_frames_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """For each type."""
    core = opened()
    with caplog.at_level(logging.WARNING, "headrace.client"):
        for _ in range(3):
            assert core.receive('{"type": "weather", "id": "c1"}') == []
    assert len(caplog.records) == 1
    assert "weather" in caplog.text


def test_late_and_foreign_frames_are_ignored() -> None:
    """Frames of an id that has ended, or that never was."""
    core = opened()
    stream = running(core)
    assert core.receive(done(0)) == [stream]
    assert core.receive(delta(1)) == []
    assert core.receive(done(0, "c77")) == []


def test_a_missing_frame_ends_the_stream() -> None:
    """It is cancelled, and its reader is told."""
    core = opened()
    stream = running(core)
    core.receive(delta(0))
    assert core.receive(delta(2)) == [stream]
    assert isinstance(stream.error, ProtocolError)
    assert stream.error.request_id == "c1"
    assert sent(core) == [{"type": "cancel", "id": "c1"}]
    assert core.in_flight == 0


@pytest.mark.parametrize(
    "frame", ['{"type": "delta", "id": "c1", "seq": 0}', '{"type": "resumed", "id": "c1", "next_seq": 0}']
)
def test_a_frame_out_of_place_ends_the_stream_and_no_other(frame: str) -> None:
    """A fault in one stream is no fault of the connection."""
    core = opened()
    stream, other = running(core), running(core)
    core.receive(frame)
    assert isinstance(stream.error, ProtocolError)
    core.receive(done(0, other.id))
    assert other.result is not None


@pytest.mark.parametrize(
    "data",
    ["", "[]", "{}", "nonsense", b"\xff", '{"type": "delta", "id": []}', '{"type": "error", "id": {}}'],
)
def test_what_is_no_frame_is_an_error(data: str | bytes) -> None:
    """Of the whole connection."""
    with pytest.raises(ProtocolError):
        opened().receive(data)


def test_without_a_token_there_is_no_hello() -> None:
    """But an error."""
    core = ClientCore(FlowConfig())
    with pytest.raises(Unauthorized):
        core.receive('{"type": "error", "id": null, "code": "unauthorized", "message": "no", "param": null}')


def test_a_lost_connection_ends_what_may_have_run_and_keeps_the_rest() -> None:
    """Sent: ended, started. Not sent: sent over the next. Resumable: resumed after its last frame."""
    core = opened("resume")
    kept = running(core, resume_token="t1")
    core.receive(delta(0))
    plain = running(core)
    unanswered = core.start({"type": "completion", "prompt": "x"})
    sent(core)
    unsent = core.start({"type": "completion", "prompt": "y"})
    answer = core.ask_models()
    assert set(core.lost()) == {plain, unanswered, answer}
    for stream in (plain, unanswered):
        assert isinstance(stream.error, ConnectionLost)
        assert stream.error.started
    assert isinstance(answer, Answer)
    assert answer.error is not None
    assert (kept.state, unsent.state) == (RequestState.LOST, RequestState.UNSENT)
    core.receive(json.dumps({**_hello(), "features": ["resume"]}))
    resume, request = sent(core)
    assert resume == {"type": "resume", "id": "c1", "token": "t1", "after_seq": 0}
    assert (request["id"], request["prompt"]) == (unsent.id, "y")
    core.receive('{"type": "resumed", "id": "c1", "rid": "r-1", "next_seq": 1}')
    core.receive(delta(0))  # again: known
    core.receive(delta(1, "b"))
    core.receive(done(2))
    assert kept.result is not None
    assert kept.result.text == "ab"


def test_a_stream_that_goes_on_elsewhere() -> None:
    """Its reader here is told so."""
    core = opened()
    stream = running(core)
    core.receive('{"type": "detached", "id": "c1", "reason": "resumed_elsewhere"}')
    assert isinstance(stream.error, ConnectionLost)
    assert stream.error.code == "detached"


def test_a_server_that_says_goodbye_gets_no_more_requests() -> None:
    """They wait for the next connection."""
    core = opened()
    core.receive('{"type": "goaway", "reason": "shutdown", "deadline_ms": 1000}')
    stream = core.start({"type": "completion", "prompt": "x"})
    assert sent(core) == []
    core.lost()
    core.receive(json.dumps(_hello()))
    assert [frame["id"] for frame in sent(core)] == [stream.id]


def test_giving_up_ends_everything() -> None:
    """And everything later."""
    core = opened()
    stream = running(core)
    core.give_up(ClientError("client_closed", "closed"))
    assert core.state is CoreState.CLOSED
    assert isinstance(stream.error, ConnectionLost)
    with pytest.raises(ClientError, match="client_closed"):
        core.start({"type": "completion", "prompt": "x"})


def test_unread_events_become_few() -> None:
    """And keep their order."""
    core = opened()
    stream = running(core)
    stream.take()
    for seq in range(1000):
        core.receive(delta(seq, f"{seq} "))
    assert stream.take() == TextDelta("".join(f"{seq} " for seq in range(1000)), 1000)
    assert not stream.has_unread


def test_reasoning_and_tool_calls_are_events_of_their_own() -> None:
    """A frame's tokens are counted once."""
    core = opened()
    stream = running(core)
    stream.take()
    call = {"index": 0, "id": "k", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    frame = {
        "type": "delta",
        "id": "c1",
        "seq": 0,
        "text": "hi",
        "n": 7,
        "reasoning": "hm",
        "tool_calls": [call],
    }
    core.receive(json.dumps(frame))
    events = []
    while (event := stream.take()) is not None:
        events.append(event)
    assert [type(event).__name__ for event in events] == ["ReasoningDelta", "TextDelta", "ToolCall"]
    assert sum(getattr(event, "num_tokens", 0) for event in events) == 7
