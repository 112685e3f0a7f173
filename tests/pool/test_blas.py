"""pool/blas.py: a tuned BLAS for engine processes on a Linux CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.pool.blas import describe, engine_environment, find_tuned_blas

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="nothing is preloaded elsewhere")


def fake_library(path: Path, symbol: str = "cblas_sgemm", machine: bytes | None = None) -> Path:
    """Write what looks like a shared library: this machine's ELF header, and a symbol in its string table."""
    with open(sys.executable, "rb") as file:
        header = bytearray(file.read(64))
    if machine is not None:
        header[18:20] = machine
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(header) + b"\0" + symbol.encode() + b"\0")
    return path


@linux_only
def test_a_library_with_a_thread_per_core_is_preferred(tmp_path: Path) -> None:
    """To one that is found first, and to one on a single thread."""
    fake_library(tmp_path / "first" / "libmkl_rt.so.2")
    fake_library(tmp_path / "second" / "openblas-serial" / "libopenblas.so.0")
    threads = fake_library(tmp_path / "second" / "openblas-pthread" / "libopenblas.so.0")
    assert find_tuned_blas([tmp_path / "first", tmp_path / "second"]) == threads


@linux_only
def test_a_library_that_would_not_serve_is_passed_over(tmp_path: Path) -> None:
    """With 64-bit integers, for another machine, empty, or under a path that LD_PRELOAD can't hold."""
    fake_library(tmp_path / "a" / "libopenblasp.so.0", symbol="cblas_sgemm64_")
    fake_library(tmp_path / "b" / "libopenblasp.so.0", symbol="scipy_cblas_sgemm")
    fake_library(tmp_path / "c" / "libopenblasp.so.0", machine=b"\xff\xff")
    fake_library(tmp_path / "d e" / "libopenblasp.so.0")
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "libopenblasp.so.0").touch()
    assert find_tuned_blas([tmp_path / name for name in ("a", "b", "c", "d e", "f", "nowhere")]) is None


@linux_only
def test_a_library_of_the_python_environment_is_found(tmp_path: Path) -> None:
    """As `pip install mkl` puts it there."""
    library = fake_library(tmp_path / "lib" / "libmkl_rt.so.2")
    assert find_tuned_blas([tmp_path / "lib"]) == library


def test_off_adds_nothing() -> None:
    """Also where a library is found."""
    assert engine_environment("off", {"LD_PRELOAD": "/lib/other.so"}) == {}
    assert describe("off").library is None


def test_a_named_library_is_added_behind_what_is_preloaded(tmp_path: Path) -> None:
    """And nothing else of the environment is touched: the number of threads is the user's."""
    library = fake_library(tmp_path / "libblis.so") if sys.platform == "linux" else tmp_path / "libblis.so"
    library.touch()
    assert engine_environment(library, {}) == {"LD_PRELOAD": str(library)}
    base = {"LD_PRELOAD": "/lib/one.so", "OPENBLAS_NUM_THREADS": "3"}
    assert engine_environment(str(library), base) == {"LD_PRELOAD": f"/lib/one.so:{library}"}


def test_a_named_library_must_be_there(tmp_path: Path) -> None:
    """The linker would only warn, once per process."""
    with pytest.raises(ValueError, match="There is no BLAS library"):
        engine_environment(tmp_path / "nothing.so", {})
    spaced = tmp_path / "my library.so"
    spaced.touch()
    with pytest.raises(ValueError, match="a space or a colon"):
        engine_environment(spaced, {})


@linux_only
def test_a_tuned_library_that_is_preloaded_already_is_enough() -> None:
    """A person who preloads MKL keeps MKL."""
    base = {"LD_PRELOAD": "/opt/mkl/libmkl_rt.so.2"}
    assert engine_environment("auto", base) == {}
    assert "already" in str(describe("auto", base))


def test_facts_are_a_sentence() -> None:
    """For a person, with or without a library."""
    facts = describe()
    assert str(facts)
    assert facts.missing == ("install OpenBLAS" in facts.reason)


@linux_only
@pytest.mark.skipif(find_tuned_blas() is None, reason="no tuned BLAS on this machine")
def test_the_preloaded_library_takes_the_products_over() -> None:
    """In a real process: the library is mapped, and 1024 x 1024 is at least three times as fast."""
    library = find_tuned_blas()
    assert library is not None
    code = (
        "import time, mlx.core as mx; a = mx.random.normal((1024, 1024)); mx.eval(a, a @ a); s = []\n"
        "for _ in range(3): t = time.perf_counter(); mx.eval(a @ a); s.append(time.perf_counter() - t)\n"
        "print(min(s), open('/proc/self/maps').read().count('openblas') + "
        "open('/proc/self/maps').read().count('mkl'))"
    )
    bare = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}

    def measure(environment: dict[str, str]) -> tuple[float, int]:
        output = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout.split()
        return float(output[0]), int(output[1])

    before_s, mapped_before = measure(bare)
    after_s, mapped_after = measure({**bare, **engine_environment("auto", bare)})
    assert (mapped_before, mapped_after > 0) == (0, True)
    assert after_s * 3 < before_s


def test_looking_for_a_library_imports_no_mlx_and_loads_no_library() -> None:
    """The gateway's process stays free of both."""
    code = (
        "import sys; from headrace.pool.blas import describe; describe()\n"
        "assert not [name for name in sys.modules if name.startswith('mlx')]\n"
        "import os; maps = '/proc/self/maps'\n"
        "assert not os.path.exists(maps) or 'openblas' not in open(maps).read()"
    )
    bare = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run([sys.executable, "-c", code], env=bare, check=True, timeout=60)


@linux_only
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_setup_script_never_fails() -> None:
    """With a library there it does nothing; without a Python it hints and goes on."""
    script = Path(__file__).parents[2] / "scripts" / "setup-blas.sh"
    if find_tuned_blas() is not None:
        done = subprocess.run(["bash", script, sys.executable], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    no_apt = {**os.environ, "PATH": "/nonexistent"}
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, script, "/nonexistent/python"], env=no_apt, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
