"""One request in the pool: its state, what was delivered of it, and its end where no engine tells one.

A request outlives its engine. It keeps the tokens that were delivered; the next engine gets them with the
prompt and goes on after them. For its client, the whole is one stream: `settled` says what its end counts.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from types import MappingProxyType
from typing import assert_never

from ..protocol.errors import ErrorBody, ErrorCode, IllegalTransition, ServerError
from ..protocol.frames import RequestFrame, RequestId, Status
from ..protocol.messages import CancelReason, Delta, End, Event, Loading, Progress, Submit
from ..protocol.options import ChatInput, GenerationOptions
from ..protocol.stream import cancelled_error, end_without_engine
from .prefix import CHARS_PER_TOKEN, Fingerprint, fingerprint
from .quarantine import Record
from .window import Window

Sink = Callable[[Event], None]
"""Takes the events of a request, in the event loop, in order; the last is its only `End`."""

_log = logging.getLogger(__name__)


class RequestState(Enum):
    """Where a request stands in the pool."""

    QUEUED = auto()
    RUNNING = auto()
    """An engine process has it."""
    CANCELLING = auto()
    """An engine process has it and was told to let it go."""
    PARKED = auto()
    """Its engine process has gone, and its client allows no more tokens: it needs none until then."""
    ENDED = auto()


class RequestEvent(Enum):
    """What can happen to a request."""

    DISPATCH = auto()
    CANCEL = auto()
    LOSE = auto()
    """Its engine process has gone, and another is to go on with it."""
    PARK = auto()
    """The same, but not yet."""
    CREDIT = auto()
    END = auto()


_S, _E = RequestState, RequestEvent

TRANSITIONS: Mapping[tuple[RequestState, RequestEvent], RequestState] = MappingProxyType(
    {
        (_S.QUEUED, _E.DISPATCH): _S.RUNNING,
        (_S.QUEUED, _E.END): _S.ENDED,
        (_S.RUNNING, _E.CANCEL): _S.CANCELLING,
        (_S.RUNNING, _E.LOSE): _S.QUEUED,
        (_S.RUNNING, _E.PARK): _S.PARKED,
        (_S.RUNNING, _E.END): _S.ENDED,
        (_S.PARKED, _E.CREDIT): _S.QUEUED,
        (_S.PARKED, _E.END): _S.ENDED,
        (_S.CANCELLING, _E.CANCEL): _S.CANCELLING,
        (_S.CANCELLING, _E.END): _S.ENDED,
    }
)


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the pool answers when it has taken a request."""

    rid: RequestId
    options: GenerationOptions
    """Those in force, with the defaults filled in."""
    queue_position: int
    """Requests that wait ahead of it; 0: it has started or is next."""


