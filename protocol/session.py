"""One connection without its socket: what came in, what goes out, what the shell around it must do.

The four verbs of the interface (after websockets' own sans-I/O core):

- `receive` takes a message from the client and returns actions for the shell;
- `accept`, `refuse` and `deliver` take what the pool answers;
- `next_frame` gives the next message to send, in order, or None;
- `lost` and `goaway` end the connection from either side.

The shell owns the socket, the clock and the pool. Everything a client can observe is decided here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import assert_never

from .actions import Action, CancelRequest, CloseConnection, CreditRequest, ResumeStream, StartRequest
from .codec import decode_client_frame
from .errors import BusyError, CloseCode, ErrorCode, FrameError, HeadraceError, RequestError, ServerError
from .frames import (
    CancelFrame,
    ClientId,
    CreditFrame,
    DetachedFrame,
    ErrorFrame,
    GoawayFrame,
    HelloFrame,
    ModelInfo,
    ModelsAnswer,
    ModelsFrame,
    PingFrame,
    PongFrame,
    RequestFrame,
    RequestId,
    ResumeFrame,
)
from .messages import CancelReason, Delta, End, Event, Progress
from .options import GenerationOptions
from .outgoing import Outgoing
from .replay import Replay
from .stream import Stream, StreamState, cancelled_error, end_without_engine


class SessionState(Enum):
    """Where a connection stands."""

    OPEN = auto()
    DRAINING = auto()
    """The server is about to stop: running requests go on, new ones are refused."""
    CLOSED = auto()
    """Nothing is sent any more; events of its last requests are dropped."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What one connection may do."""

    max_in_flight: int
    """Requests that may run at a time."""
    max_bad_frames: int
    """Bad frames in a row after which the connection is closed with 4400: broken ones, and ids in use."""


