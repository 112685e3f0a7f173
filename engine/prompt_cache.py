"""The prompts of earlier requests, so that the next turn of a conversation reads only what is new."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, LRUPromptCache


class PromptCache:
    """mlx-lm's `LRUPromptCache`, kept apart by tenant and bounded in bytes.

    Only dense caches come in here: one entry's keys and values stand for all of its tokens.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._cache = LRUPromptCache(max_size=max_entries, max_bytes=max_bytes)

    def fetch(self, tenant: str, tokens: list[int]) -> tuple[list[Any] | None, int]:
        """Return a copy of the cache of the longest known prefix, and its length in tokens.

        The last token is never part of it: the first decode step has to read one.
        """
        prompt = tokens[:-1]
        if not prompt:
            return None, 0
        cache, rest = self._cache.fetch_nearest_cache(tenant, prompt)
        return (None, 0) if cache is None else (cache, len(prompt) - len(rest))

    def store(self, tenant: str, tokens: list[int], cache: list[Any]) -> None:
        """Keep a cache that holds exactly these tokens; the oldest entries make room.

        One that is larger than the bound is not kept: it would push all others out and then itself.
        """
        if tokens and sum(layer.nbytes for layer in cache) <= self._max_bytes:
            detach(cache)
            self._cache.insert_cache(tenant, tokens, cache)

    @property
    def num_entries(self) -> int:
        """Entries held."""
        return len(self._cache)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self._cache.nbytes)


def detach(cache: Sequence[Any]) -> None:
    """Have a row's cache that comes out of a batch hold no more memory than its own.

    As mlx-lm extracts it, it is a slice that is not computed yet, or one that shares the batch's buffer:
    either keeps the caches of all rows alive.
    """
    for layer in cache:
        if isinstance(layer, CacheList):
            detach(layer.caches)
            continue
        if isinstance(layer, ArraysCache):
            layer.cache = [None if part is None else mx.contiguous(part) for part in layer.cache]
        mx.async_eval(layer.state)  # type: ignore[no-untyped-call]
