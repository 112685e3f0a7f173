"""engine/loader.py: from a name to a model that runs, and errors that a person can act on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from headrace.engine.loading.loader import (
    DEFAULT_CONTEXT_LENGTH,
    DEFAULT_MODEL,
    LoadProgress,
    ModelLoadError,
    context_length,
    load_model,
    resolve_model,
)

TinyModelDir = Callable[..., Path]

ON_CPU = mx.default_device() == mx.Device(mx.cpu)
cpu_only = pytest.mark.skipif(not ON_CPU, reason="only a CPU wants float32 weights")


@pytest.fixture
def folder(tiny_model_dir: TinyModelDir, tmp_path: Path) -> Path:
    """A tiny model's folder that the test may break."""
    return Path(shutil.copytree(tiny_model_dir(), tmp_path / "tiny"))


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_next"])
def test_loads_a_folder_and_says_what_the_engine_must_know(
    tiny_model_dir: TinyModelDir, model_type: str
) -> None:
    """Name, context, width of the logits and type of the activations come with the model."""
    folder = tiny_model_dir(model_type)
    loaded = load_model(str(folder))
    assert loaded.name == folder.name
    assert loaded.path == folder
    assert loaded.context_length == 4096
    assert loaded.vocab_size == loaded.config["vocab_size"]
    assert loaded.dtype == mx.float32
    assert loaded.weight_bytes == pytest.approx(4 * loaded.num_parameters, rel=0.001)
    assert not loaded.dequantized
    assert loaded.tokenizer.eos_token_ids == {2}
    assert loaded.tokenizer.has_chat_template


@pytest.mark.parametrize(
    "options",
    [
        {"rope_traditional": True},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"tie_word_embeddings": True},
    ],
)
def test_variants_of_llama_load(tiny_model_dir: TinyModelDir, options: dict[str, object]) -> None:
    """What only the configuration says reaches the model."""
    assert load_model(str(tiny_model_dir(**options))).vocab_size > 256


def test_the_same_arguments_make_the_same_weights(tiny_model_dir: TinyModelDir) -> None:
    """Another seed makes other weights; the name of the folder makes none."""
    first, again = load_model(str(tiny_model_dir(seed=1))), load_model(str(tiny_model_dir(seed=1)))
    other = load_model(str(tiny_model_dir(seed=2)))
    tokens = mx.array([[5, 6, 7]])
    assert mx.array_equal(first.model(tokens), again.model(tokens))
    assert not mx.array_equal(first.model(tokens), other.model(tokens))


@cpu_only
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_quantized_weights_become_float32_on_a_cpu(tiny_model_dir: TinyModelDir, dtype: str) -> None:
    """The values stay: the logits are those of the quantized model, computed in float32."""
    folder = str(tiny_model_dir(bits=4, dtype=dtype))
    quantized, loaded = load_model(folder, dequantize=False), load_model(folder)
    assert loaded.dequantized
    assert loaded.dtype == mx.float32
    assert loaded.num_parameters == quantized.num_parameters
    assert loaded.weight_bytes == 4 * loaded.num_parameters > quantized.weight_bytes
    quantized.model.set_dtype(mx.float32)
    tokens = mx.array([[5, 6, 7, 8]])
    assert mx.allclose(loaded.model(tokens), quantized.model(tokens), atol=1e-3)


@cpu_only
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_weights_become_float32_on_a_cpu(tiny_model_dir: TinyModelDir, dtype: str) -> None:
    """16-bit products do not go through BLAS."""
    loaded = load_model(str(tiny_model_dir(dtype=dtype)))
    assert loaded.dequantized
    assert loaded.dtype == mx.float32


@pytest.mark.parametrize("options", [{"bits": 4}, {"dtype": "float16"}])
def test_weights_stay_as_saved_when_told_so(tiny_model_dir: TinyModelDir, options: dict[str, object]) -> None:
    """The flag switches every conversion off."""
    loaded = load_model(str(tiny_model_dir(**options)), dequantize=False)
    assert not loaded.dequantized
    assert loaded.weight_bytes < 4 * loaded.num_parameters


