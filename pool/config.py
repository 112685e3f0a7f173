"""Configuration of a pool: which models, how many processes, and every bound and deadline."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSpec:
    """One model: its name for clients, and how many processes answer for it."""

    name: str
    engine: object
    """An `EngineConfig`. The pool hands it to the engine processes unread."""
    workers: int = 1
    aliases: tuple[str, ...] = ()
    """Other names that clients may use."""


@dataclass(frozen=True)
class PoolConfig:
    """A pool of engine processes. The first model answers requests that name none."""

    models: tuple[ModelSpec, ...]
    max_in_flight: int = 16
    """Requests that one engine process is given at a time."""
    max_queue: int = 64
    """Requests of one model that may wait for an engine process."""
    default_max_tokens: int = 512
    default_temperature: float = 0.0
    progress_interval_s: float = 0.5
    """How often a queued request hears of its place."""
    cancel_timeout_s: float = 30.0
    """How long an engine may take to confirm a cancel before that is logged."""

    restart_backoff_initial_s: float = 0.5
    """Wait before the first restart of an engine process; doubles with every failure in a row."""
    restart_backoff_max_s: float = 30.0
    restart_reset_after_s: float = 60.0
    """An engine process that was ready for this long has no failures in a row behind it."""

    shutdown_cancel_s: float = 2.0
    """At exit: how long engines may take to end the requests that run."""
    stop_timeout_s: float = 2.0
    """How long an engine process may take to exit when told to, before SIGTERM."""
    terminate_timeout_s: float = 1.0
    """The same for SIGTERM, before SIGKILL."""
    kill_timeout_s: float = 2.0
    """How long the system may take to remove a killed process."""
    last_reports_timeout_s: float = 1.0
    """How long the last messages of a dead process are waited for."""
    preload_blas: str = "auto"
    """A BLAS library for engine processes on Linux: `auto`, `off` or a path."""

    def __post_init__(self) -> None:
        """Check what would fail late.

        Raises:
            ValueError: no model, a name given twice, or a number out of its range.
        """
        names = [name for spec in self.models for name in (spec.name, *spec.aliases)]
        if not names:
            raise ValueError("a pool needs at least one model")
        if len(set(names)) != len(names):
            raise ValueError(f"model names and aliases must differ: {', '.join(names)}")
        if any(spec.workers < 1 for spec in self.models):
            raise ValueError("a model needs at least one worker")
        if self.max_in_flight < 1 or self.max_queue < 0 or self.default_max_tokens < 1:
            raise ValueError("max_in_flight and default_max_tokens must be at least 1, max_queue at least 0")
        for name in (
            "progress_interval_s",
            "cancel_timeout_s",
            "restart_backoff_initial_s",
            "restart_backoff_max_s",
            "stop_timeout_s",
            "terminate_timeout_s",
            "kill_timeout_s",
            "last_reports_timeout_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be greater than 0")
