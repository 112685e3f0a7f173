"""Which prompt tokens the target model prefills: a pure function of the scores. No mlx, no randomness.

SpecPrefill (arXiv 2502.02789, section 3.2): token scores are smoothed, averaged over chunks of consecutive
tokens, and the best chunks are kept whole. Always kept: sink tokens at the head of the prompt, a tail (the
end of the last user turn and the generation prompt), the last token, and protected ranges.

All indices are into the uncached part of the prompt, whose length is M; ``num_cached`` tokens lie before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """How to choose. ``keep_pct`` in (0, 1] is a share of the M tokens, what is always kept included.

    ``chunk_tokens``: length of a chunk. ``sink_tokens``: kept at the head of the whole prompt, so fewer of
    the uncached part when a prefix is cached. ``tail_tokens``: kept at the end; at least 1, the last token.
    Raises ValueError, naming the field, for a value out of range.
    """

    keep_pct: float = 0.3
    chunk_tokens: int = 8
    sink_tokens: int = 4
    tail_tokens: int = 24

    def __post_init__(self) -> None:
        if isinstance(self.keep_pct, bool) or not 0 < self.keep_pct <= 1:
            raise ValueError(f"keep_pct must be in (0, 1], not {self.keep_pct!r}")
        for name, low in (("chunk_tokens", 1), ("sink_tokens", 0), ("tail_tokens", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Selection:
    """``indices``: sorted, unique, int64, the last one M - 1. ``num_always``: how many the rule always keeps;
    when that is more than keep_pct asks for, it is also how many were kept.
    """

    indices: Indices
    num_tokens: int
    num_always: int

    @property
    def kept_everything(self) -> bool:
        return len(self.indices) == self.num_tokens

    def ranges(self, start: int = 0) -> list[Range]:
        """Return the kept tokens as half-open ranges, moved by ``start`` (the cached tokens before)."""
        breaks = np.flatnonzero(np.diff(self.indices) != 1) + 1
        return [(int(run[0]) + start, int(run[-1]) + 1 + start) for run in np.split(self.indices, breaks)]


def select(
    scores: Scores, rule: SelectionRule, *, num_cached: int = 0, protected: Sequence[Range] = ()
) -> Selection:
    """Keep the best-scoring chunks of M tokens up to ``rule.keep_pct``, beside what is always kept.

    ``scores`` is float32 (M,), M at least 1. ``protected`` are half-open ranges of the uncached part (a
    system prompt, the last turn) that are kept whole. The size is within one chunk of ``keep_pct * M`` unless
    what is always kept is already more. Ties go to the earlier chunk. NaN scores raise ValueError.
    """
    always = _always_kept(len(scores), rule, num_cached, protected)
    chunks = _ranked_chunks(scores, rule.chunk_tokens, always)
    budget = max(1, round(rule.keep_pct * len(scores)))
    return _take(chunks, always, budget)


def smooth(scores: Scores, window: int) -> Scores:
    """Average-pool scores (M,) over ``window`` tokens (odd, centred); shorter windows at the ends."""
    if window <= 1 or len(scores) == 0:
        return scores
    half = window // 2
    sums = np.concatenate([[0.0], np.cumsum(scores, dtype=np.float64)])
    centre = np.arange(len(scores))
    low, high = np.maximum(centre - half, 0), np.minimum(centre + half + 1, len(scores))
    means: Scores = ((sums[high] - sums[low]) / (high - low)).astype(np.float32)
    return means


def _always_kept(
    num_tokens: int, rule: SelectionRule, num_cached: int, protected: Sequence[Range]
) -> npt.NDArray[np.bool_]:
    if num_tokens < 1:
        raise ValueError("no tokens to select from")
    kept = np.zeros(num_tokens, dtype=np.bool_)
    kept[: max(0, rule.sink_tokens - num_cached)] = True
    kept[max(0, num_tokens - rule.tail_tokens) :] = True
    for start, end in protected:
        kept[max(0, start) : max(0, end)] = True
    return kept


def _ranked_chunks(scores: Scores, chunk_tokens: int, always: npt.NDArray[np.bool_]) -> list[Indices]:
    """The chunks without what is always kept, best mean score first."""
    if np.isnan(scores).any():
        raise ValueError("scores contain NaN")
    chunks: list[Indices] = []
    for start in range(0, len(scores), chunk_tokens):
        left = start + np.flatnonzero(~always[start : start + chunk_tokens])
        if len(left):
            chunks.append(left.astype(np.int64))
    order = np.argsort([-float(scores[chunk].mean()) for chunk in chunks], kind="stable")
    return [chunks[position] for position in order]


def _take(ranked: Sequence[Indices], always: npt.NDArray[np.bool_], budget: int) -> Selection:
    """Take chunks while that brings the size nearer to ``budget``."""
    kept = always.copy()
    size = num_always = int(always.sum())
    for chunk in ranked:
        if size >= budget or size + len(chunk) - budget > budget - size:
            break
        kept[chunk] = True
        size += len(chunk)
    return Selection(np.flatnonzero(kept), len(always), num_always)
