"""What `headrace serve` was told: flags over a TOML file over defaults, as one frozen object.

The file has the flags' names without their dashes in front: ``max-in-flight = 4``. Each layer's own
configuration is built from it here, once.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from .engine.config import EngineConfig, SpecPrefillConfig
from .gateway.config import (
    AccessConfig,
    DeadlinesConfig,
    GatewayConfig,
    LimitsConfig,
    ListenConfig,
    ResumeConfig,
    TokenConfig,
)
from .pool import ModelSpec, PoolConfig
from .tokens import TokenFileError, read_tokens

DEFAULT_MODEL_NAME = "smollm2-135m-instruct"
SCRIPTED_MODEL_NAME = "scripted"


class SettingsError(Exception):
    """The flags or the file make no sense; the message is one line for the operator."""


def _as_list(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return [value] if isinstance(value, str) else value


Names = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list)]


_UNITS = MappingProxyType({"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40})


def _as_bytes(value: Any) -> Any:
    """Read `12G` as a number of bytes."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:i?B)?", value.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError("write a number of bytes, such as 12G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


NumBytes = Annotated[int, BeforeValidator(_as_bytes)]


class ServeSettings(BaseModel):
    """Every setting of `headrace serve`. Fields are the flags, with underscores."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    model: Names = Field(default_factory=list)
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8765
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    max_in_flight: Annotated[int, Field(ge=1)] = 16
    max_queue: Annotated[int, Field(ge=0)] = 64
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] = 512
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    engine: Literal["mlx", "scripted"] = "mlx"
    log_format: Literal["text", "json"] = "text"
    drain_timeout: Annotated[float, Field(ge=0)] = 30.0
    memory_limit: Annotated[NumBytes, Field(gt=0)] | None = None
    prompt_cache: Annotated[NumBytes, Field(ge=0)] = 2 << 30
    hang_timeout: Annotated[float, Field(gt=0)] = 30.0
    load_timeout: Annotated[float, Field(gt=0)] = 600.0
    max_engine_deaths: Annotated[int, Field(ge=1)] = 2
    dequantize: bool = True
    blas: Annotated[str, Field(min_length=1)] = "auto"
    allow_origin: Names = Field(default_factory=list)
    allow_host: Names = Field(default_factory=list)
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    unix: str | None = None
    tcp: bool = True
    detach_timeout: Annotated[float, Field(ge=0)] = 60.0
    replay_time: Annotated[float, Field(ge=0)] = 120.0
    max_connections: Annotated[int, Field(ge=1)] = 16_384
    max_connections_per_address: Annotated[int, Field(ge=1)] = 1024
    max_in_flight_per_connection: Annotated[int, Field(ge=1)] = 256
    max_frame_bytes: Annotated[int, Field(ge=1024)] = 8 << 20
    max_bad_frames: Annotated[int, Field(ge=1)] = 16
    handshake_timeout: Annotated[float, Field(gt=0)] = 10.0
    stall_timeout: Annotated[float, Field(gt=0)] = 30.0
    paused_timeout: Annotated[float, Field(gt=0)] = 600.0
    specprefill: bool = False
    specprefill_keep_pct: Annotated[float, Field(gt=0, le=1)] = 0.3
    specprefill_threshold: Annotated[int, Field(ge=0)] = 8192
    specprefill_draft_model: Annotated[str, Field(min_length=1)] = "self"
    specprefill_chunk_tokens: Annotated[int, Field(ge=1, le=4096)] = 8
    specprefill_sink_tokens: Annotated[int, Field(ge=0)] = 4
    specprefill_tail_tokens: Annotated[int, Field(ge=1)] = 24
    specprefill_keep_system_prompt: bool = False
    scripted_token_delay_ms: Annotated[float, Field(ge=0)] = 0.0
    scripted_prefill_tokens_per_s: Annotated[float, Field(gt=0)] = 1e6
    scripted_load_s: Annotated[float, Field(ge=0)] = 0.0


def read_settings(flags: Mapping[str, Any], config_path: Path | None) -> ServeSettings:
    """Return the settings.

    Args:
        flags: those that were given on the command line.
        config_path: a TOML file, or None.

    Raises:
        SettingsError: an unknown name, a value out of its range, or a file that cannot be read.
    """
    values = {} if config_path is None else _read_file(config_path)
    values.update(flags)
    try:
        return ServeSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]).replace("_", "-")
        where = f"--{name}" if first["loc"][0] in flags else f"{name} in {config_path}"
        what = "there is no such setting" if first["type"] == "extra_forbidden" else first["msg"]
        raise SettingsError(f"{where}: {what}") from None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path}: {error}") from None
    return {name.replace("-", "_"): value for name, value in values.items()}


def access_tokens(settings: ServeSettings, environment: Mapping[str, str]) -> tuple[TokenConfig, ...]:
    """Return the tokens of which clients must show one: the file's, else HEADRACE_TOKEN; none if neither is.

    Raises:
        SettingsError: the file cannot be read, or there is no token in it.
    """
    try:
        return read_tokens(settings.token_file, environment)
    except TokenFileError as error:
        raise SettingsError(f"--token-file {settings.token_file}: {error}") from None


def pool_config(settings: ServeSettings) -> PoolConfig:
    """Return the pool's configuration.

    Raises:
        SettingsError: two models have the same name, or a model's folder is not there.
    """
    models: list[str | None] = [*settings.model] or [None]
    specs = [_model_spec(settings, model) for model in models]
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"--model: two models are called {name!r}")
    return PoolConfig(
        models=tuple(specs),
        max_in_flight=settings.max_in_flight,
        max_queue=settings.max_queue,
        default_max_tokens=settings.max_tokens,
        default_temperature=settings.temperature,
        preload_blas=settings.blas,
        memory_limit_bytes=settings.memory_limit,
        hang_timeout_s=settings.hang_timeout,
        load_timeout_s=settings.load_timeout,
        paused_timeout_s=settings.paused_timeout,
        max_engine_deaths_per_request=settings.max_engine_deaths,
        # The gateway has seen to every request by now, and promises to be gone within a second.
        shutdown_cancel_s=0.1,
        stop_timeout_s=0.2,
        terminate_timeout_s=0.1,
        last_reports_timeout_s=0.1,
    )


def _model_spec(settings: ServeSettings, model: str | None) -> ModelSpec:
    name = _model_name(settings, model)
    specprefill = SpecPrefillConfig(
        enabled=settings.specprefill,
        keep_pct=settings.specprefill_keep_pct,
        threshold=settings.specprefill_threshold,
        draft_model=settings.specprefill_draft_model,
        chunk_tokens=settings.specprefill_chunk_tokens,
        sink_tokens=settings.specprefill_sink_tokens,
        tail_tokens=settings.specprefill_tail_tokens,
        keep_system_prompt=settings.specprefill_keep_system_prompt,
    )
    engine = EngineConfig(
        model=model,
        name=name,
        kind=settings.engine,
        max_batch_size=settings.max_in_flight,
        prompt_cache_bytes=settings.prompt_cache,
        dequantize=settings.dequantize,
        log_format=settings.log_format,
        specprefill=specprefill,
        scripted_token_delay_ms=settings.scripted_token_delay_ms,
        scripted_prefill_tokens_per_s=settings.scripted_prefill_tokens_per_s,
        scripted_load_s=settings.scripted_load_s,
    )
    return ModelSpec(name=name, engine=engine, workers=settings.workers)


def _model_name(settings: ServeSettings, model: str | None) -> str:
    """Return what clients call a model: a folder's name, a hub name as it is."""
    if model is None:
        return DEFAULT_MODEL_NAME if settings.engine == "mlx" else SCRIPTED_MODEL_NAME
    if settings.engine == "scripted":
        return model
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name
    if model.startswith(("/", ".", "~")):
        raise SettingsError(f"--model {model}: there is no such folder")
    return model


def gateway_config(settings: ServeSettings, tokens: tuple[TokenConfig, ...]) -> GatewayConfig:
    """Return the gateway's configuration.

    Raises:
        SettingsError: flags that make no sense together.
    """
    if settings.tls_key is not None and settings.tls_cert is None:
        raise SettingsError("--tls-key: there is no --tls-cert to it")
    if not settings.tcp and settings.unix is None:
        raise SettingsError("--no-tcp: there is no --unix to listen on instead")
    return GatewayConfig(
        listen=ListenConfig(
            host=settings.host,
            port=settings.port,
            tcp=settings.tcp,
            tls_cert=settings.tls_cert,
            tls_key=settings.tls_key,
            unix_path=None if settings.unix is None else str(Path(settings.unix).expanduser()),
        ),
        limits=LimitsConfig(
            max_connections=settings.max_connections,
            max_connections_per_address=settings.max_connections_per_address,
            max_in_flight_per_connection=settings.max_in_flight_per_connection,
            max_frame_bytes=settings.max_frame_bytes,
            max_bad_frames=settings.max_bad_frames,
        ),
        deadlines=DeadlinesConfig(
            open_timeout_s=settings.handshake_timeout,
            stall_timeout_s=settings.stall_timeout,
            drain_timeout_s=settings.drain_timeout,
        ),
        resume=ResumeConfig(detach_timeout_s=settings.detach_timeout, replay_s=settings.replay_time),
        access=AccessConfig(
            allowed_origins=tuple(settings.allow_origin),
            allowed_hosts=tuple(settings.allow_host),
            tokens=tokens,
        ),
    )
