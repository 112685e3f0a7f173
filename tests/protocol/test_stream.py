"""The life of a request: the table holds, `seq` has no gaps, and merging loses nothing."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.errors import IllegalTransition
from headrace.protocol.frames import ClientId, RequestFrame, RequestId
from headrace.protocol.messages import Delta, End, Progress
from headrace.protocol.options import ChatInput, CompletionInput, GenerationOptions
from headrace.protocol.stream import TRANSITIONS, Stream, StreamEvent, StreamState, end_without_engine

RID = RequestId("r1")
PROGRESS = Progress(RID, "prefill", 1, 2)
CALL: Any = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
LOGPROB: Any = {"token": "a", "token_id": 1, "logprob": -0.5, "top_logprobs": []}


def make_stream(*, chat: bool = False, **options: Any) -> Stream:
    """Return a stream that has just been accepted."""
    given_options = GenerationOptions(**options)
    body = (
        ChatInput.model_validate({"messages": [{"role": "user", "content": "x"}]})
        if chat
        else CompletionInput(prompt="x")
    )
    return Stream(RequestFrame(ClientId("a"), body, given_options), RID, given_options)


def make_end(stream: Stream) -> End:
    """Return an ordinary end."""
    return end_without_engine(RID, stream.options, status="completed", reason="stop", error=None)


def happen(stream: Stream, event: StreamEvent) -> None:
    """Let an event happen to a stream."""
    match event:
        case StreamEvent.PROGRESS:
            stream.push_progress(PROGRESS)
        case StreamEvent.DELTA:
            stream.push_delta(Delta(RID, "t", 1))
        case StreamEvent.CANCEL:
            stream.cancel()
        case StreamEvent.END:
            stream.end(make_end(stream))


def snapshot(stream: Stream) -> dict[str, Any]:
    """Return all that a stream remembers."""
    memory = copy.deepcopy(vars(stream))
    return memory | {"_pending": memory["_pending"].take()}


@given(st.lists(st.sampled_from(StreamEvent), max_size=12), st.booleans())
def test_the_table_decides(events: list[StreamEvent], streaming: bool) -> None:
    """A legal event leads where the table says; an illegal one raises and changes nothing."""
    stream = make_stream(stream=streaming)
    for event in events:
        expected = TRANSITIONS.get((stream.state, event))
        if expected is not None:
            happen(stream, event)
            assert stream.state is expected
        else:
            before = snapshot(stream)
            with pytest.raises(IllegalTransition):
                happen(stream, event)
            assert snapshot(stream) == before


def test_nothing_follows_the_end() -> None:
    """DONE has no way out, and every other state can reach it."""
    assert not [state for state, _ in TRANSITIONS if state is StreamState.DONE]
    for state in (StreamState.WAITING, StreamState.STREAMING, StreamState.CANCELLING):
        assert TRANSITIONS[state, StreamEvent.END] is StreamState.DONE
        assert TRANSITIONS[state, StreamEvent.CANCEL] is StreamState.CANCELLING


STEPS = st.lists(st.one_of(st.just("take"), st.tuples(st.text(max_size=4), st.integers(0, 4))), max_size=40)


@given(STEPS)
def test_frames_have_gapless_numbers_and_all_the_text(steps: list[Any]) -> None:
    """However slowly the socket takes them: seq 0, 1, 2 …, Σn and the text are the engine's."""
    stream = make_stream()
    frames: list[Any] = []
    for step in steps:
        if step == "take":
            frames.append(stream.take_delta())
        else:
            stream.push_delta(Delta(RID, *step))
    end = make_end(stream)
    stream.end(end)
    frames.append(stream.take_delta())
    frames = [*filter(None, frames), stream.done()]
    pushed = [step for step in steps if step != "take"]
    assert [frame["seq"] for frame in frames] == list(range(len(frames)))
    assert "".join(frame["text"] for frame in frames[:-1]) == "".join(text for text, _ in pushed)
    assert sum(frame["n"] for frame in frames[:-1]) == sum(n for _, n in pushed) == stream.num_tokens
    assert "text" not in frames[-1]


