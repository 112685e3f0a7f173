"""`headrace doctor`: what it finds, and what it says to do."""

import json
import shutil
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from headrace import doctor_checks
from headrace.doctor_server import check_port, check_server
from headrace.pool.blas import BlasFacts

sys.path.insert(0, str(Path(__file__).parent))
cli = import_module("cli_helpers")


def free_port() -> str:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def test_models_that_are_whole_and_that_are_not(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Each broken folder with its reason, beside a missing library; one failure makes the exit code 1."""
    whole = tiny_model_dir()
    cut, untyped = tmp_path / "cut", tmp_path / "untyped"
    for folder in (cut, untyped):
        shutil.copytree(whole, folder)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (untyped / "config.json").write_text("{}")
    flags = [flag for name in (whole, cut, untyped, "/nowhere") for flag in ("--model", str(name))]
    result = cli.run("doctor", "--json", "--port", free_port(), "--blas", "/no/such/lib.so", *flags)
    assert result.returncode == 1, result.stderr
    findings: list[dict[str, Any]] = json.loads(result.stdout)
    first, *broken = [one for one in findings if one["topic"] == "model"]
    assert first["level"] == "ok"
    for finding, said in zip(broken, ("damaged", "model_type", "no folder"), strict=True):
        assert finding["level"] == "fail"
        assert said in finding["what"]
        assert finding["advice"]
    others = [one for one in findings if one["topic"] != "model"]
    assert {one["topic"] for one in others} == {
        "versions", "device", "blas", "memory", "packages", "cache", "port"
    }  # fmt: skip
    (missing,) = [one for one in others if one["level"] == "fail"]
    assert "There is no BLAS library" in missing["what"]
    assert any("GFLOP/s" in one["what"] for one in others)


def test_a_port_that_another_program_has() -> None:
    """With the program's id, and the way out."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        finding, is_ours = check_port("127.0.0.1", listener.getsockname()[1])
    assert (finding.level, is_ours) == ("fail", False)
    assert "is taken by process" in finding.what
    assert finding.advice == "end that program, or choose another --port"


@pytest.mark.parametrize(
    ("host", "said"), [("192.0.2.1", "can't be used"), ("no such host", "is no address")]
)
def test_an_address_that_is_not_here(host: str, said: str) -> None:
    """And what to do."""
    finding, _ = check_port(host, 9)
    assert finding.level == "fail"
    assert said in finding.what


def test_a_server_that_runs() -> None:
    """Is not taken for another program, and its models are asked for."""
    with cli.scripted_server() as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        finding, is_ours = check_port("127.0.0.1", port)
        assert (finding.level, is_ours) == ("ok", True)
        findings = check_server(url, None)
    assert [one.level for one in findings] == ["ok", "ok"]
    assert findings[1].what == "scripted is ready"
    (finding,) = check_server(url, None)
    assert (finding.level, finding.advice) == ("fail", "headrace serve starts one")


def test_no_tuned_blas_is_a_warning_with_a_way_out() -> None:
    """And a slow one too."""
    facts = {"device": "cpu", "gflops": 6.0}
    missing = doctor_checks._blas(BlasFacts(None, "the reference BLAS", missing=True), facts)
    assert (missing.level, "libopenblas0-pthread" in str(missing.advice)) == ("warn", True)
    tuned = BlasFacts(Path("/lib/libopenblas.so.0"), "found")
    assert doctor_checks._blas(tuned, facts).level == "warn"
    assert doctor_checks._blas(tuned, {**facts, "gflops": 100.0}).level == "ok"
    assert doctor_checks._blas(BlasFacts(None, "Metal"), {**facts, "device": "gpu"}).level == "ok"


def test_mlx_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is one line, whatever happens in its process."""
    monkeypatch.setattr(doctor_checks, "_CHILD", "headrace.no_such_module")
    *_, finding = doctor_checks.check_machine([None], "off")
    assert (finding.level, finding.topic) == ("fail", "device")
    assert "No module named" in finding.what
