"""The flags of `headrace calibrate`."""

from typing import Annotated

import typer


def calibrate(
    model: Annotated[
        str | None, typer.Option(help="A folder or a hub name. Without it: the default model.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=3, max=1000, help="Prompts to read.")] = 24,
    tokens: Annotated[
        int,
        typer.Option(min=200, max=100_000, help="Tokens of a prompt; every fourth is four times as long."),
    ] = 750,
) -> None:
    """Find the layers by which SpecPrefill scores a model's prompts, and store them for later servers."""
    from .calibrate import CalibrateError
    from .calibrate import calibrate as run

    try:
        run(model, num_prompts=prompts, prompt_tokens=tokens)
    except CalibrateError as error:
        typer.echo(f"headrace: {error}", err=True)
        raise typer.Exit(1) from None