def test_one_frame_is_scheduled_for_what_waits() -> None:
    """The first delta schedules a frame; later ones join it until it is taken."""
    stream = make_stream()
    assert stream.push_delta(Delta(RID, "a", 1))
    assert not stream.push_delta(Delta(RID, "b", 1))
    assert stream.take_delta() == {"type": "delta", "id": "a", "seq": 0, "text": "ab", "n": 2}
    assert stream.take_delta() is None
    assert stream.push_delta(Delta(RID, "c", 1))


def test_waiting_bytes_are_counted_until_they_are_taken() -> None:
    """What the connection's bound is about."""
    stream = make_stream()
    assert stream.pending_bytes == 0
    stream.push_delta(Delta(RID, "ab", 1, "c", [CALL], [LOGPROB]))
    waiting = stream.pending_bytes
    assert waiting > 12
    stream.push_delta(Delta(RID, "d", 1))
    assert stream.pending_bytes > waiting
    stream.take_delta()
    assert stream.pending_bytes == 0


def test_only_the_newest_progress_is_sent() -> None:
    """An old one says nothing any more, and none follows the end."""
    stream = make_stream()
    assert stream.push_progress(Progress(RID, "queue", 0, None))
    assert not stream.push_progress(Progress(RID, "prefill", 5, 10, 2))
    assert stream.take_progress() == {
        "type": "progress", "id": "a", "phase": "prefill", "processed": 5, "total": 10, "cached": 2,
    }  # fmt: skip
    assert stream.take_progress() is None
    assert stream.push_progress(PROGRESS)
    stream.end(make_end(stream))
    assert stream.take_progress() is None


def test_a_delta_shows_only_what_applies() -> None:
    """Reasoning, tool calls and logprobs where they are."""
    stream = make_stream()
    stream.push_delta(Delta(RID, "", 1, "why", [CALL], [LOGPROB]))
    frame = stream.take_delta()
    assert frame is not None
    assert frame.get("reasoning") == "why"
    assert frame.get("tool_calls") == [CALL]
    assert frame.get("logprobs") == [LOGPROB]


@pytest.mark.parametrize("chat", [False, True])
def test_without_streaming_the_last_frame_has_it_all(chat: bool) -> None:
    """One frame, seq 0, the whole text."""
    stream = make_stream(chat=chat, stream=False)
    assert not stream.push_delta(Delta(RID, "a", 1, "r1", [], [LOGPROB]))
    assert not stream.push_delta(Delta(RID, "b", 2, "r2"))
    end = make_end(stream)
    stream.end(end)
    frame = stream.done()
    assert frame["seq"] == 0
    assert frame.get("logprobs") == [LOGPROB]
    if chat:
        assert frame.get("message") == {"role": "assistant", "content": "ab", "reasoning": "r1r2"}
        assert "text" not in frame
    else:
        assert frame.get("text") == "ab"
        assert "message" not in frame


def test_a_message_with_tool_calls_fits_the_next_turn() -> None:
    """No index, and null content when there is none: `ChatInput` takes it back."""
    stream = make_stream(chat=True, stream=False)
    stream.push_delta(Delta(RID, "", 1, "", [CALL]))
    end = make_end(stream)
    stream.end(end)
    message = stream.done().get("message")
    assert message is not None
    assert message["content"] is None
    ChatInput.model_validate({"messages": [message]})


def test_accepted_shows_the_options_in_force() -> None:
    """Echoed as they were resolved."""
    stream = make_stream(temperature=0.5, stop=["x"])
    frame = stream.accepted(3)
    assert (frame["id"], frame["rid"], frame["queue_position"]) == ("a", RID, 3)
    assert frame["options"]["temperature"] == 0.5
    assert frame["options"]["stop"] == ["x"]
    assert "window" not in frame["options"]


def test_an_end_without_an_engine_still_counts() -> None:
    """Usage and the SpecPrefill report are there whoever ends a request."""
    options = GenerationOptions(specprefill=True, specprefill_keep_pct=0.2)
    end = end_without_engine(
        RID, options, status="failed", reason="engine_died", error=None, prompt_tokens=5, completion_tokens=2
    )
    assert end.usage["total_tokens"] == 7
    assert end.specprefill["requested"] is True
    assert end.specprefill["applied"] is False
    assert end.specprefill["reason"] == "engine_died"
