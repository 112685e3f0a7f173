"""The pool: requests in, events out, with the engines in processes of their own.

    async with Pool(PoolConfig(models=(ModelSpec("qwen", EngineConfig(...)),))) as pool:
        async for event in pool.submit(frame):
            ...

A library of its own: the gateway is one of its users. It belongs to one event loop. Programs that use it
must keep their top level behind ``if __name__ == "__main__"``: spawned processes import it.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType, TracebackType
from typing import Self

from ..protocol.errors import ErrorCode, HeadraceError, IllegalTransition, RequestError, ServerError
from ..protocol.frames import ModelInfo, RequestFrame, RequestId, Status
from ..protocol.messages import CancelReason, End
from ..protocol.options import GenerationOptions
from .blas import engine_environment
from .config import PoolConfig
from .group import WorkerGroup
from .request import Request, Sink, Ticket
from .states import WorkerStatus
from .stream import PoolStream

OnChange = Callable[[WorkerStatus], None]
"""Told, in the event loop, when the state of an engine process has changed or its loading has advanced.
It must not raise; a broken one hears nothing more."""

_log = logging.getLogger(__name__)


class ModelLoadFailed(Exception):
    """No model of the pool can be loaded. The message is for the operator."""


class PoolState(Enum):
    """Where a pool stands."""

    NEW = auto()
    OPENING = auto()
    """It is being entered."""
    OPEN = auto()
    DRAINING = auto()
    """No new requests; those that are in go on."""
    CLOSED = auto()


_S = PoolState

_FOLLOWERS: Mapping[PoolState, frozenset[PoolState]] = MappingProxyType(
    {
        _S.NEW: frozenset({_S.OPENING}),
        _S.OPENING: frozenset({_S.OPEN, _S.CLOSED}),
        _S.OPEN: frozenset({_S.DRAINING, _S.CLOSED}),
        _S.DRAINING: frozenset({_S.DRAINING, _S.CLOSED}),
        _S.CLOSED: frozenset(),
    }
)


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """A worker, and what the pool has given to it."""

    status: WorkerStatus
    in_flight: int
    """Requests that the pool has given to it and that have not ended."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """The pool at one moment."""

    workers: tuple[WorkerStatistics, ...]
    queued: Mapping[str, int]
    """Requests that wait, by model; also those that have lost their engine process and go on later."""
    in_flight: int
    """Requests that have been accepted and have not ended, waiting ones included."""
    started_total: int
    ended_total: Mapping[Status, int]
    refused_total: Mapping[str, int]
    """Requests that were not taken, by error code."""
    recovered_total: int
    """How often a request lost its engine process and went on."""


class Pool:
    """Engine processes, and the requests that wait for them and run in them.

    Entering the context starts the processes and does not wait for them; requests are taken at once and wait.
    Leaving it cancels what runs and stops the processes, within the deadlines of the configuration.
    """

    def __init__(self, config: PoolConfig, *, on_change: OnChange | None = None) -> None:
        self._config = config
        self._on_change = on_change
        self._state = PoolState.NEW
        self._groups: dict[str, WorkerGroup] = {}
        self._requests: dict[RequestId, tuple[WorkerGroup, Request]] = {}
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._started_total = 0
        self._ended_total: Counter[Status] = Counter()
        self._refused_total: Counter[str] = Counter()
        self._canonical = {name: spec.name for spec in config.models for name in (spec.name, *spec.aliases)}

    async def __aenter__(self) -> Self:
        self._move_to(PoolState.OPENING)
        try:
            environment = await asyncio.to_thread(engine_environment, self._config.preload_blas, os.environ)
            for spec in self._config.models:
                self._groups[spec.name] = WorkerGroup(
                    spec, self._config, environment, on_end=self._note_end, on_change=self._note_change
                )
            for group in self._groups.values():
                group.start()
        except BaseException:
            self._move_to(PoolState.CLOSED)
            for group in self._groups.values():
                group.kill()
            raise
        self._move_to(PoolState.OPEN)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._move_to(PoolState.CLOSED)
        self._pulse()
        for rid in list(self._requests):
            self.cancel(rid, "shutdown")
        try:
            await self._wait_until(lambda: not self._requests, self._config.shutdown_cancel_s)
            await asyncio.gather(*(group.stop() for group in self._groups.values()))
        finally:
            for group in self._groups.values():
                group.kill()
            await asyncio.sleep(0)  # The last ends are on their way to their sinks.

    # --- requests ---

    def start(self, frame: RequestFrame, sink: Sink, *, tenant: str = "", client: str = "") -> Ticket:
        """Take a request. Never blocks.

        Args:
            sink: called in the event loop with the request's events, in order, never before this has returned
                nor from within `cancel`; the last event is the only `End`.
            tenant: any text; prompts are cached for the same tenant only.
            client: whoever shares a tenant and this takes turns with all others when requests must wait.

        Raises:
            HeadraceError: the request is refused: `model_not_found`, `queue_full` (with `retry_after_ms`),
                `shutting_down`, or `engine_error` for a model that cannot be loaded.
            UnicodeEncodeError: the tenant has a lone surrogate, which is not text.
        """
        tenant.encode()
        try:
            group, options = self._resolve(frame)
            request = Request(
                RequestId(f"r{next(self._numbers)}"),
                frame,
                options,
                sink,
                tenant=tenant,
                accepted_s=asyncio.get_running_loop().time(),
                client=client,
                with_fingerprint=group.has_choice,
            )
            queue_position = group.admit(request)
        except HeadraceError as error:
            self._refused_total[error.code.value] += 1
            raise
        self._requests[request.rid] = (group, request)
        self._started_total += 1
        return Ticket(request.rid, options, queue_position)

    def submit(self, frame: RequestFrame, *, tenant: str = "", client: str = "") -> PoolStream:
        """Take a request and return its events as an async iterator.

        Raises:
            HeadraceError: as `start` does, here and not while iterating.
        """
        return PoolStream(
            lambda sink: self.start(frame, sink, tenant=tenant, client=client),
            lambda ticket, reason: self.cancel(ticket.rid, reason),
        )

    def cancel(self, rid: RequestId, reason: CancelReason) -> None:
        """Let a request end. Unknown and ended ids are no error; of several reasons the first counts.

        One that waits ends at once; one that runs ends when its engine has let it go. If its engine dies
        instead, it ends as cancelled all the same.
        """
        if (entry := self._requests.get(rid)) is not None:
            group, request = entry
            group.cancel(request, reason)

    def credit(self, rid: RequestId, tokens: int) -> None:
        """Allow a request with a `window` so many more tokens. Unknown and ended ids are no error."""
        if (entry := self._requests.get(rid)) is not None:
            group, request = entry
            group.credit(request, tokens)

    def _resolve(self, frame: RequestFrame) -> tuple[WorkerGroup, GenerationOptions]:
        self._check_entered()
        if self._state is not PoolState.OPEN:
            raise ServerError(ErrorCode.SHUTTING_DOWN, "the server is about to stop")
        wanted = frame.options.model
        name = self._config.models[0].name if wanted is None else self._canonical.get(wanted)
        if name is None:
            known = ", ".join(spec.name for spec in self._config.models)
            message = f"there is no model of that name; there are: {known}"
            raise RequestError(ErrorCode.MODEL_NOT_FOUND, message, param="model")
        options = frame.options.resolve(
            model=name,
            max_tokens=self._config.default_max_tokens,
            temperature=self._config.default_temperature,
            seed=secrets.randbits(53),  # what JavaScript can hold in a number
        )
        return self._groups[name], options

    def _check_entered(self) -> None:
        if self._state in (PoolState.NEW, PoolState.OPENING):
            raise RuntimeError("enter the pool before using it: async with Pool(...)")

    def _note_end(self, request: Request, end: End) -> None:
        del self._requests[request.rid]
        self._ended_total[end.status] += 1
        self._pulse()

    # --- the pool as a whole ---

    @property
    def ready(self) -> bool:
        """Whether a model can answer."""
        return any(group.is_ready for group in self._groups.values())

    def list_models(self) -> list[ModelInfo]:
        """Return the models as clients see them, the default first."""
        default = self._config.models[0].name
        return [group.model_info(default=name == default) for name, group in self._groups.items()]

    def statistics(self) -> PoolStatistics:
        """Return what there is to know about the pool at this moment."""
        return PoolStatistics(
            workers=tuple(
                WorkerStatistics(status, group.num_running(status.name))
                for group in self._groups.values()
                for status in group.workers
            ),
            queued={name: group.num_queued for name, group in self._groups.items()},
            in_flight=len(self._requests),
            started_total=self._started_total,
            ended_total=dict(self._ended_total),
            refused_total=dict(self._refused_total),
            recovered_total=sum(group.num_recovered for group in self._groups.values()),
        )

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until a model can answer.

        Raises:
            ModelLoadFailed: none ever will, or the pool is closed; the message says why, for the operator.
            TimeoutError: none could in time; the message says what the engine processes last died of.
        """
        self._check_entered()
        groups = self._groups.values()
        done = await self._wait_until(
            lambda: self.ready or self._state is PoolState.CLOSED or all(group.is_failed for group in groups),
            timeout_s,
        )
        if self._state is PoolState.CLOSED:
            raise ModelLoadFailed("the pool is closed")
        if self.ready:
            return
        failures = [
            f"{worker.name}: {worker.last_failure}"
            for group in groups
            for worker in group.workers
            if worker.last_failure is not None
        ]
        if done:
            raise ModelLoadFailed("; ".join(failures))
        raise TimeoutError("; ".join([f"no model was ready after {timeout_s:g} s", *failures]))

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests, and wait for those that are in; return whether all have ended."""
        if self._state is not PoolState.CLOSED:
            self._move_to(PoolState.DRAINING)
        return await self._wait_until(lambda: not self._requests, timeout_s)

    def _move_to(self, state: PoolState) -> None:
        if state not in _FOLLOWERS[self._state]:
            raise IllegalTransition(f"from {self._state.name} to {state.name}")
        self._state = state

    def _note_change(self, status: WorkerStatus) -> None:
        self._pulse()
        try:
            if self._on_change is not None:
                self._on_change(status)
        except Exception:
            _log.exception("whoever is told of changes failed: it hears nothing more")
            self._on_change = None

    def _pulse(self) -> None:
        """Wake those that wait for a condition."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._changed.wait()
        return condition()
