"""`headrace calibrate` as a process: what it shows, what it stores, and its errors."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

TinyModelDir = Callable[..., Path]

DEADLINE_S = 60.0


def calibrate(cache: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the command with a cache folder of its own."""
    return subprocess.run(
        [sys.executable, "-m", "headrace", "calibrate", *flags],
        env={**os.environ, "HEADRACE_CACHE": str(cache), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def test_it_shows_a_table_and_stores_what_servers_read(tmp_path: Path, tiny_model_dir: TinyModelDir) -> None:
    """Recall per layer and keep rate, the layers chosen, and the file, which the loader finds."""
    result = calibrate(tmp_path, "--model", str(tiny_model_dir()), "--prompts", "3", "--tokens", "400")
    assert result.returncode == 0, result.stderr
    assert "headrace: read 3 of 3 prompts" in result.stderr
    assert re.search(r"layer\W+keep 15%\W+keep 20%\W+keep 30%", result.stdout)
    stored = Path(next(re.finditer(r"Stored in (\S+):", result.stdout)).group(1))
    assert stored.parent == tmp_path / "calibrations"
    layers = json.loads(stored.read_text())["layers"]
    assert layers
    assert all(re.search(rf"\W{layer}\W.*chosen", result.stdout) for layer in layers)

    from headrace.engine.specprefill.calibration import load_calibration

    found = load_calibration(stored.stem, stored.parent)
    assert found is not None
    assert (found.layers, found.num_prompts, found.prompt_tokens) == (tuple(layers), 3, 400)


def test_mistakes_are_one_line(tmp_path: Path, tiny_model_dir: TinyModelDir) -> None:
    """No such model, prompts longer than the context, a number out of range; nothing is stored."""
    for flags, named in (
        (["--model", "./nowhere"], "headrace: There is no folder './nowhere'."),
        (["--model", str(tiny_model_dir()), "--tokens", "5000"], "do not fit the context of"),
    ):
        result = calibrate(tmp_path, *flags)
        assert (result.returncode, result.stdout) == (1, "")
        assert named in result.stderr.splitlines()[-1]
        assert "Traceback" not in result.stderr
    assert calibrate(tmp_path, "--prompts", "0").returncode == 2
    assert not (tmp_path / "calibrations").exists()
