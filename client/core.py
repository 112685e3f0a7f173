"""A client's connection without its socket: ids, routing, what to send, what a lost connection means.

The verbs (after websockets' own sans-I/O core): `receive` takes a message and returns whom it concerns,
`next_frame` gives the next message to send, `opened`, `lost` and `give_up` tell of the socket. The shell
around it owns the socket, the clock and the waiting.

A request that has been sent is never sent again. When the connection is lost, those that were not sent wait
for the next one, those that can be resumed are resumed, and all others end with `ConnectionLost`.
"""

import itertools
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import orjson

from ..protocol.frames import HelloFrame, ModelInfo
from .errors import (
    ClientError,
    ConnectionLost,
    ProtocolError,
    ServerBusy,
    refusal,
    resume_refusal,
)
from .options import encode_request
from .stream_core import OnProgress, RequestState, StreamCore

_log = logging.getLogger("headrace.client")


@dataclass(frozen=True, slots=True)
class FlowConfig:
    """How requests are sent that don't say otherwise, where the server can."""

    window_tokens: int | None = 4096
    """Tokens of a stream that may wait for its reader; past it the server pauses it. None: no limit."""
    resume: bool = True
    """Ask for streams that outlive a lost connection."""


class CoreState(Enum):
    """Where the connection stands."""

    CONNECTING = auto()
    """There is none, or no `hello` yet."""
    OPEN = auto()
    CLOSED = auto()
    """There will be none any more."""


