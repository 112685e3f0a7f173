"""Whose prompt is read next, and how much of it, between two decode steps.

A slice is a time: about `chunk_target_ms` while others decode, so that a long prompt stops nobody's tokens
for longer, and more while nobody does. A long prompt gets a chunk that fills the slice, by the measured
speed, on every machine and at every depth. Short ones are not read here: as many as fit the slice are handed
to the batch together, which reads them in one forward pass.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from .config import EngineConfig
from .prefill import DensePrefill
from .request import Request

GRAIN_TOKENS = 8
"""Chunks are multiples of this, so that few shapes occur."""
WARM_UP_TOKENS = 64
RELAXED = 4
"""While nobody decodes, a slice may take this many times as long: bigger chunks are cheaper."""
LEFTOVER = 1.25
"""A chunk takes the rest of its prompt too, if that makes it no more than this many times as long."""


def warm_up(model: Any, stream: Any) -> tuple[float, float]:
    """Run a model, so that no request pays for the first time.

    Returns:
        What a forward pass costs, in seconds: in any case, and for each token.
    """
    few_s = _timed_prefill(model, stream, GRAIN_TOKENS)
    many_s = _timed_prefill(model, stream, WARM_UP_TOKENS)
    token_s = max(many_s - few_s, 0.1 * many_s) / (WARM_UP_TOKENS - GRAIN_TOKENS)
    return max(few_s - GRAIN_TOKENS * token_s, 0.0), token_s


def _timed_prefill(model: Any, stream: Any, num_tokens: int) -> float:
    """Return the better of two times, in seconds: the first one compiles."""
    times = []
    with mx.stream(stream):
        for _ in range(2):
            prefill = DensePrefill(model, [0] * num_tokens, make_prompt_cache(model))
            began_s = time.monotonic()
            prefill.step(num_tokens)
            times.append(time.monotonic() - began_s)
    return min(times)


class ChunkSizer:
    """Chooses the length of a chunk by time.

    A forward pass costs `overhead_s` (the weights are read once) and `token_s` for each token; both are
    measured once, and their scale follows every chunk that is read.

    Args:
        minimum: tokens that a chunk always may have.
        maximum: tokens that it never has more of.
    """

    def __init__(self, *, minimum: int, maximum: int, overhead_s: float, token_s: float) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._overhead_s = overhead_s
        self._token_s = max(token_s, 1e-9)
        self._scale = 1.0

    @property
    def tokens_per_s(self) -> float:
        """The speed of long chunks, as measured lately."""
        return 1.0 / (self._token_s * self._scale)

    def seconds(self, num_tokens: int) -> float:
        """Return how long a chunk takes."""
        return (self._overhead_s + self._token_s * num_tokens) * self._scale

    def num_tokens(self, seconds: float, available: int) -> int:
        """Return how many of the tokens that are left a chunk of so many seconds takes."""
        most = (seconds / self._scale - self._overhead_s) / self._token_s
        grains = int(most) // GRAIN_TOKENS
        size = max(self._minimum, min(self._maximum, grains * GRAIN_TOKENS))
        return available if available <= size * LEFTOVER else size

    def record(self, num_tokens: int, seconds: float) -> None:
        """Take a chunk's measured time in."""
        if seconds > 0:
            self._scale = 0.5 * self._scale + 0.5 * seconds / (self._overhead_s + self._token_s * num_tokens)


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
        overhead_s: time of a forward pass without any tokens, in seconds.
        token_s: time that each token adds.
    """

    def __init__(self, config: EngineConfig, stream: Any, overhead_s: float, token_s: float) -> None:
        self._target_s = config.chunk_target_ms / 1e3
        self._stream = stream
        self._sizers = {
            phase: ChunkSizer(
                minimum=config.min_chunk_tokens,
                maximum=config.max_chunk_tokens,
                overhead_s=overhead_s,
                token_s=token_s,
            )
            for phase in ("score", "prefill")
        }
        self.requests: list[Request] = []
        self.tokens_total = 0
        """Tokens read so far, by scoring or prefill."""

    def run(self, *, others_decode: bool, room: int) -> list[Request]:
        """Spend one slice; return the requests that may join the batch, at most `room`, no longer ours.

        Whoever finds no room waits here: rows that waited in the batch would be merged in that order, and a
        dense one before a sparse one loses the other's positions (`sparse_cache`).
        A prompt that was short is not read yet; the batch reads what its `prefill` has left.
        """
        slice_s = self._target_s * (1 if others_decode else RELAXED)
        joining: list[Request] = []
        longest = 0
        while self.requests:
            request = self._next()
            left = request.prefill.total - request.prefill.processed
            padded = max(longest, left) * (len(joining) + 1)
            fits = self._sizers["prefill"].seconds(padded) <= slice_s
            if request.prefill.done or (fits and isinstance(request.prefill, DensePrefill)):
                if len(joining) >= room:
                    break
                longest = max(longest, left)
                self.tokens_total += left
            elif joining:
                break
            else:
                self._read_chunk(request, slice_s, left)
                if not request.prefill.done:
                    break
            self.requests.remove(request)
            request.prefill_complete()
            joining.append(request)
        return joining

    def _next(self) -> Request:
        now = time.monotonic()
        turns = [
            Turn(request.prefill.total - request.prefill.processed, now - request.asked_s)
            for request in self.requests
        ]
        return self.requests[choose(turns, self._sizers["prefill"].tokens_per_s)]

    def _read_chunk(self, request: Request, seconds: float, left: int) -> None:
        prefill = request.prefill
        phase, before, sizer = prefill.phase, prefill.processed, self._sizers[prefill.phase]
        size = sizer.num_tokens(seconds, left)
        # The decode step under way is not part of the chunk.
        mx.synchronize(self._stream)
        began_s = time.monotonic()
        try:
            with mx.stream(self._stream):
                prefill.step(size)
        except Exception as error:
            request.prefill_failed(error)
            return
        ended_s = time.monotonic()
        if prefill.phase != phase or prefill.done:
            # What is read again after a pause does not count: the first token has come long ago.
            request.phase_ms.setdefault(phase, (ended_s - request.phase_began_s) * 1e3)
            request.phase_began_s = ended_s
        if prefill.phase == phase:
            self.tokens_total += prefill.processed - before
            if prefill.processed - before >= size:
                # `size` is in tokens of a dense prefill, whatever share of the layers the chunk ran.
                sizer.record(size, ended_s - began_s)
