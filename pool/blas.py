"""Give engine processes on a Linux CPU a tuned BLAS.

mlx's CPU wheel for Linux is linked to the reference BLAS and calls ``cblas_sgemm`` for float32 products.
A tuned library that is loaded before it (``LD_PRELOAD``) takes these calls over: 6 GFLOP/s become 208 on two
cores. It must be in the environment when a process starts, so the pool sets it for its engine processes and
for nothing else.

No library is loaded here to look at it: that would start its threads in the gateway's process.
"""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

_SYMBOL = b"\0cblas_sgemm\0"
_LDCONFIG_TIMEOUT_S = 5

# In the order of preference; the first that is found is taken. OpenBLAS with a thread per core (Debian, then
# Fedora, then others), with OpenMP, MKL, and last OpenBLAS on one thread, still 17 times the reference BLAS.
_NAMES = (
    "openblas-pthread/libopenblas.so.0",
    "libopenblasp.so.0",
    "openblas-openmp/libopenblas.so.0",
    "libopenblaso.so.0",
    "libopenblas.so.0",
    "libopenblas.so",
    "libmkl_rt.so.2",
    "libmkl_rt.so",
    "openblas-serial/libopenblas.so.0",
)
_TUNED = re.compile(r"openblas|mkl_rt|blis")
_SEPARATORS = re.compile(r"[\s:]")
"""Of LD_PRELOAD, which knows no way to quote them (ld.so(8))."""


@dataclass(frozen=True)
class BlasFacts:
    """What engine processes multiply with, for a person to read."""

    library: Path | None
    """To be preloaded; None: nothing is."""
    reason: str
    """Why that one, or why none, and what could be done about it."""
    missing: bool = False
    """A tuned BLAS would help here, and none was found."""

    def __str__(self) -> str:
        return f"{self.library} ({self.reason})" if self.library else self.reason


def find_tuned_blas(folders: Iterable[Path] | None = None) -> Path | None:
    """Return a shared library with a tuned ``cblas_sgemm`` for this machine, or None.

    Args:
        folders: where to look. None: the folders of the system, of the Python environment and of MKL, and
            what ``ldconfig`` knows.
    """
    places = list(_system_folders() if folders is None else folders)
    for name in _NAMES:
        for place in places:
            if _serves(place / name):
                return place / name
    if folders is None:
        return next((library for library in _libraries_of_ldconfig() if _serves(library)), None)
    return None


def engine_environment(preload: str | Path, base: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to the environment of an engine process before it starts.

    ``OPENBLAS_NUM_THREADS``, ``OMP_NUM_THREADS`` and the like are left to the user.

    Args:
        preload: ``"auto"``: a tuned BLAS if one is found and of use; ``"off"``: nothing; else the path of
            the library.
        base: the environment to which it will be added. What its ``LD_PRELOAD`` names stays, and comes first.

    Raises:
        ValueError: ``preload`` is a path, and there is no such file or it can't be preloaded.
    """
    library = describe(preload, base).library
    if library is None:
        return {}
    before = base.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{before}:{library}" if before else str(library)}


def describe(preload: str | Path = "auto", base: Mapping[str, str] | None = None) -> BlasFacts:
    """Return which library ``engine_environment`` would add, and why.

    Raises:
        ValueError: ``preload`` is a path, and there is no such file or it can't be preloaded.
    """
    base = os.environ if base is None else base
    if str(preload) == "off":
        return BlasFacts(None, "as mlx was built: preloading a tuned BLAS is switched off")
    if str(preload) != "auto":
        library = Path(preload).expanduser().absolute()
        if not library.is_file():
            raise ValueError(f"There is no BLAS library {str(preload)!r} to preload.")
        if _SEPARATORS.search(str(library)):
            raise ValueError(f"{str(library)!r} can't be preloaded: its path has a space or a colon in it.")
        return BlasFacts(library, "as configured")
    if sys.platform != "linux":
        return BlasFacts(None, "as mlx was built: it uses the system's own tuned library here")
    if cuda := _cuda_build():
        return BlasFacts(None, f"as mlx was built: {cuda} multiplies on the GPU")
    if _TUNED.search(base.get("LD_PRELOAD", "")):
        return BlasFacts(None, f"already in LD_PRELOAD: {base['LD_PRELOAD']}")
    found = find_tuned_blas()
    if found is None:
        return BlasFacts(
            None,
            "mlx's reference BLAS, many times slower than a tuned one: install OpenBLAS "
            "(Debian: apt install libopenblas0-pthread)",
            missing=True,
        )
    return BlasFacts(found, "a tuned BLAS found on this machine, preloaded into engine processes")


def _cuda_build() -> str | None:
    """Return the name of an installed CUDA build of mlx, without importing it."""
    names = (distribution.metadata["Name"] or "" for distribution in distributions())
    return next((name for name in names if re.match(r"mlx[-_]cuda", name.lower())), None)


def _system_folders() -> Iterator[Path]:
    # Of the environment first: what a person put beside mlx is meant for it.
    for prefix in dict.fromkeys((sys.prefix, sys.base_prefix, os.environ.get("CONDA_PREFIX", ""))):
        if prefix and Path(prefix) != Path("/usr"):
            yield Path(prefix) / "lib"
    if multiarch := sysconfig.get_config_var("MULTIARCH"):
        yield Path("/usr/lib") / str(multiarch)
    yield from map(
        Path, ("/usr/lib64", "/usr/local/lib", "/usr/local/lib64", "/usr/lib", "/opt/OpenBLAS/lib")
    )
    mkl = Path(os.environ.get("MKLROOT", "/opt/intel/oneapi/mkl/latest"))
    yield from (mkl / "lib", mkl / "lib" / "intel64")


def _libraries_of_ldconfig() -> list[Path]:
    """Return what the dynamic linker's cache holds under the preferred names, best first."""
    for command in ("ldconfig", "/sbin/ldconfig"):
        try:
            listing = subprocess.run(
                [command, "-p"], capture_output=True, text=True, timeout=_LDCONFIG_TIMEOUT_S, check=True
            ).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        known = [Path(path) for path in re.findall(r"=> (/\S+)$", listing, re.MULTILINE)]
        names = [Path(name).name for name in _NAMES]
        return sorted((path for path in known if path.name in names), key=lambda path: names.index(path.name))
    return []


def _serves(library: Path) -> bool:
    """Tell whether the file is a library for this machine that exports ``cblas_sgemm`` under that very name.

    Builds with 64-bit integers call it ``cblas_sgemm64_`` and would not be called.
    """
    if _SEPARATORS.search(str(library)):
        return False
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _machine(content[:20]) == _own_machine() and content.find(_SYMBOL) >= 0
    except (OSError, ValueError):  # No such file; an empty one.
        return False


def _own_machine() -> bytes | None:
    with open(sys.executable, "rb") as file:
        return _machine(file.read(20))


def _machine(header: bytes) -> bytes | None:
    """Return word size, byte order and machine from an ELF header; None for anything else."""
    return header[4:6] + header[18:20] if header[:4] == b"\x7fELF" else None
