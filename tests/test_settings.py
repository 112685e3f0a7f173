"""Flags over the file over defaults; every mistake is one line that names its place."""

from pathlib import Path
from typing import Any

import pytest

from headrace.engine.config import EngineConfig
from headrace.settings import (
    ServeSettings,
    SettingsError,
    gateway_config,
    pool_config,
    read_settings,
    read_token,
)


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
    assert gateway_config(settings, None).deadlines.drain_timeout_s == 30.0


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
        "scripted_token_delay_ms": 1.0, "scripted_prefill_tokens_per_s": 2.0, "scripted_load_s": 3.0,
    }  # fmt: skip
    assert set(flags) | {"token_file"} == set(ServeSettings.model_fields)
    settings = read_settings(flags, None)
    pool, gateway, engine = pool_config(settings), gateway_config(settings, "t"), engine_of(settings, 1)
    assert [(spec.name, spec.workers) for spec in pool.models] == [("org/a", 2), ("org/b", 2)]
    assert (pool.max_in_flight, pool.max_queue) == (3, 4)
    assert (pool.default_max_tokens, pool.default_temperature, pool.preload_blas) == (5, 0.6, "off")
    assert (gateway.listen.host, gateway.listen.port) == ("localhost", 0)
    assert (gateway.access.allowed_origins, gateway.access.allowed_hosts) == (("o",), ("h",))
    assert (gateway.access.token, gateway.deadlines.drain_timeout_s) == ("t", 7.0)
    assert (engine.model, engine.name, engine.kind, engine.dequantize) == (
        "org/b",
        "org/b",
        "scripted",
        False,
    )
    assert engine.max_batch_size == 3
    assert (engine.specprefill.enabled, engine.specprefill.keep_pct) == (True, 0.8)
    assert (engine.specprefill.threshold, engine.specprefill.draft_model) == (9, "none")
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
    ("text", "message"),
    [
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


def test_the_token_comes_from_its_file_or_the_environment(tmp_path: Path) -> None:
    """The file wins; an empty one is a mistake, not an open door."""
    path = tmp_path / "token"
    path.write_text("of-file\n")
    settings = read_settings({"token_file": str(path)}, None)
    assert read_token(settings, {"HEADRACE_TOKEN": "of-environment"}) == "of-file"
    assert read_token(read_settings({}, None), {"HEADRACE_TOKEN": "of-environment"}) == "of-environment"
    assert read_token(read_settings({}, None), {}) is None
    path.write_text("\n")
    with pytest.raises(SettingsError, match="empty"):
        read_token(settings, {})
    path.unlink()
    with pytest.raises(SettingsError, match="cannot be read"):
        read_token(settings, {})
