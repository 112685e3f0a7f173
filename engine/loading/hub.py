"""Fetch a model from the Hugging Face hub, with progress and an error a person can act on."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

from .model_files import LoadProgress, ModelLoadError, OnProgress


def fetch_from_hub(repository: str, on_progress: OnProgress) -> Path:
    """Return the folder of ``repository`` in the hub's own cache; fetch what is missing there.

    Without a network the cached files serve, if they are all there. Authentication, mirrors, the cache folder
    and offline mode are the hub client's: ``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HOME``, ``HF_HUB_OFFLINE``.

    ``on_progress`` may be called from other threads, one call at a time.

    Raises:
        ModelLoadError: no such repository, no access, no network, no room.
    """
    # Imported late: both take a while, and the default model and local folders need neither.
    from huggingface_hub import errors, snapshot_download
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    try:
        folder = snapshot_download(
            repository, allow_patterns=DEFAULT_ALLOW_PATTERNS, tqdm_class=_progress_bars(on_progress)
        )
    except errors.HFValidationError as error:
        raise ModelLoadError(
            f"{repository!r} is neither a folder here nor a hub repository's name."
        ) from error
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"{repository!r} is gated on the model hub: accept its terms there, then set HF_TOKEN or run "
            f"`hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"{repository!r} is neither a folder here nor a repository on the model hub that this user can "
            f"see. Check the spelling; a private one needs HF_TOKEN."
        ) from error
    except (
        errors.LocalEntryNotFoundError,
        errors.IncompleteSnapshotError,
        errors.OfflineModeIsEnabled,
    ) as error:
        raise ModelLoadError(
            f"{repository!r} is not a folder here, the model hub can't be reached, and the hub's cache does "
            f"not hold all of it. Check the path, connect to the network once, or name a local folder."
        ) from error
    except Exception as error:  # The HTTP library below the hub client has errors of its own.
        raise ModelLoadError(f"Could not fetch {repository!r} from the model hub: {error}") from error
    return Path(folder)


def _progress_bars(on_progress: OnProgress) -> type[Any]:
    """Return a stand-in for tqdm that draws nothing and reports the bytes that are there.

    The hub client makes several bars and adds to them from several threads. Two count bytes, received and
    written; which of them moves depends on the transfer, so the larger counts.
    """
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    lock = Lock()
    reported = LoadProgress("download", 0, None, "bytes")

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            super().__init__(*args, **options)

        def display(self, *args: Any, **options: Any) -> None:
            """Draw nothing."""

        def update(self, n: float | None = 1) -> Any:
            nonlocal reported
            updated = super().update(n)
            if self._counts_bytes:
                with lock:
                    done = max(reported.done, int(self.n))
                    total = max(reported.total or 0, int(self.total or 0), done)
                    reported = LoadProgress("download", done, total, "bytes")
                    on_progress(reported)
            return updated

    return Bar