class Session:
    """The rules of one connection.

    Args:
        hello: the first frame.
        limits: what the connection may do.
        list_models: returns the models as they stand now, for `models` frames.
        on_refusal: told the code of every frame that is refused.
    """

    def __init__(
        self,
        hello: HelloFrame,
        limits: SessionLimits,
        list_models: Callable[[], list[ModelInfo]],
        *,
        on_refusal: Callable[[ErrorCode], None] = lambda code: None,
    ) -> None:
        self._limits = limits
        self._list_models = list_models
        self._on_refusal = on_refusal
        self._state = SessionState.OPEN
        self._ids: dict[ClientId, RequestId] = {}
        self._streams: dict[RequestId, Stream] = {}
        self._starting: set[ClientId] = set()
        self._outgoing = Outgoing()
        self._bad_frames = 0
        self._outgoing.send(hello)

    @property
    def state(self) -> SessionState:
        """Where the connection stands."""
        return self._state

    @property
    def in_flight(self) -> int:
        """Requests that have been accepted and have no last frame yet."""
        return len(self._streams)

    @property
    def has_outgoing(self) -> bool:
        """Whether `next_frame` would return anything."""
        return bool(self._outgoing)

    @property
    def buffered_bytes(self) -> int:
        """About how much waits for the socket, in bytes: frames, and tokens that no frame holds yet."""
        return self._outgoing.buffered_bytes

    # --- from the client ---

    def receive(self, data: str | bytes) -> list[Action]:
        """Take one WebSocket message; return what the shell must do, in order."""
        if self._state is SessionState.CLOSED:
            return []
        try:
            if isinstance(data, bytes):
                raise FrameError(ErrorCode.INVALID_FRAME, "frames are text messages, not binary ones")
            actions = self._handle(data)
        except FrameError as error:
            return self._bad_frame(error)
        self._bad_frames = 0
        return actions

    def _handle(self, data: str) -> list[Action]:
        frame = decode_client_frame(data)
        match frame:
            case RequestFrame():
                return self._start(frame)
            case CancelFrame():
                return self._cancel(frame.id, "client")
            case CreditFrame():
                return self._credit(frame)
            case ResumeFrame():
                return self._resume(frame)
            case ModelsFrame():
                answer: ModelsAnswer = {"type": "models", "id": frame.id, "models": self._list_models()}
                self._outgoing.send(answer)
            case PingFrame():
                pong: PongFrame = {"type": "pong", "nonce": frame.nonce}
                self._outgoing.send(pong)
            case _:
                assert_never(frame)
        return []

    def _start(self, frame: RequestFrame) -> list[Action]:
        self._check_unused(frame.id)
        if self._state is SessionState.DRAINING:
            self._send_error(ServerError(ErrorCode.SHUTTING_DOWN, "the server is about to stop"), frame.id)
            return []
        if self._is_full(frame.id):
            return []
        self._starting.add(frame.id)
        return [StartRequest(frame)]

    def _resume(self, frame: ResumeFrame) -> list[Action]:
        self._check_unused(frame.id)
        if self._is_full(frame.id):
            return []
        self._starting.add(frame.id)
        return [ResumeStream(frame)]

    def _check_unused(self, frame_id: ClientId) -> None:
        if frame_id in self._ids or frame_id in self._starting:
            message = "a request with this id is running on this connection"
            raise FrameError(ErrorCode.DUPLICATE_ID, message, param="id", frame_id=frame_id)

    def _is_full(self, frame_id: ClientId) -> bool:
        """Return whether no more requests may run here; the client is told so."""
        limit = self._limits.max_in_flight
        if len(self._streams) + len(self._starting) < limit:
            return False
        message = f"{limit} requests run on this connection, and no more may"
        self._send_error(BusyError(ErrorCode.TOO_MANY_IN_FLIGHT, message), frame_id)
        return True

    def _credit(self, frame: CreditFrame) -> list[Action]:
        rid = self._ids.get(frame.id)
        if rid is None:
            return []
        if self._streams[rid].options.window is None:
            message = "credit is for requests that were sent with window"
            self._send_error(RequestError(ErrorCode.INVALID_PARAM, message, param="id"), frame.id)
            return []
        return [CreditRequest(rid, frame.tokens)]

    def _cancel(self, frame_id: ClientId, reason: CancelReason) -> list[Action]:
        rid = self._ids.get(frame_id)
        if rid is None:
            return []
        self._streams[rid].cancel()
        return [CancelRequest(rid, reason)]

    def _bad_frame(self, error: FrameError) -> list[Action]:
        self._send_error(error, error.frame_id)
        self._bad_frames += 1
        if self._bad_frames < self._limits.max_bad_frames:
            return []
        return [CloseConnection(CloseCode.TOO_MANY_BAD_FRAMES, "too many bad frames")]

    # --- from the pool ---

    def accept(
        self,
        frame: RequestFrame,
        rid: RequestId,
        options: GenerationOptions,
        queue_position: int,
        *,
        replay: Replay | None = None,
        resume_token: str | None = None,
    ) -> Stream:
        """Note that the pool has taken a request.

        Args:
            options: those in force.
            replay: keeps the frames of a stream that can be resumed.
            resume_token: what the client must show for that.
        """
        self._starting.discard(frame.id)
        stream = Stream(frame, rid, options, replay)
        self._ids[frame.id] = rid
        self._streams[rid] = stream
        self._outgoing.send(stream.accepted(queue_position, resume_token))
        return stream

    def refuse(self, frame: RequestFrame | ResumeFrame, error: HeadraceError) -> None:
        """Note that a request was not taken, or a stream cannot be resumed: nothing was started."""
        self._starting.discard(frame.id)
        self._send_error(error, frame.id)

    def attach(self, stream: Stream, frame: ResumeFrame, missed: list[bytes]) -> None:
        """Go on with a stream that no other connection has any more, after the frames that were missed."""
        self._starting.discard(frame.id)
        self._outgoing.send(stream.resumed(frame.after_seq))
        self._outgoing.send_replayed(missed)
        if stream.owes_last_frame:
            self._outgoing.send_last(stream)
        elif stream.state is not StreamState.DONE:
            self._ids[stream.id] = stream.rid
            self._streams[stream.rid] = stream
            if stream.has_progress:
                self._outgoing.send_progress(stream)
            if stream.has_tokens and stream.options.stream:
                self._outgoing.send_tokens(stream)

    def release(self, stream: Stream, *, is_elsewhere: bool = True) -> None:
        """Let a stream go, to another connection or to be attached here again.

        The client of another one's is told, unless it has had all of the stream.
        """
        is_running = self._streams.pop(stream.rid, None) is not None
        if is_running:
            del self._ids[stream.id]
        was_ending = self._outgoing.drop(stream)
        if is_elsewhere and self._state is not SessionState.CLOSED and (is_running or was_ending):
            frame: DetachedFrame = {"type": "detached", "id": stream.id, "reason": "resumed_elsewhere"}
            self._outgoing.send(frame)

    def deliver(self, event: Event) -> int:
        """Take an event of a running request.

        Returns:
            Milliseconds after which the shell must call `flush` for the event's request; 0: nothing to do.
        """
        stream = self._streams.get(event.rid)
        if stream is None or self._state is SessionState.CLOSED:
            self._streams.pop(event.rid, None)
            return 0
        match event:
            case Delta():
                if not stream.push_delta(event):
                    return 0
                if stream.options.flush_ms:
                    return stream.options.flush_ms
                self._outgoing.send_tokens(stream)
            case Progress():
                if stream.push_progress(event):
                    self._outgoing.send_progress(stream)
            case End():
                stream.end(event)
                self._outgoing.send_last(stream)
                del self._streams[event.rid]
                del self._ids[stream.id]
            case _:
                assert_never(event)
        return 0

    def flush(self, rid: RequestId) -> None:
        """Let the tokens go that a request's `flush_ms` has held together."""
        if (stream := self._streams.get(rid)) is not None:
            self._outgoing.send_tokens(stream)

    # --- to the client ---

    def next_frame(self, now_s: float = 0.0) -> bytes | None:
        """Return the next message to send, or None when there is nothing to send now.

        Args:
            now_s: the time, by the clock that resumable streams count with.
        """
        return self._outgoing.next_frame(now_s)

    # --- the end ---

    def goaway(self, reason: str, deadline_ms: int) -> None:
        """Tell the client that the server is about to stop; new requests are refused from now on."""
        if self._state is SessionState.OPEN:
            self._state = SessionState.DRAINING
            frame: GoawayFrame = {"type": "goaway", "reason": reason, "deadline_ms": deadline_ms}
            self._outgoing.send(frame)

    def cancel_all(self, reason: CancelReason) -> list[CancelRequest]:
        """Return a cancel for every running request; their last frames still go out."""
        for stream in self._streams.values():
            if stream.state is not StreamState.CANCELLING:
                stream.cancel()
        return [CancelRequest(rid, reason) for rid in self._streams]

    def end_all(self, reason: CancelReason) -> None:
        """End every running request here and now: its engine has not let go of it in time."""
        for rid, stream in list(self._streams.items()):
            self.deliver(
                end_without_engine(
                    rid,
                    stream.options,
                    status="cancelled",
                    reason=reason,
                    error=cancelled_error(reason),
                    completion_tokens=stream.num_tokens,
                )
            )

    def lost(self, reason: CancelReason = "connection_lost") -> list[CancelRequest]:
        """Note that nothing can be sent any more; return a cancel for every request that ends with it.

        Streams that can be resumed are forgotten here and not cancelled.
        """
        if self._state is SessionState.CLOSED:
            return []
        for stream in [stream for stream in self._streams.values() if stream.replay is not None]:
            self._streams.pop(stream.rid)
            self._ids.pop(stream.id)
        cancels = self.cancel_all(reason)
        self._state = SessionState.CLOSED
        self._outgoing.clear()
        return cancels

    def _send_error(self, error: HeadraceError, frame_id: str | None) -> None:
        frame: ErrorFrame = {"type": "error", "id": frame_id, **error.body()}
        self._on_refusal(error.code)
        self._outgoing.send(frame)
