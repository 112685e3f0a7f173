"""One request as this client sees it, without I/O: where it stands, and what its reader has not taken yet.

`TRANSITIONS` is the rule, and nothing else assigns a state. An event that it does not allow is the server's
fault: `ProtocolError`, and nothing changes.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

from ..protocol.frames import AcceptedFrame, DeltaFrame, DoneFrame, ProgressFrame, ResumedFrame
from .errors import ClientError, ProtocolError, RequestFailed, failure
from .events import (
    Accepted,
    Done,
    Event,
    Progress,
    ReasoningDelta,
    Result,
    TextDelta,
    ToolCall,
    Transcript,
    accepted_of,
    can_merge,
    events_of,
    merge,
    progress_of,
)

OnProgress = Callable[[Progress], None]
"""Told of every `progress` frame at once, also while nobody reads the stream."""

_log = logging.getLogger("headrace.client")

_MAX_RUN = 256
"""Unread events that could be one; then they become one."""


class RequestState(Enum):
    """Where a request stands."""

    UNSENT = auto()
    """No server can know of it."""
    SENT = auto()
    """The server has not answered yet: it may run."""
    RUNNING = auto()
    LOST = auto()
    """Its connection is gone; a `resume` may bring it back."""
    RESUMING = auto()
    """The `resume` is sent."""
    ENDED = auto()


class RequestEvent(Enum):
    """What can happen to a request."""

    SEND = auto()
    ACCEPT = auto()
    FRAME = auto()
    """A `progress` or a `delta`."""
    LOSE = auto()
    RESUME = auto()
    RESUMED = auto()
    END = auto()


_S, _E = RequestState, RequestEvent

TRANSITIONS: Mapping[tuple[RequestState, RequestEvent], RequestState] = MappingProxyType(
    {
        (_S.UNSENT, _E.SEND): _S.SENT,
        (_S.UNSENT, _E.END): _S.ENDED,
        (_S.SENT, _E.ACCEPT): _S.RUNNING,
        (_S.SENT, _E.END): _S.ENDED,
        (_S.RUNNING, _E.FRAME): _S.RUNNING,
        (_S.RUNNING, _E.LOSE): _S.LOST,
        (_S.RUNNING, _E.END): _S.ENDED,
        (_S.LOST, _E.RESUME): _S.RESUMING,
        (_S.LOST, _E.END): _S.ENDED,
        (_S.RESUMING, _E.RESUMED): _S.RUNNING,
        (_S.RESUMING, _E.LOSE): _S.LOST,
        (_S.RESUMING, _E.END): _S.ENDED,
    }
)


class StreamCore:
    """A request, its answer so far, and the events that nobody has read yet.

    Unread events that can be told as one become one, so that a reader that lags costs no more memory than
    the text.

    Args:
        fields: the request's frame.
        on_progress: told of progress at once.
    """

    def __init__(self, fields: Mapping[str, Any], text: str, on_progress: OnProgress | None = None) -> None:
        self.id: str = fields["id"]
        self.rid: str | None = None
        self.window: int | None = fields.get("window")
        self.text = text
        """Its frame, encoded."""
        self.resume_token: str | None = None
        self.is_cancelling = False
        self._is_chat = fields["type"] == "chat"
        self._on_progress = on_progress
        self._state = RequestState.UNSENT
        self._seq = -1
        self._num_received = 0
        self._num_read = 0
        self._num_granted = 0
        """Tokens that the server was allowed beyond the window."""
        self._accepted: Accepted | None = None
        self._transcript = Transcript()
        self._unread: deque[list[Event]] = deque()
        self._result: Result | None = None
        self._error: ClientError | None = None

    # --- for its reader ---

    @property
    def state(self) -> RequestState:
        """Where the request stands."""
        return self._state

    @property
    def is_ended(self) -> bool:
        """Whether nothing more can come."""
        return self._state is RequestState.ENDED

    @property
    def accepted(self) -> Accepted | None:
        """The server's answer; None before it."""
        return self._accepted

    @property
    def result(self) -> Result | None:
        """The result once it has ended, whole or not; None if no server has said how."""
        return self._result

    @property
    def error(self) -> ClientError | None:
        """Why it has ended without a whole answer."""
        return self._error

    @property
    def last_seq(self) -> int:
        """The `seq` of the newest frame; -1: none has one yet."""
        return self._seq

    @property
    def has_unread(self) -> bool:
        """Whether `take` would return an event."""
        return bool(self._unread)

    def take(self) -> Event | None:
        """Return the next unread event, or None when there is none now."""
        if not self._unread:
            return None
        event = merge(self._unread.popleft())
        if isinstance(event, TextDelta | ReasoningDelta | ToolCall):
            self._num_read += event.num_tokens
        return event

    def drop_unread(self) -> None:
        """Let the reader miss what it has not taken yet; the result still has it."""
        while self.take() is not None:
            pass

    def take_credit(self) -> int:
        """Return how many tokens the server may be allowed again; 0: none, or not worth a frame yet."""
        due = self._num_read - self._num_granted
        if self.window is None or self.is_ended or due * 2 < self.window:
            return 0
        self._num_granted += due
        return due

    # --- for the connection ---

    def sent(self) -> None:
        """Note that the frame is on its way: from now on it may run."""
        self._apply(RequestEvent.SEND)

    def accept(self, frame: AcceptedFrame) -> None:
        """Take the server's yes."""
        self._apply(RequestEvent.ACCEPT)
        self.rid = frame["rid"]
        self.resume_token = frame.get("resume_token")
        self._accepted = accepted_of(frame)
        self._add(self._accepted)

    def progress(self, frame: ProgressFrame) -> None:
        """Take what it waits for."""
        self._apply(RequestEvent.FRAME)
        event = progress_of(frame)
        self._add(event)
        if self._on_progress is not None:
            try:
                self._on_progress(event)
            except Exception:  # the caller's own; the stream goes on
                _log.exception("a progress callback raised")

    def delta(self, frame: DeltaFrame) -> None:
        """Take new tokens; those that had come before a lost connection are known already."""
        self._apply(RequestEvent.FRAME)
        if not self._is_next(frame["seq"]):
            return
        self._num_received += frame["n"]
        self._transcript.add(frame)
        for event in events_of(frame):
            self._add(event)

    def done(self, frame: DoneFrame) -> None:
        """Take the last frame."""
        self._is_next(frame["seq"])
        self._apply(RequestEvent.END)
        result = self._transcript.result(frame, rid=self.rid, is_chat=self._is_chat)
        self._result = result
        if frame["error"] is not None:
            self._error = failure(frame["error"], result)
        elif frame["status"] == "failed":
            self._error = _unexplained(result)
        else:
            self._add(Done(result))

    def end(self, error: ClientError) -> None:
        """End it without a last frame: refused, lost, or out of step."""
        self._apply(RequestEvent.END)
        self._error = error

    def end_unsent(self) -> None:
        """End it before any server knows of it, as the reader wants it to."""
        self._apply(RequestEvent.END)
        self._result = self._transcript.result(_nothing_done(self.id), rid=None, is_chat=self._is_chat)
        self._add(Done(self._result))

    def lose(self) -> None:
        """Note that its connection is gone."""
        self._apply(RequestEvent.LOSE)

    def resume(self) -> None:
        """Note that a `resume` is on its way."""
        self._apply(RequestEvent.RESUME)

    def resumed(self, frame: ResumedFrame) -> None:
        """Take the server's yes to a `resume`."""
        if frame["next_seq"] > self._seq + 1:
            raise ProtocolError("protocol_error", "the server resumes with a gap", started=True)
        self._apply(RequestEvent.RESUMED)
        if self.window is not None:
            # Credit may have been lost with the connection. The server has had what it took to make the
            # tokens that came; the rest is given again: at worst the window is larger for a while.
            self._num_granted = min(self._num_granted, max(0, self._num_received - self.window))

    # --- inside ---

    def _apply(self, event: RequestEvent) -> None:
        try:
            self._state = TRANSITIONS[self._state, event]
        except KeyError:
            message = f"{event.name} came while the request was {self._state.name}"
            raise ProtocolError("protocol_error", message, started=True) from None

    def _is_next(self, seq: int) -> bool:
        if seq > self._seq + 1:
            message = f"frame {self._seq + 1} is missing: {seq} came"
            raise ProtocolError("protocol_error", message, started=True, retryable=True)
        is_next = seq == self._seq + 1
        self._seq = max(self._seq, seq)
        return is_next

    def _add(self, event: Event) -> None:
        if self._unread and can_merge(self._unread[-1][-1], event):
            run = self._unread[-1]
            run.append(event)
            if len(run) >= _MAX_RUN or isinstance(event, Progress):
                run[:] = [merge(run)]
        else:
            self._unread.append([event])


def _unexplained(result: Result) -> RequestFailed:
    error = RequestFailed(
        result.reason or "failed",
        "the request failed",
        started=True,
        request_id=result.request_id,
        rid=result.rid,
    )
    error.result = result
    return error


def _nothing_done(request_id: str) -> DoneFrame:
    return {
        "type": "done",
        "id": request_id,
        "seq": 0,
        "status": "cancelled",
        "finish_reason": None,
        "reason": "client",
        "error": None,
        "usage": {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        "timings": {
            "queue_ms": None,
            "score_ms": None,
            "prefill_ms": None,
            "ttft_ms": None,
            "decode_ms": None,
            "tokens_per_s": None,
        },
        "specprefill": {
            "requested": None,
            "applied": False,
            "reason": "client",
            "keep_pct": None,
            "prompt_tokens": 0,
            "uncached_tokens": 0,
            "kept_tokens": 0,
            "score_ms": None,
            "prefill_ms": None,
            "draft": None,
        },
    }
