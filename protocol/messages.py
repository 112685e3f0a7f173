"""Messages between the gateway's process and an engine process, one JSON array each: `[tag, fields]`.

Down: `Submit`, `Cancel`, `Credit`, `Stop`. Up: `Loading`, then `Ready` or `LoadFailed`, then a `Step` after
every engine step in which anything happened. The events in it belong to requests; the pool passes them on.
Both ends are the same installation, so there is no versioning; a message that does not decode is a bug.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import orjson

from .errors import ErrorBody
from .frames import (
    FinishReason,
    Phase,
    RequestId,
    SpecPrefillAbility,
    SpecPrefillReport,
    Status,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from .options import ChatInput, CompletionInput, GenerationOptions

CancelReason = Literal["client", "deadline", "shutdown", "slow_consumer", "connection_lost"]

# --- events of one request ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """What a request waits for. `total` is None where nobody knows; `cached` tokens need no prefill."""

    TAG: ClassVar = "progress"
    rid: RequestId
    phase: Phase
    processed: int
    total: int | None
    cached: int = 0
    prompt_tokens: int | None = None


@dataclass(slots=True)
class Delta:
    """`n` new tokens. Text held back (half a character, a possible stop string) comes with later tokens."""

    TAG: ClassVar = "delta"
    rid: RequestId
    text: str
    n: int
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """The ids of the `n` tokens: what another engine needs to go on. Never sent to a client."""
    is_thinned: bool = False
    """Whether the prompt was thinned for them: it must be so for those that follow. Never sent either."""

    def merge(self, later: "Delta") -> None:
        """Take a later delta of the same request into this one, which belongs to the caller alone."""
        self.text += later.text
        self.n += later.n
        self.reasoning += later.reasoning
        self.tool_calls += later.tool_calls
        self.logprobs += later.logprobs
        self.tokens += later.tokens
        self.is_thinned = self.is_thinned or later.is_thinned


@dataclass(frozen=True, slots=True)
class End:
    """The engine has let the request go. Nothing of it comes after this."""

    TAG: ClassVar = "end"
    rid: RequestId
    status: Status
    finish_reason: FinishReason | None
    reason: str | None
    error: ErrorBody | None
    usage: Usage
    timings: Timings
    specprefill: SpecPrefillReport


Event = Progress | Delta | End

# --- down the pipe ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a request. `options` are resolved; `tenant` separates prompt caches; `queue_ms` was its wait.

    `max_tokens_is_default`: the client named no limit, so the engine may lower it to what the context holds.
    `generated`: tokens that an earlier engine made and the client has: go on after them.
    `credit`: how many tokens may come before the first `Credit`; None: as many as there are.
    `stays_dense`: `generated` was made from the whole prompt, so it must not be thinned now.
    """

    TAG: ClassVar = "submit"
    rid: RequestId
    input: CompletionInput | ChatInput
    options: GenerationOptions
    tenant: str
    queue_ms: float
    max_tokens_is_default: bool = False
    generated: list[int] = field(default_factory=list)
    credit: int | None = None
    stays_dense: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Let a request go at the next step or chunk. An unknown rid is no error: its `End` is on the way up."""

    TAG: ClassVar = "cancel"
    rid: RequestId
    reason: CancelReason


@dataclass(frozen=True, slots=True)
class Credit:
    """Allow a request that was sent with `window` so many more tokens. An unknown rid is no error."""

    TAG: ClassVar = "credit"
    rid: RequestId
    tokens: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Exit now. Requests that still run end without an `End`: the sender has seen to them."""

    TAG: ClassVar = "stop"


Command = Submit | Cancel | Credit | Stop

# --- up the pipe --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loading:
    """A step of loading a model: `stage` in a word, `done` of `total` (None: unknown) in `unit`."""

    TAG: ClassVar = "loading"
    stage: str
    done: int
    total: int | None
    unit: str


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about a loaded engine."""

    model: str
    context_length: int
    vocab_size: int
    chat: bool
    specprefill: SpecPrefillAbility
    device: str
    dtype: str
    num_parameters: int
    weight_bytes: int
    load_s: float


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine can answer."""

    TAG: ClassVar = "ready"
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The model cannot be loaded. `permanent`: trying again will not help; `message` is for the operator."""

    TAG: ClassVar = "load_failed"
    message: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and counters of an engine, sent along with every `Step`.

    The first five are requests in each phase and return to zero when nothing runs; `*_total` only grow.
    """

    waiting: int = 0
    scoring: int = 0
    prefilling: int = 0
    decoding: int = 0
    paused: int = 0
    """Out of the batch until their clients give credit."""
    prompt_cache_entries: int = 0
    prompt_cache_bytes: int = 0
    memory_bytes: int = 0
    prefill_tokens_total: int = 0
    cached_tokens_total: int = 0
    completion_tokens_total: int = 0
    steps_total: int = 0

    @property
    def in_flight(self) -> int:
        """Requests that the engine holds."""
        return self.waiting + self.scoring + self.prefilling + self.decoding + self.paused


