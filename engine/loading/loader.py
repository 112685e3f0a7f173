"""From a name to a model that is ready to run: find or fetch its files, load them, fit them to the device."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import get_total_parameters, load_tokenizer
from mlx_lm.utils import load_model as load_weights

from .cpu_weights import evaluate, make_float32, weight_bytes
from .default_model import DEFAULT_MODEL, fetch_default_model
from .host_memory import available_memory_bytes
from .hub import fetch_from_hub
from .model_files import LoadProgress, ModelLoadError, OnProgress, ignore_progress

__all__ = [
    "DEFAULT_CONTEXT_LENGTH",
    "DEFAULT_MODEL",
    "LoadProgress",
    "LoadedModel",
    "ModelLoadError",
    "OnProgress",
    "load_model",
    "resolve_model",
]

DEFAULT_CONTEXT_LENGTH = 4096
"""Tokens, for a model whose configuration does not say."""

_CONTEXT_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_seq_len",
    "max_seq_length",
    "seq_length",
    "context_length",
    "model_max_length",
)
_NESTED_CONFIGS = ("text_config", "language_config", "llm_config")


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, with what the engine must know about it.

    Runs only on the thread that loaded it: streams of mlx belong to a thread.
    """

    name: str
    path: Path
    model: Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    """``config.json`` as mlx-lm read it."""
    context_length: int
    """The most tokens a sequence may have, prompt and answer together."""
    vocab_size: int
    """The width of the logits: may be more than the tokenizer has tokens."""
    dtype: mx.Dtype
    """Of the activations and the logits."""
    num_parameters: int
    """As mlx-lm counts them: packed ones as many as they stand for."""
    dequantized: bool
    """The weights were made float32 for the CPU."""
    weight_bytes: int
    """The memory that the weights take."""


def resolve_model(name: str | None, on_progress: OnProgress = ignore_progress) -> tuple[str, Path]:
    """Return the model's public name and the folder with its files, fetching them if need be.

    Args:
        name: None or ``DEFAULT_MODEL``: the default model. Else a local folder, whose name becomes the
            model's; else a repository of the Hugging Face hub, named as given.

    Raises:
        ModelLoadError: there is no such model, or it can't be fetched.
    """
    if name is None or name == DEFAULT_MODEL:
        return DEFAULT_MODEL, fetch_default_model(on_progress)
    path = Path(name).expanduser()
    if path.is_dir():
        path = path.resolve()
        return path.name, path
    if path.exists():
        raise ModelLoadError(
            f"{name!r} is a file. Name the folder that holds config.json and the safetensors files."
        )
    if path.is_absolute() or name.startswith((".", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ModelLoadError(f"There is no folder {name!r}.")
    return name, fetch_from_hub(name, on_progress)


def load_model(
    name: str | None, *, dequantize: bool = True, on_progress: OnProgress = ignore_progress
) -> LoadedModel:
    """Load a model and run one token through it, all on the calling thread.

    Args:
        name: as for ``resolve_model``.
        dequantize: where mlx runs on the CPU, make quantized and 16-bit weights float32, if memory allows.
            Elsewhere it does nothing.
        on_progress: called on this thread, or one call at a time from others while the hub is read.

    Raises:
        ModelLoadError: the message says what is wrong with the files and what to do.
    """
    name, path = resolve_model(name, on_progress)
    check_files(path)
    try:
        model, config = load_weights(path, lazy=True)
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        dequantized = dequantize and on_cpu and make_float32(model, available_memory_bytes(), on_progress)
        if not dequantized:
            evaluate(model, on_progress)
        tokenizer = load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))
        logits = _run_one_token(model)
    except Exception as error:
        raise ModelLoadError(_load_message(path, error)) from error
    return LoadedModel(
        name=name,
        path=path,
        model=model,
        tokenizer=tokenizer,
        config=config,
        context_length=context_length(config, getattr(model, "args", None)),
        vocab_size=logits.shape[-1],
        dtype=logits.dtype,
        num_parameters=get_total_parameters(model),
        dequantized=dequantized,
        weight_bytes=weight_bytes(model),
    )


def check_files(folder: Path) -> None:
    """Look for what is often missing, before anything large is read.

    Raises:
        ModelLoadError: no usable ``config.json``, no weights, or a part of them missing.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(
            f"{folder} has no config.json, so it is not a model folder. Name the folder that holds "
            f"config.json and the safetensors files."
        ) from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"{folder / 'config.json'} can't be read: {error}. Fetch the model again."
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelLoadError(
            f"{folder / 'config.json'} names no model_type. It is not the configuration of a language model."
        )
    if not any(folder.glob("model*.safetensors")):
        others = sorted(
            file.name
            for pattern in ("*.gguf", "*.bin", "*.pth", "*.safetensors")
            for file in folder.glob(pattern)
        )
        found = f" It holds {', '.join(others[:3])}, which mlx-lm does not read." if others else ""
        raise ModelLoadError(
            f"{folder} has no model*.safetensors.{found} Fetch the model again, or convert it with "
            f"`mlx_lm.convert`."
        )
    missing = sorted(name for name in _indexed_files(folder) if not (folder / name).exists())
    if missing:
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} of its weight files (first {missing[0]}). Fetch the model again."
        )


def context_length(config: Mapping[str, Any], model_args: object = None) -> int:
    """Return the longest sequence in tokens.

    From the configuration, one nested in it, or the defaults of mlx-lm's class for the architecture;
    ``DEFAULT_CONTEXT_LENGTH`` if none of them says.
    """
    for place in _config_places(config, model_args):
        for key in _CONTEXT_LENGTH_KEYS:
            value = place.get(key)
            if isinstance(value, int | float) and value >= 1:
                return int(value)
    return DEFAULT_CONTEXT_LENGTH


def _config_places(config: Mapping[str, Any], model_args: object) -> Iterator[Mapping[str, Any]]:
    for place in (config, getattr(model_args, "__dict__", {})):
        yield place
        for key in _NESTED_CONFIGS:
            nested = place.get(key)
            nested = nested if isinstance(nested, dict) else getattr(nested, "__dict__", None)
            if nested:
                yield nested


def _indexed_files(folder: Path) -> set[str]:
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return set(index["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()


def _run_one_token(model: Any) -> mx.array:
    """Return logits: their width and type, and proof that the model runs on this device."""
    logits: mx.array = model(mx.array([[0]]), cache=make_prompt_cache(model))
    mx.eval(logits)
    return logits


def _load_message(path: Path, error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    match error:
        case ValueError() if "not supported" in text:
            return f"The model in {path} can't be run here: {text} A newer mlx-lm may know it."
        case ValueError() if "model_file" in text or "trust_remote_code" in text:
            return f"The model in {path} brings code of its own, which is not run here."
        case ValueError() if re.match(r"Missing|Received|Expected shape", text):
            first = text.splitlines()[0].rstrip(": ")
            return (
                f"The weights in {path} do not match its config.json ({first}). Fetch the model again, or "
                f"convert it with `mlx_lm.convert`."
            )
        case RuntimeError() if "safetensors" in text.lower() or "[load" in text:
            return f"A weight file in {path} is damaged ({text}). Fetch the model again."
        case MemoryError():
            return f"Not enough memory for the model in {path}."
        case _:
            return f"The model in {path} can't be loaded: {type(error).__name__}: {text}"
