"""Reading a prompt in chunks between decode steps.

A `Prefill` does one bounded chunk for each call. `ChunkSizer` says how many tokens a chunk may have, from the
measured speed, so that a chunk takes about the same time on every machine and at every depth of a prompt.
`choose` says whose turn it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module


class Prefill(Protocol):
    """A prompt that is being read, all but its last token (the first decode step reads that one)."""

    @property
    def phase(self) -> Literal["score", "prefill"]:
        """What the next chunk does."""

    @property
    def processed(self) -> int:
        """Tokens that the current phase is through with; a cached prefix does not count."""

    @property
    def total(self) -> int:
        """Tokens that the current phase has in all."""

    @property
    def done(self) -> bool:
        """Whether `cache` is complete."""

    @property
    def cache(self) -> list[Any]:
        """The prompt's cache, one per layer, as mlx-lm's `BatchGenerator.insert` takes it."""

    def step(self, num_tokens: int) -> None:
        """Read at most `num_tokens` more and evaluate them."""


class DensePrefill:
    """Reads every token.

    Args:
        tokens: what to read: the prompt after its cached prefix and before its last token. May be empty.
        cache: one per layer, holding the cached prefix if there is one; it is extended in place.
    """

    phase: Literal["prefill"] = "prefill"

    def __init__(self, model: Module, tokens: Sequence[int], cache: list[Any]) -> None:
        self._model = model
        self._tokens = list(tokens)
        self.cache = cache
        self.processed = 0
        self.total = len(tokens)

    @property
    def done(self) -> bool:
        """Whether every token has been read."""
        return self.processed >= self.total

    def step(self, num_tokens: int) -> None:
        """Read at most `num_tokens` more and evaluate them."""
        chunk = self._tokens[self.processed : self.processed + num_tokens]
        self._model(mx.array(chunk)[None], cache=self.cache)
        mx.eval([layer.state for layer in self.cache])
        self.processed += len(chunk)


class ChunkSizer:
    """Chooses the length of a chunk by time.

    Args:
        target_s: how long a chunk should take, in seconds.
        tokens_per_s: the speed to begin with.
    """

    GRAIN = 8
    """Chunks are multiples of this many tokens, so that few shapes occur."""
    RELAXED = 2.5
    """While nobody else waits, a chunk may take this many times as long: bigger is cheaper."""

    def __init__(self, target_s: float, *, minimum: int, maximum: int, tokens_per_s: float) -> None:
        self._target_s = target_s
        self._minimum = minimum
        self._maximum = maximum
        self._tokens_per_s = tokens_per_s

    @property
    def tokens_per_s(self) -> float:
        """The speed as measured lately."""
        return self._tokens_per_s

    def num_tokens(self, *, others_wait: bool) -> int:
        """Return how many tokens the next chunk may have."""
        seconds = self._target_s * (1.0 if others_wait else self.RELAXED)
        grains = int(seconds * self._tokens_per_s) // self.GRAIN
        return max(self._minimum, min(self._maximum, grains * self.GRAIN))

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
