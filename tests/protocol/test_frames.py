"""Client frames: which objects are frames, and what is said about those that are none."""

from typing import Any

import pytest

from headrace.protocol.errors import ErrorCode, FrameError
from headrace.protocol.frames import (
    CLIENT_FRAME_TYPES,
    CancelFrame,
    CreditFrame,
    ModelsFrame,
    PingFrame,
    RequestFrame,
    ResumeFrame,
    parse_client_frame,
    read_id,
)
from headrace.protocol.options import ChatInput, CompletionInput

CHAT = {"type": "chat", "id": "a", "messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"type": "completion", "id": "a", "prompt": "x"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def refusal(fields: Any) -> FrameError:
    """Return the error that an object is refused with."""
    with pytest.raises(FrameError) as caught:
        parse_client_frame(fields)
    return caught.value


def test_completion_takes_text_or_token_ids() -> None:
    """Both kinds of prompt arrive as they were sent."""
    for prompt in ("x", [1, 2, 3]):
        frame = parse_client_frame({**COMPLETION, "prompt": prompt})
        assert isinstance(frame, RequestFrame)
        assert isinstance(frame.input, CompletionInput)
        assert frame.input.prompt == prompt
        assert frame.kind == "completion"


def test_chat_takes_messages_of_every_role() -> None:
    """System prompt, tool calls and tool results, as a second turn has them."""
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": part} for part in "ab"], "name": "u"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "r"},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
    ]
    frame = parse_client_frame({**CHAT, "messages": messages, "tools": [TOOL], "tool_choice": "auto"})
    assert isinstance(frame, RequestFrame)
    assert isinstance(frame.input, ChatInput)
    assert [message.text for message in frame.input.messages] == ["s", "d", "ab", "", "42"]
    assert frame.kind == "chat"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*CHAT["messages"], {"role": "user", "content": 1}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": "x", "mood": "sad"}]}, "messages[0].mood"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": {}}, "tools"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_a_broken_chat_names_the_field(fields: dict[str, Any], param: str) -> None:
    """The path is written as a client would."""
    error = refusal({**CHAT, **fields})
    assert (error.code, error.param, error.frame_id) == (ErrorCode.INVALID_PARAM, param, "a")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """Known elsewhere and not here: never ignored."""
    error = refusal({**CHAT, **fields})
    assert (error.code, error.param) == (ErrorCode.NOT_SERVED, param)


@pytest.mark.parametrize("prompt", ["", [], None, 1, True, {}, [1, -1], [1, True], ["a"], [2**31], [1.0]])
def test_a_broken_prompt_is_refused(prompt: Any) -> None:
    """Text or token ids, and at least one."""
    error = refusal({**COMPLETION, "prompt": prompt})
    assert error.code is ErrorCode.INVALID_PARAM
    assert error.param is not None
    assert error.param.startswith("prompt")


def test_an_empty_prompt_is_called_empty() -> None:
    """And not a wrong type: the rule of the kind that it has."""
    assert "at least 1 item" in refusal({**COMPLETION, "prompt": []}).message
    assert "at least 1 character" in refusal({**COMPLETION, "prompt": ""}).message


def test_a_missing_input_is_refused_by_name() -> None:
    """Neither frame goes without."""
    assert refusal({"type": "completion", "id": "a"}).param == "prompt"
    assert refusal({"type": "chat", "id": "a"}).param == "messages"


@pytest.mark.parametrize("frame_id", [None, 1, True, "", "a b", "ä", "a\n", "x" * 129, [], {}])
@pytest.mark.parametrize("kind", ["completion", "chat", "cancel"])
def test_an_unusable_id_is_refused(kind: str, frame_id: Any) -> None:
    """1 to 128 characters of the alphabet, nothing else."""
    error = refusal({**COMPLETION, **CHAT, "type": kind, "id": frame_id})
    assert (error.code, error.param, error.frame_id) == (ErrorCode.INVALID_FRAME, "id", None)


def test_ids_may_use_the_whole_alphabet() -> None:
    """And all of their length."""
    for frame_id in ("a", "A-Z.a_z:0-9", "x" * 128):
        assert read_id({"id": frame_id}) == frame_id
        assert parse_client_frame({"type": "cancel", "id": frame_id}) == CancelFrame(frame_id)


def test_small_frames() -> None:
    """Cancel, models and ping."""
    assert parse_client_frame({"type": "models"}) == ModelsFrame(None)
    assert parse_client_frame({"type": "models", "id": "a"}) == ModelsFrame("a")
    for nonce in (None, "n", 5, -1):
        assert parse_client_frame({"type": "ping", "nonce": nonce}) == PingFrame(nonce)
    for fields in ({"nonce": 1.5}, {"nonce": True}, {"nonce": "x" * 129}):
        assert refusal({"type": "ping", **fields}).param == "nonce"
    assert refusal({"type": "models", "id": 1}).param == "id"
    for kind in ("cancel", "models", "ping"):
        assert refusal({"type": kind, "id": "a", "extra": 1}).param == "extra"


def test_credit_is_a_number_of_tokens() -> None:
    """At least one."""
    assert parse_client_frame({"type": "credit", "id": "a", "tokens": 5}) == CreditFrame("a", 5)
    for tokens in (0, -1, True, 1.5, "1", None, 2**31):
        assert refusal({"type": "credit", "id": "a", "tokens": tokens}).param == "tokens"
    assert refusal({"type": "credit", "id": "a"}).param == "tokens"


def test_resume_needs_a_token_and_a_place() -> None:
    """-1 stands before the first frame."""
    fields = {"type": "resume", "id": "a", "token": "t.x-_", "after_seq": -1}
    assert parse_client_frame(fields) == ResumeFrame("a", "t.x-_", -1)
    for token in ("", 1, None, "x" * 129, "tö", "a b"):
        assert refusal({**fields, "token": token}).param == "token"
    for after_seq in (-2, True, 1.5, "1", None, 2**60):
        assert refusal({**fields, "after_seq": after_seq}).param == "after_seq"


@pytest.mark.parametrize("kind", [None, 1, [], {}])
def test_a_frame_needs_a_type(kind: Any) -> None:
    """A type is a string."""
    assert refusal({"type": kind, "id": "a"}).code is ErrorCode.INVALID_FRAME
    assert refusal({"id": "a"}).code is ErrorCode.INVALID_FRAME


def test_an_unknown_type_lists_the_known_ones() -> None:
    """So that a person at a terminal can go on."""
    error = refusal({"type": "complete", "id": "a"})
    assert error.code is ErrorCode.UNKNOWN_TYPE
    assert all(kind in error.message for kind in CLIENT_FRAME_TYPES)
