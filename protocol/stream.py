"""The life of one request as its client sees it. PROTOCOL.md, "The life of a request".

The table `TRANSITIONS` is the rule; `Stream` applies it and builds the frames. Nothing else assigns a state.
An event that the table does not allow raises `IllegalTransition` and changes nothing.
"""

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, assert_never

from .delta_buffer import DeltaBuffer
from .errors import ErrorBody, ErrorCode, HeadraceError, IllegalTransition
from .frames import (
    AcceptedFrame,
    AssistantMessage,
    DeltaFrame,
    DoneFrame,
    ProgressFrame,
    RequestFrame,
    RequestId,
    ResumedFrame,
    SpecPrefillReport,
    Status,
    Timings,
    ToolCallDelta,
    Usage,
)
from .messages import CancelReason, Delta, End, Progress
from .options import GenerationOptions
from .replay import Replay

_RUN_BYTES = 64
"""What one of `prompt_runs` has beside its text."""


class StreamState(Enum):
    """Where a request stands."""

    WAITING = auto()
    """Accepted; no token yet."""
    STREAMING = auto()
    """Tokens have come."""
    CANCELLING = auto()
    """Somebody wants it to end; the engine has not let go yet."""
    DONE = auto()
    """The engine has let it go; the last frame is built when the deltas before it are sent."""


class StreamEvent(Enum):
    """What can happen to a request."""

    PROGRESS = auto()
    DELTA = auto()
    CANCEL = auto()
    END = auto()


_S, _E = StreamState, StreamEvent

TRANSITIONS: Mapping[tuple[StreamState, StreamEvent], StreamState] = MappingProxyType(
    {
        (_S.WAITING, _E.PROGRESS): _S.WAITING,
        (_S.WAITING, _E.DELTA): _S.STREAMING,
        (_S.WAITING, _E.CANCEL): _S.CANCELLING,
        (_S.WAITING, _E.END): _S.DONE,
        # An engine that takes a stream over reads the text so far again.
        (_S.STREAMING, _E.PROGRESS): _S.STREAMING,
        (_S.STREAMING, _E.DELTA): _S.STREAMING,
        (_S.STREAMING, _E.CANCEL): _S.CANCELLING,
        (_S.STREAMING, _E.END): _S.DONE,
        # What the engine had sent before it saw the cancel still counts.
        (_S.CANCELLING, _E.PROGRESS): _S.CANCELLING,
        (_S.CANCELLING, _E.DELTA): _S.CANCELLING,
        (_S.CANCELLING, _E.CANCEL): _S.CANCELLING,
        (_S.CANCELLING, _E.END): _S.DONE,
    }
)