class Answer:
    """What comes back for a `models` frame or a `ping`."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.models: list[ModelInfo] | None = None
        self.is_there = False
        self.error: ClientError | None = None


Touched = StreamCore | Answer
"""Whom a message concerns."""


class ClientCore:
    """The rules of a client's side."""

    def __init__(self, flow: FlowConfig) -> None:
        self._flow = flow
        self._state = CoreState.CONNECTING
        self._hello: HelloFrame | None = None
        self._numbers = itertools.count(1)
        self._streams: dict[str, StreamCore] = {}
        self._answers: dict[str, Answer] = {}
        self._unsent: deque[StreamCore] = deque()
        self._control: deque[str] = deque()
        self._warned: set[str] = set()
        self._goaway = False
        self._end: ClientError | None = None

    # --- for callers ---

    @property
    def state(self) -> CoreState:
        """Where the connection stands."""
        return self._state

    @property
    def hello(self) -> HelloFrame | None:
        """The newest `hello`."""
        return self._hello

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def start(self, fields: Mapping[str, Any], on_progress: OnProgress | None = None) -> StreamCore:
        """Take a request; it is sent as soon as there is a connection.

        Args:
            fields: its frame, without an id.

        Raises:
            InvalidRequest: the server would refuse it, or it is too long.
            ServerBusy: as many requests as the server allows run on this connection.
            ClientError: there will be no connection any more.
        """
        if self._end is not None:
            raise self._end
        assert self._hello is not None, "there has been a connection"
        limits, features = self._hello["limits"], self._hello["features"]
        request_id = f"c{next(self._numbers)}"
        frame = {**fields, "id": request_id}
        if self._flow.resume and "resume" in features:
            frame.setdefault("detach", True)
        if self._flow.window_tokens and "credit" in features and frame.get("stream", True):
            frame.setdefault("window", self._flow.window_tokens)
        text = encode_request(frame, limits["max_frame_bytes"])
        if len(self._streams) >= limits["max_in_flight"]:
            message = f"{limits['max_in_flight']} requests run on this connection, and no more may"
            raise ServerBusy("too_many_in_flight", message, retryable=True, request_id=request_id)
        stream = StreamCore(frame, text, on_progress)
        self._streams[request_id] = stream
        self._unsent.append(stream)
        return stream

    def cancel(self, stream: StreamCore) -> None:
        """Ask for the end of a request; calling it again does nothing."""
        if stream.is_ended or stream.is_cancelling:
            return
        stream.is_cancelling = True
        if stream.state is RequestState.UNSENT:
            self._unsent.remove(stream)
            stream.end_unsent()
            del self._streams[stream.id]
        elif self._state is CoreState.OPEN:
            self._send(type="cancel", id=stream.id)

    def abandon(self, stream: StreamCore, error: ClientError) -> None:
        """End a request here, whatever the server does; its late frames are ignored."""
        if not stream.is_ended:
            stream.end(error)
            self._streams.pop(stream.id, None)

    def note_read(self, stream: StreamCore) -> None:
        """Let the server go on with a stream whose reader has read."""
        if self._state is CoreState.OPEN and stream.state is RequestState.RUNNING:
            num_tokens = stream.take_credit()
            if num_tokens:
                self._send(type="credit", id=stream.id, tokens=num_tokens)

    def ask_models(self) -> Answer:
        """Ask what models there are."""
        answer = self._ask()
        self._send(type="models", id=answer.key)
        return answer

    def ping(self) -> Answer:
        """Ask for a `pong`."""
        answer = self._ask()
        self._send(type="ping", nonce=answer.key)
        return answer

    def _ask(self) -> Answer:
        if self._end is not None:
            raise self._end
        answer = Answer(f"q{next(self._numbers)}")
        if self._state is not CoreState.OPEN:
            raise ConnectionLost("connection_lost", "there is no connection now", retryable=True)
        self._answers[answer.key] = answer
        return answer

    # --- for the shell ---

    def next_frame(self) -> str | None:
        """Return the next message to send, or None when there is nothing to send now."""
        if self._state is not CoreState.OPEN:
            return None
        if self._control:
            return self._control.popleft()
        if self._unsent and not self._goaway:
            stream = self._unsent.popleft()
            stream.sent()
            return stream.text
        return None

    @property
    def has_outgoing(self) -> bool:
        """Whether `next_frame` would return anything."""
        is_open = self._state is CoreState.OPEN
        return is_open and bool(self._control or (self._unsent and not self._goaway))

    def receive(self, data: str | bytes) -> list[Touched]:
        """Take one message; return whom it concerns.

        Raises:
            ProtocolError: it is no frame.
            Unauthorized, RequestRefused: the server does not let this client in.
        """
        try:
            frame = orjson.loads(data)
            kind = frame["type"]
            if not isinstance(frame.get("id"), str | None):
                raise TypeError
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise ProtocolError("protocol_error", "the server sent something that is no frame") from None
        if self._state is CoreState.CONNECTING:
            self._open(kind, frame)
            return []
        match kind:
            case "accepted" | "progress" | "delta" | "done" | "resumed" | "detached":
                return self._route(kind, frame)
            case "error":
                return self._refused(frame)
            case "models" | "pong":
                return self._answered(frame)
            case "goaway":
                self._goaway = True
            case _:
                self._warn_once(str(kind))
        return []

    def lost(self) -> list[Touched]:
        """Note that the connection is gone; return what ended with it."""
        if self._state is not CoreState.OPEN:
            return []
        self._state = CoreState.CONNECTING
        self._goaway = False
        self._control.clear()
        touched: list[Touched] = list(self._fail_answers(_lost(started=False)))
        for stream in list(self._streams.values()):
            if stream.state is RequestState.UNSENT:
                continue
            if stream.resume_token is not None:
                stream.lose()
            else:
                stream.end(_lost(started=True, stream=stream))
                del self._streams[stream.id]
                touched.append(stream)
        return touched

    def give_up(self, error: ClientError) -> list[Touched]:
        """Note that there will be no connection any more; return what ended with that."""
        if self._state is CoreState.CLOSED:
            return []
        self._state = CoreState.CLOSED
        self._end = error
        touched: list[Touched] = list(self._fail_answers(error))
        for stream in self._streams.values():
            started = stream.state is not RequestState.UNSENT
            stream.end(_lost(started=started, stream=stream, cause=error))
            touched.append(stream)
        self._streams.clear()
        self._unsent.clear()
        return touched

    # --- messages in ---

    def _open(self, kind: str, frame: dict[str, Any]) -> None:
        if kind == "error":
            raise refusal(frame, None)
        if kind != "hello":
            raise ProtocolError("protocol_error", f"the server's first frame is {kind!r}, not hello")
        self._hello = HelloFrame(**frame)  # type: ignore[typeddict-item]  # newer servers may say more
        self._state = CoreState.OPEN
        for stream in self._streams.values():
            if stream.state is RequestState.LOST:
                stream.resume()
                self._send(type="resume", id=stream.id, token=stream.resume_token, after_seq=stream.last_seq)
                if stream.is_cancelling:
                    self._send(type="cancel", id=stream.id)

    def _route(self, kind: str, frame: Any) -> list[Touched]:
        stream = self._streams.get(frame.get("id"))
        if stream is None:
            return []  # late, for a request that has ended here
        try:
            match kind:
                case "accepted":
                    stream.accept(frame)
                case "progress":
                    stream.progress(frame)
                case "delta":
                    stream.delta(frame)
                case "resumed":
                    stream.resumed(frame)
                    # What was read meanwhile could not be said.
                    self.note_read(stream)
                case "detached":
                    stream.end(_detached(stream))
                case _:
                    stream.done(frame)
        except (ProtocolError, KeyError, TypeError) as error:
            self._break_off(stream, error)
        if stream.is_ended:
            self._streams.pop(stream.id, None)
        return [stream]

    def _break_off(self, stream: StreamCore, error: Exception) -> None:
        """End a stream that is out of step with its server."""
        self._send(type="cancel", id=stream.id)
        if not isinstance(error, ProtocolError):
            error = ProtocolError(
                "protocol_error", "the server sent a frame without its fields", started=True
            )
        error.request_id, error.rid = stream.id, stream.rid
        if not stream.is_ended:
            stream.end(error)

    def _refused(self, frame: dict[str, Any]) -> list[Touched]:
        stream = self._streams.get(frame.get("id") or "")
        if stream is None:
            answer = self._answers.pop(frame.get("id") or "", None)
            if answer is None:
                _log.warning("the server refused a frame: %s (%s)", frame.get("message"), frame.get("code"))
                return []
            answer.error = refusal(frame, answer.key)
            return [answer]
        if stream.state is RequestState.SENT:
            stream.end(refusal(frame, stream.id))
        elif stream.state is RequestState.RESUMING:
            stream.end(resume_refusal(frame, stream.id, stream.rid))
        else:
            # A credit or cancel of a running request was refused; the request itself is unaffected.
            _log.warning("the server refused a frame: %s (%s)", frame.get("message"), frame.get("code"))
            return []
        del self._streams[stream.id]
        return [stream]

    def _answered(self, frame: dict[str, Any]) -> list[Touched]:
        answer = self._answers.pop(str(frame.get("id") or frame.get("nonce")), None)
        if answer is None:
            return []
        answer.models = frame.get("models")
        answer.is_there = True
        return [answer]

    def _fail_answers(self, error: ClientError) -> list[Answer]:
        answers = list(self._answers.values())
        self._answers.clear()
        for answer in answers:
            answer.error = error
        return answers

    def _warn_once(self, kind: str) -> None:
        if kind not in self._warned and len(self._warned) < 64:
            self._warned.add(kind)
            _log.warning("frames of the type %r are unknown to this client, and ignored", kind)

    def _send(self, **fields: Any) -> None:
        self._control.append(orjson.dumps(fields).decode())


def _lost(
    *, started: bool, stream: StreamCore | None = None, cause: ClientError | None = None
) -> ConnectionLost:
    error = ConnectionLost(
        "connection_lost" if cause is None else cause.code,
        "the connection was lost" if cause is None else cause.message,
        retryable=True if cause is None else cause.retryable,
        started=started,
        request_id=None if stream is None else stream.id,
        rid=None if stream is None else stream.rid,
    )
    error.__cause__ = cause
    return error


def _detached(stream: StreamCore) -> ConnectionLost:
    return ConnectionLost(
        "detached",
        "the stream goes on over another connection",
        started=True,
        request_id=stream.id,
        rid=stream.rid,
    )
