"""model_support.py: which models can prefill sparsely, be cut between two layers, and score for another."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from tiny_models import CONFIGS, tiny_model

from headrace.engine.specprefill.model_support import check_carry_on, draft_mismatch, specprefill_support

SPLIT = 2


@pytest.mark.parametrize("name", list(CONFIGS))
def test_support_and_cut_are_found(name: str) -> None:
    """The probes accept what the oracle accepts; a hybrid can't be cut above recurrent layers."""
    model = tiny_model(name)
    assert specprefill_support(model, CONFIGS[name]) is None
    assert check_carry_on(model, SPLIT, CONFIGS[name]) == (name != "qwen3_next")


def test_unsupported_models_are_named_with_a_reason() -> None:
    """Absolute positions, dynamic RoPE, and models whose probe fails, each with its reason."""
    model = tiny_model("llama")
    assert "absolute" in str(specprefill_support(model, {"model_type": "llama4"}))
    nested = {"model_type": "mistral3", "text_config": {"model_type": "ministral3"}}
    assert "ministral3" in str(specprefill_support(model, nested))
    dynamic = tiny_model("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert "dynamic" in str(specprefill_support(dynamic, CONFIGS["llama"]))


def test_probe_finds_a_model_that_reads_absolute_positions() -> None:
    """A model that adds position embeddings from its cache's offset fails the probe, whatever its name."""
    model = tiny_model("llama")
    embed = model.model.embed_tokens

    class Positional(type(model.model)):  # type: ignore[misc]
        def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> mx.array:
            offset = cache[0].offset if cache is not None else 0
            offset = offset if isinstance(offset, int) else offset[0]
            where = (mx.arange(inputs.shape[1]) + offset)[None, :, None]
            return super().__call__(inputs, cache, embed(inputs) * (1 + 0.2 * where))

    model.model.__class__ = Positional
    assert "thinned" in str(specprefill_support(model, CONFIGS["llama"]))


def test_draft_mismatch_is_named() -> None:
    """The same vocabulary and the same splits are needed; what differs is said."""

    class Tokenizer:
        def __init__(self, vocabulary: dict[str, int], extra: int = 0) -> None:
            self._vocabulary, self._extra = vocabulary, extra

        def get_vocab(self) -> dict[str, int]:
            return self._vocabulary

        def encode(self, text: str) -> list[int]:
            return [len(text) + self._extra]

    one, other = {"a": 0, "b": 1}, {"a": 0, "b": 2, "c": 1}
    assert draft_mismatch(Tokenizer(one), Tokenizer(dict(one))) is None
    assert "1 of 2" in str(draft_mismatch(Tokenizer(one), Tokenizer(other)))
    assert "splits" in str(draft_mismatch(Tokenizer(one), Tokenizer(one, extra=1)))
