"""scoring.py: the scorer's rows are the model's attention."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import dense_cache, tiny_model, tokens

from headrace.engine.specprefill import scoring
from headrace.engine.specprefill.scoring import PromptReader, Scorer, default_layers
from headrace.engine.specprefill.seams import AttentionCall, SeamError, observed_attention
from headrace.engine.specprefill.sparse_cache import arrays_of

QUERIES = 6


def naive_rows(model: Any, prompt: list[int], layers: list[int]) -> dict[int, np.ndarray[Any, Any]]:
    """Softmax of q·k in float64, one query, one head at a time, from one forward over the whole prompt."""
    calls: list[AttentionCall] = []
    with observed_attention(calls.append):
        mx.eval(model(mx.array([prompt])))
    found = {}
    for layer in layers:
        call = calls[layer]
        queries = np.array(call.queries[0].astype(mx.float32), dtype=np.float64)
        keys = np.array(call.keys[0].astype(mx.float32), dtype=np.float64)
        rows = np.zeros((QUERIES, len(prompt)))
        for head in range(queries.shape[0]):
            for row in range(QUERIES):
                at = len(prompt) - QUERIES + row
                logits = keys[head * keys.shape[0] // queries.shape[0], : at + 1] @ queries[head, at]
                logits *= call.scale
                if isinstance(call.mask, mx.array):
                    allowed = np.array(call.mask).reshape(-1, len(prompt))[at, : at + 1]
                    logits = np.where(allowed, logits, -np.inf)
                weights = np.exp(logits - logits.max())
                total = weights.sum()
                if call.sinks is not None:
                    total += np.exp(float(call.sinks[head]) - logits.max())
                rows[row, : at + 1] = np.maximum(rows[row, : at + 1], weights / total)
        found[layer] = rows
    return found


@pytest.mark.parametrize("name", ["llama", "llama3", "traditional", "qwen3", "smollm3", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("num_cached", [0, 19])
@pytest.mark.parametrize("step", [7, 50, 1000])
def test_rows_equal_a_naive_forward(name: str, num_cached: int, step: int) -> None:
    """In chunks, after a dense prefix, with windows and sinks: the same attention."""
    model, prompt = tiny_model(name), tokens(80)
    cache = dense_cache(model, prompt[:num_cached])
    reader = PromptReader(
        model, prompt[num_cached:], [1, 2], cache=cache, num_cached=num_cached, num_queries=QUERIES
    )
    steps = 0
    while not reader.done:
        reader.step(step)
        steps += 1
    assert steps >= (80 - num_cached) // step
    expected = naive_rows(model, prompt, [1, 2])
    for layer, rows in reader.layer_rows().items():
        np.testing.assert_allclose(np.array(rows), expected[layer][:, num_cached:], atol=2e-6)


def test_softmax_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on the elements held at a time changes nothing."""
    model, prompt = tiny_model("llama"), tokens(60)

    def read() -> np.ndarray[Any, Any]:
        reader = PromptReader(model, prompt, [2], num_queries=QUERIES)
        reader.step(1000)
        return reader.scores()

    whole = read()
    monkeypatch.setattr(scoring, "MAX_SOFTMAX_ELEMENTS", 250)
    np.testing.assert_array_equal(read(), whole)


@pytest.mark.parametrize("step", [1, 2, 5, 9, 33])
def test_short_steps_and_short_prompts(step: int) -> None:
    """Steps shorter than the number of queries, and prompts shorter than it, are read whole and once."""
    model = tiny_model("llama")
    for length in (1, 2, 5, 17, 40):
        reader = PromptReader(model, tokens(length), [2], num_queries=16)
        while not reader.done:
            before = reader.processed
            reader.step(step)
            assert before < reader.processed <= before + max(step, 16)
        assert reader.scores().shape == (length,)
        assert reader.cache[2].offset == length


def test_stops_at_the_last_selection_layer() -> None:
    """Layers above it are never run."""
    model = tiny_model("llama")
    reader = PromptReader(model, tokens(30), [1], num_queries=4)
    reader.step(100)
    assert [entry.offset for entry in reader.cache] == [30, 30, 0, 0]


def test_given_cache_is_not_changed() -> None:
    """The dense prefix is the same before and after, so a failure can go on from it."""
    for name in ("llama", "gemma3", "qwen3_next"):
        model, prompt = tiny_model(name), tokens(70)
        cache = dense_cache(model, prompt[:30])
        before = [np.array(array) for array in arrays_of(cache)]
        reader = PromptReader(model, prompt[30:], default_layers(model), cache=cache, num_cached=30)
        reader.step(11)
        reader.step(100)
        for array, kept in zip(arrays_of(cache), before, strict=True):
            np.testing.assert_array_equal(np.array(array), kept)


def test_scores_are_deterministic_and_float32() -> None:
    """The same prompt gives the same float32 scores, also for a bfloat16 model."""
    model, prompt = tiny_model("llama", mx.bfloat16), tokens(50)
    results = []
    for _ in range(2):
        scorer = Scorer(model, (1, 2), num_queries=QUERIES)
        reader = scorer.start(prompt)
        reader.step(100)
        results.append(scorer.scores(reader))
    assert results[0].dtype == np.float32
    np.testing.assert_array_equal(results[0], results[1])


def test_a_layer_without_attention_is_an_error() -> None:
    """A recurrent layer can't score: SeamError, and nothing is left behind."""
    model = tiny_model("qwen3_next")
    with pytest.raises(SeamError):
        PromptReader(model, tokens(20), [2]).step(100)
    assert default_layers(model) == (1,)
