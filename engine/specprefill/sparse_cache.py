"""Caches of a thinned prompt: N tokens held, at positions that go on as after M tokens.

The keys keep their true positions, so the row must decode at M while its cache holds N tokens. mlx-lm's
batch caches keep the RoPE offset of each row (``offset``) apart from the physical length, so adding M - N
to it when the row's cache is merged into a batch is all that is needed: ``extend``, ``filter``, ``trim``
and ``deepcopy`` keep it. ``BatchKVCache.extract`` loses it: what comes out of a batch for a sparse row must
never be stored as a cache of the prompt. :func:`holds_all` is the guard.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)


class SparseKVCache(KVCache):  # type: ignore[misc]
    """A finished KVCache whose next token stands at ``offset + position_delta``. Only for a batch."""

    position_delta: int = 0

    @classmethod
    def merge(cls, caches: Sequence[KVCache]) -> BatchKVCache:
        """Build mlx-lm's batch cache of these rows, each row's offset moved by its delta."""
        return _moved(BatchKVCache.merge(caches), caches)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Raise RuntimeError: a model called with this cache would rotate at wrong positions."""
        raise RuntimeError("a sparse cache can only be merged into a batch")


class SparseRotatingKVCache(RotatingKVCache):  # type: ignore[misc]
    """The same for a sliding-window layer; its window counts the tokens held, not positions."""

    position_delta: int = 0

    @classmethod
    def merge(cls, caches: Sequence[RotatingKVCache]) -> BatchRotatingKVCache:
        """Build mlx-lm's batch cache of these rows, each row's offset moved by its delta."""
        return _moved(BatchRotatingKVCache.merge(caches), caches)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Raise RuntimeError: a model called with this cache would rotate at wrong positions."""
        raise RuntimeError("a sparse cache can only be merged into a batch")


class WindowedKVCache(KVCache):  # type: ignore[misc]
    """Holds every token of a sliding-window layer, and masks to the window as RotatingKVCache would.

    Reading a prompt through it gives what RotatingKVCache gives, and no key is lost before the selection.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """Return the causal mask within the window for N new tokens, in mlx-lm's form."""
        window: int | None = window_size or self.window
        if self.offset + N <= (window or 0) and not return_array:
            window = None
        return super().make_mask(N, window_size=window, return_array=return_array)


def unsupported_cache(cache: Sequence[Any]) -> str | None:
    """Name the first cache type that can't be thinned and batched, or None."""
    for entry in cache:
        if isinstance(entry, CacheList):
            reason = unsupported_cache(entry.caches)
        elif type(entry) in (KVCache, ArraysCache) or (type(entry) is RotatingKVCache and entry.keep == 0):
            reason = None
        else:
            reason = type(entry).__name__
        if reason is not None:
            return reason
    return None


def is_attention(entry: Any) -> bool:
    """Say whether the entry holds one key per token (or the last ones), and nothing recurrent."""
    if isinstance(entry, CacheList):
        return all(is_attention(part) for part in entry.caches)
    return isinstance(entry, (KVCache, RotatingKVCache))


def has_keys(entry: Any) -> bool:
    """Say whether the layer attends: it may hold recurrent states beside its keys."""
    if isinstance(entry, CacheList):
        return any(has_keys(part) for part in entry.caches)
    return is_attention(entry)


def is_sparse(cache: Sequence[Any]) -> bool:
    """Say whether a request's cache list (not yet in a batch) holds fewer tokens than it stands for."""
    return any(
        is_sparse(entry.caches) if isinstance(entry, CacheList) else getattr(entry, "position_delta", 0) > 0
        for entry in cache
    )


def holds_all(cache: Sequence[Any], num_tokens: int) -> bool:
    """Say whether a cache list can stand for ``num_tokens`` tokens: the guard before storing one.

    Sees through ``BatchKVCache.extract``, which loses the delta: full-attention layers must hold exactly that
    many. A model of sliding windows only (no such layer) can't be judged once it went through a batch.
    """
    if is_sparse(cache):
        return False
    return all(
        holds_all(entry.caches, num_tokens) if isinstance(entry, CacheList) else entry.offset == num_tokens
        for entry in cache
        if isinstance(entry, (CacheList, KVCache, RotatingKVCache))
    )


