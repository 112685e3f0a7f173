"""What a stream gives its reader: events while it runs, and a result. PROTOCOL.md, "Server frames"."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..protocol.frames import (
    AcceptedFrame,
    AssistantMessage,
    DeltaFrame,
    DoneFrame,
    FinishReason,
    Phase,
    ProgressFrame,
    SpecPrefillReport,
    Status,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The server has taken the request. `options` are those in force, its defaults filled in."""

    request_id: str
    rid: str
    queue_position: int
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Progress:
    """What a request without a token waits for. `total` is None where nobody knows.

    `load`: its model; `queue`: its turn; `recover`: another engine process; `score`, `prefill`: its prompt,
    in tokens, `cached` of which needed no reading.
    """

    phase: Phase
    processed: int
    total: int | None
    cached: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of the answer. `num_tokens` new tokens came with it; the text may be empty."""

    text: str
    num_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New text of what the model marked as reasoning; not part of the answer."""

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole tool call. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str
    num_tokens: int = 0

    @classmethod
    def of(cls, call: ToolCallDelta, num_tokens: int = 0) -> "ToolCall":
        """Return the call of a frame."""
        return cls(call["id"], call["function"]["name"], call["function"]["arguments"], num_tokens)


@dataclass(frozen=True, slots=True)
class Result:
    """The answer, whole or as far as it came, and what it took."""

    request_id: str
    rid: str | None
    status: Status
    finish_reason: FinishReason | None
    """None unless completed."""
    reason: str | None
    """Why it was cancelled or failed; None when completed."""
    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    logprobs: tuple[TokenLogprob, ...]
    usage: Usage
    timings: Timings
    specprefill: SpecPrefillReport
    message: AssistantMessage | None
    """Of a chat: the message, fit for the next turn's `messages`."""


@dataclass(frozen=True, slots=True)
class Done:
    """The last event of a stream that was completed, or cancelled by this client."""

    result: Result


@dataclass(slots=True)
class Transcript:
    """What has come of an answer so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, frame: DeltaFrame) -> None:
        """Take a delta in."""
        self.text.append(frame["text"])
        self.reasoning.append(frame.get("reasoning", ""))
        self.tool_calls += frame.get("tool_calls", [])
        self.logprobs += frame.get("logprobs", [])

    def result(self, done: DoneFrame, *, rid: str | None, is_chat: bool) -> Result:
        """Return the result of a request that has ended."""
        text, reasoning = "".join(self.text), "".join(self.reasoning)
        calls = [ToolCall.of(call) for call in self.tool_calls]
        message = done.get("message")
        if message is not None:  # with `stream: false`, all of it is here
            text, reasoning = message["content"] or "", message.get("reasoning", "")
            calls = _calls_of(message)
        elif is_chat:
            message = self._message(text, reasoning)
        return Result(
            request_id=done["id"],
            rid=rid,
            status=done["status"],
            finish_reason=done["finish_reason"],
            reason=done["reason"],
            text=done.get("text", text),
            reasoning=reasoning,
            tool_calls=tuple(calls),
            logprobs=tuple(done.get("logprobs", self.logprobs)),
            usage=done["usage"],
            timings=done["timings"],
            specprefill=done["specprefill"],
            message=message,
        )

    def _message(self, text: str, reasoning: str) -> AssistantMessage:
        calls = [{name: value for name, value in call.items() if name != "index"} for call in self.tool_calls]
        message: AssistantMessage = {"role": "assistant", "content": text or (None if calls else "")}
        if reasoning:
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message


def _calls_of(message: AssistantMessage) -> list[ToolCall]:
    calls = message.get("tool_calls", [])
    return [
        ToolCall(str(call.get("id")), call["function"]["name"], call["function"]["arguments"])
        for call in calls
    ]


Event = Accepted | Progress | TextDelta | ReasoningDelta | ToolCall | Done


def accepted_of(frame: AcceptedFrame) -> Accepted:
    """Return the event of an `accepted` frame."""
    return Accepted(frame["id"], frame["rid"], frame["queue_position"], frame["options"])


def progress_of(frame: ProgressFrame) -> Progress:
    """Return the event of a `progress` frame."""
    return Progress(frame["phase"], frame["processed"], frame["total"], frame["cached"])


def events_of(frame: DeltaFrame) -> list[Event]:
    """Return the events of a `delta` frame. Its tokens are counted once, with the first of them."""
    num_tokens = frame["n"]
    events: list[Event] = []
    if reasoning := frame.get("reasoning"):
        events.append(ReasoningDelta(reasoning, num_tokens))
        num_tokens = 0
    calls = frame.get("tool_calls", [])
    if frame["text"] or frame.get("logprobs") or not (events or calls):
        events.append(TextDelta(frame["text"], num_tokens, tuple(frame.get("logprobs", ()))))
        num_tokens = 0
    for call in calls:
        events.append(ToolCall.of(call, num_tokens))
        num_tokens = 0
    return events


def can_merge(earlier: Event, later: Event) -> bool:
    """Return whether two neighbours can be told as one."""
    return type(earlier) is type(later) and isinstance(earlier, TextDelta | ReasoningDelta | Progress)


def merge(run: Sequence[Event]) -> Event:
    """Return one event that says what a run of events does, each of which can merge with the next."""
    if len(run) == 1 or isinstance(run[-1], Progress):
        return run[-1]
    parts = [event for event in run if isinstance(event, TextDelta | ReasoningDelta)]
    text = "".join(part.text for part in parts)
    num_tokens = sum(part.num_tokens for part in parts)
    if isinstance(run[0], ReasoningDelta):
        return ReasoningDelta(text, num_tokens)
    logprobs = tuple(entry for part in parts if isinstance(part, TextDelta) for entry in part.logprobs)
    return TextDelta(text, num_tokens, logprobs)
