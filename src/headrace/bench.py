"""`headrace bench`: what a running server does under load."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .client_options import (
    DEFAULT_URL,
    EXIT_FAILED,
    EXIT_NO_SERVER,
    EXIT_USAGE,
    KeepPct,
    Model,
    Token,
    Url,
    complain,
)

if TYPE_CHECKING:
    from .bench_runs import Report

_MAX_CELLS = 200


def bench(
    url: Url = DEFAULT_URL,
    token: Token = None,
    model: Model = None,
    streams: Annotated[str, typer.Option(help="Requests at a time, such as 1,4,16.")] = "1,4",
    prompt_tokens: Annotated[
        str, typer.Option(help="Tokens of a prompt, about, such as 128,2048.")
    ] = "128,512",
    specprefill: Annotated[
        str, typer.Option(help="off, on, or both: off,on. Where the model can't, on is left out.")
    ] = "off,on",
    keep_pct: KeepPct = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    repeat: Annotated[int, typer.Option(min=1, max=100, help="How often; the median counts.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw an SVG file as well.")] = None,
) -> None:
    """Measure a running server: time to the first token and tokens a second, from the client's side.

    Prompts are random words, new each time and not cached; answers are greedy. The server should have nothing
    else to do.
    """
    import asyncio

    from .bench_plot import draw
    from .bench_runs import Cell, measure
    from .client import ClientError, ConnectError

    try:
        counts, lengths, modes = _numbers(streams), _numbers(prompt_tokens), _modes(specprefill)
    except ValueError as error:
        complain(str(error))
        raise typer.Exit(EXIT_USAGE) from None
    cells = [Cell(count, length, mode) for mode in modes for length in lengths for count in counts]
    if len(cells) > _MAX_CELLS:
        complain(f"{len(cells)} combinations are too many")
        raise typer.Exit(EXIT_USAGE)
    try:
        report = asyncio.run(
            measure(
                url,
                token or None,
                cells,
                model=model,
                keep_pct=keep_pct,
                max_tokens=max_tokens,
                repeat=repeat,
                on_cell=None if as_json else lambda line: print(line, file=sys.stderr, flush=True),
            )
        )
    except ClientError as error:
        complain(str(error))
        raise typer.Exit(EXIT_NO_SERVER if isinstance(error, ConnectError) else EXIT_FAILED) from None
    if as_json:
        import orjson

        print(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode())
    else:
        _print_table(report)
    if plot is not None:
        plot.write_text(draw(report), encoding="utf-8")
        print(f"headrace: {plot} is written", file=sys.stderr)


def _numbers(text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"{text!r} is no list of numbers such as 1,4,16") from None
    if not 1 <= numbers[0] <= numbers[-1] <= 1_000_000:
        raise ValueError(f"{text!r}: numbers from 1 to 1,000,000")
    return numbers


def _modes(text: str) -> list[bool]:
    known = {"off": False, "on": True}
    names = [part.strip() for part in text.split(",")]
    if not set(names) <= set(known):
        raise ValueError(f"--specprefill {text!r}: off, on, or off,on")
    return [known[name] for name in ("off", "on") if name in names]


def _print_table(report: "Report") -> None:
    from rich.console import Console
    from rich.table import Table

    speeds = ("prefill\ntok/s", "each\ntok/s", "all\ntok/s")
    names = ("prompt", "SpecPrefill", "streams", "TTFT s", "worst", *speeds, "gap ms", "worst")
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right", min_width=max(map(len, name.split("\n"))))
    for row in report.rows:
        kept = f"kept {row.kept_share:.0%}" if row.applied else row.reason if row.specprefill else "off"
        table.add_row(
            f"{row.prompt_tokens:,}",
            kept,
            str(row.streams),
            f"{row.ttft_s:.3f}",
            f"{row.ttft_worst_s:.3f}",
            f"{row.prefill_tokens_per_s:,.0f}",
            _number(row.stream_tokens_per_s),
            _number(row.total_tokens_per_s),
            _number(row.gap_ms),
            _number(row.gap_worst_ms),
        )
    console = Console(soft_wrap=True)
    console.print(f"{report.server}, {report.model}, {report.max_tokens} tokens an answer", highlight=False)
    console.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
