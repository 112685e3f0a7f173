"""Keep one engine process alive: start it, watch it, replace it, start it again.

A process that dies is noticed by its sentinel; one that hangs, by the watchdog, which kills it; one that has
grown over its memory limit gets no new requests and is then stopped. All three end in `_died`, and from
there the process is started again after a backoff, or given up after too many failures in a row.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Mapping
from typing import Protocol, assert_never

from ..protocol.errors import IllegalTransition
from ..protocol.messages import (
    Command,
    Delta,
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
from .memory import resident_bytes
from .process import EngineProcess
from .states import TRANSITIONS, WorkerEvent, WorkerState, WorkerStatus
from .watchdog import Watchdog

MAX_WATCH_INTERVAL_S = 1.0
MAX_OVERSHOOT = 1.25
"""A process with so many times its memory limit is replaced also when the others can't do without it."""

_log = logging.getLogger(__name__)


class Listener(Protocol):
    """Who hears of an engine process."""

    def on_events(self, worker: "Supervisor", events: list[Event]) -> None:
        """Take what happened to the requests of a worker, in order."""

    def on_state(self, worker: "Supervisor", previous: WorkerState) -> None:
        """Note that a worker's state has changed; one that neither is READY nor DRAINING has no requests."""

    def on_loading(self, worker: "Supervisor") -> None:
        """Note that a worker's loading has advanced."""

    def may_replace(self, worker: "Supervisor") -> bool:
        """Tell whether the others can do without a worker for a while."""

    def has_requests(self, worker: "Supervisor") -> bool:
        """Tell whether a worker was given requests that have not ended."""


def backoff_s(num_failures: int, config: PoolConfig) -> float:
    """Return how long to wait before a restart after so many failures in a row (1 and up)."""
    doubled = config.restart_backoff_initial_s * 2.0 ** min(num_failures - 1, 30)
    return min(doubled, config.restart_backoff_max_s)


