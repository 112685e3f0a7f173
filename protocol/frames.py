"""Frames of the wire: the client's as validated objects, the server's as typed dictionaries. PROTOCOL.md.

Client frames are read here, whole: `parse_client_frame` returns an object or raises one documented error.
Server frames are built once and only written, so they are dictionaries (`TypedDict`): nothing to convert on
the way to the bytes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType, NotRequired, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12

from .errors import ErrorBody, ErrorCode, FrameError
from .options import OPTION_NAMES, ChatInput, CompletionInput, GenerationOptions

PROTOCOL = "headrace.v1"
"""Name of this version of the protocol, also as a WebSocket subprotocol."""

ClientId = NewType("ClientId", str)
"""A request's id as the client chose it: unique among the running requests of its connection."""
RequestId = NewType("RequestId", str)
"""A request's id inside the server: unique in the life of a server."""

_Model = TypeVar("_Model", bound=BaseModel)
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")

# --- client to server ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestFrame:
    """A `completion` or `chat` frame: the two differ in their input and in nothing else."""

    id: ClientId
    input: CompletionInput | ChatInput
    options: GenerationOptions

    @property
    def kind(self) -> Literal["completion", "chat"]:
        """The frame's type."""
        return "chat" if isinstance(self.input, ChatInput) else "completion"


@dataclass(frozen=True, slots=True)
class CancelFrame:
    """End a request. Unknown and finished ids are no error."""

    id: ClientId


@dataclass(frozen=True, slots=True)
class ModelsFrame:
    """Ask for the models."""

    id: ClientId | None


@dataclass(frozen=True, slots=True)
class PingFrame:
    """Ask for a `pong` that carries the same nonce."""

    nonce: str | int | None


ClientFrame = RequestFrame | CancelFrame | ModelsFrame | PingFrame


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _NoFields(_Fields):
    pass


class _PingFields(_Fields):
    nonce: Annotated[str, StringConstraints(max_length=128)] | int | None = None


REQUEST_INPUTS: Mapping[str, type[CompletionInput] | type[ChatInput]] = {
    "completion": CompletionInput,
    "chat": ChatInput,
}
CLIENT_FRAME_TYPES = ("completion", "chat", "cancel", "models", "ping")
NOT_SERVED_TYPES = ("resume", "credit")


def parse_client_frame(fields: Mapping[str, Any]) -> ClientFrame:
    """Return the frame that a JSON object is.

    Raises:
        FrameError: the object is no frame; the error names the field and, where it could be read, the id.
    """
    kind = fields.get("type")
    frame_id = read_id(fields)
    if not isinstance(kind, str):
        raise FrameError(ErrorCode.INVALID_FRAME, "type must be a string", param="type", frame_id=frame_id)
    if kind in NOT_SERVED_TYPES:
        raise FrameError(ErrorCode.NOT_SERVED, f"{kind} is not served yet", param="type", frame_id=frame_id)
    if kind not in CLIENT_FRAME_TYPES:
        known = ", ".join(CLIENT_FRAME_TYPES)
        raise FrameError(
            ErrorCode.UNKNOWN_TYPE, f"unknown frame type; known are {known}", param="type", frame_id=frame_id
        )
    rest = {name: value for name, value in fields.items() if name not in ("type", "id")}
    if kind == "ping":
        return PingFrame(_validate(_PingFields, rest, frame_id).nonce)
    if frame_id is None and not (kind == "models" and fields.get("id") is None):
        raise FrameError(
            ErrorCode.INVALID_FRAME, "id must be 1 to 128 characters of A-Z a-z 0-9 . _ : -", param="id"
        )
    if kind == "models":
        _validate(_NoFields, rest, frame_id)
        return ModelsFrame(frame_id)
    assert frame_id is not None  # checked above; tells the type checker
    if kind == "cancel":
        _validate(_NoFields, rest, frame_id)
        return CancelFrame(frame_id)
    return _request(kind, frame_id, rest)


def read_id(fields: Mapping[str, Any]) -> ClientId | None:
    """Return the id of a frame that may otherwise be broken; None if it has no usable one."""
    value = fields.get("id")
    return ClientId(value) if isinstance(value, str) and _ID.match(value) else None


def _request(kind: str, frame_id: ClientId, rest: dict[str, Any]) -> RequestFrame:
    options = {name: value for name, value in rest.items() if name in OPTION_NAMES}
    others = {name: value for name, value in rest.items() if name not in OPTION_NAMES}
    frame = RequestFrame(
        frame_id,
        _validate(REQUEST_INPUTS[kind], others, frame_id),
        _validate(GenerationOptions, options, frame_id),
    )
    if frame.options.echo and kind == "chat":
        raise FrameError(
            ErrorCode.NOT_SERVED,
            "echo is not served: only for completion frames",
            param="echo",
            frame_id=frame_id,
        )
    return frame


def _validate(model: type[_Model], data: Any, frame_id: ClientId | None) -> _Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _frame_error(error, frame_id) from None


def _frame_error(error: ValidationError, frame_id: ClientId | None) -> FrameError:
    """Turn the most telling of pydantic's errors into the one that the client gets."""
    # Of a union's errors those of the branch that got furthest tell the most.
    first = max(error.errors(include_url=False, include_input=False), key=lambda e: len(e["loc"]))
    param = (first.get("ctx") or {}).get("param") or _path(first["loc"])
    match first["type"]:
        case "extra_forbidden":
            code, message = ErrorCode.INVALID_PARAM, "is not a field of this frame"
        case "missing":
            code, message = ErrorCode.INVALID_PARAM, "is missing"
        case "not_served":
            code, message = ErrorCode.NOT_SERVED, first["msg"]
        case _:
            code, message = ErrorCode.INVALID_PARAM, first["msg"]
    return FrameError(code, f"{param}: {message}" if param else message, param=param, frame_id=frame_id)


