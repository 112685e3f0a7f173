"""Scores of prompt tokens: how much the last tokens of the prompt attend to each, step by step.

A scorer is a model (a draft model, or the target itself) and the few layers whose attention tells what
matters (see ``calibration``). The forward stops inside the last of them: no layers above, no lm_head.
Queries are the last tokens of the prompt, so they exist only once it is read: until then only keys are
kept, and the softmax of those few rows is taken at the end, a bounded number of elements at a time.

After arXiv 2502.02789 (SpecPrefill), section 3.1, without its sampled lookahead tokens: the result is the
same every time. Stopping at a layer in the middle: arXiv 2409.17422 (GemFilter), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from .seams import (
    AttentionCall,
    SeamError,
    explicit_positions,
    layer_list,
    observed_attention,
    replaced_layers,
)
from .selection import Scores, smooth
from .sparse_cache import arrays_of, has_keys, reading_copy

DEFAULT_NUM_QUERIES = 16
DEFAULT_POOL_TOKENS = 17
DEFAULT_BAND = (0.4, 0.55)
MAX_SOFTMAX_ELEMENTS = 1 << 24
"""Most float32 elements of attention held at a time: 64 MiB."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """What scores: ``model`` and its selection ``layers`` (sorted, at least one); ``name`` for reports,
    ``"self"`` when ``model`` is the target. ``num_queries``: how many of the last prompt tokens ask.
    ``pool_tokens``: width of the average pooling.
    """

    model: Any
    layers: tuple[int, ...]
    name: str = "self"
    num_queries: int = DEFAULT_NUM_QUERIES
    pool_tokens: int = DEFAULT_POOL_TOKENS

    @property
    def last_layer(self) -> int:
        """The layer in which scoring stops, and which the carried hidden states enter."""
        return max(self.layers)

    @property
    def cost_share(self) -> float:
        """The share of the model's layers that scoring runs, about: that of a forward pass it costs."""
        return (max(self.layers) + 0.2) / len(layer_list(self.model))

    def start(
        self,
        tokens: Sequence[int],
        cache: Sequence[Any] | None = None,
        num_cached: int = 0,
        *,
        keep_hidden: bool = False,
    ) -> PromptReader:
        """Begin to read ``tokens``, what follows the ``num_cached`` tokens of a prompt in ``cache``."""
        return PromptReader(
            self.model,
            tokens,
            self.layers,
            cache=cache,
            num_cached=num_cached,
            num_queries=self.num_queries,
            keep_hidden=keep_hidden,
        )

    def scores(self, reader: PromptReader) -> Scores:
        """Return the smoothed float32 scores (M,) of a prompt that was read whole."""
        return smooth(reader.scores(), self.pool_tokens)


class _StopForward(Exception):
    """Ends a forward pass that has given what it was run for."""


class PromptReader:
    """Reads M tokens up to the last selection layer, a chunk per ``step``; the given cache never changes.

    ``cache`` holds the layers' caches after reading (those above the last selection layer are empty), of
    the kinds ``reading_copy`` makes. ``hidden``, with ``keep_hidden``: per chunk, the states (1, n, hidden
    size) that enter the last selection layer.
    """

    def __init__(
        self,
        model: Any,
        tokens: Sequence[int],
        layers: Sequence[int],
        *,
        cache: Sequence[Any] | None = None,
        num_cached: int = 0,
        num_queries: int = DEFAULT_NUM_QUERIES,
        keep_hidden: bool = False,
    ) -> None:
        if not tokens or not layers:
            raise ValueError("nothing to read, or no layer to look at")
        self.total = len(tokens)
        self.processed = 0
        self.last_layer = max(layers)
        self.hidden: list[mx.array] = []
        self._model = model
        self._tokens = mx.array(list(tokens), dtype=mx.int32)
        self._layers = sorted(set(layers))
        self._num_cached = num_cached
        self._num_queries = min(num_queries, len(tokens))
        self._keep_hidden = keep_hidden
        self._inside: int | None = None
        self._calls: dict[int, AttentionCall] = {}
        fresh = make_prompt_cache(model)
        held = list(fresh if cache is None else cache)
        self.cache = [reading_copy(held[i] if i <= self.last_layer else fresh[i]) for i in range(len(fresh))]

    @property
    def done(self) -> bool:
        return self.processed == self.total

    def step(self, num_tokens: int) -> None:
        """Read ``num_tokens`` more and evaluate; some more or fewer where the last queries would be cut."""
        left = self.total - self.processed
        count = min(num_tokens, left)
        if 0 < left - count < self._num_queries:
            # The queries must come from one call: leave them all for the next, or take them all now.
            count = left - self._num_queries if left > self._num_queries else left
        chunk = self._tokens[self.processed : self.processed + count]
        taps = {layer: self._tap(layer) for layer in self._layers}
        with (
            explicit_positions(self._num_cached + self.processed),
            observed_attention(self._observe),
            replaced_layers(self._model, taps),
        ):
            try:
                self._model(chunk[None], cache=self.cache)
            except _StopForward:
                pass
            else:
                raise SeamError(f"layer {self.last_layer} never attended through mx.fast")
            finally:
                self._inside = None
        self.processed += count
        if not self.done:
            self._calls.clear()
        asked = [call.queries for call in self._calls.values()]
        mx.eval(arrays_of(self.cache[: self.last_layer + 1]), self.hidden[-1:], asked)
        mx.clear_cache()

    def layer_rows(self) -> dict[int, mx.array]:
        """Return for each selection layer the attention (W, M) of the last W tokens, maximum over heads."""
        if not self.done:
            raise RuntimeError("the prompt has not been read whole")
        if missing := set(self._layers) - set(self._calls):
            raise SeamError(f"layers {sorted(missing)} never attended through mx.fast")
        return {
            i: attention_rows(call, self._num_queries)[:, -self.total :] for i, call in self._calls.items()
        }

    def scores(self) -> Scores:
        """Return float32 (M,): the maximum over queries, heads and layers; not smoothed."""
        highest = mx.stack([rows.max(axis=0) for rows in self.layer_rows().values()]).max(axis=0)
        return np.array(highest, dtype=np.float32)

    def _tap(self, layer: int) -> Callable[..., Any]:
        original = layer_list(self._model)[layer]

        def call(*args: Any, **kwargs: Any) -> Any:
            if layer == self.last_layer and self._keep_hidden:
                self.hidden.append(args[0])
            self._inside = layer
            try:
                return original(*args, **kwargs)
            finally:
                self._inside = None

        return call

    def _observe(self, call: AttentionCall) -> None:
        if self._inside is None:
            return
        self._calls[self._inside] = _last_rows(call, self._num_queries)
        if self._inside == self.last_layer:
            raise _StopForward