class Request:
    """A request between its acceptance and its end. Its group alone changes its state."""

    def __init__(
        self,
        rid: RequestId,
        frame: RequestFrame,
        options: GenerationOptions,
        sink: Sink,
        *,
        tenant: str,
        accepted_s: float,
        client: str = "",
        with_fingerprint: bool = False,
    ) -> None:
        self.rid = rid
        self.frame = frame
        self.options = options
        self.tenant = tenant
        self.client_key = (tenant, client)
        """Whose turns it takes in the line."""
        self.accepted_s = accepted_s
        self.dispatched_s: float | None = None
        """When the engine got it that made its first token; until there is one, the last engine."""
        self.first_token_s: float | None = None
        self.num_ahead = 0
        """Requests that waited ahead of it when it was accepted."""
        self.num_passed = 0
        """How many of them have left, as its client was told."""
        self.cancel_reason: CancelReason | None = None
        self._estimated_prompt_tokens = _estimate_prompt_tokens(frame)
        self.estimated_tokens = self._estimated_prompt_tokens + (options.max_tokens or 0)
        """What it may cost an engine, for the router."""
        self.num_tokens = 0
        """Tokens delivered: the sum of `n` over its deltas."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated: list[int] = []
        """The ids of the tokens delivered: where another engine goes on."""
        self.window = None if options.window is None else Window(options.window)
        self.record = Record()
        """What deaths of engines are held against it."""
        self.is_recovering = False
        """Whether its engine has gone, and no token has come of another yet."""
        self.fingerprint: Fingerprint = ()
        if with_fingerprint and options.cache_prompt:
            self.fingerprint = fingerprint(frame.input, tenant)
        self._was_recovered = False
        """Whether its first token came of another engine than its last."""
        self._has_deltas = False
        self._was_thinned = False
        """Whether its tokens were made from a thinned prompt."""
        self._progress: Progress | None = None
        """The latest."""
        self._is_silent = False
        """Whether nothing has been delivered since the last `repeat_progress`."""
        self.timers: list[asyncio.TimerHandle] = []
        """Cancelled when it ends."""
        self.credit_timer: asyncio.TimerHandle | None = None
        """There while it lacks credit."""
        self._state = RequestState.QUEUED
        self._sink = sink

    @property
    def state(self) -> RequestState:
        """Where the request stands."""
        return self._state

    def apply(self, event: RequestEvent) -> None:
        """Change the state as the table says."""
        try:
            self._state = TRANSITIONS[self._state, event]
        except KeyError:
            raise IllegalTransition(f"{event.name} in {self._state.name}") from None

    @property
    def can_recover(self) -> bool:
        """Whether another engine could go on: not without the ids of all tokens delivered."""
        return len(self.generated) == self.num_tokens

    @property
    def is_paused(self) -> bool:
        """Whether its engine waits for credit."""
        return self.window is not None and self.window.is_paused(self.num_tokens)

    @property
    def lacks_credit(self) -> bool:
        """Whether its client allows no more tokens."""
        return self.window is not None and self.window.left(self.num_tokens) <= 0

    @property
    def awaits_token(self) -> bool:
        """Whether an engine has it that has made no token for it yet: its client must not hear nothing."""
        return self._state is RequestState.RUNNING and (self.num_tokens == 0 or self.is_recovering)

    @property
    def num_to_read(self) -> int:
        """About how many tokens another engine must read before it can go on."""
        return (self.prompt_tokens or self._estimated_prompt_tokens) + self.num_tokens

    def lose_engine(self) -> None:
        """Go back to the queue, or wait for credit: the engine has gone. The client has yet to be told."""
        self.apply(RequestEvent.PARK if self.lacks_credit else RequestEvent.LOSE)
        self.is_recovering = True
        self.record.tokens_here = 0
        self._was_recovered = self.num_tokens > 0

    def stop_credit_timer(self) -> None:
        """Note that its client allows more tokens, or need not."""
        if self.credit_timer is not None:
            self.credit_timer.cancel()
            self.credit_timer = None

    def stop_timers(self) -> None:
        """Forget all timers: it has ended."""
        self.stop_credit_timer()
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()

    def deliver(self, event: Event, now_s: float = 0.0) -> None:
        """Hand an event to the sink, which must not raise; a broken one gets nothing more."""
        match event:
            case Delta():
                self._note_delta(event, now_s)
            case Progress():
                event = self._note_progress(event)
            case End():
                pass
            case _:
                assert_never(event)
        self._is_silent = False
        try:
            self._sink(event)
        except Exception:
            _log.exception(
                "the receiver of request %s failed: it hears nothing more",
                self.rid,
                extra={"rid": self.rid},
            )
            self._sink = _ignore

    def _note_delta(self, event: Delta, now_s: float) -> None:
        # The sink may merge later deltas into this one: what is kept of it is copied here.
        self.num_tokens += event.n
        self.generated += event.tokens
        self._has_deltas = True
        self._was_thinned = self._was_thinned or event.is_thinned
        self.record.note_tokens(event.n)
        if event.n:
            self.is_recovering = False
            if self.first_token_s is None:
                self.first_token_s = now_s

    def _note_progress(self, event: Progress) -> Progress:
        if event.prompt_tokens is not None:
            self.prompt_tokens = event.prompt_tokens
        if not self._was_recovered:
            self.cached_tokens = max(self.cached_tokens, event.cached)
        self._progress = replace(event, phase="recover") if self.is_recovering else event
        return self._progress

    def waiting_progress(self, num_ahead: int, loading: Loading | None, *, is_ready: bool) -> Progress:
        """Return what it waits for in the line: its model, or those ahead of it.

        `load`: as far as a worker is, in whatever unit that stage of loading counts.
        `queue`: `processed` of the `total` requests that were ahead at first have left.
        `recover`: its engine process, or another one; how long that takes, nobody knows.
        """
        if self.is_recovering:
            return Progress(self.rid, "recover", 0, None)
        if is_ready:
            self.num_passed = max(self.num_passed, self.num_ahead - num_ahead)
            return Progress(self.rid, "queue", self.num_passed, self.num_ahead)
        done, total = (0, None) if loading is None else (loading.done, loading.total)
        return Progress(self.rid, "load", done, total)

    def repeat_progress(self) -> None:
        """Say again where it stands if nothing was said since the last call: its engine may be stuck."""
        if self._is_silent:
            at_head = Progress(self.rid, "queue", self.num_ahead, self.num_ahead)
            self.deliver(self._progress or at_head)
        self._is_silent = True

    def submit_message(self, now_s: float) -> Submit:
        """Return the message that starts the request in an engine, or has it go on there."""
        options = self.options
        if self._has_deltas and options.echo:
            options = options.model_copy(update={"echo": False})  # The client has the prompt.
        return Submit(
            rid=self.rid,
            input=self.frame.input,
            options=options,
            tenant=self.tenant,
            queue_ms=(now_s - self.accepted_s) * 1000,
            max_tokens_is_default=self.frame.options.max_tokens is None,
            generated=list(self.generated),
            stays_dense=bool(self.generated) and not self._was_thinned,
            credit=None if self.window is None else self.window.begin(self.num_tokens),
        )

    def settled(self, end: End, now_s: float) -> End:
        """Return the end that an engine reported, as it is for the whole stream.

        The wait, the time to the first token and the cached tokens are those of the engine that made the
        first token. Decoding lasts from that token to the end, whatever happened between. How long scoring
        and prefill took, that engine would have said at its end: unknown. `specprefill` is the last one's.
        """
        if not self._was_recovered or self.dispatched_s is None or self.first_token_s is None:
            return end
        decode_s, num_tokens = now_s - self.first_token_s, end.usage["completion_tokens"]
        # An engine that has not come to it yet doesn't know how long the prompt is.
        num_prompt = end.usage["prompt_tokens"] or self.prompt_tokens
        specprefill = end.specprefill
        if not end.usage["prompt_tokens"]:
            num_new = num_prompt - self.cached_tokens
            specprefill = {
                **specprefill,
                "prompt_tokens": num_prompt,
                "uncached_tokens": num_new,
                "kept_tokens": num_new,
            }
        return replace(
            end,
            specprefill=specprefill,
            usage={
                "prompt_tokens": num_prompt,
                "cached_tokens": self.cached_tokens,
                "completion_tokens": num_tokens,
                "total_tokens": num_prompt + num_tokens,
            },
            timings={
                "queue_ms": _ms(self.dispatched_s - self.accepted_s),
                "score_ms": None,
                "prefill_ms": None,
                "ttft_ms": _ms(self.first_token_s - self.accepted_s),
                "decode_ms": _ms(decode_s),
                "tokens_per_s": _ratio(num_tokens - 1, decode_s),
            },
        )

    def cancelled_end(self, reason: CancelReason, now_s: float) -> End:
        """Return the end of a request that nobody runs and that was cancelled."""
        return self._end("cancelled", reason, cancelled_error(reason), now_s)

    def failed_end(self, error: ServerError, now_s: float) -> End:
        """Return the end of a request that no engine can run, or whose engine is gone."""
        return self._end("failed", error.code.value, error.body(), now_s)

    def _end(self, status: Status, reason: str, error: ErrorBody | None, now_s: float) -> End:
        until_s = now_s if self.dispatched_s is None else self.dispatched_s
        return end_without_engine(
            self.rid,
            self.options,
            status=status,
            reason=reason,
            error=error,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.num_tokens,
            queue_ms=(until_s - self.accepted_s) * 1000,
        )


def engine_died(num_deaths: int) -> ServerError:
    """Return the error of a request that is not tried again after so many engines died under it."""
    what = "the engine process" if num_deaths <= 1 else f"{num_deaths} engine processes, one after another,"
    message = f"{what} died, or had to be replaced, while this request was running"
    return ServerError(ErrorCode.ENGINE_DIED, message)


def model_failed(model: str) -> ServerError:
    """Return the error of a request for a model that cannot be loaded, or not be kept; the log says why."""
    return ServerError(ErrorCode.ENGINE_ERROR, f"the model {model!r} could not be loaded or kept running")


def _estimate_prompt_tokens(frame: RequestFrame) -> int:
    if isinstance(frame.input, ChatInput):
        return sum(len(message.text) for message in frame.input.messages) // CHARS_PER_TOKEN
    if isinstance(frame.input.prompt, str):
        return len(frame.input.prompt) // CHARS_PER_TOKEN
    return len(frame.input.prompt)


def _ms(duration_s: float) -> float:
    return round(duration_s * 1000, 3)


def _ratio(num_tokens: int, duration_s: float) -> float | None:
    return round(num_tokens / duration_s, 3) if num_tokens > 0 and duration_s > 0 else None


def _ignore(event: Event) -> None:
    pass
