"""What `headrace doctor` finds out about the machine: device, BLAS, memory, models, versions.

mlx is asked in a child process (`engine/doctor_main.py`), which gets the BLAS that engine processes get.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from . import __version__
from .pool.blas import BlasFacts, describe, engine_environment

_CHILD = "headrace.engine.doctor_main"
_CHILD_TIMEOUT_S = 120.0
_GIBIBYTE = 1 << 30
_LEAST_MEMORY_BYTES = 2 * _GIBIBYTE
_LEAST_DISK_BYTES = 2 * _GIBIBYTE
_SLOW_GFLOPS = 20.0
"""A tuned BLAS has several times as many on any CPU of the last ten years; the reference one has 6."""
_DEFAULT_MODEL_SIZE = "93 MB"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Literal["ok", "warn", "fail"]
    topic: str
    what: str
    advice: str | None = None
    """What to do about it."""


def check_machine(models: Sequence[str | None], blas: str) -> list[Finding]:
    """Return what can be said of this machine and of these models (None: the default one)."""
    findings = [_versions()]
    try:
        library = describe(blas)
        environment = engine_environment(blas, os.environ)
    except ValueError as error:
        findings.append(Finding("fail", "blas", str(error), "give --blas auto, off, or a library's path"))
        library, environment = describe("off"), {}
    facts, problem = _ask_mlx(models, environment)
    if facts is None:
        advice = "make setup installs everything anew; pip check names what does not fit together"
        return [*findings, Finding("fail", "device", problem, advice)]
    findings += [_device(facts), _blas(library, facts), _memory(facts), _packages(facts), _cache(facts)]
    findings += [_model(model, facts) for model in facts["models"]]
    return findings


def _ask_mlx(models: Sequence[str | None], environment: dict[str, str]) -> tuple[dict[str, Any] | None, str]:
    """Return the child's facts, or None and why there are none."""
    try:
        child = subprocess.run(
            [sys.executable, "-m", _CHILD, json.dumps(list(models))],
            capture_output=True,
            text=True,
            timeout=_CHILD_TIMEOUT_S,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired:
        return None, f"mlx has not answered in {_CHILD_TIMEOUT_S:.0f} s"
    if child.returncode == 0:
        try:
            facts: dict[str, Any] = json.loads(child.stdout)
        except ValueError:
            return None, "mlx's process has said something else than the facts"
        return facts, ""
    if child.returncode < 0:
        return None, f"mlx's process was killed by signal {-child.returncode}"
    last = (child.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return None, f"mlx can't be used: {last}"


def _versions() -> Finding:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return Finding("ok", "versions", f"headrace {__version__}, Python {platform.python_version()}, {system}")


def _packages(facts: dict[str, Any]) -> Finding:
    packages = facts["packages"]
    missing = [name for name, version in packages.items() if version is None]
    text = ", ".join(f"{name} {version}" for name, version in packages.items() if version is not None)
    if missing:
        return Finding("fail", "packages", f"missing: {', '.join(missing)}", "make setup installs them")
    return Finding("ok", "packages", text)


def _device(facts: dict[str, Any]) -> Finding:
    device, name = facts["device"], facts["device_name"]
    text = f"mlx runs on the {device}" + (f" ({name})" if name else "")
    if device == "gpu":
        return Finding("ok", "device", text)
    if sys.platform == "darwin":
        return Finding(
            "warn",
            "device",
            text,
            "mlx finds no Metal: is this Python a native one (arm64), on macOS 14 or newer?",
        )
    return Finding("ok", "device", f"{text}, {os.cpu_count()} cores; small models only")


def _blas(library: BlasFacts, facts: dict[str, Any]) -> Finding:
    text = f"{library}; measured: {facts['gflops']:,.0f} GFLOP/s"
    if facts["device"] == "gpu":
        return Finding("ok", "blas", text)
    if library.missing:
        return Finding(
            "warn", "blas", text, "bash scripts/setup-blas.sh gets one, or apt install libopenblas0-pthread"
        )
    if facts["gflops"] < _SLOW_GFLOPS:
        return Finding(
            "warn", "blas", text, "that is slow: is the machine busy? --blas names another library"
        )
    return Finding("ok", "blas", text)


def _memory(facts: dict[str, Any]) -> Finding:
    available = facts["available_memory_bytes"]
    if available is None:
        return Finding("warn", "memory", "the system does not say how much is to be had")
    text = f"{available / _GIBIBYTE:.1f} GiB can be had"
    if available < _LEAST_MEMORY_BYTES:
        return Finding("warn", "memory", text, "close other programs, or choose a small or quantized model")
    return Finding("ok", "memory", text)


def _cache(facts: dict[str, Any]) -> Finding:
    folder = Path(facts["cache_folder"])
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return Finding(
            "fail", "cache", f"{folder} can't be written to", "give HEADRACE_CACHE a folder of your own"
        )
    free = shutil.disk_usage(existing).free
    text = f"{folder}, {free / _GIBIBYTE:.1f} GiB free"
    if free < _LEAST_DISK_BYTES:
        return Finding("warn", "cache", text, "make room, or give HEADRACE_CACHE a folder on another disk")
    return Finding("ok", "cache", text)


def _model(model: dict[str, Any], facts: dict[str, Any]) -> Finding:
    name, size = model["name"], model["weight_bytes"]
    if model["problem"] is not None:
        advice = "remove that folder, and it is fetched anew" if name == "the default model" else None
        return Finding(
            "fail", "model", f"{name}: {model['problem']}", advice or "name another folder with --model"
        )
    if not model["is_fetched"]:
        what = (
            _DEFAULT_MODEL_SIZE if name == "the default model" else "from the Hugging Face hub, or its cache"
        )
        return Finding("ok", "model", f"{name}: not looked at; fetched when it is first served ({what})")
    text = f"{name}: complete, {size / (1 << 20):,.0f} MiB of weights in {model['path']}"
    available = facts["available_memory_bytes"]
    if available is not None and size > available:
        return Finding(
            "fail", "model", f"{text}: more than the memory that can be had", "choose a smaller one"
        )
    return Finding("ok", "model", text)