def attention_rows(call: AttentionCall, num_queries: int) -> mx.array:
    """Return softmax(q·k) of the last ``num_queries`` queries W, float32 (W, T), the maximum over the heads.

    T is the number of keys in the call. Its mask and sinks apply as in the model's own attention.
    """
    _, num_heads, length, _ = call.queries.shape
    num_kv_heads, num_keys = call.keys.shape[1], call.keys.shape[2]
    asked = min(num_queries, length)
    repeats = num_heads // num_kv_heads
    mask = _mask_rows(call.mask, asked, num_keys)
    block = max(1, MAX_SOFTMAX_ELEMENTS // (repeats * num_keys))
    parts: list[mx.array] = []
    for start in range(0, asked, block):
        end = min(start + block, asked)
        highest: mx.array | None = None
        for head in range(num_kv_heads):
            heads = slice(head * repeats, (head + 1) * repeats)
            queries = call.queries[0, heads, length - asked + start : length - asked + end].astype(mx.float32)
            logits = (queries * call.scale) @ call.keys[0, head].astype(mx.float32).T
            if mask is not None:
                rows = mask[:, start:end] if mask.shape[0] == 1 else mask[heads, start:end]
                logits = mx.where(rows, logits, -mx.inf) if rows.dtype == mx.bool_ else logits + rows
            if call.sinks is not None:
                sink = mx.broadcast_to(call.sinks[heads, None, None], (repeats, end - start, 1))
                logits = mx.concatenate([logits, sink.astype(mx.float32)], axis=-1)
            weights = mx.softmax(logits, axis=-1)[..., :num_keys].max(axis=0)
            highest = weights if highest is None else mx.maximum(highest, weights)
            mx.eval(highest)
        assert highest is not None
        parts.append(highest)
    return mx.concatenate(parts, axis=0)


def default_layers(model: Any) -> tuple[int, ...]:
    """Return the selection layers of a model nobody calibrated.

    Its full-attention layers (sliding-window ones if it has no other) from 40 to 55 % of the depth, or the
    one nearest to the middle of that.

    A band, not one layer: retrieval starts sharply, and the layer beside a good one may find nothing.
    """
    kinds = make_prompt_cache(model)
    usable = [i for i, kind in enumerate(kinds) if has_keys(kind)]
    full = [i for i in usable if not hasattr(kinds[i], "max_size")] or usable
    if not full:
        raise SeamError("the model has no attention layer")
    low, high = (share * len(kinds) for share in DEFAULT_BAND)
    band = tuple(i for i in full if low <= i <= high)
    return band or (min(full, key=lambda i: abs(i - (low + high) / 2)),)


def _last_rows(call: AttentionCall, num_queries: int) -> AttentionCall:
    queries = call.queries[:, :, -num_queries:]
    mask = call.mask
    if isinstance(mask, mx.array) and mask.ndim >= 2 and mask.shape[-2] != 1:
        mask = mask[..., -queries.shape[2] :, :]
    return AttentionCall(queries, call.keys, call.scale, mask, call.sinks)


def _mask_rows(mask: mx.array | str | None, asked: int, num_keys: int) -> mx.array | None:
    """The mask as (1 or H, W, T), or None."""
    if mask is None:
        return None
    if isinstance(mask, str):
        positions = mx.arange(num_keys - asked, num_keys)
        return (positions[:, None] >= mx.arange(num_keys)[None])[None]
    if mask.ndim == 4:
        mask = mask[0]
    mask = mask.reshape(-1, *mask.shape[-2:]) if mask.ndim >= 2 else mask[None, None]
    return mx.broadcast_to(mask, (mask.shape[0], asked, num_keys))
