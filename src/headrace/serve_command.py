"""The flags of `headrace serve`: read here and explained here; what they mean is elsewhere."""

from pathlib import Path
from typing import Annotated, Any

import typer

_SERVING = "Serving"
_ACCESS = "Access"
_LIMITS = "Limits"
_SPECPREFILL = "SpecPrefill"


def serve(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file with the names of these flags, such as max-in-flight = 4. Flags win."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A folder or a hub name; once for each model. Without it: the default model."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 picks a free one. Default: 8765.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="mlx, or scripted: no model, for tests and load. Default: mlx.")
    ] = None,
    log_format: Annotated[
        str | None,
        typer.Option(
            help="text, or json: a line for each ended request too. Default: text.", rich_help_panel=_SERVING
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Engine processes for each model. Default: 1.", rich_help_panel=_SERVING),
    ] = None,
    max_in_flight: Annotated[
        int | None,
        typer.Option(help="Requests that an engine runs at a time. Default: 16.", rich_help_panel=_SERVING),
    ] = None,
    max_queue: Annotated[
        int | None,
        typer.Option(help="Requests that may wait for each model. Default: 64.", rich_help_panel=_SERVING),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="For requests that name no max_tokens. Default: 512.", rich_help_panel=_SERVING),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="For requests that name no temperature. Default: 0.", rich_help_panel=_SERVING),
    ] = None,
    drain_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds that running requests have when the server is told to stop. Default: 30.",
            rich_help_panel=_SERVING,
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="Replace an engine that has more memory than this, such as 12G; its streams go on. "
            "Default: no limit.",
            rich_help_panel=_SERVING,
        ),
    ] = None,
    prompt_cache: Annotated[
        str | None,
        typer.Option(
            help="Memory of an engine for the prompts of earlier requests; 0: none. Default: 2G.",
            rich_help_panel=_SERVING,
        ),
    ] = None,
    hang_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds without a step after which an engine is replaced. Default: 30.",
            rich_help_panel=_SERVING,
        ),
    ] = None,
    load_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds without progress after which loading is begun again. Default: 600.",
            rich_help_panel=_SERVING,
        ),
    ] = None,
    max_engine_deaths: Annotated[
        int | None,
        typer.Option(
            help="A request fails when so many engines died under it; 1: no stream is carried over. "
            "Default: 2.",
            rich_help_panel=_SERVING,
        ),
    ] = None,
    dequantize: Annotated[
        bool | None,
        typer.Option(
            help="On a CPU: load quantized weights as float32 where memory allows. Default: on.",
            rich_help_panel=_SERVING,
        ),
    ] = None,
    blas: Annotated[
        str | None,
        typer.Option(
            help="Linux CPU: a BLAS library to preload into engines: auto, off, or a path. Default: auto.",
            rich_help_panel=_SERVING,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="A web page's origin that may connect, such as https://chat.example.org; * for any.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A name that clients may use for this server; * for any.", rich_help_panel=_ACCESS),
    ] = None,
    token_file: Annotated[
        str | None,
        typer.Option(
            help="A file with the token that clients must show; .toml: several. Else HEADRACE_TOKEN.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    tls_cert: Annotated[
        str | None,
        typer.Option(help="A PEM file with a certificate: speak TLS.", rich_help_panel=_ACCESS),
    ] = None,
    tls_key: Annotated[
        str | None,
        typer.Option(
            help="The certificate's key; without it, it is in the same file.", rich_help_panel=_ACCESS
        ),
    ] = None,
    unix: Annotated[
        str | None,
        typer.Option(
            help="A Unix socket to listen on as well, for this user's programs.", rich_help_panel=_ACCESS
        ),
    ] = None,
    tcp: Annotated[
        bool | None,
        typer.Option(
            help="--no-tcp: listen on the Unix socket only. Default: both.", rich_help_panel=_ACCESS
        ),
    ] = None,
    max_connections: Annotated[
        int | None,
        typer.Option(help="Connections that may be open. Default: 16384.", rich_help_panel=_LIMITS),
    ] = None,
    max_connections_per_address: Annotated[
        int | None,
        typer.Option(help="The same from one address. Default: 1024.", rich_help_panel=_LIMITS),
    ] = None,
    max_in_flight_per_connection: Annotated[
        int | None,
        typer.Option(
            help="Requests of one connection that may run or wait. Default: 256.", rich_help_panel=_LIMITS
        ),
    ] = None,
    max_frame_bytes: Annotated[
        int | None,
        typer.Option(help="Longest frame of a client. Default: 8388608.", rich_help_panel=_LIMITS),
    ] = None,
    max_bad_frames: Annotated[
        int | None,
        typer.Option(
            help="Refused frames in a row after which a connection is closed. Default: 16.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    handshake_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds that an opening handshake may take. Default: 10.", rich_help_panel=_LIMITS
        ),
    ] = None,
    stall_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds after which a client that takes nothing is dropped. Default: 30.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    paused_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds after which a stream is ended whose client gives it no credit. Default: 600.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    detach_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a stream with detach goes on without a connection. Default: 60.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    replay_time: Annotated[
        float | None,
        typer.Option(
            help="Seconds that sent frames are kept for a resume. Default: 120.", rich_help_panel=_LIMITS
        ),
    ] = None,
    specprefill: Annotated[
        bool | None,
        typer.Option(
            help="Speculative prefill for long prompts of requests that don't say. Default: off.",
            rich_help_panel=_SPECPREFILL,
        ),
    ] = None,
    specprefill_keep_pct: Annotated[
        float | None,
        typer.Option(
            help="Share of the uncached prompt that is kept, 0 < x <= 1. Default: 0.3.",
            rich_help_panel=_SPECPREFILL,
        ),
    ] = None,
    specprefill_threshold: Annotated[
        int | None,
        typer.Option(
            help="Uncached prompt tokens above which it is used. Default: 8192.", rich_help_panel=_SPECPREFILL
        ),
    ] = None,
    specprefill_draft_model: Annotated[
        str | None,
        typer.Option(
            help="A folder or hub name; self: the model's own first layers; none: off. Default: self.",
            rich_help_panel=_SPECPREFILL,
        ),
    ] = None,
    specprefill_chunk_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens are kept or dropped in runs of this length. Default: 8.",
            rich_help_panel=_SPECPREFILL,
        ),
    ] = None,
    specprefill_sink_tokens: Annotated[
        int | None,
        typer.Option(help="First tokens of a prompt, always kept. Default: 4.", rich_help_panel=_SPECPREFILL),
    ] = None,
    specprefill_tail_tokens: Annotated[
        int | None,
        typer.Option(help="Last tokens of a prompt, always kept. Default: 24.", rich_help_panel=_SPECPREFILL),
    ] = None,
    specprefill_keep_system_prompt: Annotated[
        bool | None,
        typer.Option(help="Keep a chat's system prompt whole. Default: off.", rich_help_panel=_SPECPREFILL),
    ] = None,
    scripted_token_delay_ms: Annotated[float | None, typer.Option(hidden=True)] = None,
    scripted_prefill_tokens_per_s: Annotated[float | None, typer.Option(hidden=True)] = None,
    scripted_load_s: Annotated[float | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve models over a WebSocket until told to stop (SIGTERM, Ctrl-C; twice: at once)."""
    from .serve import ServeError, run
    from .settings import SettingsError, read_settings

    try:
        run(read_settings(_given(ctx.params), config))
    except (SettingsError, ServeError) as error:
        typer.echo(f"headrace: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, SettingsError) else 1) from None


def _given(params: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that were given: the others are None, or an empty list."""
    given = {name: value for name, value in params.items() if value is not None}
    given.pop("config", None)
    return {name: value for name, value in given.items() if value not in ((), [])}
