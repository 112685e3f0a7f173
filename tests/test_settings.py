"""Flags over the file over defaults; every mistake is one line that names its place."""

from pathlib import Path
from typing import Any

import pytest

from headrace.engine.config import EngineConfig
from headrace.gateway.config import GatewayConfig, TokenConfig
from headrace.settings import (
    ServeSettings,
    SettingsError,
    access_tokens,
    gateway_config,
    pool_config,
    read_settings,
)

TOKENS = (TokenConfig.of_secret("alice", "t"),)


def engine_of(settings: ServeSettings, index: int = 0) -> EngineConfig:
    """Return the engine's configuration of a model."""
    engine = pool_config(settings).models[index].engine
    assert isinstance(engine, EngineConfig)
    return engine


def test_defaults() -> None:
    """The default model on loopback."""
    settings = read_settings({}, None)
    assert (settings.host, settings.port) == ("127.0.0.1", 8765)
    (spec,) = pool_config(settings).models
    assert (spec.name, spec.workers) == ("smollm2-135m-instruct", 1)
    assert engine_of(settings) == EngineConfig()
    assert gateway_config(settings, ()) == GatewayConfig()


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    """What only the file has is kept."""
    path = tmp_path / "headrace.toml"
    path.write_text(
        'port = 1\nmax-in-flight = 4\nmodel = "org/a"\nallow-origin = ["https://x"]\ntemperature = 1\n'
    )
    settings = read_settings({"port": 2}, path)
    assert (settings.port, settings.max_in_flight, settings.model) == (2, 4, ["org/a"])
    assert settings.allow_origin == ["https://x"]
    assert settings.temperature == 1.0


def test_every_setting_reaches_its_layer() -> None:
    """No flag is read and lost."""
    flags: dict[str, Any] = {
        "model": ["org/a", "org/b"], "host": "localhost", "port": 0, "workers": 2, "max_in_flight": 3,
        "max_queue": 4, "max_tokens": 5, "temperature": 0.6, "engine": "scripted", "drain_timeout": 7.0,
        "dequantize": False, "blas": "off", "allow_origin": ["o"], "allow_host": ["h"], "specprefill": True,
        "specprefill_keep_pct": 0.8, "specprefill_threshold": 9, "specprefill_draft_model": "none",
        "specprefill_chunk_tokens": 31, "specprefill_sink_tokens": 32, "specprefill_tail_tokens": 33,
        "specprefill_keep_system_prompt": True,
        "scripted_token_delay_ms": 1.0, "scripted_prefill_tokens_per_s": 2.0, "scripted_load_s": 3.0,
        "tls_cert": "c", "tls_key": "k", "unix": "/u", "tcp": False,
        "memory_limit": "1.5G", "hang_timeout": 11.0, "load_timeout": 12.0, "max_engine_deaths": 13,
        "detach_timeout": 21.0, "replay_time": 22.0,
        "max_connections": 23, "max_connections_per_address": 24, "max_in_flight_per_connection": 25,
        "max_frame_bytes": 2600, "max_bad_frames": 27, "handshake_timeout": 28.0, "stall_timeout": 29.0,
        "log_format": "json", "prompt_cache": "34K", "paused_timeout": 35.0,
    }  # fmt: skip
    assert set(flags) | {"token_file"} == set(ServeSettings.model_fields)
    settings = read_settings(flags, None)
    pool, gateway, engine = pool_config(settings), gateway_config(settings, TOKENS), engine_of(settings, 1)
    assert [(spec.name, spec.workers) for spec in pool.models] == [("org/a", 2), ("org/b", 2)]
    assert (pool.max_in_flight, pool.max_queue) == (3, 4)
    assert (pool.default_max_tokens, pool.default_temperature, pool.preload_blas) == (5, 0.6, "off")
    assert (pool.memory_limit_bytes, pool.max_engine_deaths_per_request) == (3 << 29, 13)
    assert (pool.hang_timeout_s, pool.load_timeout_s, pool.paused_timeout_s) == (11.0, 12.0, 35.0)
    assert (gateway.listen.host, gateway.listen.port) == ("localhost", 0)
    assert (gateway.access.allowed_origins, gateway.access.allowed_hosts) == (("o",), ("h",))
    assert (gateway.access.tokens, gateway.deadlines.drain_timeout_s) == (TOKENS, 7.0)
    assert (gateway.listen.tls_cert, gateway.listen.tls_key) == ("c", "k")
    assert (gateway.listen.unix_path, gateway.listen.tcp) == ("/u", False)
    assert (gateway.resume.detach_timeout_s, gateway.resume.replay_s) == (21.0, 22.0)
    limits, deadlines = gateway.limits, gateway.deadlines
    assert (limits.max_connections, limits.max_connections_per_address) == (23, 24)
    assert (limits.max_in_flight_per_connection, limits.max_frame_bytes, limits.max_bad_frames) == (
        25,
        2600,
        27,
    )
    assert (deadlines.open_timeout_s, deadlines.stall_timeout_s) == (28.0, 29.0)
    assert (engine.model, engine.name, engine.kind, engine.dequantize) == (
        "org/b",
        "org/b",
        "scripted",
        False,
    )
    assert (engine.max_batch_size, engine.prompt_cache_bytes) == (3, 34 << 10)
    assert engine.log_format == "json"
    assert (engine.specprefill.enabled, engine.specprefill.keep_pct) == (True, 0.8)
    assert (engine.specprefill.threshold, engine.specprefill.draft_model) == (9, "none")
    specprefill = engine.specprefill
    assert (specprefill.chunk_tokens, specprefill.sink_tokens, specprefill.tail_tokens) == (31, 32, 33)
    assert specprefill.keep_system_prompt
    assert (engine.scripted_token_delay_ms, engine.scripted_load_s) == (1.0, 3.0)
    assert engine.scripted_prefill_tokens_per_s == 2.0