_UNION_BRANCH = re.compile(r"(function-|constrained-|list\[|TextPart|json-|nullable|str$|int$|float$|bool$)")


def _path(loc: tuple[int | str, ...]) -> str | None:
    """Write pydantic's location as a client would: ``messages[1].content``."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part == "[key]":
            continue
        elif path and _UNION_BRANCH.match(part):
            continue  # the name of a union's branch, not of a field
        else:
            path += f".{part}" if path else part
    return path[:256] or None


# --- server to client ---------------------------------------------------------------------------------------

Phase = Literal["load", "queue", "recover", "score", "prefill"]
Status = Literal["completed", "cancelled", "failed"]
FinishReason = Literal["stop", "length", "tool_calls"]


class SpecPrefillAbility(TypedDict):
    """Whether a model can prefill speculatively, with which draft, and if not, why."""

    supported: bool
    reason: str | None
    draft: str | None


class ModelInfo(TypedDict):
    """A model as `hello` and `models` show it."""

    name: str
    state: Literal["loading", "ready", "restarting", "failed"]
    context_length: int | None
    chat: bool | None
    specprefill: SpecPrefillAbility
    default: bool


class Limits(TypedDict):
    """The limits that a client can run into."""

    max_frame_bytes: int
    max_in_flight: int
    max_queue: int
    max_tokens: int


class HelloFrame(TypedDict):
    """First frame of a connection."""

    type: Literal["hello"]
    protocol: str
    server: str
    epoch: str
    models: list[ModelInfo]
    limits: Limits
    heartbeat_s: float
    features: list[str]


class AcceptedFrame(TypedDict):
    """The request is in; `options` are those in force, with the server's defaults filled in."""

    type: Literal["accepted"]
    id: str
    rid: str
    queue_position: int
    options: dict[str, Any]


class ProgressFrame(TypedDict):
    """What happens before the first token; at least once a second."""

    type: Literal["progress"]
    id: str
    phase: Phase
    processed: int
    total: int | None
    cached: int


class TopLogprob(TypedDict):
    """One alternative at a token's place."""

    token: str
    token_id: int
    logprob: float


class TokenLogprob(TopLogprob):
    """A generated token with its log probability, and the likeliest alternatives."""

    top_logprobs: list[TopLogprob]


class ToolCallFunction(TypedDict):
    """What a tool call calls; `arguments` is JSON text, as in OpenAI's API."""

    name: str
    arguments: str


class ToolCallDelta(TypedDict):
    """A whole tool call: sent when its last token is there."""

    index: int
    id: str
    type: Literal["function"]
    function: ToolCallFunction


class DeltaFrame(TypedDict):
    """Tokens: `n` of them, whose text is `text` (and `reasoning`, `tool_calls` where those apply)."""

    type: Literal["delta"]
    id: str
    seq: int
    text: str
    n: int
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]
    logprobs: NotRequired[list[TokenLogprob]]


class Usage(TypedDict):
    """Token counts. `completion_tokens` is the sum of `n` over the request's deltas, always."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_tokens: int


class Timings(TypedDict):
    """Milliseconds that each phase took; None for a phase that did not begin."""

    queue_ms: float | None
    score_ms: float | None
    prefill_ms: float | None
    ttft_ms: float | None
    decode_ms: float | None
    tokens_per_s: float | None


class SpecPrefillReport(TypedDict):
    """What became of the request's SpecPrefill fields. `reason` says why when it was not applied.

    `kept_tokens` of the `uncached_tokens` were prefilled: all of them when it was not applied.
    """

    requested: bool | None
    applied: bool
    reason: str | None
    keep_pct: float | None
    prompt_tokens: int
    uncached_tokens: int
    kept_tokens: int
    score_ms: float | None
    prefill_ms: float | None
    draft: str | None
    kept_ranges: NotRequired[list[list[int]]]
    """Half-open, in the prompt: only with `specprefill_debug`."""


class AssistantMessage(TypedDict):
    """The whole answer to a `chat` frame with `stream: false`, fit for the next turn's `messages`."""

    role: Literal["assistant"]
    content: str | None
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


class DoneFrame(TypedDict):
    """Last frame of a request: exactly one for each accepted request."""

    type: Literal["done"]
    id: str
    seq: int
    status: Status
    finish_reason: FinishReason | None
    reason: str | None
    error: ErrorBody | None
    usage: Usage
    timings: Timings
    specprefill: SpecPrefillReport
    text: NotRequired[str]
    message: NotRequired[AssistantMessage]
    logprobs: NotRequired[list[TokenLogprob]]


class ErrorFrame(ErrorBody):
    """A frame was refused and nothing was started."""

    type: Literal["error"]
    id: str | None


class GoawayFrame(TypedDict):
    """The server is about to stop: no new requests, running ones have until the deadline."""

    type: Literal["goaway"]
    reason: str
    deadline_ms: int


class PongFrame(TypedDict):
    """Answer to a `ping`."""

    type: Literal["pong"]
    nonce: str | int | None


class ModelsAnswer(TypedDict):
    """Answer to a `models` frame."""

    type: Literal["models"]
    id: str | None
    models: list[ModelInfo]


ServerFrame = Annotated[
    HelloFrame
    | AcceptedFrame
    | ProgressFrame
    | DeltaFrame
    | DoneFrame
    | ErrorFrame
    | GoawayFrame
    | PongFrame
    | ModelsAnswer,
    Field(discriminator="type"),
]
"""Every frame that the server sends."""