class Stream:
    """One request on one connection: its state, its sequence numbers, and what is not sent yet.

    Deltas wait here until the socket takes them. One that waits takes later ones in, so that a slow socket
    costs no more memory than the text itself, and `seq` counts the frames that are really sent.
    A request with ``stream: false`` collects its deltas for the last frame in the same way.
    """

    def __init__(
        self,
        frame: RequestFrame,
        rid: RequestId,
        options: GenerationOptions,
        replay: Replay | None = None,
    ) -> None:
        self.id = frame.id
        self.rid = rid
        self.options = options
        self.is_chat = frame.kind == "chat"
        self.num_tokens = 0
        """Tokens taken from the engine so far: the sum of `n` over deltas, sent or waiting."""
        self.replay = replay
        """Its sent frames, if it can be resumed."""
        self._state = StreamState.WAITING
        self._end: End | None = None
        self._seq = 0
        self._pending = DeltaBuffer()
        self._pending_bytes = 0
        self._pending_progress: Progress | None = None

    @property
    def state(self) -> StreamState:
        """Where the request stands."""
        return self._state

    def _apply(self, event: StreamEvent) -> None:
        try:
            self._state = TRANSITIONS[self._state, event]
        except KeyError:
            raise IllegalTransition(f"{event.name} in {self._state.name}") from None

    # --- events in ---

    def cancel(self) -> None:
        """Note that somebody wants the request to end."""
        self._apply(StreamEvent.CANCEL)

    def push_progress(self, event: Progress) -> bool:
        """Take a progress event; return whether a frame for it must be scheduled."""
        self._apply(StreamEvent.PROGRESS)
        scheduled, self._pending_progress = self._pending_progress is not None, event
        return not scheduled

    def push_delta(self, event: Delta) -> bool:
        """Take a delta; return whether a frame for it must be scheduled (no: one is, or none is wanted)."""
        self._apply(StreamEvent.DELTA)
        self.num_tokens += event.n
        self._pending_bytes += _size_bytes(event)
        is_first = not self._pending
        self._pending.add(event)
        return is_first and self.options.stream

    # --- frames out ---

    @property
    def pending_bytes(self) -> int:
        """About how many bytes the frame of the waiting tokens will have; 0 if none wait."""
        return self._pending_bytes

    @property
    def last_frame_bytes(self) -> int:
        """About how many bytes `done` has beside its numbers: a whole answer, and a prompt's text."""
        runs = () if self._end is None else self._end.specprefill.get("prompt_runs", ())
        whole = 0 if self.options.stream else self._pending_bytes
        return whole + sum(_text_bytes(run["text"]) + _RUN_BYTES for run in runs)

    @property
    def has_progress(self) -> bool:
        """Whether `take_progress` would return anything."""
        return self._pending_progress is not None

    @property
    def has_tokens(self) -> bool:
        """Whether `take_delta` would return anything."""
        return bool(self._pending)

    @property
    def owes_last_frame(self) -> bool:
        """Whether the request has ended and `done` has not been called."""
        return self._end is not None

    def accepted(self, queue_position: int, resume_token: str | None = None) -> AcceptedFrame:
        """Return the request's first frame."""
        frame: AcceptedFrame = {
            "type": "accepted",
            "id": self.id,
            "rid": self.rid,
            "queue_position": queue_position,
            "options": self.options.model_dump(exclude_none=True),
        }
        if resume_token is not None:
            frame["resume_token"] = resume_token
        return frame

    def resumed(self, after_seq: int) -> ResumedFrame:
        """Return the frame before those that a client has missed."""
        return {"type": "resumed", "id": self.id, "rid": self.rid, "next_seq": after_seq + 1}

    def take_progress(self) -> ProgressFrame | None:
        """Return the newest progress as a frame, or None if there is none any more."""
        event, self._pending_progress = self._pending_progress, None
        if event is None:
            return None
        return {
            "type": "progress",
            "id": self.id,
            "phase": event.phase,
            "processed": event.processed,
            "total": event.total,
            "cached": event.cached,
        }

    def take_delta(self) -> DeltaFrame | None:
        """Return all tokens that wait as one frame with the next sequence number, or None."""
        delta, self._pending_bytes = self._pending.take(), 0
        if delta is None:
            return None
        frame: DeltaFrame = {
            "type": "delta",
            "id": self.id,
            "seq": self._next_seq(),
            "text": delta.text,
            "n": delta.n,
        }
        if delta.reasoning:
            frame["reasoning"] = delta.reasoning
        if delta.tool_calls:
            frame["tool_calls"] = delta.tool_calls
        if delta.logprobs:
            frame["logprobs"] = delta.logprobs
        return frame

    def _next_seq(self) -> int:
        seq, self._seq = self._seq, self._seq + 1
        return seq

    def end(self, event: End) -> None:
        """Take the end of the request. `done` builds its frame once the deltas before it are taken."""
        self._apply(StreamEvent.END)
        self._pending_progress = None
        self._end = event

    def done(self) -> DoneFrame:
        """Return the request's last frame; call it once, after `end` and after the last `take_delta`."""
        event, self._end = self._end, None
        assert event is not None, "it has not ended, or has had its last frame"
        frame: DoneFrame = {
            "type": "done",
            "id": self.id,
            "seq": 0,
            "status": event.status,
            "finish_reason": event.finish_reason,
            "reason": event.reason,
            "error": event.error,
            "usage": event.usage,
            "timings": event.timings,
            "specprefill": event.specprefill,
        }
        if not self.options.stream:
            whole, self._pending_bytes = self._pending.take() or Delta(self.rid, "", 0), 0
            if self.is_chat:
                frame["message"] = _message(whole)
            else:
                frame["text"] = whole.text
            if whole.logprobs:
                frame["logprobs"] = whole.logprobs
        frame["seq"] = self._next_seq()
        return frame


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


