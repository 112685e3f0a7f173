"""`python -m headrace.engine.doctor_main`: what only a process with mlx can say, for `headrace doctor`.

The one argument is a JSON list of models, each as for `load_model`, null being the default one; stdout gets
one JSON object (`Facts`). Nothing is fetched, and no weights are read beyond their headers.
"""

import json
import struct
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import load_model as load_weights

from .loading.default_model import ModelWheel, is_complete
from .loading.host_memory import available_memory_bytes
from .loading.loader import check_files
from .loading.model_files import ModelLoadError, cache_folder

_PACKAGES = ("mlx", "mlx-lm", "tokenizers", "transformers", "websockets")
_MATRIX = 1024
_TRIES = 3
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class ModelFacts:
    """One model: where it is, what is wrong with it, how large it is."""

    name: str
    path: str | None
    problem: str | None
    is_fetched: bool
    weight_bytes: int


@dataclass(frozen=True)
class Facts:
    """What the command line cannot find out itself."""

    device: str
    device_name: str | None
    gflops: float
    """Of float32 products, as engine processes have them."""
    available_memory_bytes: int | None
    cache_folder: str
    packages: dict[str, str | None]
    models: list[ModelFacts]


def gather(models: list[str | None]) -> Facts:
    """Return the facts."""
    info: dict[str, Any] = mx.device_info() if mx.metal.is_available() else {}
    return Facts(
        device=str(mx.default_device().type).rsplit(".", 1)[-1],
        device_name=info.get("device_name"),
        gflops=measure_gflops(),
        available_memory_bytes=available_memory_bytes(),
        cache_folder=str(cache_folder()),
        packages={name: _version(name) for name in _PACKAGES},
        models=[look_at(name) for name in models],
    )


def measure_gflops() -> float:
    """Return how many billion float32 operations a second a matrix product makes, the best of three."""
    a = mx.random.normal((_MATRIX, _MATRIX))
    mx.eval(a, a[:64] @ a)
    best_s = float("inf")
    for _ in range(_TRIES):  # others may be busy just now
        started_s = time.perf_counter()
        mx.eval(a @ a)
        best_s = min(best_s, time.perf_counter() - started_s)
    return 2 * _MATRIX**3 / best_s / 1e9


def look_at(name: str | None) -> ModelFacts:
    """Return what can be said of a model without loading it."""
    if name is None:
        wheel = ModelWheel()
        path = cache_folder() / "models" / wheel.folder_name
        if not is_complete(path, wheel):
            problem = f"{path} is damaged" if path.exists() else None
            return ModelFacts("the default model", str(path), problem, False, 0)
        return _look_into(path, "the default model")
    path = Path(name).expanduser()
    if path.is_dir():
        return _look_into(path, name)
    if path.exists() or name.startswith(("/", ".", "~")):
        return ModelFacts(name, None, f"there is no folder {name}", False, 0)
    return ModelFacts(name, None, None, False, 0)


def _look_into(path: Path, name: str) -> ModelFacts:
    size = sum(file.stat().st_size for file in path.glob("model*.safetensors"))
    try:
        check_files(path)
        for file in sorted(path.glob("model*.safetensors")):
            check_length(file)
        load_weights(path, lazy=True)
        load_tokenizer(path)
    except ModelLoadError as error:
        return ModelFacts(name, str(path), str(error), True, size)
    except Exception as error:  # whatever a broken folder makes mlx-lm and transformers raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return ModelFacts(name, str(path), f"{path} can't be loaded: {first}", True, size)
    return ModelFacts(name, str(path), None, True, size)


def check_length(file: Path) -> None:
    """Compare a safetensors file's length with what its header says.

    Raises:
        ModelLoadError: it is too short, or no safetensors file.
    """
    damaged = ModelLoadError(f"{file} is damaged or was not fetched to its end. Fetch the model again.")
    try:
        with file.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            if header_bytes > _MAX_HEADER_BYTES:
                raise damaged
            header = json.loads(stream.read(header_bytes))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    except (OSError, struct.error, ValueError, LookupError, TypeError, AttributeError):
        raise damaged from None
    if file.stat().st_size < 8 + header_bytes + max(ends, default=0):
        raise damaged


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Print the facts."""
    models = json.loads(sys.argv[1])
    # Libraries print; only the facts may be on stdout.
    out, sys.stdout = sys.stdout, sys.stderr
    json.dump(asdict(gather(models)), out)
    out.flush()


if __name__ == "__main__":
    main()
