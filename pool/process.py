"""One engine process, from its start to its end.

The sentinel of the process is watched by the event loop, so that a death is known at once. It is reported
when the last messages of the process have been delivered: the reader thread runs into the end of the pipe.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import SpawnProcess

from ..protocol.messages import Command, Report, Stop
from . import worker
from .channel import Channel, ChannelFull
from .config import PoolConfig

_REAP_INTERVAL_S = 0.005

_log = logging.getLogger(__name__)


class EngineProcess:
    """A spawned process that runs `worker.main`. Made and used in the event loop.

    Args:
        environment: variables that the process gets besides those of this one.
        on_reports: called with the reports of the process, in order.
        on_death: called once, after the last `on_reports`, with the exit code: negative, the number of the
            signal that killed the process; None, it could not be had.
    """

    def __init__(
        self,
        name: str,
        engine_config: object,
        config: PoolConfig,
        environment: Mapping[str, str],
        *,
        on_reports: Callable[[list[Report]], None],
        on_death: Callable[[int | None], None],
    ) -> None:
        self._name = name
        self._engine_config = engine_config
        self._config = config
        self._environment = environment
        self._on_reports = on_reports
        self._on_death = on_death
        self._exited = asyncio.Event()  # the sentinel has fired
        self._killed = asyncio.Event()  # SIGKILL has been sent
        self._read_to_end = asyncio.Event()  # the last report has been delivered
        self._ended = asyncio.Event()  # on_death has been called
        self._process: SpawnProcess | None = None
        self._channel: Channel | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process; None before its start and after its end."""
        return self._process.pid if self._process is not None and not self._ended.is_set() else None

    def start(self) -> None:
        """Start the process. Takes the event loop a few milliseconds.

        Raises:
            OSError, RuntimeError: the system has no room for another process, or its threads.
        """
        context = multiprocessing.get_context("spawn")
        command_read, command_write = context.Pipe(duplex=False)
        report_read, report_write = context.Pipe(duplex=False)
        process = context.Process(
            target=worker.main,
            args=(
                command_read,
                report_write,
                self._engine_config,
                min(worker.SIGN_OF_LIFE_S, self._config.hang_timeout_s / 4),
            ),
            name=self._name,
            daemon=True,
        )
        try:
            with _variables(self._environment), _sigint_blocked():
                process.start()
        except BaseException:
            command_write.close()
            report_read.close()
            raise
        finally:
            # The process has these ends to itself: else neither side would see the other's end.
            command_read.close()
            report_write.close()
        channel = Channel(
            self._name,
            report_read,
            command_write,
            on_reports=self._on_reports,
            on_closed=self._read_to_end.set,
            # Submit, credit and cancel for every request, and as much again for those that ended meanwhile.
            max_commands=6 * (self._config.max_in_flight + self._config.max_paused) + 16,
        )
        try:
            channel.start()
        except BaseException:
            process.kill()
            raise
        self._process, self._channel = process, channel
        asyncio.get_running_loop().add_reader(process.sentinel, self._on_sentinel, process.sentinel)
        self._watch = asyncio.create_task(self._watch_end(process, channel), name=f"watch {self._name}")

    def send(self, command: Command) -> None:
        """Send a command. A process that does not take its commands is killed: its death tells the rest."""
        if self._channel is None:
            return
        try:
            self._channel.send(command)
        except ChannelFull:
            _log.error("%s does not take its commands: killing it", self._name)
            self.kill()

    def kill(self) -> None:
        """Kill the process now. One that the system does not remove in time counts as dead."""
        if self._process is not None and not self._exited.is_set():
            self._process.kill()
            self._killed.set()

    async def stop(self) -> None:
        """End the process: ask, then SIGTERM, then SIGKILL, each with its deadline."""
        if self._process is None:
            return
        if not self._exited.is_set():
            self.send(Stop())
        config = self._config
        if await _wait(self._ended, config.stop_timeout_s):
            return
        if not self._exited.is_set():
            _log.warning("%s does not stop: terminating it", self._name)
            self._process.terminate()
        if await _wait(self._ended, config.terminate_timeout_s):
            return
        self.kill()
        await _wait(self._ended, 2 * config.kill_timeout_s + config.last_reports_timeout_s)

    def _on_sentinel(self, sentinel: int) -> None:
        asyncio.get_running_loop().remove_reader(sentinel)
        self._exited.set()

    async def _watch_end(self, process: SpawnProcess, channel: Channel) -> None:
        """Wait for the end of the process, whichever of its two signs comes first, and report it."""
        signs = (self._exited, self._read_to_end, self._killed)
        waits = [asyncio.create_task(event.wait()) for event in signs]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not self._killed.is_set() and not await _wait(
                self._exited, self._config.last_reports_timeout_s
            ):
                _log.error("%s has closed its pipe and lives on: killing it", self._name)
                self.kill()
            if not await _wait(self._exited, self._config.kill_timeout_s):
                _log.error("%s (process %s) can't be killed: leaving it", self._name, process.pid)
                asyncio.get_running_loop().remove_reader(process.sentinel)
            elif not await _wait(self._read_to_end, self._config.last_reports_timeout_s):
                _log.warning("%s is dead, but its pipe does not end: what it sent last is lost", self._name)
            exit_code = await self._reap(process)
        finally:
            for task in waits:
                task.cancel()
            channel.close()
        self._ended.set()
        self._on_death(exit_code)

    async def _reap(self, process: SpawnProcess) -> int | None:
        """Return the exit code. The sentinel fires a moment before the system has it."""
        if not self._exited.is_set():
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.kill_timeout_s):
                while process.exitcode is None:  # noqa: ASYNC110 (the system has no event for it)
                    await asyncio.sleep(_REAP_INTERVAL_S)
        exit_code = process.exitcode
        if exit_code is not None:
            process.close()
        return exit_code


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event; return whether it has come."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


@contextlib.contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Give this process other variables for as long as it takes to start a child.

    `multiprocessing` has no other way. Nothing is awaited meanwhile; only a thread could see it.
    """
    changed = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in changed.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Let a child start with SIGINT blocked, until it has said that it ignores it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
