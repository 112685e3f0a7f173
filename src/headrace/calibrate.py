"""`headrace calibrate`: run the search for a model's layers in a child process, and show it.

The child (`engine/specprefill/calibrate_main.py`) has mlx and the tuned BLAS; this process has neither.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from .pool.blas import engine_environment

_CHILD = "headrace.engine.specprefill.calibrate_main"
_LINE_INTERVAL_S = 5.0
_STOP_TIMEOUT_S = 5.0
_MEBIBYTE = 1 << 20
_GOOD_RECALL = 0.8
"""Of the best keep rate; below it the person is warned."""


class CalibrateError(Exception):
    """The layers could not be found; the message is one line for the person who asked."""


def calibrate(model: str | None, *, num_prompts: int, prompt_tokens: int) -> None:
    """Find the layers, show progress on stderr, and the table and the place of the file on stdout.

    Args:
        model: a folder, a hub name, or None for the default model.

    Raises:
        CalibrateError: the model can't be loaded or can't prefill sparsely, or the child died.
    """
    job = {"model": model, "num_prompts": num_prompts, "prompt_tokens": prompt_tokens}
    result: dict[str, Any] | None = None
    with _child(job) as messages, _Display(sys.stderr) as display:
        for message in messages:
            if "error" in message:
                raise CalibrateError(message["error"])
            if "result" in message:
                result = message["result"]
            else:
                display.show(**message)
    assert result is not None, "a child without a result raised"
    _print_result(result, Console())


@contextmanager
def _child(job: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """Start the child; yield its messages. It is gone at the end, whatever happened."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", _CHILD, json.dumps(job)],
            env={**os.environ, **engine_environment("auto", os.environ)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        try:
            yield _messages(process, stderr)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _messages(process: subprocess.Popen[str], stderr: TextIO) -> Iterator[dict[str, Any]]:
    """Yield messages up to the last one.

    Raises:
        CalibrateError: the child ended before it.
    """
    assert process.stdout is not None
    for line in process.stdout:
        message = json.loads(line)
        yield message
        if "result" in message or "error" in message:
            return
    code = process.wait()
    stderr.seek(0)
    last = next((line.strip() for line in reversed(stderr.readlines()) if line.strip()), "")
    how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
    raise CalibrateError(f"the process that runs the model {how}{': ' if last else ''}{last}")


class _Display:
    """Progress: a bar for each stage on a terminal, a plain line now and then anywhere else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = Console(file=stream, highlight=False)
        self._tasks: dict[str, TaskID] = {}
        self._bars: Progress | None = None
        self._stage = ""
        self._line_due_s = 0.0
        self._is_told = False

    def __enter__(self) -> "_Display":
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[unit]}"),
                TimeElapsedColumn(),
            )
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._bars.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, stage: str, done: int, total: int | None, unit: str) -> None:
        """Take how far a stage is."""
        if unit == "bytes":
            done, total, unit = done // _MEBIBYTE, total and total // _MEBIBYTE, "MiB"
        if self._bars is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(stage, unit=unit)
            self._bars.update(self._tasks[stage], completed=done, total=total)
            return
        now_s = time.monotonic()
        is_new = stage != self._stage
        if is_new or now_s >= self._line_due_s or (done == total and not self._is_told):
            self._stage, self._line_due_s, self._is_told = stage, now_s + _LINE_INTERVAL_S, done == total
            of = f" of {total}" if total is not None else ""
            print(f"headrace: {stage} {done}{of} {unit}", file=self._stream, flush=True)


def _print_result(result: dict[str, Any], console: Console) -> None:
    layers, keep_pcts = result["layers"], result["keep_pcts"]
    table = Table(title=f"{result['name']}: recall of hidden facts", min_width=48)
    table.add_column("layer", justify="right")
    for keep_pct in keep_pcts:
        table.add_column(f"keep {keep_pct:.0%}", justify="right")
    table.add_column("")
    for layer, recall in result["recall"].items():
        chosen = "chosen" if int(layer) in layers else ""
        table.add_row(layer, *(f"{share:.2f}" for share in recall), chosen, style="bold" if chosen else None)
    if len(layers) > 1:
        table.add_section()
        table.add_row("together", *(f"{share:.2f}" for share in result["chosen_recall"]), "")
    console.print(table)
    named = f"layer {layers[0]}" if len(layers) == 1 else f"layers {', '.join(map(str, layers))}"
    share = max(layers) / result["num_layers"]
    print(f"Chosen: {named} of {result['num_layers']}; scoring runs {share:.0%} of the model.")
    if not result["carries_on"]:
        print("This model can't be cut there: it scores first and then reads the kept part anew.")
    if max(result["chosen_recall"]) < _GOOD_RECALL:
        print("Warning: no layers find the hidden facts reliably; answers will miss what was left out.")
    print(f"Stored in {result['path']}: used from now on, by servers that start.")