@dataclass(frozen=True, slots=True)
class Step:
    """All that happened to the engine's requests since the last `Step`, in order."""

    TAG: ClassVar = "step"
    events: list[Event]
    stats: EngineStats
    monotonic_s: float
    """When the step ended: `time.monotonic()`, which both processes share."""


Report = Loading | Ready | LoadFailed | Step

# --- bytes --------------------------------------------------------------------------------------------------

_EVENTS: dict[str, Any] = {kind.TAG: kind for kind in (Progress, Delta, End)}
_PLAIN = "+"
"""Tag of a delta that has nothing but text and tokens: nearly all of what goes up, so it is kept small."""


def _pack(event: Event) -> list[Any]:
    if isinstance(event, Delta) and not (event.reasoning or event.tool_calls or event.logprobs):
        return [_PLAIN, event.rid, event.text, event.n, event.tokens, event.is_thinned]
    return [event.TAG, event]


def _unpack(packed: list[Any]) -> Event:
    if packed[0] == _PLAIN:
        _, rid, text, n, tokens, is_thinned = packed
        return Delta(rid, text, n, "", [], [], tokens, is_thinned)
    event: Event = _EVENTS[packed[0]](**packed[1])
    return event


def encode_command(command: Command) -> bytes:
    """Return a command as bytes for the pipe."""
    fields: dict[str, Any] = {}
    match command:
        case Submit():
            fields = {
                "rid": command.rid,
                "chat": isinstance(command.input, ChatInput),
                "input": command.input.model_dump(exclude_none=True),
                "options": command.options.model_dump(),
                "tenant": command.tenant,
                "queue_ms": command.queue_ms,
                "max_tokens_is_default": command.max_tokens_is_default,
                "generated": command.generated,
                "stays_dense": command.stays_dense,
                "credit": command.credit,
            }
        case Cancel():
            fields = {"rid": command.rid, "reason": command.reason}
        case Credit():
            fields = {"rid": command.rid, "tokens": command.tokens}
        case Stop():
            pass
    return orjson.dumps([command.TAG, fields])


def decode_command(data: bytes) -> Command:
    """Return the command that `encode_command` wrote."""
    tag, fields = orjson.loads(data)
    match tag:
        case Submit.TAG:
            model = ChatInput if fields["chat"] else CompletionInput
            return Submit(
                RequestId(fields["rid"]),
                model.model_validate(fields["input"]),
                GenerationOptions.model_validate(fields["options"]),
                fields["tenant"],
                fields["queue_ms"],
                fields["max_tokens_is_default"],
                fields["generated"],
                fields["credit"],
                fields["stays_dense"],
            )
        case Cancel.TAG:
            return Cancel(**fields)
        case Credit.TAG:
            return Credit(**fields)
        case Stop.TAG:
            return Stop()
    raise ValueError(f"unknown command {tag!r}")


def encode_report(report: Report) -> bytes:
    """Return a report as bytes for the pipe."""
    if isinstance(report, Step):
        events = [_pack(event) for event in report.events]
        return orjson.dumps([Step.TAG, {"events": events, "stats": report.stats, "at": report.monotonic_s}])
    return orjson.dumps([report.TAG, report])


def decode_report(data: bytes) -> Report:
    """Return the report that `encode_report` wrote."""
    tag, fields = orjson.loads(data)
    match tag:
        case Step.TAG:
            events = [_unpack(packed) for packed in fields["events"]]
            return Step(events, EngineStats(**fields["stats"]), fields["at"])
        case Loading.TAG:
            return Loading(**fields)
        case Ready.TAG:
            return Ready(EngineInfo(**fields["info"]))
        case LoadFailed.TAG:
            return LoadFailed(**fields)
    raise ValueError(f"unknown report {tag!r}")
