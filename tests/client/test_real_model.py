"""The client against the default model, in a server of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.client import Progress, connect_blocking

_LONG = "The headrace leads the water to the turbine, and the tailrace leads it away again. " * 20


@pytest.mark.model
def test_the_default_model_answers(default_model_path: Path, tmp_path: Path) -> None:
    """Over a Unix socket: a chat, a long prompt with SpecPrefill, and a cancel while a prompt is read."""
    path = tmp_path / "headrace.sock"
    command = [sys.executable, "-m", "headrace", "serve", "--no-tcp", "--unix", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "ready" in process.stdout.readline()
        seen: list[Progress] = []
        with connect_blocking(unix=str(path)) as hr:
            answer = hr.chat("What is the capital of France?", max_tokens=16, temperature=0).result()
            assert "Paris" in answer.text
            assert answer.message == {"role": "assistant", "content": answer.text}
            sparse = hr.complete(
                _LONG, max_tokens=4, specprefill=True, specprefill_keep_pct=0.3, on_progress=seen.append
            ).result()
            report = sparse.specprefill
            assert (report["applied"], report["draft"]) == (True, "self")
            assert 0 < report["kept_tokens"] < report["uncached_tokens"]
            assert {"score", "prefill"} >= {one.phase for one in seen} - {"queue"}
            with hr.complete("Anew. " + _LONG, specprefill=False, cache_prompt=False) as stream:
                stream.accepted()
            cut = stream.result()
            assert (cut.status, cut.usage["completion_tokens"]) == ("cancelled", 0)
            assert hr.in_flight == 0
    finally:
        process.terminate()
        process.communicate(timeout=30)
