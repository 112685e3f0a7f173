"""One request in the pool: its state, what was delivered of it, and its end where no engine tells one."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import assert_never

from ..protocol.errors import ErrorBody, ErrorCode, IllegalTransition, ServerError
from ..protocol.frames import RequestFrame, RequestId, Status
from ..protocol.messages import CancelReason, Delta, End, Event, Progress, Submit
from ..protocol.options import ChatInput, GenerationOptions
from ..protocol.stream import cancelled_error, end_without_engine

Sink = Callable[[Event], None]
"""Takes the events of a request, in the event loop, in order; the last is its only `End`."""

CHARS_PER_TOKEN = 4
"""A guess for the router: the pool has no tokenizer."""

_log = logging.getLogger(__name__)


class RequestState(Enum):
    """Where a request stands in the pool."""

    QUEUED = auto()
    RUNNING = auto()
    """An engine process has it."""
    CANCELLING = auto()
    """An engine process has it and was told to let it go."""
    ENDED = auto()


class RequestEvent(Enum):
    """What can happen to a request."""

    DISPATCH = auto()
    CANCEL = auto()
    END = auto()


_S, _E = RequestState, RequestEvent

# A request whose engine has died ends. Going back to QUEUED with the text so far is issue 4's.
TRANSITIONS: Mapping[tuple[RequestState, RequestEvent], RequestState] = MappingProxyType(
    {
        (_S.QUEUED, _E.DISPATCH): _S.RUNNING,
        (_S.QUEUED, _E.END): _S.ENDED,
        (_S.RUNNING, _E.CANCEL): _S.CANCELLING,
        (_S.RUNNING, _E.END): _S.ENDED,
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
    ) -> None:
        self.rid = rid
        self.frame = frame
        self.options = options
        self.tenant = tenant
        self.accepted_s = accepted_s
        self.dispatched_s: float | None = None
        self.num_ahead = 0
        """Requests that waited ahead of it when it was accepted."""
        self.cancel_reason: CancelReason | None = None
        self.estimated_tokens = _estimate_tokens(frame, options)
        self.num_tokens = 0
        """Tokens delivered: the sum of `n` over its deltas."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.timers: list[asyncio.TimerHandle] = []
        """Cancelled when it ends."""
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

    def deliver(self, event: Event) -> None:
        """Hand an event to the sink, which must not raise; a broken one gets nothing more."""
        match event:
            case Delta():
                self.num_tokens += event.n
            case Progress():
                if event.prompt_tokens is not None:
                    self.prompt_tokens = event.prompt_tokens
                self.cached_tokens = max(self.cached_tokens, event.cached)
            case End():
                pass
            case _:
                assert_never(event)
        try:
            self._sink(event)
        except Exception:
            _log.exception("the receiver of request %s failed: it hears nothing more", self.rid)
            self._sink = _ignore

    def submit_message(self, now_s: float) -> Submit:
        """Return the message that starts the request in an engine."""
        return Submit(
            rid=self.rid,
            input=self.frame.input,
            options=self.options,
            tenant=self.tenant,
            queue_ms=(now_s - self.accepted_s) * 1000,
            max_tokens_is_default=self.frame.options.max_tokens is None,
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


def engine_died() -> ServerError:
    """Return the error of a request whose engine process has gone."""
    return ServerError(ErrorCode.ENGINE_DIED, "the engine process died; another is being started")


def model_failed(model: str) -> ServerError:
    """Return the error of a request for a model that cannot be loaded; the log says why."""
    return ServerError(ErrorCode.ENGINE_ERROR, f"the model {model!r} could not be loaded")


def _estimate_tokens(frame: RequestFrame, options: GenerationOptions) -> int:
    if isinstance(frame.input, ChatInput):
        num_chars = sum(len(message.text) for message in frame.input.messages)
        num_prompt = num_chars // CHARS_PER_TOKEN
    elif isinstance(frame.input.prompt, str):
        num_prompt = len(frame.input.prompt) // CHARS_PER_TOKEN
    else:
        num_prompt = len(frame.input.prompt)
    return num_prompt + (options.max_tokens or 0)


def _ignore(event: Event) -> None:
    pass
