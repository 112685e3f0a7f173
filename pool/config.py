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
    max_paused: int = 1024
    """Requests beyond those that an engine process may hold while their clients give no credit. With one more
    the client that has the most of them loses the one that has waited longest: it is cancelled with reason
    `slow_consumer`."""
    paused_timeout_s: float = 600.0
    """How long a request may wait for credit; then it is cancelled with reason `slow_consumer`."""
    max_queue: int = 64
    """Requests of one model that may wait for an engine process, those not counted whose engine was lost.

    A client that has none waiting may still wait with one, up to twice as many in all.
    """
    default_max_tokens: int = 512
    default_temperature: float = 0.0
    progress_interval_s: float = 0.5
    """How often a queued request hears of its place."""
    cancel_timeout_s: float = 30.0
    """How long an engine may take to confirm a cancel before it is replaced."""

    max_engine_deaths_per_request: int = 2
    """A request that so many engine processes died under fails. 1: none is tried again."""
    hang_timeout_s: float = 30.0
    """How old the last step of an engine may get before its process is killed and replaced."""
    load_timeout_s: float = 600.0
    """The same while loading, for the last progress of it."""
    memory_limit_bytes: int | None = None
    """An engine process that has more is replaced; its requests go on in the next. None: no limit."""
    replace_drain_s: float = 10.0
    """How long requests may end in a process that is to be replaced, before they go on elsewhere."""

    max_restarts_in_a_row: int = 8
    """An engine process that was started again so often, each time without making a token, is given up."""
    restart_backoff_initial_s: float = 0.5
    """Wait before the first restart of an engine process; doubles with every failure in a row."""
    restart_backoff_max_s: float = 30.0
    restart_reset_after_s: float = 60.0
    """An engine process that was ready for this long has no failures in a row behind it; nor has one that
    has made a token."""

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
        for name in ("max_in_flight", "max_paused", "default_max_tokens", "max_engine_deaths_per_request"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if min(self.max_queue, self.max_restarts_in_a_row, self.replace_drain_s) < 0:
            raise ValueError("max_queue, max_restarts_in_a_row and replace_drain_s must not be negative")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes <= 0:
            raise ValueError("memory_limit_bytes must be greater than 0, or None")
        for name in (
            "progress_interval_s",
            "cancel_timeout_s",
            "paused_timeout_s",
            "hang_timeout_s",
            "load_timeout_s",
            "restart_backoff_initial_s",
            "restart_backoff_max_s",
            "stop_timeout_s",
            "terminate_timeout_s",
            "kill_timeout_s",
            "last_reports_timeout_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be greater than 0")
