"""All engine processes of one model, and the requests that wait for one of them or run in one.

A group owns its requests from admission to their end. A request whose engine process has gone goes back to
the head of the line and on in the next one (`_lose`). Every request leaves through `_finish`, whatever the
way out: ended by its engine, cancelled while queued, too many engines gone, its model failed.
"""

import asyncio
from collections.abc import Callable, Mapping

from ..protocol.errors import BusyError, ErrorCode
from ..protocol.frames import ModelInfo
from ..protocol.messages import Cancel, CancelReason, Credit, End, Event, Progress
from .config import ModelSpec, PoolConfig
from .line import Line
from .pace import Pace
from .quarantine import blame
from .request import Request, RequestEvent, RequestState, engine_died, model_failed
from .router import choose_worker
from .seat import Seat
from .states import WorkerState, WorkerStatus, model_info
from .supervisor import Supervisor

_LONG_READ_TOKENS = 4096


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
        self._line = Line()
        self._parked: list[Request] = []
        self._seats: dict[str, Seat] = {}
        self._ticker: asyncio.TimerHandle | None = None
        self._pace = Pace()
        self._num_recovered = 0
        self._is_closing = False
        for index in range(spec.workers):
            worker = Supervisor(f"{spec.name}/{index}", spec, config, environment, self)
            self._seats[worker.name] = Seat(worker, config.max_paused)

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
        for request in [*self._line, *self._parked]:
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
        """Requests that wait for a worker, or for credit before they need one again."""
        return len(self._line) + len(self._parked)

    @property
    def num_recovered(self) -> int:
        """How often a request went back into the line because its engine process had gone."""
        return self._num_recovered

    @property
    def has_choice(self) -> bool:
        """Whether there are several workers."""
        return len(self._seats) > 1

    def num_running(self, worker: str) -> int:
        """Return how many requests a worker has."""
        return len(self._seats[worker].requests)

    def model_info(self, *, default: bool) -> ModelInfo:
        """Return the model as clients see it."""
        return model_info(self._spec.name, self.workers, default=default)

    # --- requests ---

    def admit(self, request: Request) -> int:
        """Take a request; return how many wait ahead of it.

        Raises:
            ServerError: the model cannot be loaded.
            BusyError: the queue is full.
        """
        if self.is_failed:
            raise model_failed(self._spec.name)
        # Who has nothing waiting yet finds a place though others have filled the line.
        max_queue = self._config.max_queue * (1 if self._line.num_of(request.client_key) else 2)
        if self._line.num_fresh >= max_queue and not self._has_room_for_fresh():
            raise BusyError(
                ErrorCode.QUEUE_FULL,
                f"{self._line.num_fresh} requests wait for {self._spec.name!r}, and no more may",
                retry_after_ms=self._retry_after_ms(),
            )
        request.num_ahead = self._line.push(request)
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
            case RequestState.QUEUED | RequestState.PARKED:
                self._finish_here(request, request.cancelled_end(reason, self._loop.time()))
                if request.is_recovering:
                    self._dispatch()  # Fresh ones had left room for it.
            case RequestState.RUNNING:
                request.apply(RequestEvent.CANCEL)
                request.cancel_reason = reason
                self._seat_of(request).worker.send(Cancel(request.rid, reason))
                limit_s = self._config.cancel_timeout_s
                self._set_timer(request, limit_s, lambda: self._give_up_engine(request))
            case RequestState.CANCELLING | RequestState.ENDED:
                pass

    def credit(self, request: Request, num_tokens: int) -> None:
        """Allow a request so many more tokens; one without a `window` needs none."""
        if request.window is None or request.state is RequestState.ENDED:
            return
        request.window.grant(num_tokens)
        self._watch_credit(request)
        if request.state is RequestState.PARKED:
            self._parked.remove(request)
            request.apply(RequestEvent.CREDIT)
            self._line.push(request)
            self._dispatch()
            self._start_ticker()
        elif request.state is RequestState.RUNNING:
            self._pass_credit(self._seat_of(request), request)

    def _pass_credit(self, seat: Seat, request: Request) -> bool:
        """Tell the engine of new credit; return whether the request's pause has made room for another."""
        if request.window is None:
            return False
        if request.state is RequestState.RUNNING and (due := request.window.take_due(request.num_tokens)):
            seat.worker.send(Credit(request.rid, due))
        has_room = seat.note_pause(request)
        if has_room:
            self._loop.call_soon(self._shed_paused, seat)  # not at once: credit may be on its way
        return has_room

    def _shed_paused(self, seat: Seat) -> None:
        for request in seat.paused_in_excess():
            self.cancel(request, "slow_consumer")

    def _watch_credit(self, request: Request) -> None:
        """Let a request go, in the end, whose client allows no more tokens."""
        if not request.lacks_credit:
            request.stop_credit_timer()
        elif request.credit_timer is None:
            limit_s = self._config.paused_timeout_s
            request.credit_timer = self._loop.call_later(limit_s, self.cancel, request, "slow_consumer")

    def _seat_of(self, request: Request) -> Seat:
        return next(seat for seat in self._seats.values() if request.rid in seat.requests)

    def _set_timer(self, request: Request, delay_s: float, callback: Callable[[], None]) -> None:
        request.timers.append(self._loop.call_later(delay_s, callback))

    def _give_up_engine(self, request: Request) -> None:
        """Have an engine process replaced that does not let a cancelled request go."""
        limit_s = self._config.cancel_timeout_s
        worker = self._seat_of(request).worker
        worker.give_up_process(f"has not let request {request.rid} go for {limit_s:.0f} s")

    # --- from the line to the engines ---

    def _has_room_for_fresh(self) -> bool:
        """Whether there is room beyond what those need that have lost their engine."""
        limit = self._config.max_in_flight
        ready = (seat for seat in self._seats.values() if seat.worker.state is WorkerState.READY)
        return sum(max(0, limit - seat.num_active) for seat in ready) > self._line.num_recovering

    def _dispatch(self) -> None:
        """Give waiting requests to workers, until there are none, or no room."""
        if self._is_closing:
            return
        for request in sorted(self._line.recovering, key=_recovery_order):
            if not self._try_worker(request):
                break
        while (fresh := self._line.first_fresh) is not None and self._has_room_for_fresh():
            if not self._try_worker(fresh):
                break

    def _try_worker(self, request: Request) -> bool:
        """Give a request to the best worker that can take it; return whether there is one."""
        loads = [seat.load(request) for seat in self._seats.values()]
        name = choose_worker(loads, max_in_flight=self._config.max_in_flight)
        if name is None:
            return False
        seat, now_s = self._seats[name], self._loop.time()
        self._line.serve(request)
        request.apply(RequestEvent.DISPATCH)
        if request.num_tokens == 0:
            request.dispatched_s = now_s
        seat.add(request)
        seat.worker.send(request.submit_message(now_s))
        self._start_ticker()
        return True

    def _retry_after_ms(self) -> int:
        loads_s = [worker.info.load_s for worker in self.workers if worker.info is not None]
        num_running = sum(seat.num_active for seat in self._seats.values())
        return self._pace.retry_after_ms(num_running, is_ready=self.is_ready, loads_s=loads_s)

    # --- progress of those that wait ---

    @property
    def _awaiting_token(self) -> list[Request]:
        running = (request for seat in self._seats.values() for request in seat.requests.values())
        return [request for request in running if request.awaits_token]

    def _start_ticker(self) -> None:
        if self._ticker is None:
            self._ticker = self._loop.call_later(self._config.progress_interval_s, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        queued, running = list(self._line), self._awaiting_token
        for num_ahead, request in enumerate(queued):
            self._report_queued(request, num_ahead)
        for request in running:
            request.repeat_progress()
        if queued or running:
            self._start_ticker()

    def _report_queued(self, request: Request, num_ahead: int) -> None:
        """Tell a request what it waits for, if it still does."""
        if request.state is RequestState.QUEUED:
            loading = next((worker.loading for worker in self.workers if worker.loading is not None), None)
            request.deliver(request.waiting_progress(num_ahead, loading, is_ready=self.is_ready))

    # --- from the engines ---

    def on_events(self, worker: Supervisor, events: list[Event]) -> None:
        """Give events to the requests that they belong to; those of requests that have ended are dropped."""
        seat, now_s = self._seats[worker.name], self._loop.time()
        has_room = False
        for event in events:
            request = seat.requests.get(event.rid)
            if request is None:
                continue
            if isinstance(event, End):
                if event.usage["prompt_tokens"]:
                    seat.note_read(request)
                end = request.settled(event, now_s)
                self._finish(request, end)
                request.deliver(end)
                has_room = True
            else:
                held = request.record.num_deaths
                request.deliver(event, now_s)
                self._watch_credit(request)
                has_room |= self._pass_credit(seat, request)
                has_room |= bool(held and self._line.num_recovering)
        if has_room:
            self._dispatch()

    def on_state(self, worker: Supervisor, previous: WorkerState) -> None:
        """Note that a worker has come or gone."""
        seat = self._seats[worker.name]
        if previous.has_requests and not worker.state.has_requests:
            self._lose(seat)
        if worker.state is WorkerState.DRAINING and not seat.requests:
            worker.end_drained()
        if self.is_failed:
            for request in [*self._line, *self._parked]:
                end = request.failed_end(model_failed(self._spec.name), self._loop.time())
                self._finish_here(request, end)
        self._dispatch()
        self._on_change(worker.status)

    def on_loading(self, worker: Supervisor) -> None:
        """Note that a worker's loading has advanced."""
        self._on_change(worker.status)

    def may_replace(self, worker: Supervisor) -> bool:
        """Tell whether all others are there: workers that share a limit reach it at about the same time."""
        others = (seat.worker.state for seat in self._seats.values() if seat.worker is not worker)
        return all(state in (WorkerState.READY, WorkerState.FAILED) for state in others)

    def has_requests(self, worker: Supervisor) -> bool:
        """Tell whether a worker was given requests that have not ended."""
        return bool(self._seats[worker.name].requests)

    # --- when an engine process has gone ---

    def _lose(self, seat: Seat) -> None:
        """Have the requests of a process that has gone go on in another, or end."""
        seat.forget()
        requests = list(seat.requests.values())
        blamed = [request.record for request in seat.running]
        if seat.worker.was_replaced:
            blamed = [record for record in blamed if record.note_replaced()]
        blame(blamed, max_deaths=self._config.max_engine_deaths_per_request)
        for request in requests:
            if (end := self._end_of_lost(request)) is not None:
                self._finish_here(request, end)
                continue
            seat.remove(request)
            self._num_recovered += 1
            request.lose_engine()
            if request.state is RequestState.PARKED:
                self._parked.append(request)
            else:
                self._line.push(request)
            request.deliver(Progress(request.rid, "recover", 0, None))
        self._start_ticker()

    def _end_of_lost(self, request: Request) -> End | None:
        """Return the end of a request that lost its engine and is not gone on with; None: it goes on."""
        now_s, num_deaths = self._loop.time(), request.record.num_deaths
        if request.cancel_reason is not None:
            return request.cancelled_end(request.cancel_reason, now_s)
        if self._is_closing:
            return request.cancelled_end("shutdown", now_s)
        if num_deaths >= self._config.max_engine_deaths_per_request or not request.can_recover:
            return request.failed_end(engine_died(num_deaths), now_s)
        return None

    # --- the way out ---

    def _finish_here(self, request: Request, end: End) -> None:
        """End a request that no engine ends. Its sink hears of it in the event loop's next round."""
        self._finish(request, end)
        self._loop.call_soon(request.deliver, end)

    def _finish(self, request: Request, end: End) -> None:
        """Release a request: the one place where it leaves the queue, its worker and the pool."""
        was = request.state
        request.apply(RequestEvent.END)
        request.stop_timers()
        match was:
            case RequestState.QUEUED:
                self._line.remove(request)
            case RequestState.PARKED:
                self._parked.remove(request)
            case _:
                seat = self._seat_of(request)
                seat.remove(request)
                if request.dispatched_s is not None:
                    self._pace.note_run(self._loop.time() - request.dispatched_s)
                if not seat.requests:
                    seat.worker.end_drained()
        self._on_end(request, end)


def _recovery_order(request: Request) -> tuple[bool, int, bool, int]:
    """Return a sort key for requests that have lost their engine: nobody waits for a long prompt.

    Of prompts that take about as long, suspects are first, and of those the ones with the fewest tokens: the
    likeliest to kill an engine, while there are few others in it.
    """
    record = request.record
    is_long = request.num_to_read // _LONG_READ_TOKENS
    return record.needs_solitude, is_long, not record.is_suspect, request.num_tokens
