"""Keep one engine process alive: its state, its restarts, and what is known of it.

The table `TRANSITIONS` is the rule; `Supervisor` applies it. An event that the table does not allow raises
`IllegalTransition` and changes nothing.

    STOPPED -> STARTING -> LOADING -> READY -> STOPPING -> STOPPED
                  |           |         |
                  +-----------+---------+--> BACKOFF -> STARTING      it died
                  +-----------+--> FAILED                             its model can never be loaded
"""

import asyncio
import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Protocol, assert_never

from ..protocol.errors import IllegalTransition
from ..protocol.messages import (
    Command,
    EngineInfo,
    EngineStats,
    Event,
    LoadFailed,
    Loading,
    Ready,
    Report,
    Step,
)
from .config import ModelSpec, PoolConfig
from .process import EngineProcess

_log = logging.getLogger(__name__)


class WorkerState(Enum):
    """Where an engine process stands."""

    STOPPED = auto()
    """Not started yet, or stopped on purpose."""
    STARTING = auto()
    """Started; nothing heard of it yet."""
    LOADING = auto()
    READY = auto()
    """It can answer."""
    BACKOFF = auto()
    """It died and is started again after a while."""
    FAILED = auto()
    """Its model cannot be loaded, and trying again would not help."""
    STOPPING = auto()
    """Told to stop; still there."""


class WorkerEvent(Enum):
    """What can happen to an engine process."""

    START = auto()
    LOADING = auto()
    LOADED = auto()
    LOAD_FAILED = auto()
    """For good."""
    DIED = auto()
    STOP = auto()


_S, _E = WorkerState, WorkerEvent

TRANSITIONS: Mapping[tuple[WorkerState, WorkerEvent], WorkerState] = MappingProxyType(
    {
        (_S.STOPPED, _E.START): _S.STARTING,
        (_S.STOPPED, _E.STOP): _S.STOPPED,
        (_S.STARTING, _E.LOADING): _S.LOADING,
        (_S.STARTING, _E.LOADED): _S.READY,
        (_S.STARTING, _E.LOAD_FAILED): _S.FAILED,
        (_S.STARTING, _E.DIED): _S.BACKOFF,
        (_S.STARTING, _E.STOP): _S.STOPPING,
        (_S.LOADING, _E.LOADING): _S.LOADING,
        (_S.LOADING, _E.LOADED): _S.READY,
        (_S.LOADING, _E.LOAD_FAILED): _S.FAILED,
        (_S.LOADING, _E.DIED): _S.BACKOFF,
        (_S.LOADING, _E.STOP): _S.STOPPING,
        (_S.READY, _E.DIED): _S.BACKOFF,
        (_S.READY, _E.STOP): _S.STOPPING,
        (_S.BACKOFF, _E.START): _S.STARTING,
        (_S.BACKOFF, _E.STOP): _S.STOPPED,
        # The process exits by itself after it has said that it failed.
        (_S.FAILED, _E.DIED): _S.FAILED,
        (_S.FAILED, _E.STOP): _S.STOPPED,
        # Its last reports may still be on the way.
        (_S.STOPPING, _E.LOADING): _S.STOPPING,
        (_S.STOPPING, _E.LOADED): _S.STOPPING,
        (_S.STOPPING, _E.LOAD_FAILED): _S.STOPPING,
        (_S.STOPPING, _E.STOP): _S.STOPPING,
        (_S.STOPPING, _E.DIED): _S.STOPPED,
        (_S.STOPPED, _E.DIED): _S.STOPPED,
    }
)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What is known of an engine process, at one moment."""

    name: str
    """The model's name and a number: `qwen/0`."""
    model: str
    state: WorkerState
    pid: int | None
    restarts: int
    """How often the process was started again."""
    stats: EngineStats
    """As of the last report; all zero when the process is gone."""
    info: EngineInfo | None
    """As of the last successful load, also while the process is being restarted."""
    loading: Loading | None
    """The stage of loading; None unless LOADING."""
    last_failure: str | None
    """Why the process last died or failed to load, for the operator."""
    last_report_s: float | None
    """`time.monotonic()` at the end of the last step that was reported; None before the first."""


class Listener(Protocol):
    """Who hears of an engine process."""

    def on_events(self, worker: "Supervisor", events: list[Event]) -> None:
        """Take what happened to the requests of a worker, in order."""

    def on_state(self, worker: "Supervisor", previous: WorkerState) -> None:
        """Note that a worker's state has changed; one that is no longer READY has lost its requests."""

    def on_loading(self, worker: "Supervisor") -> None:
        """Note that a worker's loading has advanced."""


def backoff_s(num_failures: int, config: PoolConfig) -> float:
    """Return how long to wait before a restart after so many failures in a row (1 and up)."""
    doubled = config.restart_backoff_initial_s * 2.0 ** min(num_failures - 1, 30)
    return min(doubled, config.restart_backoff_max_s)


