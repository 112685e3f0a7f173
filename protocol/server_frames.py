"""Frames that the server sends, as typed dictionaries. PROTOCOL.md, "Server frames".

They are built once and only written, so there is nothing to convert on the way to the bytes.
"""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12

from .errors import ErrorBody

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
    detach_timeout_ms: int
    """How long a stream with `detach` goes on without a connection."""
    replay_ms: int
    """How long a frame is kept for a `resume` after it was sent, and the last one after the end."""
    replay_bytes: int
    """How much of a stream is kept for a `resume`."""


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
    resume_token: NotRequired[str]
    """Only with `detach`: what a `resume` must show."""


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


class PromptRun(TypedDict):
    """Tokens of a prompt that follow each other and had the same fate."""

    fate: Literal["cached", "kept", "left_out"]
    tokens: int
    text: str


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
    prompt_runs: NotRequired[list[PromptRun]]
    """The whole prompt, in order: only with `specprefill_debug`."""


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


class ResumedFrame(TypedDict):
    """A `resume` is answered: every frame of the stream from `next_seq` on follows, exactly once."""

    type: Literal["resumed"]
    id: str
    rid: str
    next_seq: int


class DetachedFrame(TypedDict):
    """The stream goes on, and not here: the last frame with its id on this connection."""

    type: Literal["detached"]
    id: str
    reason: Literal["resumed_elsewhere"]


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
    | ResumedFrame
    | DetachedFrame
    | GoawayFrame
    | PongFrame
    | ModelsAnswer,
    Field(discriminator="type"),
]
"""Every frame that the server sends."""