class Supervisor:
    """One worker: the engine process that there is now, and the next one when that has gone."""

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
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._stopping: asyncio.Task[None] | None = None
        self._num_starts = 0
        self._num_failures = 0
        self._ready_since_s: float | None = None
        self._has_served = False
        self._stats = EngineStats()
        self._info: EngineInfo | None = None
        self._loading: Loading | None = None
        self._failure: str | None = None  # of the process that there is, where it is known before its end
        self._was_given_up = False
        self._was_replaced = False
        self._last_failure: str | None = None
        self._last_report_s: float | None = None
        self._resident_bytes = 0
        self._watch_interval_s = min(
            MAX_WATCH_INTERVAL_S, config.hang_timeout_s / 4, config.load_timeout_s / 4
        )
        self._watchdog = Watchdog(
            hang_timeout_s=config.hang_timeout_s,
            load_timeout_s=config.load_timeout_s,
            interval_s=self._watch_interval_s,
        )

    @property
    def state(self) -> WorkerState:
        """Where the process stands."""
        return self._state

    @property
    def was_replaced(self) -> bool:
        """Whether the last process was ended on purpose: nobody is to blame for it."""
        return self._was_replaced

    @property
    def memory_bytes(self) -> int:
        """What the process has, by its own account or the system's, whichever is more; 0: unknown."""
        return max(self._stats.memory_bytes, self._resident_bytes)

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
            memory_bytes=self.memory_bytes,
        )

    # --- what others want of it ---

    def start(self) -> None:
        """Start the process; from then on keep it alive."""
        self._apply(WorkerEvent.START)
        self._num_starts += 1
        self._failure = None
        self._has_served = self._was_replaced = self._was_given_up = False
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
        except Exception as error:  # no process, no memory, no thread: all may be there again later
            self._process = None
            self._died(f"could not be started: {error}")
            return
        self._watchdog.start(time.monotonic())
        self._set_timer("watch", self._watch_interval_s, self._watch)

    def send(self, command: Command) -> None:
        """Send a command to the process, if there is one."""
        if self._process is not None:
            self._process.send(command)

    def give_up_process(self, failure: str) -> None:
        """Kill the process because it does not do what it must. It is started again."""
        if self._process is not None and not self._was_given_up:
            self._was_given_up = True
            self._failure = failure
            _log.error("%s %s: killing it", self.name, failure)
            self._process.kill()

    def replace(self, why: str) -> None:
        """Give the process no new requests; after a while, or when `end_drained` is called, replace it."""
        if self._state is WorkerState.READY:
            _log.warning("%s %s: replacing it", self.name, why)
            self._failure = why
            self._set_timer("drain", self._config.replace_drain_s, self.end_drained)
            self._apply(WorkerEvent.DRAIN)

    def end_drained(self) -> None:
        """Stop a process that is draining now: its requests have ended, or had their time."""
        if self._state is WorkerState.DRAINING and self._process is not None and self._stopping is None:
            self._was_replaced = True
            self._cancel_timer("watch")  # A process that stops gives no sign of life.
            self._stopping = asyncio.create_task(self._process.stop(), name=f"stop {self.name}")

    async def stop(self) -> None:
        """Stop the process within the configured deadlines. It is not started again."""
        self._give_up()
        if self._process is not None:
            await self._process.stop()

    def kill(self) -> None:
        """Kill the process now, if a `stop` has not ended it. It is not started again."""
        self._give_up()
        if self._stopping is not None:
            self._stopping.cancel()
        if self._process is not None:
            self._process.kill()

    def _give_up(self) -> None:
        self._clear_timers()
        self._apply(WorkerEvent.STOP)

    # --- watching ---

    def _watch(self) -> None:
        """Look at the process, and again after a while."""
        if self._process is None:
            return
        self._set_timer("watch", self._watch_interval_s, self._watch)
        pid, now_s = self._process.pid, time.monotonic()
        self._resident_bytes = (resident_bytes(pid) or 0) if pid is not None else 0
        if self._watchdog.is_hanging(now_s, is_loading=not self._state.has_requests):
            doing = "hangs" if self._state.has_requests else "does not get on with loading"
            silent_s = self._watchdog.silent_s(now_s)
            self.give_up_process(f"{doing}: no sign of life for {silent_s:.0f} s")
        elif self._is_over_limit(self.memory_bytes) and (
            self._is_over_limit(self.memory_bytes / MAX_OVERSHOOT) or self._listener.may_replace(self)
        ):
            self.replace(f"has {self.memory_bytes >> 20} MiB, more than its limit")

    def _is_over_limit(self, memory_bytes: float) -> bool:
        limit = self._config.memory_limit_bytes
        return limit is not None and memory_bytes > limit

    def _refuse_limit(self, info: EngineInfo) -> bool:
        """Give a model up whose weights alone are over the limit; return whether it is so."""
        if not self._is_over_limit(info.weight_bytes) or self._process is None:
            return False
        self._failure = self._last_failure = (
            f"the weights alone have {info.weight_bytes >> 20} MiB, more than the memory limit: raise it"
        )
        _log.error("%s: %s", self.name, self._failure)
        self._apply(WorkerEvent.LOAD_FAILED)
        self._process.kill()
        return True

    def _set_timer(self, name: str, delay_s: float, callback: Callable[[], None]) -> None:
        self._cancel_timer(name)
        self._timers[name] = asyncio.get_running_loop().call_later(delay_s, callback)

    def _cancel_timer(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def _clear_timers(self) -> None:
        for name in list(self._timers):
            self._cancel_timer(name)

    def _apply(self, event: WorkerEvent) -> None:
        previous = self._state
        try:
            self._state = TRANSITIONS[previous, event]
        except KeyError:
            raise IllegalTransition(f"{event.name} in {previous.name}") from None
        if self._state is not previous:
            if self._state is not WorkerState.DRAINING:
                is_ready = self._state is WorkerState.READY
                self._ready_since_s = time.monotonic() if is_ready else None
            _log.info("%s: %s -> %s", self.name, previous.name, self._state.name)
            self._listener.on_state(self, previous)

    # --- from the process ---

    def _on_reports(self, reports: list[Report]) -> None:
        for report in reports:
            match report:
                case Step():
                    self._stats = report.stats
                    self._last_report_s = report.monotonic_s
                    self._watchdog.note_sign(report.monotonic_s)
                    if report.events:
                        self._has_served = self._has_served or any(
                            isinstance(event, Delta) for event in report.events
                        )
                        self._listener.on_events(self, report.events)
                case Loading():
                    self._on_loading(report)
                case Ready():
                    self._watchdog.note_sign(time.monotonic())
                    if not self._refuse_limit(report.info):
                        self._info = report.info
                        self._apply(WorkerEvent.LOADED)
                case LoadFailed():
                    self._failure = self._last_failure = report.message
                    _log.error("%s could not load: %s", self.name, report.message)
                    if report.permanent:
                        self._apply(WorkerEvent.LOAD_FAILED)
                case _:
                    assert_never(report)

    def _on_loading(self, report: Loading) -> None:
        if report != self._loading or self._state is WorkerState.STARTING:
            self._watchdog.note_sign(time.monotonic())
        self._loading = report
        is_first = self._state is WorkerState.STARTING
        self._apply(WorkerEvent.LOADING)
        if not is_first:
            self._listener.on_loading(self)

    def _on_death(self, exit_code: int | None) -> None:
        self._process = None
        self._died(self._failure or _exit_message(exit_code))

    def _died(self, failure: str) -> None:
        """Note that there is no process any more, and have it started again if that is wanted."""
        self._clear_timers()
        self._stopping = None
        self._stats, self._resident_bytes = EngineStats(), 0
        since_s = self._ready_since_s
        # A request may have killed it, which says nothing of the model: `quarantine` deals with requests.
        if (
            self._has_served
            or self._listener.has_requests(self)
            or (since_s is not None and time.monotonic() - since_s >= self._config.restart_reset_after_s)
        ):
            self._num_failures = 0
        if self._state in (WorkerState.STOPPING, WorkerState.STOPPED, WorkerState.FAILED):
            self._apply(WorkerEvent.DIED)
            return
        self._num_failures += 1
        if self._num_failures > self._config.max_restarts_in_a_row:
            failure = f"{failure}; given up after {self._config.max_restarts_in_a_row} restarts in a row"
            _log.error("%s %s", self.name, failure)
            self._last_failure = failure
            self._apply(WorkerEvent.DIED_TOO_OFTEN)
            return
        wait_s = backoff_s(self._num_failures, self._config)
        _log.error("%s %s; starting it again in %.1f s", self.name, failure, wait_s)
        self._last_failure = failure
        self._set_timer("restart", wait_s, self.start)
        self._apply(WorkerEvent.DIED)


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
