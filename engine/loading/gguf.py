"""Turn a GGUF file of the llama family into a folder that mlx-lm loads.

Only what the default model needs: llama architecture, a byte-level BPE tokenizer, and the tensor types
that ``mx.load`` keeps as they are (Q4_0, Q4_1, Q8_0, F16, F32).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from .model_files import LoadProgress, ModelLoadError, OnProgress

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# gguf.md, tokenizer.ggml.token_type: 3 is a control token, 4 a user-defined one.
_CONTROL_TOKEN = 3
_USER_DEFINED_TOKEN = 4

Metadata = dict[str, Any]


def convert_gguf(gguf: Path, folder: Path, on_progress: OnProgress) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer of ``gguf`` into an existing folder.

    Raises:
        ModelLoadError: the file holds another architecture, tokenizer or tensor than expected, or mlx can't
            read it or write what it holds.
    """
    try:
        # Nothing here is worth a GPU, and the CPU is always there.
        tensors, metadata = mx.load(str(gguf), return_metadata=True, stream=mx.cpu)
    except (RuntimeError, ValueError) as error:
        raise ModelLoadError(f"{gguf} is not a GGUF model file: {error}") from error
    if not isinstance(tensors, dict) or not isinstance(metadata, dict):
        raise ModelLoadError(f"{gguf} is not a GGUF model file.")
    total = len(tensors) + 1
    on_progress(LoadProgress("convert", 0, total, "tensors"))
    # The norm weights stay float32, which makes all activations float32: on a CPU mlx multiplies quantized
    # weights with float16 activations 12 times slower, and sums in float16.
    weights = {weight_name(name): value for name, value in tensors.items()}
    _write_json(folder / "config.json", model_config(metadata, weights))
    _write_tokenizer(folder, metadata)
    on_progress(LoadProgress("convert", 1, total, "tensors"))
    try:
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    except RuntimeError as error:
        raise ModelLoadError(f"Could not write the weights into {folder}: {error}") from error
    on_progress(LoadProgress("convert", total, total, "tensors"))


def weight_name(gguf_name: str) -> str:
    """Return mlx-lm's name of a tensor.

    ``blk.3.attn_q.scales`` is ``model.layers.3.self_attn.q_proj.scales``.
    """
    stem, _, kind = gguf_name.rpartition(".")
    if stem in _TENSOR_NAMES:
        return f"{_TENSOR_NAMES[stem]}.{kind}"
    match stem.split("."):
        case ["blk", index, part] if part in _LAYER_TENSOR_NAMES:
            return f"model.layers.{index}.{_LAYER_TENSOR_NAMES[part]}.{kind}"
    raise ModelLoadError(f"The GGUF file holds a tensor that this conversion does not know: {gguf_name!r}.")


def model_config(metadata: Metadata, weights: dict[str, mx.array]) -> dict[str, Any]:
    """Return the ``config.json`` of a llama model from its GGUF metadata and its renamed weights."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelLoadError(f"The GGUF file holds a model of architecture {architecture!r}, not 'llama'.")
    end_of_turn = _integer(metadata, "tokenizer.ggml.eos_token_id")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": _integer(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_token_ids(metadata, end_of_turn),
        "hidden_act": "silu",
        "hidden_size": _integer(metadata, "llama.embedding_length"),
        "intermediate_size": _integer(metadata, "llama.feed_forward_length"),
        "max_position_embeddings": _integer(metadata, "llama.context_length"),
        "num_attention_heads": _integer(metadata, "llama.attention.head_count"),
        "num_hidden_layers": _integer(metadata, "llama.block_count"),
        "num_key_value_heads": _integer(metadata, "llama.attention.head_count_kv"),
        "rms_norm_eps": _decimal(metadata, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _decimal(metadata, "llama.rope.freq_base"),
        # GGUF permutes the rows of q and k so that rotary pairs lie side by side.
        "rope_traditional": True,
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
    }
    if quantization := _quantization(weights):
        config["quantization"] = quantization
    return config


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Build the byte-level BPE tokenizer that the metadata describes.

    Adds no BOS or EOS unless the metadata says so.
    """
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        raise ModelLoadError("The GGUF file's tokenizer is not a byte-level BPE ('gpt2').")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
    tokenizer.decoder = decoders.ByteLevel()
    added = []
    for token, token_type in zip(tokens, metadata["tokenizer.ggml.token_type"].tolist(), strict=True):
        if token_type in (_CONTROL_TOKEN, _USER_DEFINED_TOKEN):
            added.append(AddedToken(token, special=token_type == _CONTROL_TOKEN, normalized=False))
    tokenizer.add_tokens(added)
    before = [tokens[_integer(metadata, "tokenizer.ggml.bos_token_id")]] if _adds(metadata, "bos") else []
    after = [tokens[_integer(metadata, "tokenizer.ggml.eos_token_id")]] if _adds(metadata, "eos") else []
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=[(token, vocab[token]) for token in before + after]
        )
    return tokenizer


def _pre_tokenizer(name: str | None) -> pre_tokenizers.PreTokenizer:
    split_of_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match name:
        case "smollm":  # Every digit stands alone.
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split_of_gpt2])
        case "gpt-2" | "default" | None:
            return split_of_gpt2
        case _:
            raise ModelLoadError(f"The GGUF file's pre-tokenizer {name!r} is not known to this conversion.")


def _write_tokenizer(folder: Path, metadata: Metadata) -> None:
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _integer(metadata, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for role, name in roles.items():
        if f"tokenizer.ggml.{name}_token_id" in metadata:
            config[role] = tokens[_integer(metadata, f"tokenizer.ggml.{name}_token_id")]
    _write_json(folder / "tokenizer_config.json", config)
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _end_token_ids(metadata: Metadata, end_of_turn: int) -> list[int]:
    """The end-of-turn token, and the end of a text where the vocabulary has one of its own."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    end_of_text = [tokens.index("<|endoftext|>")] if "<|endoftext|>" in tokens else []
    return list(dict.fromkeys([end_of_turn, *end_of_text]))


def _quantization(weights: dict[str, mx.array]) -> dict[str, Any]:
    """Return mlx-lm's ``quantization`` entry: 4 bits for all, and each module that differs by name."""
    group_size = 32  # Of every GGUF type that mx.load keeps quantized.
    modules: dict[str, Any] = {}
    for name, scales in weights.items():
        if name.endswith(".scales"):
            module = name.removesuffix(".scales")
            bits = weights[f"{module}.weight"].shape[-1] * 32 // (scales.shape[-1] * group_size)
            modules[module] = {"group_size": group_size, "bits": bits}
    if not modules:
        return {}
    others = {module: settings for module, settings in modules.items() if settings["bits"] != 4}
    return {"group_size": group_size, "bits": 4, **others}


def _adds(metadata: Metadata, role: str) -> bool:
    value = metadata.get(f"tokenizer.ggml.add_{role}_token")
    return value is not None and bool(value.item())


def _integer(metadata: Metadata, key: str) -> int:
    return int(_number(metadata, key))


def _decimal(metadata: Metadata, key: str) -> float:
    # A float32 carries 7 digits: 9.999999747378752e-06 is 1e-05.
    return float(f"{_number(metadata, key):.7g}")


def _number(metadata: Metadata, key: str) -> float:
    value = metadata.get(key)
    number = value.item() if isinstance(value, mx.array) and value.size == 1 else None
    if not isinstance(number, int | float):
        raise ModelLoadError(f"The GGUF file lacks the number {key!r} in its metadata.")
    return number


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