def working_copy(entry: Any) -> Any:
    """Copy one cache entry so that the original never changes; the arrays are shared, not copied."""
    if isinstance(entry, CacheList):
        return CacheList(*(working_copy(part) for part in entry.caches))
    clone = copy.copy(entry)
    if isinstance(entry, ArraysCache):
        clone.cache = list(entry.cache)
    elif entry.keys is not None:
        # A slice is a new array object: caches assign into theirs in place.
        clone.keys, clone.values = entry.keys[...], entry.values[...]
    return clone


def reading_copy(entry: Any) -> Any:
    """As ``working_copy``, but a sliding window's cache becomes one that keeps every token from here on."""
    if isinstance(entry, CacheList):
        return CacheList(*(reading_copy(part) for part in entry.caches))
    if not isinstance(entry, RotatingKVCache):
        return working_copy(entry)
    windowed = WindowedKVCache(entry.max_size)
    if entry.keys is not None:
        windowed.keys = entry._temporal_order(entry.keys)[..., -entry.size() :, :]
        windowed.values = entry._temporal_order(entry.values)[..., -entry.size() :, :]
        windowed.offset = entry.size()
    return windowed


def thinned(entry: Any, kept: mx.array, num_new: int, num_tokens: int) -> Any:
    """Return a cache like one from ``reading_copy``, with only ``kept`` of the last ``num_new`` tokens.

    ``kept`` is int32 (N,), indices into those. ``num_tokens`` is what the result's offset counts: the cached
    tokens and N. Recurrent states are returned as they are. Sliding windows become RotatingKVCache again.
    """
    if isinstance(entry, CacheList):
        return CacheList(*(thinned(part, kept, num_new, num_tokens) for part in entry.caches))
    if isinstance(entry, ArraysCache):
        return entry
    before = entry.offset - num_new
    index = mx.concatenate([mx.arange(before, dtype=mx.int32), kept + before])
    if not isinstance(entry, WindowedKVCache):
        plain = KVCache()
        plain.keys, plain.values = mx.take(entry.keys, index, axis=2), mx.take(entry.values, index, axis=2)
        plain.offset = num_tokens
        return plain
    rotating, index = RotatingKVCache(max_size=entry.window), index[-entry.window :]
    rotating.keys, rotating.values = mx.take(entry.keys, index, axis=2), mx.take(entry.values, index, axis=2)
    rotating.offset, rotating._idx = num_tokens, index.shape[0]
    return rotating


def as_sparse(entry: Any, position_delta: int) -> Any:
    """Return the finished entry as one that decodes ``position_delta`` further on; recurrent ones as is."""
    if position_delta == 0 or isinstance(entry, ArraysCache):
        return entry
    if isinstance(entry, CacheList):
        return CacheList(*(as_sparse(part, position_delta) for part in entry.caches))
    kind = SparseRotatingKVCache if isinstance(entry, RotatingKVCache) else SparseKVCache
    sparse: Any = kind.__new__(kind)
    sparse.__dict__.update(entry.__dict__)
    sparse.position_delta = position_delta
    return sparse


def arrays_of(cache: Sequence[Any]) -> list[mx.array]:
    """Return every array of the entries, for ``mx.eval``."""
    found: list[mx.array] = []
    for entry in cache:
        if isinstance(entry, CacheList):
            found += arrays_of(entry.caches)
        elif isinstance(entry, ArraysCache):
            found += [state for state in entry.cache if state is not None]
        elif entry.keys is not None:
            found += [entry.keys, entry.values]
    return found


def _moved(batch: Any, caches: Sequence[Any]) -> Any:
    deltas = [getattr(cache, "position_delta", 0) for cache in caches]
    batch.offset = batch.offset + mx.array(deltas, dtype=batch.offset.dtype)
    return batch
