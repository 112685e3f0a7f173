"""Errors that reach a client, and the close codes of a connection. PROTOCOL.md, "Errors" and "Closing".

    HeadraceError               code, message, param, retryable: what the wire shows
    ├── RequestError            the client's fault: change the frame before trying again
    │   └── FrameError          the frame itself could not be read; carries its id where one was found
    ├── BusyError               nobody's fault: try again later (`retry_after_ms`)
    └── ServerError             ours: the engine, the pool or the gateway failed
    IllegalTransition           a bug in Headrace: never reaches a client

Messages are written for the client. No exception text of a library, no path and no secret goes into one.
"""

from enum import IntEnum, StrEnum
from typing import NotRequired

from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12


class ErrorCode(StrEnum):
    """Every code that an `error` frame or `done.error` can carry."""

    INVALID_JSON = "invalid_json"
    INVALID_FRAME = "invalid_frame"
    INVALID_PARAM = "invalid_param"
    UNKNOWN_TYPE = "unknown_type"
    NOT_SERVED = "not_served"
    DUPLICATE_ID = "duplicate_id"
    MODEL_NOT_FOUND = "model_not_found"
    CONTEXT_TOO_LONG = "context_too_long"
    QUEUE_FULL = "queue_full"
    TOO_MANY_IN_FLIGHT = "too_many_in_flight"
    UNAUTHORIZED = "unauthorized"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    SLOW_CONSUMER = "slow_consumer"
    SHUTTING_DOWN = "shutting_down"
    ENGINE_DIED = "engine_died"
    ENGINE_ERROR = "engine_error"
    RESUME_FAILED = "resume_failed"
    INTERNAL = "internal"


RETRYABLE = frozenset(
    {
        ErrorCode.QUEUE_FULL,
        ErrorCode.TOO_MANY_IN_FLIGHT,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.SLOW_CONSUMER,
        ErrorCode.SHUTTING_DOWN,
        ErrorCode.ENGINE_DIED,
    }
)
"""Codes after which sending the same request again makes sense."""


class CloseCode(IntEnum):
    """WebSocket close codes that the server sends (RFC 6455, section 7.4; 4000–4999 are private use)."""

    NORMAL = 1000
    FRAME_TOO_LARGE = 1009
    RESTART = 1012
    TOO_MANY_BAD_FRAMES = 4400
    UNAUTHORIZED = 4401
    FORBIDDEN_ORIGIN = 4403
    SLOW_CONSUMER = 4508


class ErrorBody(TypedDict):
    """An error as the wire shows it: alone in an `error` frame, or as `error` in `done`."""

    code: str
    message: str
    param: str | None
    retryable: bool
    retry_after_ms: NotRequired[int]
    reason: NotRequired[str]
    """Why a `resume` failed."""


class HeadraceError(Exception):
    """Base of all errors that a client may see.

    Args:
        code: what went wrong, for programs.
        message: what went wrong, for people; no internals.
        param: the field of the frame that is at fault, such as ``messages[1].content``; None if none is.
        retry_after_ms: when trying again makes sense, in milliseconds; None says nothing about it.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms

    @property
    def retryable(self) -> bool:
        """Whether sending the same request again makes sense."""
        return self.code in RETRYABLE

    def body(self) -> ErrorBody:
        """Return the error as the wire shows it."""
        body: ErrorBody = {
            "code": self.code.value,
            "message": self.message,
            "param": self.param,
            "retryable": self.retryable,
        }
        if self.retry_after_ms is not None:
            body["retry_after_ms"] = self.retry_after_ms
        return body


class RequestError(HeadraceError):
    """The client's fault: the same frame will fail again."""


class FrameError(RequestError):
    """A frame that could not be taken; `frame_id` is its id where one could be read."""

    def __init__(
        self, code: ErrorCode, message: str, *, param: str | None = None, frame_id: str | None = None
    ) -> None:
        super().__init__(code, message, param=param)
        self.frame_id = frame_id


class BusyError(HeadraceError):
    """Nobody's fault: there is no room now."""


class ServerError(HeadraceError):
    """Our fault: a part of the server failed."""


class IllegalTransition(RuntimeError):
    """An event that the state table does not allow: a bug in Headrace; the state is unchanged."""