def test_progress_never_goes_back_and_ends_complete(tiny_model_dir: TinyModelDir) -> None:
    """The last report of a stage says that all of it is done."""
    reports: list[LoadProgress] = []
    load_model(str(tiny_model_dir(bits=4)), on_progress=reports.append)
    assert len({report.stage for report in reports}) == 1
    assert [report.done for report in reports] == sorted(report.done for report in reports)
    assert reports[-1].done == reports[-1].total


def test_a_model_without_a_chat_template_loads(tiny_model_dir: TinyModelDir) -> None:
    """Completions need none."""
    assert not load_model(str(tiny_model_dir(chat_template=None))).tokenizer.has_chat_template


def test_a_relative_folder_gets_its_own_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not ``.``."""
    monkeypatch.chdir(folder)
    assert resolve_model(".") == ("tiny", folder)


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/no such folder", "two words", "a/b/c"])
def test_a_path_to_nothing_is_not_looked_up_on_the_hub(name: str) -> None:
    """The message says that the folder is missing."""
    with pytest.raises(ModelLoadError, match="There is no folder"):
        resolve_model(name)


def test_a_file_is_not_a_model(folder: Path) -> None:
    """Naming the weights or the configuration is a common slip."""
    with pytest.raises(ModelLoadError, match="is a file"):
        resolve_model(str(folder / "config.json"))


def test_missing_config(folder: Path) -> None:
    """A folder of something else."""
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        load_model(str(folder))


@pytest.mark.parametrize(("text", "message"), [("{", "can't be read"), ("[]", "names no model_type")])
def test_broken_config(folder: Path, text: str, message: str) -> None:
    """Cut off, or not a configuration."""
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=message):
        load_model(str(folder))


def test_unsupported_architecture(folder: Path) -> None:
    """The message names it."""
    edit_config(folder, model_type="perceptron")
    with pytest.raises(ModelLoadError, match="perceptron not supported"):
        load_model(str(folder))


def test_code_of_the_model_is_not_run(folder: Path) -> None:
    """A model folder must not be able to run code here."""
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    edit_config(folder, model_file="evil.py")
    with pytest.raises(ModelLoadError, match="code of its own, which is not run"):
        load_model(str(folder))


def test_missing_weights(folder: Path) -> None:
    """What is there instead is named."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"no model\*\.safetensors.*pytorch_model\.bin"):
        load_model(str(folder))


def test_a_part_of_the_weights_is_missing(folder: Path) -> None:
    """An interrupted download."""
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"lacks 1 of its weight files.*00002"):
        load_model(str(folder))


def test_weights_that_do_not_match(folder: Path) -> None:
    """Of another model."""
    edit_config(folder, num_hidden_layers=2)
    with pytest.raises(ModelLoadError, match="do not match its config"):
        load_model(str(folder))


@pytest.mark.parametrize("kept", [4, 0.5])
def test_damaged_weights(folder: Path, kept: float) -> None:
    """Cut off in the header, and in the middle."""
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: int(kept if kept > 1 else kept * len(content))])
    with pytest.raises(ModelLoadError, match="damaged"):
        load_model(str(folder))


def test_missing_tokenizer(folder: Path) -> None:
    """The message names the folder, not the library's ten guesses."""
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"model_type": "x", "text_config": {"max_position_embeddings": 131072}}, 131072),
        ({"max_position_embeddings": None, "seq_length": 512}, 512),
        ({}, DEFAULT_CONTEXT_LENGTH),
    ],
)
def test_context_length(config: dict[str, object], expected: int) -> None:
    """By any of its names, also nested."""
    assert context_length(config) == expected


def test_context_length_of_the_architecture() -> None:
    """mlx-lm's class knows what a short configuration leaves out."""

    class Args:
        def __init__(self) -> None:
            self.max_position_embeddings = 32768

    assert context_length({}, Args()) == 32768


@pytest.mark.model
def test_the_default_model_answers(default_model_path: Path) -> None:
    """Greedy, through mlx-lm, as any other folder."""
    from mlx_lm import generate

    loaded = load_model(None)
    assert (loaded.name, loaded.path) == (DEFAULT_MODEL, default_model_path)
    assert (loaded.context_length, loaded.vocab_size, loaded.num_parameters) == (8192, 49152, 134515008)
    assert loaded.dtype == mx.float32
    assert loaded.dequantized == ON_CPU
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert "Paris" in generate(loaded.model, loaded.tokenizer, prompt, max_tokens=10)
