"""What can go wrong, as a caller sees it.

    ClientError               code, message, param, retryable, started, request_id, rid
    ├── ConnectError          no connection could be made: nothing was started
    │   └── Unauthorized      no valid token
    ├── ConnectionLost        it was there and is gone, and could not be had back
    │   └── ResumeFailed      it is back, and the stream is not
    ├── RequestRefused        the server did not take the request: nothing was started
    │   ├── InvalidRequest    it must be changed first: see `param`
    │   └── ServerBusy        try again, after `retry_after_ms` if that is there
    ├── RequestFailed         it ran, and ended without a whole answer: see `result`
    │   └── DeadlineExceeded  `timeout_ms` ran out
    └── ProtocolError         the server said what PROTOCOL.md does not allow

`retryable`: sending the same request again makes sense. `started`: the request ran, or may have run: the
client itself never sends such a request twice.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..protocol.errors import RETRYABLE, ErrorBody, ErrorCode

if TYPE_CHECKING:
    from .events import Result


class ClientError(Exception):
    """Base of all errors of this package.

    Args:
        code: what went wrong, for programs: one of PROTOCOL.md's codes, or `connect_failed`,
            `connection_lost`, `client_closed`, `detached` or `protocol_error`.
        message: what went wrong, for people.
        param: the field that is at fault; None if none is.
        retryable: whether sending the same request again makes sense.
        started: whether the request ran, or may have run.
        request_id: the id that this client gave the request; None if it concerns no request.
        rid: the server's id for it, for its logs; None if it has none yet.
        retry_after_ms: when trying again makes sense; None says nothing about it.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retryable: bool = False,
        started: bool = False,
        request_id: str | None = None,
        rid: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message
        self.param = param
        self.retryable = retryable
        self.started = started
        self.request_id = request_id
        self.rid = rid
        self.retry_after_ms = retry_after_ms


class ConnectError(ClientError):
    """No connection could be made. Nothing was started."""


class Unauthorized(ConnectError):
    """The server wants another token."""


class ConnectionLost(ClientError):
    """The connection is gone, and could not be had back in time, or not with this request."""


class ResumeFailed(ConnectionLost):
    """The connection is back, and the server has not kept the stream. `reason` says why."""

    reason: str | None = None


class RequestRefused(ClientError):
    """The request was not taken. Nothing was started."""


class InvalidRequest(RequestRefused):
    """The request was not taken and would not be the next time: change it."""


class ServerBusy(RequestRefused):
    """There is no room now: try again later."""


class RequestFailed(ClientError):
    """The request ran and ended without a whole answer. `result` holds what there was of it."""

    result: "Result | None" = None


class DeadlineExceeded(RequestFailed):
    """`timeout_ms` ran out before the answer was whole."""


class ProtocolError(ClientError):
    """The server said what PROTOCOL.md does not allow: a fault of the server or of this client."""


def refusal(body: ErrorBody | Mapping[str, Any], request_id: str | None) -> RequestRefused | Unauthorized:
    """Return the exception of an `error` frame."""
    code = str(body.get("code"))
    retryable = bool(body.get("retryable"))
    kind: type[RequestRefused | Unauthorized] = ServerBusy if retryable else InvalidRequest
    if code == ErrorCode.UNAUTHORIZED:
        kind = Unauthorized
    elif code in (ErrorCode.INTERNAL, ErrorCode.ENGINE_ERROR):
        kind = RequestRefused
    return kind(
        code,
        str(body.get("message")),
        param=body.get("param"),
        retryable=retryable,
        request_id=request_id,
        retry_after_ms=body.get("retry_after_ms"),
    )


def resume_refusal(body: ErrorBody | Mapping[str, Any], request_id: str, rid: str | None) -> ResumeFailed:
    """Return the exception of an `error` frame that answers a `resume`."""
    error = ResumeFailed(
        str(body.get("code")),
        f"the stream cannot be resumed: {body.get('message')}",
        retryable=True,
        started=True,
        request_id=request_id,
        rid=rid,
    )
    error.reason = body.get("reason")
    return error


def failure(body: ErrorBody, result: "Result") -> RequestFailed:
    """Return the exception of a `done` frame with an error."""
    kind = DeadlineExceeded if body["code"] == ErrorCode.DEADLINE_EXCEEDED else RequestFailed
    error = kind(
        body["code"],
        body["message"],
        param=body.get("param"),
        retryable=bool(body.get("retryable")),
        started=True,
        request_id=result.request_id,
        rid=result.rid,
        retry_after_ms=body.get("retry_after_ms"),
    )
    error.result = result
    return error


def invalid(
    code: ErrorCode, message: str, param: str | None, request_id: str | None = None
) -> InvalidRequest:
    """Return the exception of a request that is not sent, because it would be refused."""
    return InvalidRequest(
        code.value, message, param=param, retryable=code in RETRYABLE, request_id=request_id
    )
