"""Tests for engine/prefill.py."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import tiny_model

from headrace.engine.prefill import DensePrefill


@pytest.mark.parametrize("sizes", [[100], [1] * 12, [5, 7], [16]])
def test_chunks_of_any_size_fill_the_same_cache(sizes):
    """What the model says after the prompt does not depend on how it was cut."""
    model, tokens = tiny_model("llama"), list(range(1, 13))
    prefill = DensePrefill(model, tokens, make_prompt_cache(model))
    for size in sizes:
        prefill.step(size)
    assert prefill.done
    assert prefill.processed == prefill.total == 12
    expected = model(mx.array([*tokens, 13])[None])[:, -1]
    got = model(mx.array([[13]]), cache=prefill.cache)[:, -1]
    assert mx.allclose(got, expected, atol=1e-5)


def test_nothing_to_read_is_done_at_once():
    """A prompt of one token, or one that is cached whole."""
    assert DensePrefill(tiny_model("llama"), [], []).done
