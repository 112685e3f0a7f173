"""Shows how far engine processes are with loading: bars on a terminal, plain lines anywhere else."""

import logging
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .pool import WorkerState, WorkerStatus
from .protocol.messages import Loading

_LINE_INTERVAL_S = 5.0
_MEBIBYTE = 1 << 20


class LoadingDisplay:
    """Takes the pool's `on_change` calls. After `close` it shows nothing any more.

    While it is open it tells of failures itself, and the pool's log is quiet.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = Console(file=stream, highlight=False)
        self._bars: Progress | None = None
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._stages: dict[str, str] = {}
        self._line_due_s: dict[str, float] = {}
        self._failures: dict[str, str] = {}
        self._is_open = False
        self._pool_log = logging.getLogger("headrace.pool")
        self._pool_log_level = logging.NOTSET

    def __enter__(self) -> Self:
        self._is_open = True
        self._pool_log_level = self._pool_log.level
        self._pool_log.setLevel(logging.CRITICAL)
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[amount]}"),
                TimeElapsedColumn(),
            )
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._bars.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Show nothing any more; calling it again does nothing."""
        if self._is_open:
            self._is_open = False
            self._pool_log.setLevel(self._pool_log_level)
            if self._bars is not None:
                self._bars.stop()

    def show(self, status: WorkerStatus) -> None:
        """Take what has changed of an engine process."""
        if not self._is_open:
            return
        if status.state is WorkerState.BACKOFF and status.last_failure is not None:
            self._show_failure(status.name, status.last_failure)
        elif status.loading is not None:
            self._show_loading(status.name, status.loading)

    def _show_failure(self, worker: str, failure: str) -> None:
        if self._failures.get(worker) != failure:
            self._failures[worker] = failure
            self._line(f"{worker}: {failure}; trying again")

    def _show_loading(self, worker: str, loading: Loading) -> None:
        if self._bars is None:
            self._show_as_line(worker, loading)
            return
        key = (worker, loading.stage)
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(f"{worker} {loading.stage}", amount="")
        self._bars.update(
            self._tasks[key], completed=loading.done, total=loading.total, amount=_amount(loading)
        )

    def _show_as_line(self, worker: str, loading: Loading) -> None:
        """Print a line for each new stage, and one every few seconds within a stage."""
        now_s = time.monotonic()
        is_new = self._stages.get(worker) != loading.stage
        if is_new or now_s >= self._line_due_s[worker]:
            self._stages[worker] = loading.stage
            self._line_due_s[worker] = now_s + _LINE_INTERVAL_S
            self._line(f"{worker}: {loading.stage} {_amount(loading)}".rstrip())

    def _line(self, text: str) -> None:
        if self._bars is not None:
            self._bars.console.print(f"headrace: {text}", markup=False)
        else:
            print(f"headrace: {text}", file=self._stream, flush=True)


def _amount(loading: Loading) -> str:
    """Return how much is done in words; nothing where nothing is known."""
    if loading.unit == "bytes":
        done, total, unit = f"{loading.done / _MEBIBYTE:.0f}", loading.total, "MiB"
        of = f" of {total / _MEBIBYTE:.0f}" if total is not None else ""
    else:
        done, unit = str(loading.done), loading.unit
        of = f" of {loading.total}" if loading.total is not None else ""
    return f"{done}{of} {unit}" if loading.done or loading.total else ""