class Supervisor:
    """One worker: the engine process that there is now, and the next one when that dies."""

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        config: PoolConfig,
        environment: Mapping[str, str],
        listener: Listener,
    ) -> None:
        self.name = name
        self._spec = spec
        self._config = config
        self._environment = environment
        self._listener = listener
        self._state = WorkerState.STOPPED
        self._process: EngineProcess | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._num_starts = 0
        self._num_failures = 0
        self._ready_since_s: float | None = None
        self._stats = EngineStats()
        self._info: EngineInfo | None = None
        self._loading: Loading | None = None
        self._load_failure: str | None = None
        self._last_failure: str | None = None
        self._last_report_s: float | None = None

    @property
    def state(self) -> WorkerState:
        """Where the process stands."""
        return self._state

    @property
    def status(self) -> WorkerStatus:
        """What is known of the process."""
        return WorkerStatus(
            name=self.name,
            model=self._spec.name,
            state=self._state,
            pid=self._process.pid if self._process is not None else None,
            restarts=max(0, self._num_starts - 1),
            stats=self._stats,
            info=self._info,
            loading=self._loading if self._state is WorkerState.LOADING else None,
            last_failure=self._last_failure,
            last_report_s=self._last_report_s,
        )

    def start(self) -> None:
        """Start the process; from then on keep it alive."""
        self._retry = None
        self._apply(WorkerEvent.START)
        self._num_starts += 1
        self._load_failure = None
        self._process = EngineProcess(
            self.name,
            self._spec.engine,
            self._config,
            self._environment,
            on_reports=self._on_reports,
            on_death=self._on_death,
        )
        try:
            self._process.start()
        except OSError as error:
            self._process = None
            self._died(f"could not be started: {error.strerror}")

    def send(self, command: Command) -> None:
        """Send a command to the process, if there is one."""
        if self._process is not None:
            self._process.send(command)

    async def stop(self) -> None:
        """Stop the process within the configured deadlines. It is not started again."""
        self._give_up()
        if self._process is not None:
            await self._process.stop()

    def kill(self) -> None:
        """Kill the process now, if a `stop` has not ended it. It is not started again."""
        self._give_up()
        if self._process is not None:
            self._process.kill()

    def _give_up(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._apply(WorkerEvent.STOP)

    def _apply(self, event: WorkerEvent) -> None:
        previous = self._state
        try:
            self._state = TRANSITIONS[previous, event]
        except KeyError:
            raise IllegalTransition(f"{event.name} in {previous.name}") from None
        if self._state is not previous:
            self._ready_since_s = (
                asyncio.get_running_loop().time() if self._state is WorkerState.READY else None
            )
            _log.info("%s: %s -> %s", self.name, previous.name, self._state.name)
            self._listener.on_state(self, previous)

    # --- from the process ---

    def _on_reports(self, reports: list[Report]) -> None:
        for report in reports:
            match report:
                case Step():
                    self._stats = report.stats
                    self._last_report_s = report.monotonic_s
                    if report.events:
                        self._listener.on_events(self, report.events)
                case Loading():
                    self._loading = report
                    is_first = self._state is WorkerState.STARTING
                    self._apply(WorkerEvent.LOADING)
                    if not is_first:
                        self._listener.on_loading(self)
                case Ready():
                    self._info = report.info
                    self._apply(WorkerEvent.LOADED)
                case LoadFailed():
                    self._load_failure = self._last_failure = report.message
                    _log.error("%s could not load: %s", self.name, report.message)
                    if report.permanent:
                        self._apply(WorkerEvent.LOAD_FAILED)
                case _:
                    assert_never(report)

    def _on_death(self, exit_code: int | None) -> None:
        self._process = None
        self._died(self._load_failure or _exit_message(exit_code))

    def _died(self, failure: str) -> None:
        """Note that there is no process any more, and have it started again if that is wanted."""
        self._stats = EngineStats()
        now_s, ready_since_s = asyncio.get_running_loop().time(), self._ready_since_s
        if ready_since_s is not None and now_s - ready_since_s >= self._config.restart_reset_after_s:
            self._num_failures = 0
        if self._state not in (WorkerState.STOPPING, WorkerState.STOPPED):
            self._last_failure = failure
        self._apply(WorkerEvent.DIED)
        if self._state is WorkerState.BACKOFF:
            self._num_failures += 1
            wait_s = backoff_s(self._num_failures, self._config)
            _log.error("%s %s; starting it again in %.1f s", self.name, failure, wait_s)
            self._retry = asyncio.get_running_loop().call_later(wait_s, self.start)


def _exit_message(exit_code: int | None) -> str:
    if exit_code is None:
        return "died"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = " (perhaps for want of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
