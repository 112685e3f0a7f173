"""What one connection has to send, in order. Streams' frames are built when the socket is ready for them."""

from collections import deque
from dataclasses import dataclass

from .codec import encode
from .messages import Delta, Progress
from .server_frames import DeltaFrame, DoneFrame
from .stream import Stream


@dataclass(frozen=True, slots=True)
class _Taker:
    """A frame that is built only when the socket is ready for it."""

    stream: Stream
    kind: type[Progress] | type[Delta]


@dataclass(frozen=True, slots=True)
class _LastFrame:
    stream: Stream
    num_bytes: int
    """About what it has beside the tokens that go out before it."""


@dataclass(frozen=True, slots=True)
class _Replayed:
    """A frame that a stream has sent before. Its bytes are mostly the ring's: only a part of them counts."""

    data: bytes

    @property
    def num_bytes(self) -> int:
        return 64 + len(self.data) // 16


class Outgoing:
    """A queue of frames, and of places where a stream's next frame goes."""

    def __init__(self) -> None:
        self._items: deque[bytes | _Replayed | _Taker | _LastFrame] = deque()
        self._with_tokens: deque[Stream] = deque()  # of the places for tokens among them, in order
        self._ready_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def buffered_bytes(self) -> int:
        """About how much waits, in bytes: frames, and tokens that no frame holds yet."""
        # One may have two places: its tokens wait for the first, and its end has added another.
        return self._ready_bytes + sum(stream.pending_bytes for stream in set(self._with_tokens))

    def send(self, frame: object) -> None:
        """Add a frame."""
        data = encode(frame)
        self._items.append(data)
        self._ready_bytes += len(data)

    def send_replayed(self, frames: list[bytes]) -> None:
        """Add frames of a stream that is resumed."""
        replayed = [_Replayed(data) for data in frames]
        self._items.extend(replayed)
        self._ready_bytes += sum(frame.num_bytes for frame in replayed)

    def send_tokens(self, stream: Stream) -> None:
        """Add a place for all tokens of a stream that wait when its turn comes."""
        self._items.append(_Taker(stream, Delta))
        self._with_tokens.append(stream)

    def send_progress(self, stream: Stream) -> None:
        """Add a place for a stream's newest progress."""
        self._items.append(_Taker(stream, Progress))

    def send_last(self, stream: Stream) -> None:
        """Add what is left of a stream that has ended: its tokens and its last frame."""
        if stream.options.stream:
            self.send_tokens(stream)
        last = _LastFrame(stream, stream.last_frame_bytes)
        self._items.append(last)
        self._ready_bytes += last.num_bytes

    def next_frame(self, now_s: float) -> bytes | None:
        """Return the next frame, or None when there is none now."""
        while self._items:
            item = self._items.popleft()
            match item:
                case bytes():
                    self._ready_bytes -= len(item)
                    return item
                case _Replayed():
                    self._ready_bytes -= item.num_bytes
                    return item.data
                case _LastFrame():
                    self._ready_bytes -= item.num_bytes
                    return _keep(item.stream, item.stream.done(), now_s)
                case _Taker() if item.kind is Delta:
                    self._with_tokens.popleft()
                    if (delta := item.stream.take_delta()) is not None:
                        return _keep(item.stream, delta, now_s)
                case _Taker():
                    if (progress := item.stream.take_progress()) is not None:
                        return encode(progress)
        return None

    def drop(self, stream: Stream) -> bool:
        """Take out the places of a stream that goes on elsewhere; return whether its last frame was due."""
        kept: deque[bytes | _Replayed | _Taker | _LastFrame] = deque()
        was_ending = False
        for item in self._items:
            if isinstance(item, bytes | _Replayed) or item.stream is not stream:
                kept.append(item)
            elif isinstance(item, _LastFrame):
                self._ready_bytes -= item.num_bytes
                was_ending = True
        self._items = kept
        self._with_tokens = deque(other for other in self._with_tokens if other is not stream)
        return was_ending

    def clear(self) -> None:
        """Forget everything: nothing can be sent any more."""
        self._items.clear()
        self._with_tokens.clear()
        self._ready_bytes = 0


def _keep(stream: Stream, frame: DeltaFrame | DoneFrame, now_s: float) -> bytes:
    """Return a frame's bytes; a stream that can be resumed keeps them."""
    data = encode(frame)
    if stream.replay is not None:
        stream.replay.add(frame["seq"], data, now_s)
    return data
