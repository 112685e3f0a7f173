"""engine/cpu_weights.py and engine/host_memory.py: float32 weights for a CPU, if there is room for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model as load_weights

from headrace.engine.loading.cpu_weights import is_quantized, make_float32, weight_bytes
from headrace.engine.loading.host_memory import available_memory_bytes
from headrace.engine.loading.model_files import ignore_progress

TinyModelDir = Callable[..., Path]

MEMINFO = "MemTotal:       24000000 kB\nMemFree:         1000 kB\nMemAvailable:    2000000 kB\n"
MANY = 1 << 40


def test_without_room_packed_weights_stay_packed(
    tiny_model_dir: TinyModelDir, caplog: pytest.LogCaptureFixture
) -> None:
    """They get float32 scales, which are much faster on a CPU than float16 ones, and the log says why."""
    model, _ = load_weights(tiny_model_dir(bits=4, dtype="float16"), lazy=True)
    with caplog.at_level(logging.WARNING):
        assert make_float32(model, 1 << 20, ignore_progress) is False
    assert is_quantized(model)
    assert model(mx.array([[1, 2]])).dtype == mx.float32
    assert "stay as they are" in caplog.text


def test_without_room_16_bit_weights_stay_16_bit(tiny_model_dir: TinyModelDir) -> None:
    """Nothing about them changes."""
    model, _ = load_weights(tiny_model_dir(dtype="bfloat16"), lazy=True)
    before = weight_bytes(model)
    assert make_float32(model, 1 << 20, ignore_progress) is False
    assert weight_bytes(model) == before


@pytest.mark.parametrize("available_bytes", [MANY, None])
def test_with_room_nothing_packed_is_left(tiny_model_dir: TinyModelDir, available_bytes: int | None) -> None:
    """Also where the system does not say how much room there is."""
    model, _ = load_weights(tiny_model_dir("qwen3_next", bits=4, dtype="bfloat16"), lazy=True)
    assert make_float32(model, available_bytes, ignore_progress) is True
    assert not is_quantized(model)
    assert model(mx.array([[1, 2]])).dtype == mx.float32


def test_float32_weights_are_left_alone(tiny_model_dir: TinyModelDir) -> None:
    """And not called dequantized."""
    model, _ = load_weights(tiny_model_dir(), lazy=True)
    assert make_float32(model, MANY, ignore_progress) is False


def test_memory_of_this_machine() -> None:
    """Some, and less than a petabyte."""
    available = available_memory_bytes()
    assert available is None or 1 << 20 < available < 1 << 50


@pytest.mark.parametrize(
    ("limit", "used", "inactive", "expected"),
    [
        ("max", 1000, 0, 2_048_000_000),
        ("1000000000", 600_000_000, 100_000_000, 500_000_000),
        ("1000000000", 2_000_000_000, 0, 0),
        ("9000000000", 1000, 0, 2_048_000_000),
    ],
)
def test_the_limit_of_a_container_counts(
    tmp_path: Path, limit: str, used: int, inactive: int, expected: int
) -> None:
    """File cache that the kernel would drop is free; no limit, or one above the machine's memory, is none."""
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\nactive_file 3\n")
    assert available_memory_bytes(tmp_path / "meminfo", tmp_path) == expected


def test_no_container(tmp_path: Path) -> None:
    """Only the machine counts."""
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert available_memory_bytes(tmp_path / "meminfo", tmp_path / "none") == 2_048_000_000