def test_models_are_named_by_folder_or_hub_name(tmp_path: Path) -> None:
    """A folder by its own name, a hub model as it was given."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    specs = pool_config(read_settings({"model": [str(folder), "org/name"]}, None)).models
    assert [spec.name for spec in specs] == ["my-model", "org/name"]


def test_models_of_the_same_name_are_refused(tmp_path: Path) -> None:
    """A client could not choose."""
    for parent in ("a", "b"):
        (tmp_path / parent / "m").mkdir(parents=True)
    models = [str(tmp_path / "a" / "m"), str(tmp_path / "b" / "m")]
    with pytest.raises(SettingsError, match="two models are called 'm'"):
        pool_config(read_settings({"model": models}, None))


def test_a_missing_folder_is_no_hub_name() -> None:
    """Said before anything is started."""
    with pytest.raises(SettingsError, match="no such folder"):
        pool_config(read_settings({"model": ["./nowhere"]}, None))


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("700", 700), ("2k", 2048), ("3 MiB", 3 << 20), ("0.5gb", 1 << 29), (9, 9)]
)
def test_numbers_of_bytes_may_have_units(text: str | int, num_bytes: int) -> None:
    """As people write them, powers of two; a file may have a plain number."""
    assert read_settings({"memory_limit": text}, None).memory_limit == num_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('memory-limit = "much"', "memory-limit in"),
        ("memory-limit = 0", "memory-limit in"),
        ("max-inflight = 4", "max-inflight in"),
        ("port = true", "port in"),
        ('port = "1"', "port in"),
        ("temperature = nan", "temperature in"),
        ("temperature = 3", "temperature in"),
        ('engine = "gguf"', "engine in"),
        ("model = [1]", "model in"),
        ("port = ", "--config"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    """By the key, or the file's line."""
    path = tmp_path / "headrace.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message) as caught:
        read_settings({}, path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Named."""
    with pytest.raises(SettingsError, match="nowhere"):
        read_settings({}, tmp_path / "nowhere.toml")


def test_mistakes_in_flags_are_named() -> None:
    """As the flag."""
    with pytest.raises(SettingsError, match=r"^--max-in-flight: "):
        read_settings({"max_in_flight": 0}, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep_pct", 0.0), ("keep_pct", 1.01), ("keep_pct", float("nan")), ("keep_pct", True),
        ("keep_pct", "0.3"), ("threshold", -1), ("chunk_tokens", 0), ("chunk_tokens", 1.5),
        ("sink_tokens", -1), ("tail_tokens", 0), ("draft_model", ""),
    ],
)  # fmt: skip
def test_specprefill_keeps_to_its_bounds(name: str, value: object) -> None:
    """Rates in (0, 1], whole lengths; the flag is named."""
    with pytest.raises(SettingsError, match=f"^--specprefill-{name.replace('_', '-')}: [^\n]+$"):
        read_settings({f"specprefill_{name}": value}, None)


def test_tokens_come_from_their_file_or_the_environment(tmp_path: Path) -> None:
    """A mistake in the file is named as the flag's."""
    path = tmp_path / "token"
    path.write_text("of-file\n")
    settings = read_settings({"token_file": str(path)}, None)
    assert access_tokens(settings, {}) == (TokenConfig.of_secret("default", "of-file"),)
    assert access_tokens(read_settings({}, None), {}) == ()
    path.unlink()
    with pytest.raises(SettingsError, match=r"^--token-file .*: cannot be read"):
        access_tokens(settings, {})


def test_flags_that_need_another() -> None:
    """A key without its certificate, nothing to listen on."""
    for flags, named in (({"tls_key": "k"}, "--tls-key"), ({"tcp": False}, "--no-tcp")):
        with pytest.raises(SettingsError, match=named):
            gateway_config(read_settings(flags, None), ())