def _size_bytes(event: Delta) -> int:
    """Return about how many bytes a delta adds to a frame, but for what JSON escapes."""
    size_bytes = _text_bytes(event.text) + _text_bytes(event.reasoning)
    if not (event.tool_calls or event.logprobs):
        return size_bytes
    size_bytes += sum(4 * len(call["function"]["arguments"]) + 100 for call in event.tool_calls)
    return size_bytes + sum(80 * (1 + len(logprob["top_logprobs"])) for logprob in event.logprobs)


def _message(whole: Delta) -> AssistantMessage:
    """Return a whole answer as a message that fits into the next turn's `messages`."""
    message: AssistantMessage = {"role": "assistant", "content": whole.text}
    if whole.reasoning:
        message["reasoning"] = whole.reasoning
    if whole.tool_calls:
        message["tool_calls"] = [_without_index(call) for call in whole.tool_calls]
        message["content"] = whole.text or None
    return message


def _without_index(call: ToolCallDelta) -> dict[str, Any]:
    return {"id": call["id"], "type": call["type"], "function": call["function"]}


# --- ends that no engine reported ---------------------------------------------------------------------------


def cancelled_error(reason: CancelReason) -> ErrorBody | None:
    """Return the error of a request that was cancelled, by the reason; None where the client wanted it so."""
    match reason:
        case "client" | "connection_lost":
            return None
        case "deadline":
            code, message = ErrorCode.DEADLINE_EXCEEDED, "timeout_ms ran out before the request had ended"
        case "shutdown":
            code, message = ErrorCode.SHUTTING_DOWN, "the server stopped before the request had ended"
        case "slow_consumer":
            code, message = ErrorCode.SLOW_CONSUMER, "the client did not take what was sent to it"
        case _:
            assert_never(reason)
    return HeadraceError(code, message).body()


def specprefill_not_run(
    options: GenerationOptions, reason: str, prompt_tokens: int, cached_tokens: int = 0
) -> SpecPrefillReport:
    """Return the report of a request whose prompt was, or would have been, read densely: at no keep rate."""
    return {
        "requested": options.specprefill,
        "applied": False,
        "reason": reason,
        "keep_pct": None,
        "prompt_tokens": prompt_tokens,
        "uncached_tokens": prompt_tokens - cached_tokens,
        "kept_tokens": prompt_tokens - cached_tokens,
        "score_ms": None,
        "prefill_ms": None,
        "draft": None,
    }


def no_timings(queue_ms: float | None = None) -> Timings:
    """Return the timings of a request that never reached an engine."""
    return {
        "queue_ms": queue_ms,
        "score_ms": None,
        "prefill_ms": None,
        "ttft_ms": None,
        "decode_ms": None,
        "tokens_per_s": None,
    }


def end_without_engine(
    rid: RequestId,
    options: GenerationOptions,
    *,
    status: Status,
    reason: str,
    error: ErrorBody | None,
    prompt_tokens: int = 0,
    cached_tokens: int = 0,
    completion_tokens: int = 0,
    queue_ms: float | None = None,
) -> End:
    """Return the end of a request that no engine can report: it was queued, or its engine is gone."""
    usage: Usage = {
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return End(
        rid=rid,
        status=status,
        finish_reason=None,
        reason=reason,
        error=error,
        usage=usage,
        timings=no_timings(queue_ms),
        specprefill=specprefill_not_run(options, reason, prompt_tokens, cached_tokens),
    )
