"""Reading one prompt in chunks. A `Prefill` does one bounded chunk for each call."""

from collections.abc import Sequence
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
