"""Tiny random mlx-lm models of many architectures, and the masked-dense oracle SpecPrefill must equal."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from headrace.engine.specprefill.seams import AttentionCall, observed_attention

VOCABULARY = 97

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 1000.0,
    "rope_traditional": False,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GDN = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "traditional": _LLAMA | {"rope_traditional": True},
    "llama3": _LLAMA | {"rope_scaling": _LLAMA3},
    "linear": _LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "yarn": _LLAMA
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "longrope": _LLAMA
    | {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 1.5, 2.0, 4.0],
            "original_max_position_embeddings": 64,
        }
    },
    "llama_sliding": _LLAMA
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 12},
    "qwen2": _LLAMA | {"model_type": "qwen2"},
    "qwen3": _LLAMA | {"model_type": "qwen3"},
    "qwen3_moe": _LLAMA
    | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [], **_MOE},
    "gemma3": _LLAMA
    | {
        "model_type": "gemma3_text",
        "sliding_window": 12,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 8,
    },
    "gpt_oss": _LLAMA
    | {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 12,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
    "smollm3": _LLAMA | {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "olmo2": _LLAMA | {"model_type": "olmo2"},
    "phi3": _LLAMA | {"model_type": "phi3"},
    "qwen3_next": _LLAMA
    | {
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "shared_expert_intermediate_size": 24,
        **_MOE,
        **_GDN,
    },
}


def tiny_model(name: str, dtype: mx.Dtype = mx.float32, seed: int = 3, **changes: Any) -> Any:
    """Build the model of CONFIGS with weights wide enough that positions and every token matter."""
    config = CONFIGS[name] | changes
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    key = mx.random.key(seed)

    def weight(array: mx.array) -> mx.array:
        nonlocal key
        if array.ndim < 2:
            return array.astype(dtype) if array.dtype == mx.float32 else array
        key, own = mx.random.split(key)
        return (mx.random.normal(array.shape, key=own) * (1.6 / array.shape[-1] ** 0.5)).astype(dtype)

    model.update(tree_map(weight, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCABULARY, count).tolist()


def dense_cache(model: Any, prompt: list[int]) -> list[Any]:
    cache = make_prompt_cache(model)
    if prompt:
        mx.eval(model(mx.array([prompt]), cache=cache), [entry.state for entry in cache])
    return cache


def masked_dense_logits(
    model: Any, prompt: list[int], dropped: list[int], after: list[int], dense_below: int = 0
) -> mx.array:
    """Return logits (1 + len(after), V) of the last prompt token and of ``after``, teacher-forced.

    One dense forward of full length at the usual positions, in which the dropped tokens are hidden from every
    other row. Below layer ``dense_below`` the rows of the prompt still see all (the last token, which is fed
    again by the first decode step, does not). A sliding window counts the tokens that are left.
    """
    length, last = len(prompt) + len(after), len(prompt) - 1
    kept = np.ones(length, dtype=bool)
    kept[dropped] = False
    rank = np.cumsum(kept)
    row, column = np.arange(length)[:, None], np.arange(length)[None]
    windows = [getattr(entry, "max_size", None) for entry in make_prompt_cache(model)]
    layer = 0

    def hide(call: AttentionCall) -> mx.array:
        nonlocal layer
        window, number = windows[layer], layer
        layer += 1
        visible = (row >= column) & (kept[None] | (row == column))
        seen_all = row >= column
        if window is not None:
            visible &= rank[:, None] - rank[None] < window
            seen_all = seen_all & (row - column < window)
        if number < dense_below:
            visible = np.where(row < last, seen_all, visible)
        shown = mx.array(visible)[None, None]
        if isinstance(call.mask, mx.array) and call.mask.dtype != mx.bool_:
            return mx.where(shown, call.mask, mx.finfo(call.mask.dtype).min)
        return shown

    with observed_attention(hide):
        logits = model(mx.array([prompt + after]))[0, last:]
        mx.eval(logits)
    assert layer == len(windows), "one attention call per layer"
    return logits


def decode_logits(model: Any, cache: list[Any], inputs: list[int], neighbour: list[int]) -> mx.array:
    """Return logits (len(inputs), V) of a row decoded in a batch beside a dense row, fed with ``inputs``.

    The neighbour has read ``neighbour`` and is fed the same inputs; it must give what it gives alone.
    """
    beside = dense_cache(model, neighbour)
    alone = [model(mx.array([[token]]), cache=beside)[0, -1] for token in inputs]
    batch = [entry.merge([entry]) for entry in dense_cache(model, neighbour)]
    for dense, entry in zip(batch, cache, strict=True):
        dense.extend(entry.merge([entry]))
    rows = [model(mx.array([[token], [token]]), cache=batch)[:, -1] for token in inputs]
    mx.eval(rows, alone)
    difference = max(float(mx.abs(both[0] - one).max()) for both, one in zip(rows, alone, strict=True))
    assert difference < 2e-4 or rows[0].dtype != mx.float32
    return mx.stack([both[1] for both in rows])


def attention_kinds(cache: list[Any]) -> bool:
    return all(isinstance(entry, (KVCache, RotatingKVCache)) for entry in cache)
