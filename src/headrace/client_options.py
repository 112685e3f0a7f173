"""Flags that the commands which talk to a server share, and how they come to their server."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .client import BlockingClient

DEFAULT_URL = "ws://127.0.0.1:8765/v1/stream"

EXIT_FAILED = 1
"""The server refused the request, or it failed."""
EXIT_USAGE = 2
EXIT_NO_SERVER = 3
EXIT_INTERRUPTED = 130

_SERVER = "Server"
_GENERATION = "Generation"

Url = Annotated[
    str,
    typer.Option(envvar="HEADRACE_URL", help="The server: ws://, wss:// or ws+unix:///SOCKET.",
                 rich_help_panel=_SERVER),
]  # fmt: skip
Token = Annotated[
    str | None,
    typer.Option(envvar="HEADRACE_TOKEN", show_envvar=True, show_default=False,
                 help="The server's token. Better in the environment: other users see flags.",
                 rich_help_panel=_SERVER),
]  # fmt: skip
Model = Annotated[str | None, typer.Option(help="One of the server's models. Default: its first.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens of an answer.", rich_help_panel=_GENERATION)]
Temperature = Annotated[
    float | None, typer.Option(help="0: greedy. Default: the server's.", rich_help_panel=_GENERATION)
]
TopP = Annotated[
    float | None, typer.Option(help="Nucleus sampling, 0 < x <= 1.", rich_help_panel=_GENERATION)
]
Seed = Annotated[int | None, typer.Option(help="The same seed, the same text.", rich_help_panel=_GENERATION)]
Stop = Annotated[
    list[str] | None, typer.Option(help="Ends the answer; may be repeated.", rich_help_panel=_GENERATION)
]
SpecPrefill = Annotated[
    bool | None,
    typer.Option(help="Speculative prefill on or off. Default: the server decides.",
                 rich_help_panel=_GENERATION),
]  # fmt: skip
KeepPct = Annotated[
    float | None,
    typer.Option(help="Share of the prompt that SpecPrefill keeps, 0 < x <= 1.", rich_help_panel=_GENERATION),
]


@contextmanager
def server(url: str, token: str | None) -> "Iterator[BlockingClient]":
    """Connect; say in one line what went wrong, and exit with the code for it."""
    from .client import ClientError, ConnectError, ConnectionLost, connect_blocking

    try:
        with ended_by_signals(), connect_blocking(url, token=token or None) as client:
            yield client
    except ConnectError as error:
        complain(error.message)
        if error.code == "unauthorized":
            complain("give it in HEADRACE_TOKEN")
        elif url == DEFAULT_URL and error.retryable:
            complain("is there a server? headrace serve starts one; --url names another")
        raise typer.Exit(EXIT_NO_SERVER) from None
    except ConnectionLost as error:
        complain(error.message)
        raise typer.Exit(EXIT_NO_SERVER) from None
    except ClientError as error:
        complain(str(error))
        raise typer.Exit(EXIT_FAILED) from None


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the program by way of its `finally` blocks: streams are cancelled there."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def complain(line: str) -> None:
    """Print a line for a person."""
    print(f"headrace: {line}", file=sys.stderr, flush=True)
