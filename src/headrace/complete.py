"""`headrace complete`: one prompt, one text."""

import dataclasses
import os
import sys
from typing import Annotated

import typer

from .client_options import (
    DEFAULT_URL,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    KeepPct,
    MaxTokens,
    Model,
    Seed,
    SpecPrefill,
    Stop,
    Temperature,
    Token,
    TopP,
    Url,
    complain,
    server,
)

_EXIT_BROKEN_PIPE = 141


def complete(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to go on from. Without it, or with -: what stdin says.")
    ] = None,
    url: Url = DEFAULT_URL,
    token: Token = None,
    model: Model = None,
    specprefill: SpecPrefill = None,
    keep_pct: KeepPct = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    echo: Annotated[bool, typer.Option(help="Print the prompt as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
) -> None:
    """Complete a text. The text goes to stdout, the rest to stderr.

    Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 no server, 130 cancelled by Ctrl-C.
    """
    from .answer_view import AnswerView

    text = sys.stdin.read() if prompt in (None, "-") else prompt
    if not text:
        complain("there is no prompt: give it as an argument or on stdin")
        raise typer.Exit(EXIT_USAGE)
    with server(url, token) as client:
        stream = client.complete(
            text,
            model=model,
            specprefill=specprefill,
            specprefill_keep_pct=keep_pct,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=stop or None,
            echo=echo or None,
        )
        try:
            with stream, open(os.devnull, "w") as nowhere:
                view = AnswerView(out=nowhere if as_json else None)
                result = view.show(stream)
                if as_json:
                    print(_as_json(dataclasses.asdict(result)), flush=True)
        except BrokenPipeError:
            # Nobody reads on. What Python still wants to flush at its end must not complain either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(_EXIT_BROKEN_PIPE) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        if sys.stdout.isatty() and not as_json:
            view.end_line(result)
        view.show_figures(result)
    if result.status == "cancelled":
        raise typer.Exit(EXIT_INTERRUPTED)
    if result.status != "completed":
        raise typer.Exit(EXIT_FAILED)


def _as_json(value: object) -> str:
    import orjson

    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
