"""The command line: its commands. Each has a file of its own with its flags."""

from typing import Annotated

import typer

from . import __version__
from .bench import bench
from .calibrate_command import calibrate
from .chat import chat
from .complete import complete
from .doctor import doctor
from .models import models
from .schema_command import schema
from .serve_command import serve

app = typer.Typer(
    name="headrace",
    help="A WebSocket streaming gateway for MLX language models, with the models in processes of their own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Commands that concern no command in particular."""


app.command()(serve)
app.command()(chat)
app.command()(complete)
app.command()(models)
app.command()(bench)
app.command()(calibrate)
app.command()(doctor)
app.command()(schema)


def main() -> None:
    """Run the command line."""
    app(prog_name="headrace")


if __name__ == "__main__":
    main()
