"""One connection without its socket: what came in, what goes out, what the shell around it must do.

The four verbs of the interface (after websockets' own sans-I/O core):

- `receive` takes a message from the client and returns actions for the shell;
- `accept`, `refuse` and `deliver` take what the pool answers;
- `next_frame` gives the next message to send, in order, or None;
- `lost` and `goaway` end the connection from either side.

The shell owns the socket, the clock and the pool. Everything a client can observe is decided here.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import assert_never

from .codec import decode_client_frame, encode
from .errors import BusyError, CloseCode, ErrorCode, FrameError, HeadraceError, ServerError
from .frames import (
    CancelFrame,
    ClientId,
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
)
from .messages import CancelReason, Delta, End, Event, Progress
from .options import GenerationOptions
from .stream import Stream, StreamState, end_without_engine


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
    """Refused frames in a row after which the connection is closed with 4400."""


@dataclass(frozen=True, slots=True)
class StartRequest:
    """Give the frame to the pool, then call `accept` or `refuse`."""

    frame: RequestFrame


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Tell the pool that a request should end."""

    rid: RequestId
    reason: CancelReason


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Send what is buffered, then close the WebSocket."""

    code: CloseCode
    reason: str


Action = StartRequest | CancelRequest | CloseConnection


@dataclass(frozen=True, slots=True)
class _Taker:
    """A frame that is built only when the socket is ready for it."""

    stream: Stream
    kind: type[Progress] | type[Delta]


@dataclass(frozen=True, slots=True)
class _LastFrame:
    stream: Stream
    event: End


class Session:
    """The rules of one connection.

    Args:
        hello: the first frame.
        limits: what the connection may do.
        list_models: returns the models as they stand now, for `models` frames.
    """

    def __init__(
        self, hello: HelloFrame, limits: SessionLimits, list_models: Callable[[], list[ModelInfo]]
    ) -> None:
        self._limits = limits
        self._list_models = list_models
        self._state = SessionState.OPEN
        self._ids: dict[ClientId, RequestId] = {}
        self._streams: dict[RequestId, Stream] = {}
        self._starting: set[ClientId] = set()
        self._outgoing: deque[bytes | _Taker | _LastFrame] = deque()
        self._outgoing_bytes = 0
        self._bad_frames = 0
        self._send(hello)

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
        takers = (item for item in self._outgoing if isinstance(item, _Taker) and item.kind is Delta)
        return self._outgoing_bytes + sum(taker.stream.pending_bytes for taker in takers)

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
            case ModelsFrame():
                answer: ModelsAnswer = {"type": "models", "id": frame.id, "models": self._list_models()}
                self._send(answer)
            case PingFrame():
                pong: PongFrame = {"type": "pong", "nonce": frame.nonce}
                self._send(pong)
            case _:
                assert_never(frame)
        return []

    def _start(self, frame: RequestFrame) -> list[Action]:
        if frame.id in self._ids or frame.id in self._starting:
            raise FrameError(
                ErrorCode.DUPLICATE_ID,
                "a request with this id is running on this connection",
                param="id",
                frame_id=frame.id,
            )
        if self._state is SessionState.DRAINING:
            self._send_error(ServerError(ErrorCode.SHUTTING_DOWN, "the server is about to stop"), frame.id)
            return []
        if len(self._streams) + len(self._starting) >= self._limits.max_in_flight:
            limit = self._limits.max_in_flight
            busy = BusyError(
                ErrorCode.TOO_MANY_IN_FLIGHT, f"{limit} requests run on this connection, and no more may"
            )
            self._send_error(busy, frame.id)
            return []
        self._starting.add(frame.id)
        return [StartRequest(frame)]

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
        self, frame: RequestFrame, rid: RequestId, options: GenerationOptions, queue_position: int
    ) -> None:
        """Note that the pool has taken a request; `options` are those in force."""
        self._starting.discard(frame.id)
        stream = Stream(frame, rid, options)
        self._ids[frame.id] = rid
        self._streams[rid] = stream
        self._send(stream.accepted(queue_position))

    def refuse(self, frame: RequestFrame, error: HeadraceError) -> None:
        """Note that the pool has not taken a request: nothing was started."""
        self._starting.discard(frame.id)
        self._send_error(error, frame.id)

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
                self._outgoing.append(_Taker(stream, Delta))
            case Progress():
                if stream.push_progress(event):
                    self._outgoing.append(_Taker(stream, Progress))
            case End():
                stream.end(event)
                if stream.options.stream:
                    self._outgoing.append(_Taker(stream, Delta))
                self._outgoing.append(_LastFrame(stream, event))
                del self._streams[event.rid]
                del self._ids[stream.id]
            case _:
                assert_never(event)
        return 0

    def flush(self, rid: RequestId) -> None:
        """Let the tokens go that a request's `flush_ms` has held together."""
        if (stream := self._streams.get(rid)) is not None:
            self._outgoing.append(_Taker(stream, Delta))

    # --- to the client ---

    def next_frame(self) -> bytes | None:
        """Return the next message to send, or None when there is nothing to send now."""
        while self._outgoing:
            item = self._outgoing.popleft()
            match item:
                case bytes():
                    self._outgoing_bytes -= len(item)
                    return item
                case _LastFrame():
                    return encode(item.stream.done(item.event))
                case _Taker():
                    stream = item.stream
                    frame = stream.take_delta() if item.kind is Delta else stream.take_progress()
                    if frame is not None:
                        return encode(frame)
        return None

    # --- the end ---

    def goaway(self, reason: str, deadline_ms: int) -> None:
        """Tell the client that the server is about to stop; new requests are refused from now on."""
        if self._state is SessionState.OPEN:
            self._state = SessionState.DRAINING
            frame: GoawayFrame = {"type": "goaway", "reason": reason, "deadline_ms": deadline_ms}
            self._send(frame)

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
                    error=None,
                    completion_tokens=stream.num_tokens,
                )
            )

    def lost(self, reason: CancelReason = "connection_lost") -> list[CancelRequest]:
        """Note that nothing can be sent any more; return a cancel for every running request."""
        cancels = [] if self._state is SessionState.CLOSED else self.cancel_all(reason)
        self._state = SessionState.CLOSED
        self._outgoing.clear()
        self._outgoing_bytes = 0
        return cancels

    def _send(self, frame: object) -> None:
        data = encode(frame)
        self._outgoing.append(data)
        self._outgoing_bytes += len(data)

    def _send_error(self, error: HeadraceError, frame_id: str | None) -> None:
        frame: ErrorFrame = {"type": "error", "id": frame_id, **error.body()}
        self._send(frame)
