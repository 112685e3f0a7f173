"""All engine processes of one model, and the requests that wait for one of them or run in one.

A group owns its requests from admission to their end. Every request leaves through `_finish`, whatever the
way out: ended by its engine, cancelled while queued, its engine gone, its model failed.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..protocol.errors import BusyError, ErrorCode
from ..protocol.frames import ModelInfo, RequestId, SpecPrefillAbility
from ..protocol.messages import Cancel, CancelReason, End, Event, Progress
from .config import ModelSpec, PoolConfig
from .request import Request, RequestEvent, RequestState, engine_died, model_failed
from .router import WorkerLoad, choose_worker
from .supervisor import Supervisor, WorkerState, WorkerStatus

RETRY_AFTER_MIN_MS = 100
RETRY_AFTER_MAX_MS = 60_000
RETRY_AFTER_UNKNOWN_MS = 1000
"""The hint before any request has ended."""
_AVERAGE_WEIGHT = 0.2

_ModelState = Literal["loading", "ready", "restarting", "failed"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Seat:
    """A worker, and the requests that it has been given."""

    worker: Supervisor
    requests: dict[RequestId, Request] = field(default_factory=dict)
    num_tokens: int = 0


class WorkerGroup:
    """Requests in, events out, for one model. Implements `supervisor.Listener`.

    Args:
        on_end: called when a request has left the group, before its sink gets the `End`.
        on_change: called with a worker's status when its state or its loading has changed.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: PoolConfig,
        environment: Mapping[str, str],
        *,
        on_end: Callable[[Request, End], None],
        on_change: Callable[[WorkerStatus], None],
    ) -> None:
        self._spec = spec
        self._config = config
        self._on_end = on_end
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Request] = deque()
        self._seats: dict[str, _Seat] = {}
        self._ticker: asyncio.TimerHandle | None = None
        self._mean_run_s: float | None = None
        self._is_closing = False
        for index in range(spec.workers):
            worker = Supervisor(f"{spec.name}/{index}", spec, config, environment, self)
            self._seats[worker.name] = _Seat(worker)

    # --- processes ---

    def start(self) -> None:
        """Start the engine processes."""
        for seat in self._seats.values():
            seat.worker.start()

    async def stop(self) -> None:
        """Stop the engine processes within their deadlines; requests that still run end as cancelled."""
        self._is_closing = True
        await asyncio.gather(*(seat.worker.stop() for seat in self._seats.values()))

    def kill(self) -> None:
        """Kill what is left of the engine processes, and end what is left of the requests."""
        self._is_closing = True
        for seat in self._seats.values():
            seat.worker.kill()
            self._lose(seat)
        for request in list(self._queue):
            self._finish_here(request, request.cancelled_end("shutdown", self._loop.time()))

    @property
    def workers(self) -> list[WorkerStatus]:
        """What is known of each worker."""
        return [seat.worker.status for seat in self._seats.values()]

    @property
    def states(self) -> list[WorkerState]:
        """The state of each worker."""
        return [seat.worker.state for seat in self._seats.values()]

    @property
    def is_ready(self) -> bool:
        """Whether a worker can answer."""
        return WorkerState.READY in self.states

    @property
    def is_failed(self) -> bool:
        """Whether no worker will ever be able to answer."""
        return all(state is WorkerState.FAILED for state in self.states)

    @property
    def num_queued(self) -> int:
        """Requests that wait for a worker."""
        return len(self._queue)

    def num_running(self, worker: str) -> int:
        """Return how many requests a worker has."""
        return len(self._seats[worker].requests)

    def model_info(self, *, default: bool) -> ModelInfo:
        """Return the model as clients see it."""
        workers = self.workers
        info = next((worker.info for worker in workers if worker.info is not None), None)
        not_loaded: SpecPrefillAbility = {"supported": False, "reason": "not_loaded", "draft": None}
        return {
            "name": self._spec.name,
            "state": self._state_for_clients(has_been_ready=info is not None),
            "context_length": info.context_length if info else None,
            "chat": info.chat if info else None,
            "specprefill": info.specprefill if info else not_loaded,
            "default": default,
        }

    def _state_for_clients(self, *, has_been_ready: bool) -> _ModelState:
        if self.is_ready:
            return "ready"
        if self.is_failed:
            return "failed"
        return "restarting" if has_been_ready else "loading"

    # --- requests ---

    def admit(self, request: Request) -> int:
        """Take a request; return how many wait ahead of it.

        Raises:
            ServerError: the model cannot be loaded.
            BusyError: the queue is full.
        """
        if self.is_failed:
            raise model_failed(self._spec.name)
        if len(self._queue) >= self._config.max_queue and self._choose() is None:
            raise BusyError(
                ErrorCode.QUEUE_FULL,
                f"{len(self._queue)} requests wait for {self._spec.name!r}, and no more may",
                retry_after_ms=self._retry_after_ms(),
            )
        request.num_ahead = len(self._queue)
        self._queue.append(request)
        timeout_ms = request.options.timeout_ms
        if timeout_ms is not None:
            self._set_timer(request, timeout_ms / 1000, lambda: self.cancel(request, "deadline"))
        self._dispatch()
        if request.state is RequestState.QUEUED:
            # Not at once: the caller does not know yet that the request is in.
            self._loop.call_soon(self._report_queued, request, request.num_ahead)
            self._start_ticker()
        return request.num_ahead

    def cancel(self, request: Request, reason: CancelReason) -> None:
        """Let a request go: at once if it waits, else as soon as its engine has. The first reason counts."""
        match request.state:
            case RequestState.QUEUED:
                self._finish_here(request, request.cancelled_end(reason, self._loop.time()))
            case RequestState.RUNNING:
                request.apply(RequestEvent.CANCEL)
                request.cancel_reason = reason
                self._seat_of(request).worker.send(Cancel(request.rid, reason))
                limit_s = self._config.cancel_timeout_s
                self._set_timer(request, limit_s, lambda: self._note_unconfirmed(request))
            case RequestState.CANCELLING | RequestState.ENDED:
                pass

    def _seat_of(self, request: Request) -> _Seat:
        return next(seat for seat in self._seats.values() if request.rid in seat.requests)

    def _set_timer(self, request: Request, delay_s: float, callback: Callable[[], None]) -> None:
        request.timers.append(self._loop.call_later(delay_s, callback))

    def _note_unconfirmed(self, request: Request) -> None:
        # The watchdog of issue 4 starts here: an engine that does not let go is stuck and must be replaced.
        # Until then the request keeps its place, and the end of the pool or of the process ends it.
        limit_s = self._config.cancel_timeout_s
        _log.error("%s has not let request %s go for %.0f s", self._spec.name, request.rid, limit_s)

    # --- from the queue to the engines ---

    def _choose(self) -> str | None:
        loads = [
            WorkerLoad(name, seat.worker.state is WorkerState.READY, len(seat.requests), seat.num_tokens)
            for name, seat in self._seats.items()
        ]
        return choose_worker(loads, max_in_flight=self._config.max_in_flight)

    def _dispatch(self) -> None:
        """Give waiting requests to workers, first come first served, until there are none or no room."""
        while self._queue and not self._is_closing and (name := self._choose()) is not None:
            request, seat, now_s = self._queue.popleft(), self._seats[name], self._loop.time()
            request.apply(RequestEvent.DISPATCH)
            request.dispatched_s = now_s
            seat.requests[request.rid] = request
            seat.num_tokens += request.estimated_tokens
            seat.worker.send(request.submit_message(now_s))

    def _retry_after_ms(self) -> int:
        """Guess when the queue will next have room: requests end one after another, so many at a time."""
        if self._mean_run_s is None:
            return RETRY_AFTER_UNKNOWN_MS
        num_running = sum(len(seat.requests) for seat in self._seats.values())
        next_end_ms = int(self._mean_run_s * 1000 / max(1, num_running))
        return min(max(next_end_ms, RETRY_AFTER_MIN_MS), RETRY_AFTER_MAX_MS)

    # --- progress of those that wait ---

    def _start_ticker(self) -> None:
        if self._ticker is None and self._queue:
            self._ticker = self._loop.call_later(self._config.progress_interval_s, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        for num_ahead, request in enumerate(list(self._queue)):
            self._report_queued(request, num_ahead)
        self._start_ticker()

    def _report_queued(self, request: Request, num_ahead: int) -> None:
        """Tell a request what it waits for: its model, or those ahead of it.

        `load`: as far as the worker is that has come furthest, in whatever unit that stage of loading counts.
        `queue`: `processed` of the `total` requests that were ahead at first have left.
        """
        if request.state is not RequestState.QUEUED:
            return
        if self.is_ready:
            processed = max(0, request.num_ahead - num_ahead)
            progress = Progress(request.rid, "queue", processed, request.num_ahead)
        else:
            stages = [worker.loading for worker in self.workers if worker.loading is not None]
            done, total = (stages[0].done, stages[0].total) if stages else (0, None)
            progress = Progress(request.rid, "load", done, total)
        request.deliver(progress)

    # --- from the engines ---

    def on_events(self, worker: Supervisor, events: list[Event]) -> None:
        """Give events to the requests that they belong to; those of requests that have ended are dropped."""
        requests = self._seats[worker.name].requests
        has_room = False
        for event in events:
            request = requests.get(event.rid)
            if request is None:
                continue
            if isinstance(event, End):
                self._finish(request, event)
                request.deliver(event)
                has_room = True
            else:
                request.deliver(event)
        if has_room:
            self._dispatch()

    def on_state(self, worker: Supervisor, previous: WorkerState) -> None:
        """Note that a worker has come or gone."""
        if previous is WorkerState.READY:
            self._lose(self._seats[worker.name])
        if self.is_failed:
            for request in list(self._queue):
                end = request.failed_end(model_failed(self._spec.name), self._loop.time())
                self._finish_here(request, end)
        if worker.state is WorkerState.READY:
            self._dispatch()
        self._on_change(worker.status)

    def on_loading(self, worker: Supervisor) -> None:
        """Note that a worker's loading has advanced."""
        self._on_change(worker.status)

    def _lose(self, seat: _Seat) -> None:
        """End the requests of a worker that is no longer there."""
        for request in list(seat.requests.values()):
            self._finish_here(request, self._lost_end(request, self._loop.time()))

    def _lost_end(self, request: Request, now_s: float) -> End:
        """Return the end of a request whose engine has gone. Issue 4 puts it back into the queue instead."""
        if request.cancel_reason is not None:
            return request.cancelled_end(request.cancel_reason, now_s)
        if self._is_closing:
            return request.cancelled_end("shutdown", now_s)
        return request.failed_end(engine_died(), now_s)

    # --- the way out ---

    def _finish_here(self, request: Request, end: End) -> None:
        """End a request that no engine ends. Its sink hears of it in the event loop's next round."""
        self._finish(request, end)
        self._loop.call_soon(request.deliver, end)

    def _finish(self, request: Request, end: End) -> None:
        """Release a request: the one place where it leaves the queue, its worker and the pool."""
        was_queued = request.state is RequestState.QUEUED
        request.apply(RequestEvent.END)
        for timer in request.timers:
            timer.cancel()
        request.timers.clear()
        if was_queued:
            self._queue.remove(request)
        else:
            seat = self._seat_of(request)
            del seat.requests[request.rid]
            seat.num_tokens -= request.estimated_tokens
            self._note_run(request)
        self._on_end(request, end)

    def _note_run(self, request: Request) -> None:
        if request.dispatched_s is not None:
            run_s = self._loop.time() - request.dispatched_s
            mean_s = run_s if self._mean_run_s is None else self._mean_run_s
            self._mean_run_s = mean_s + _AVERAGE_WEIGHT * (run_s - mean_s)
