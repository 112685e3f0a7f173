"""Whose prompt is read next, and how much of it, between two decode steps.

A slice is a time: about `chunk_target_ms` while others decode, so that a long prompt stops nobody's tokens
for longer, and more while nobody does. Chunks fill it, from the measured speed, on every machine and at every
depth of a prompt.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .config import EngineConfig
from .request import Request

GRAIN_TOKENS = 8
"""Chunks are multiples of this, so that few shapes occur."""
RELAXED = 2.5
"""While nobody decodes, a slice may take this many times as long: bigger chunks are cheaper."""


class ChunkSizer:
    """Chooses the length of a chunk by time.

    Args:
        minimum: tokens that a chunk always may have.
        maximum: tokens that it never has more of.
        tokens_per_s: the speed to begin with.
    """

    def __init__(self, *, minimum: int, maximum: int, tokens_per_s: float) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._tokens_per_s = tokens_per_s

    @property
    def tokens_per_s(self) -> float:
        """The speed as measured lately."""
        return self._tokens_per_s

    @property
    def shortest_s(self) -> float:
        """How long the shortest chunk takes, in seconds."""
        return self._minimum / self._tokens_per_s

    def num_tokens(self, seconds: float) -> int:
        """Return how many tokens a chunk of so many seconds has."""
        grains = int(seconds * self._tokens_per_s) // GRAIN_TOKENS
        return max(self._minimum, min(self._maximum, grains * GRAIN_TOKENS))

    def record(self, num_tokens: int, seconds: float) -> None:
        """Take a chunk's measured time in. Short last chunks say little and are left out."""
        if num_tokens >= self._minimum and seconds > 0:
            self._tokens_per_s = 0.5 * self._tokens_per_s + 0.5 * num_tokens / seconds


@dataclass(frozen=True)
class Turn:
    """What `choose` knows of a request: tokens left to read, and seconds since it asked."""

    tokens_left: int
    waited_s: float


def choose(turns: Sequence[Turn], tokens_per_s: float) -> int:
    """Return the index of the prompt whose chunk comes next.

    The shortest remaining time comes first, less the time already waited: a short prompt overtakes a long
    one, and a long one is overtaken for no longer than it would take alone.
    """
    return min(
        range(len(turns)), key=lambda i: turns[i].tokens_left / max(tokens_per_s, 1e-9) - turns[i].waited_s
    )


class PrefillSchedule:
    """The prompts that are being read.

    Args:
        stream: the MLX stream of the batch; prompts are read on it too.
        tokens_per_s: the speed to begin with.
    """

    def __init__(self, config: EngineConfig, stream: Any, tokens_per_s: float) -> None:
        self._target_s = config.chunk_target_ms / 1e3
        self._stream = stream
        self._sizers = {
            phase: ChunkSizer(
                minimum=config.min_chunk_tokens, maximum=config.max_chunk_tokens, tokens_per_s=tokens_per_s
            )
            for phase in ("score", "prefill")
        }
        self.requests: list[Request] = []
        self.tokens_total = 0
        """Tokens read so far, by scoring or prefill."""

    def run(self, *, others_decode: bool) -> list[Request]:
        """Read prompts for one slice; return the requests whose prompts are complete, no longer ours."""
        # The decode step under way is not part of the slice.
        mx.synchronize(self._stream)
        deadline_s = time.monotonic() + self._target_s * (1.0 if others_decode else RELAXED)
        complete: list[Request] = []
        while self.requests:
            request = self._next()
            sizer = self._sizers[request.prefill.phase]
            left_s = deadline_s - time.monotonic()
            if not request.prefill.done:
                self._read_chunk(request, sizer, left_s)
            if request.prefill.done:
                request.prefill_complete()
                self.requests.remove(request)
                complete.append(request)
            if deadline_s - time.monotonic() < sizer.shortest_s:
                break
        return complete

    def _next(self) -> Request:
        now = time.monotonic()
        turns = [
            Turn(request.prefill.total - request.prefill.processed, now - request.arrived_s)
            for request in self.requests
        ]
        return self.requests[choose(turns, self._sizers["prefill"].tokens_per_s)]

    def _read_chunk(self, request: Request, sizer: ChunkSizer, seconds: float) -> None:
        prefill = request.prefill
        phase, before, size = prefill.phase, prefill.processed, sizer.num_tokens(seconds)
        began_s = time.monotonic()
        try:
            with mx.stream(self._stream):
                prefill.step(size)
        except Exception as error:
            request.prefill_failed(error)
            return
        ended_s = time.monotonic()
        if prefill.phase == phase and prefill.processed - before >= size:
            # `size` is in tokens of a dense prefill, whatever share of the layers the chunk ran.
            sizer.record(size, ended_s - began_s)
        if prefill.phase == phase:
            self.tokens_total += prefill.processed - before
        if prefill.phase != phase or prefill.done:
            request.phase_ms[phase] = (ended_s - request.phase_began_s) * 1e3
            request.phase_began_s = ended_s
