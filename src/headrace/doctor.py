"""`headrace doctor`: is this machine ready, and what to do where it is not."""

from typing import Annotated

import typer

from .client_options import DEFAULT_URL, Token

_MARKS = {"ok": "[green]ok  [/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}


def doctor(
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model to look at: a folder or a hub name. Default: the default model."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address that a server is to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port.")] = 8765,
    blas: Annotated[str, typer.Option(help="As for serve: auto, off, or a path.")] = "auto",
    url: Annotated[
        str | None, typer.Option(envvar="HEADRACE_URL", help="A server that runs already: how is it?")
    ] = None,
    token: Token = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look at device, BLAS, memory, models, port, versions and a running server, and say what to do.

    Nothing is changed and nothing is fetched. The exit code is 1 if anything fails.
    """
    import dataclasses

    from .doctor_checks import check_machine
    from .doctor_server import check_port, check_server

    findings = check_machine(model or [None], blas)
    port_finding, is_ours = check_port(host, port)
    findings.append(port_finding)
    if url is not None or is_ours:
        findings += check_server(url or DEFAULT_URL.replace("127.0.0.1:8765", f"{host}:{port}"), token)
    if as_json:
        import orjson

        print(
            orjson.dumps([dataclasses.asdict(one) for one in findings], option=orjson.OPT_INDENT_2).decode()
        )
    else:
        from rich.console import Console

        console = Console(soft_wrap=True, highlight=False)
        for one in findings:
            console.print(f"{_MARKS[one.level]} {one.topic:<8} ", end="")
            console.print(one.what, markup=False)
            if one.advice:
                console.print(f"              → {one.advice}", markup=False)
    if any(one.level == "fail" for one in findings):
        raise typer.Exit(1)
