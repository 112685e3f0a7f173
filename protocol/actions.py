"""What a session asks of the shell around it, in the order in which it must be done."""

from dataclasses import dataclass

from .client_frames import RequestFrame, RequestId, ResumeFrame
from .errors import CloseCode
from .messages import CancelReason


@dataclass(frozen=True, slots=True)
class StartRequest:
    """Give the frame to the pool, then call `accept` or `refuse`."""

    frame: RequestFrame


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Tell the pool that a request should end."""

    rid: RequestId
    reason: CancelReason


@dataclass(frozen=True, slots=True)
class CreditRequest:
    """Tell the pool that a request may have so many more tokens."""

    rid: RequestId
    tokens: int


@dataclass(frozen=True, slots=True)
class ResumeStream:
    """Find the stream, take it from its connection, then call `attach` or `refuse`."""

    frame: ResumeFrame


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Send what is buffered, then close the WebSocket."""

    code: CloseCode
    reason: str


Action = StartRequest | CancelRequest | CreditRequest | ResumeStream | CloseConnection
