"""Shows one answer in the terminal: a bar while the prompt is read, the text as it comes, a line of figures.

The text goes to stdout, and all else to stderr. Nothing draws over the whole screen, so that a window may
change its size at any time.
"""

import contextlib
import re
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .client import BlockingStream, Done, ReasoningDelta, Result, TextDelta, ToolCall
from .client import Progress as PromptProgress

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal could take for an order: all control characters but tab and newline."""
_PHASES = {
    "load": "loading the model",
    "queue": "waiting",
    "recover": "another engine takes over",
    "score": "scoring the prompt",
    "prefill": "reading the prompt",
}


class AnswerView:
    """Shows answers one after the other.

    Args:
        out: where the text goes.
        err: where the rest goes.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._err = Console(file=sys.stderr if err is None else err, highlight=False, soft_wrap=True)
        self._is_terminal = self._out.isatty()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._is_reasoning = False

    def show(self, stream: BlockingStream) -> Result:
        """Show an answer to its end, and return it. Ctrl-C cancels it; a second one is `KeyboardInterrupt`.

        Raises:
            ClientError: the request was refused or has failed.
        """
        self._is_reasoning = False
        try:
            with _ctrl_c_cancels(stream):
                for event in stream:
                    match event:
                        case PromptProgress():
                            self._show_progress(event)
                        case TextDelta(text) if text:
                            self._show_text(text)
                        case ReasoningDelta(text):
                            self._show_reasoning(text)
                        case ToolCall():
                            self._hide_progress()
                            self._err.print(f"[tool call] {event.name} {event.arguments}", markup=False)
                        case Done(result):
                            return result
        finally:
            self._hide_progress()
            self._out.flush()
        return stream.result()  # raises: the stream has ended without `Done`

    def end_line(self, result: Result) -> None:
        """End the answer's last line."""
        if not result.text.endswith("\n"):
            print(file=self._out, flush=True)

    def show_figures(self, result: Result) -> None:
        """Print what the answer took."""
        self._err.print(figures(result), style="dim", markup=False)
        self._err.print(specprefill_line(result), style="dim", markup=False)

    # --- while the prompt is read ---

    def _show_progress(self, event: PromptProgress) -> None:
        if not self._err.is_terminal:
            return
        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[amount]}"),
                TimeElapsedColumn(),
                console=self._err,
                transient=True,
            )
            self._task = self._bar.add_task("", amount="")
            self._bar.start()
        assert self._task is not None
        amount = f"{event.processed:,}" + (f" of {event.total:,}" if event.total is not None else "")
        if event.cached:
            amount += f" ({event.cached:,} cached)"
        has_amount = event.processed or event.total
        self._bar.update(
            self._task,
            description=_PHASES.get(event.phase, event.phase),
            completed=event.processed,
            total=event.total or None,
            amount=amount if has_amount else "",
        )

    def _hide_progress(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    # --- text ---

    def _show_text(self, text: str) -> None:
        self._hide_progress()
        if self._is_reasoning:
            self._is_reasoning = False
            self._err.print()
        self._out.write(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if self._is_terminal else text)
        self._out.flush()

    def _show_reasoning(self, text: str) -> None:
        self._hide_progress()
        self._is_reasoning = True
        self._err.print(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text), style="dim", end="", markup=False)


@contextlib.contextmanager
def _ctrl_c_cancels(stream: BlockingStream) -> Iterator[None]:
    presses = 0

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt
        stream.cancel()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def figures(result: Result) -> str:
    """Return how an answer went, in one line."""
    usage, timings = result.usage, result.timings
    parts = [f"{usage['prompt_tokens']:,} prompt tokens"]
    if usage["cached_tokens"]:
        parts[0] += f" ({usage['cached_tokens']:,} cached)"
    parts.append(f"{usage['completion_tokens']:,} tokens")
    if timings["ttft_ms"] is not None:
        parts.append(f"first after {timings['ttft_ms'] / 1000:.2f} s")
    if timings["tokens_per_s"] is not None:
        parts.append(f"{timings['tokens_per_s']:.1f} tokens/s")
    how = result.finish_reason or result.reason or result.status
    if result.status == "cancelled":
        how = "cancelled"
    return f"[{', '.join(parts)}, {how}]"


def specprefill_line(result: Result) -> str:
    """Return what became of SpecPrefill, in one line."""
    report = result.specprefill
    if not report["applied"]:
        return f"[SpecPrefill: not applied ({report['reason']})]"
    kept, of = report["kept_tokens"], report["uncached_tokens"]
    share = f" ({100 * kept / of:.0f} %)" if of else ""
    scored = f", scored in {report['score_ms'] / 1000:.2f} s" if report["score_ms"] is not None else ""
    read = f", read in {report['prefill_ms'] / 1000:.2f} s" if report["prefill_ms"] is not None else ""
    return f"[SpecPrefill: kept {kept:,} of {of:,} tokens{share}{scored} by {report['draft']}{read}]"
