"""Models for tests: tiny random ones made on the spot, and the real default model."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TinyModelDir = Callable[..., Path]

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TRAINING_TEXT = (
    "The headrace leads the water to the turbine, and the tailrace leads it away again. "
    "A gate at the head of the channel is opened when the turbine needs water, and closed when it does not. "
    "What is the capital of France? The capital of France is Paris."
)
_DENSE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _DENSE,
    "qwen3": _DENSE,
    "qwen3_next": {**_DENSE, **_MIXTURE, **_LINEAR_ATTENTION},
}


def _write_tokenizer(folder: Path, chat_template: str | None) -> int:
    """Train a byte-level BPE tokenizer; return the number of its tokens. Any text survives a round trip."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return int(tokenizer.get_vocab_size())


def _write_weights(folder: Path, config: dict[str, Any], seed: int, dtype: str, bits: int | None) -> None:
    """Write weights that depend on ``seed`` and the parameters' names and shapes alone."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten, tree_unflatten

    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    random = np.random.default_rng(seed)
    weights = []
    for name, value in sorted(tree_flatten(model.parameters())):
        if value.ndim >= 2:
            # A sharp output layer: the likeliest token stays so under another order of additions.
            gain = 4.0 if name.startswith("lm_head") else 1.0 if "embed" in name else 0.8
            fan_in = 1 if "embed" in name else value.shape[-2 if "conv" in name else -1]
            value = mx.array(random.normal(0.0, gain / fan_in**0.5, value.shape).astype(np.float32))
        weights.append((name, value))
    model.update(tree_unflatten(weights))
    model.set_dtype(getattr(mx, dtype))
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    flat = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), flat, metadata={"format": "mlx"})


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> TinyModelDir:
    """A factory of folders with a tiny random model that mlx-lm loads in well under a second.

    ``tiny_model_dir(model_type="llama", seed=0, dtype="float32", bits=None, chat_template=..., **config)``
    returns the folder; the same arguments return the same one, so a test that changes it must copy it first.

    - ``model_type``: ``llama``, ``qwen3`` and ``qwen3_next`` (hybrid, mixture of experts) have a
      configuration here; any other one of mlx-lm starts from llama's.
    - ``config`` overrides single entries: ``rope_traditional=True``, ``rope_scaling={...}``.
    - ``bits``: quantize the weights in groups of 32. ``chat_template=None``: have none.

    The tokenizer is a real byte-level BPE of 300-odd tokens, with ChatML's special tokens.
    """
    made: dict[str, Path] = {}

    def make(
        model_type: str = "llama",
        *,
        seed: int = 0,
        dtype: str = "float32",
        bits: int | None = None,
        chat_template: str | None = _CHATML,
        **overrides: Any,
    ) -> Path:
        key = json.dumps([model_type, seed, dtype, bits, chat_template, overrides], sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"tiny-{model_type}-")
            vocab_size = _write_tokenizer(folder, chat_template)
            config = {
                "model_type": model_type,
                "vocab_size": vocab_size,
                "eos_token_id": 2,
                **_CONFIGS.get(model_type, _DENSE),
                **overrides,
            }
            _write_weights(folder, config, seed, dtype, bits)
            (folder / "config.json").write_text(json.dumps(config))
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The folder of the default model, fetched into the user's own cache the first time."""
    from headrace.engine.loading.default_model import fetch_default_model

    return fetch_default_model()
