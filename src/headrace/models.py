"""`headrace models`: what a server has."""

from typing import Annotated

import typer

from .client_options import DEFAULT_URL, Token, Url, server


def models(
    url: Url = DEFAULT_URL,
    token: Token = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List a server's models, and what each can do."""
    with server(url, token) as client:
        found = client.models()
    if as_json:
        import orjson

        print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "state", "context", "chat", "SpecPrefill", box=None, pad_edge=False)
    for model in found:
        ability = model["specprefill"]
        table.add_row(
            model["name"] + (" (default)" if model["default"] else ""),
            model["state"],
            "?" if model["context_length"] is None else f"{model['context_length']:,}",
            {True: "yes", False: "no", None: "?"}[model["chat"]],
            f"yes, draft: {ability['draft']}" if ability["supported"] else f"no: {ability['reason']}",
        )
    Console(soft_wrap=True).print(table)
