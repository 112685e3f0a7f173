"""`headrace schema`."""

from pathlib import Path
from typing import Annotated

import typer


def schema(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Where to write the JSON Schemas and the AsyncAPI document; it is made."),
    ] = None,
) -> None:
    """Write the protocol as JSON Schema and AsyncAPI 3; without a folder, print the AsyncAPI document."""
    from .schema import documents, write

    if folder is None:
        typer.echo(documents()["asyncapi.json"], nl=False)
        return
    for path in write(folder):
        typer.echo(f"wrote {path}")
