"""What all ways of getting a model share: the error, the progress report, the cache folder and its locks."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_LOCK_POLL_S = 0.1


class ModelLoadError(Exception):
    """A model can't be had or can't be loaded.

    The message is for the person who named the model: what is wrong with the name, the folder or the
    network, and what to do. It needs no traceback beside it.
    """


@dataclass(frozen=True)
class LoadProgress:
    """How far one stage of getting a model is.

    Stages, in the order in which they may come: ``wait`` (another process fetches the same model),
    ``download``, ``convert``, ``load``, ``dequantize``. A stage may be left out, and reports of one
    stage never go back.
    """

    stage: str
    done: int
    total: int | None
    """None: not known (yet)."""
    unit: str
    """What ``done`` and ``total`` count: ``bytes``, ``tensors``, ``seconds`` or ``steps``."""


OnProgress = Callable[[LoadProgress], None]


def ignore_progress(progress: LoadProgress) -> None:
    """Take a progress report and do nothing."""


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Return Headrace's cache folder; it may not exist yet.

    ``$HEADRACE_CACHE``, else ``$XDG_CACHE_HOME/headrace``, else the custom of the system:
    ``~/Library/Caches/headrace`` on macOS, ``~/.cache/headrace`` elsewhere.
    """
    environment = os.environ if environment is None else environment
    if chosen := environment.get("HEADRACE_CACHE"):
        return Path(chosen).expanduser()
    if xdg := environment.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "headrace"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "headrace"
    return Path.home() / ".cache" / "headrace"


@contextmanager
def exclusive_lock(
    path: Path, *, timeout_s: float, on_progress: OnProgress = ignore_progress
) -> Iterator[None]:
    """Hold an advisory lock on ``path`` among all processes of this machine.

    The system lets go of the lock when its holder dies, however it dies; the empty file stays.

    Raises:
        ModelLoadError: another process still holds the lock after ``timeout_s``.
        OSError: the file can't be made.
    """
    started = time.monotonic()
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited_s = time.monotonic() - started
                if waited_s > timeout_s:
                    raise ModelLoadError(
                        f"Another process has been preparing the same model for more than {timeout_s:.0f} s "
                        f"(it holds {path}). End that process, then start again."
                    ) from None
                on_progress(LoadProgress("wait", int(waited_s), None, "seconds"))
                time.sleep(_LOCK_POLL_S)
        yield
