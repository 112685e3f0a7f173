"""The frames that a stream has sent, kept for a client that may have lost them. PROTOCOL.md, "Resuming"."""

from collections import deque
from dataclasses import dataclass

FRAME_OVERHEAD_BYTES = 128
"""What a kept frame costs beside its own bytes, about."""


@dataclass(frozen=True, slots=True)
class _Kept:
    seq: int
    sent_s: float
    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data) + FRAME_OVERHEAD_BYTES


class Replay:
    """A ring of sent frames with consecutive `seq`: the oldest go first. The newest is always kept.

    Args:
        max_bytes: what the ring may hold.
        max_age_s: how long after it was sent a frame is kept.
    """

    def __init__(self, max_bytes: int, max_age_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._frames: deque[_Kept] = deque()
        self._size_bytes = 0
        self._next_seq = 0

    @property
    def size_bytes(self) -> int:
        """About how much memory the ring holds."""
        return self._size_bytes

    @property
    def max_bytes(self) -> int:
        """How much it may hold."""
        return self._max_bytes

    @property
    def next_seq(self) -> int:
        """The `seq` of the next frame that is sent."""
        return self._next_seq

    def add(self, seq: int, data: bytes, now_s: float) -> None:
        """Keep the bytes of the frame that is sent now."""
        kept = _Kept(seq, now_s, data)
        self._frames.append(kept)
        self._size_bytes += kept.size_bytes
        self._next_seq = seq + 1
        self._forget_old(now_s)

    def after(self, seq: int, now_s: float) -> list[bytes] | None:
        """Return every frame sent after the one with this `seq` (-1: all), or None if one is not held."""
        self._forget_old(now_s)
        first = self._frames[0].seq if self._frames else self._next_seq
        if not first - 1 <= seq < self._next_seq:
            return None
        return [kept.data for kept in self._frames if kept.seq > seq]

    def _forget_old(self, now_s: float) -> None:
        frames = self._frames
        while len(frames) > 1 and (
            self._size_bytes > self._max_bytes or now_s - frames[0].sent_s > self._max_age_s
        ):
            self._size_bytes -= frames.popleft().size_bytes
