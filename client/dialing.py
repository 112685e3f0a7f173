"""How a connection is made: URLs, Unix sockets, tokens, and what a refused handshake means."""

import os
import ssl
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidMessage,
    InvalidStatus,
    InvalidURI,
)

from ..protocol.errors import CloseCode, ErrorCode
from ..protocol.frames import PROTOCOL
from .errors import ConnectError, Unauthorized

DEFAULT_URL = "ws://127.0.0.1:8765/v1/stream"
STREAM_PATH = "/v1/stream"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_FATAL_CLOSE_CODES = (CloseCode.UNAUTHORIZED, CloseCode.FORBIDDEN_ORIGIN, CloseCode.TOO_MANY_BAD_FRAMES)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is.

    Args:
        url: `ws://`, `wss://`, or `ws+unix://SOCKET[:PATH]`; without a path: `/v1/stream`.
        unix: the path of a Unix socket, in place of the URL's host and port.
        token: the server's bearer token.
        tls: for `wss://`: None: the system's certificates.
    """

    url: str = DEFAULT_URL
    unix: str | None = None
    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None

    def target(self) -> tuple[str, str | None]:
        """Return the URL to ask for, and the Unix socket to ask at.

        Raises:
            ConnectError: it is no URL of a server.
        """
        url, unix = self.url, self.unix
        if url.startswith("ws+unix://"):
            unix, _, path = url.removeprefix("ws+unix://").partition(":")
            url = f"ws://localhost{path}"
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname or (self.unix == "" or unix == ""):
            raise ConnectError(
                "connect_failed", f"{self.url!r} is no URL of the kind {DEFAULT_URL} or ws+unix:///SOCKET"
            )
        if parts.path in ("", "/"):
            url = parts._replace(path=STREAM_PATH).geturl()
        if unix is not None and self.unix is not None:
            url = f"ws://localhost{urlsplit(url).path}"
        return url, unix


async def dial(address: Address, *, timeout_s: float, max_message_bytes: int | None) -> ClientConnection:
    """Return a connection, its opening handshake done.

    Raises:
        ConnectError: there is none to be had; `retryable` says whether later there may be.
    """
    url, unix = address.target()
    headers = {} if address.token is None else {"Authorization": f"Bearer {address.token}"}
    options: dict[str, Any] = {
        "additional_headers": headers,
        "subprotocols": [PROTOCOL],
        "compression": None,
        "open_timeout": timeout_s,
        "close_timeout": 2.0,
        "max_size": max_message_bytes,
    }
    if address.tls is not None and url.startswith("wss:"):
        options["ssl"] = address.tls
    try:
        if unix is not None:
            return await unix_connect(unix, url, **options)
        if urlsplit(url).hostname in _LOOPBACK:
            options["proxy"] = None  # a proxy's loopback is another machine's
        return await connect(url, **options)
    except InvalidStatus as error:
        raise _refused_handshake(error, address.url) from error
    except InvalidMessage as error:
        raise ConnectError(
            "connect_failed", f"what answers at {address.url} speaks no HTTP", retryable=True
        ) from error
    except (InvalidURI, InvalidHandshake, ValueError) as error:
        raise ConnectError("connect_failed", f"cannot connect to {address.url}: {error}") from error
    except TimeoutError as error:
        raise ConnectError(
            "connect_failed", f"{address.url} has not answered in {timeout_s:g} s", retryable=True
        ) from error
    except ssl.SSLError as error:
        what = getattr(error, "verify_message", None) or error.reason or "TLS failed"
        raise ConnectError("connect_failed", f"cannot connect to {address.url}: {what}") from error
    except OSError as error:
        where = unix or address.url
        raise ConnectError(
            "connect_failed", f"cannot connect to {where}: {_say(error)}", retryable=True
        ) from error


def _say(error: OSError) -> str:
    # asyncio puts a text of its own, with the address, in place of the system's.
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)


def _refused_handshake(error: InvalidStatus, url: str) -> ConnectError:
    status = error.response.status_code
    if status == 401:
        return Unauthorized(ErrorCode.UNAUTHORIZED, "the server needs a valid token")
    retryable = status == 429 or status >= 500
    return ConnectError("connect_failed", f"{url} answered with HTTP {status}", retryable=retryable)


def is_final(closed: ConnectionClosed) -> bool:
    """Return whether another connection would end in the same way."""
    if is_too_long(closed):
        return True
    return closed.rcvd is not None and closed.rcvd.code in _FATAL_CLOSE_CODES


def is_too_long(closed: ConnectionClosed) -> bool:
    """Return whether this side closed, because the server sent a message longer than may be read."""
    return closed.sent is not None and closed.sent.code == CloseCode.FRAME_TOO_LARGE
