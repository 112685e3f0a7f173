"""selection.py: which tokens are kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.specprefill.selection import SelectionRule, select, smooth

RULES = st.builds(
    SelectionRule,
    keep_pct=st.floats(0.01, 1.0),
    chunk_tokens=st.integers(1, 40),
    sink_tokens=st.integers(0, 20),
    tail_tokens=st.integers(1, 40),
)


@settings(max_examples=200, deadline=None)
@given(rule=RULES, num_tokens=st.integers(1, 400), num_cached=st.integers(0, 30), seed=st.integers(0, 99))
def test_size_order_and_what_is_always_kept(
    rule: SelectionRule, num_tokens: int, num_cached: int, seed: int
) -> None:
    """Sorted, unique, head, tail and last token in, within one chunk of the rate, the same every time."""
    scores = np.random.default_rng(seed).random(num_tokens, dtype=np.float32)
    chosen = select(scores, rule, num_cached=num_cached)
    kept = chosen.indices
    assert (np.diff(kept) > 0).all()
    assert kept[0] >= 0
    assert kept[-1] == num_tokens - 1
    sink = min(max(0, rule.sink_tokens - num_cached), num_tokens)
    tail = min(rule.tail_tokens, num_tokens)
    assert set(range(sink)) | set(range(num_tokens - tail, num_tokens)) <= set(kept.tolist())
    if chosen.num_always <= rule.keep_pct * num_tokens:
        assert abs(len(kept) - rule.keep_pct * num_tokens) <= rule.chunk_tokens
    else:
        assert len(kept) - chosen.num_always <= rule.chunk_tokens
    assert (select(scores, rule, num_cached=num_cached).indices == kept).all()


def test_best_chunks_are_kept() -> None:
    """The chunks with the highest mean score are the ones kept, whole."""
    scores = np.zeros(100, dtype=np.float32)
    scores[43], scores[71] = 1.0, 0.5
    rule = SelectionRule(keep_pct=0.25, chunk_tokens=10, sink_tokens=2, tail_tokens=3)
    assert select(scores, rule).ranges() == [(0, 2), (40, 50), (70, 80), (97, 100)]


def test_more_always_kept_than_asked() -> None:
    """What is always kept stays, and the selection says how much it is."""
    rule = SelectionRule(keep_pct=0.05, chunk_tokens=10, sink_tokens=8, tail_tokens=8)
    chosen = select(np.ones(100, dtype=np.float32), rule)
    assert len(chosen.indices) == chosen.num_always == 16


def test_protected_ranges_are_kept_whole() -> None:
    """A range that starts in the cached part protects what lies in the uncached one."""
    rule = SelectionRule(keep_pct=0.01, chunk_tokens=10, sink_tokens=0, tail_tokens=1)
    chosen = select(np.ones(100, dtype=np.float32), rule, protected=[(-5, 3), (50, 57), (99, 120)])
    assert chosen.ranges(1000) == [(1000, 1003), (1050, 1057), (1099, 1100)]


def test_keep_everything() -> None:
    """A keep rate of 1 keeps every token."""
    assert select(np.zeros(55, dtype=np.float32), SelectionRule(keep_pct=1.0)).kept_everything


@pytest.mark.parametrize("keep_pct", [0, -0.1, 1.01, float("nan"), True])
def test_keep_rate_out_of_range(keep_pct: float) -> None:
    """A keep rate outside of (0, 1] is refused by name."""
    with pytest.raises(ValueError, match="keep_pct"):
        SelectionRule(keep_pct=keep_pct)


def test_nan_scores_are_refused() -> None:
    """Broken scores raise instead of choosing at random."""
    with pytest.raises(ValueError, match="NaN"):
        select(np.full(50, np.nan, dtype=np.float32), SelectionRule())


def test_smooth_is_a_centred_average() -> None:
    """As a naive loop gives it, ends included."""
    scores = np.random.default_rng(1).random(30, dtype=np.float32)
    naive = [scores[max(0, i - 2) : i + 3].mean() for i in range(30)]
    np.testing.assert_allclose(smooth(scores, 5), naive, rtol=1e-5)
