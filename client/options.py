"""Keyword arguments of requests, and the frames that they become. PROTOCOL.md, "Options"."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12

from ..protocol.errors import ErrorCode, FrameError
from ..protocol.frames import parse_client_frame
from .errors import InvalidRequest, invalid

Messages = str | Sequence[Mapping[str, Any]]
"""A conversation, or one thing that the user says."""
Prompt = str | Sequence[int]
"""Text, or token ids."""


class Options(TypedDict, total=False):
    """The options of a request, under their names on the wire. What is left out, the server decides."""

    model: str | None
    stream: bool
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[str, float] | None
    stop: str | Sequence[str] | None
    seed: int | None
    logprobs: bool | None
    top_logprobs: int | None
    specprefill: bool | None
    specprefill_keep_pct: float | None
    specprefill_debug: bool | None
    cache_prompt: bool | None
    timeout_ms: int | None
    flush_ms: int | None
    window: int | None
    """Tokens that may come before this client has read any. None: the client's own default."""
    detach: bool | None
    """Whether the stream outlives a lost connection. None: yes, where the server can."""


class ChatOptions(Options, total=False):
    """What a chat may have beside its messages."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | None
    response_format: Mapping[str, str] | None
    chat_template_kwargs: Mapping[str, Any] | None


class CompletionOptions(Options, total=False):
    """What a completion may have beside its prompt."""

    echo: bool | None


def chat_fields(messages: Messages, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `chat` frame, without its id."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return {"type": "chat", "messages": [_plain(message) for message in messages], **_given(options)}


def completion_fields(prompt: Prompt, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `completion` frame, without its id."""
    return {"type": "completion", "prompt": _plain(prompt), **_given(options)}


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in options.items() if value is not None}


def _plain(value: Any) -> Any:
    """Return mappings as dicts, and sequences as lists."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value


def encode_request(fields: Mapping[str, Any], max_frame_bytes: int | None) -> str:
    """Return a request as the text of its frame, checked as the server would.

    Raises:
        InvalidRequest: the server would refuse it, or it is longer than a frame may be.
    """
    request_id = str(fields.get("id"))
    try:
        parse_client_frame(fields)
        data = orjson.dumps(fields)
    except FrameError as error:
        raise invalid(error.code, error.message, error.param, request_id) from None
    except (TypeError, ValueError) as error:
        raise _not_json(fields, error, request_id) from None
    if max_frame_bytes is not None and len(data) > max_frame_bytes:
        message = f"the frame has {len(data):,} bytes; the server takes {max_frame_bytes:,}"
        raise invalid(ErrorCode.INVALID_FRAME, message, None, request_id)
    return data.decode()


def _not_json(fields: Mapping[str, Any], error: Exception, request_id: str) -> InvalidRequest:
    """Return the error of a value that JSON has no word for, with its field."""
    for name, value in fields.items():
        try:
            orjson.dumps(value)
        except (TypeError, ValueError) as own:
            return invalid(ErrorCode.INVALID_PARAM, f"{name}: {own}", name, request_id)
    return invalid(ErrorCode.INVALID_PARAM, str(error), None, request_id)
