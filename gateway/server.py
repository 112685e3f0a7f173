"""The gateway: listens, lets clients in, and stops within a known time.

A request's way in: `_answer_http` (host, origin, path, token), then for the WebSocket `_serve`, which runs a
`Connection` until it ends.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from ..pool import Pool
from ..protocol.codec import encode
from ..protocol.errors import CloseCode, ErrorCode, RequestError
from ..protocol.frames import PROTOCOL, ErrorFrame, HelloFrame
from .access import ANYONE, AccessRules
from .config import GatewayConfig
from .connection import Connection
from .doors import Doors
from .http import PAGES, STREAM_PATH, Facts, error_response
from .listeners import bind_unix, file_identity, remove_unix, tls_context
from .metrics import Metrics
from .page_files import page_files
from .pool_metrics import PoolCollector
from .resumables import ResumableStreams, ResumeStatistics
from .sockets import GatewaySocket
from .tenants import Tenant

FEATURES = ("completion", "chat", "tools", "logprobs", "echo", "resume", "credit")
"""Parts of the protocol that this server serves, for `hello`."""

_BACKLOG = 1024
"""Connections that the system holds until they are accepted."""

_log = logging.getLogger(__name__)


class Gateway:
    """A listening gateway in front of a pool: ``async with Gateway(pool, config, …) as gateway``.

    Leaving the block stops it gracefully, as `stop` says. The pool is the caller's and must outlive it.

    Args:
        pool: where requests go.
        config: the gateway's configuration.
        server_version: for `hello` and HTTP headers.
        max_queue: the pool's, for `hello`.
        max_tokens: what a request gets that names no `max_tokens`, for `hello`.
    """

    def __init__(
        self, pool: Pool, config: GatewayConfig, *, server_version: str, max_queue: int, max_tokens: int
    ) -> None:
        self._pool = pool
        self._config = config
        self._version = f"headrace/{server_version}"
        self._max_queue = max_queue
        self._max_tokens = max_tokens
        self._access = AccessRules(config.access, config.listen)
        self._epoch = secrets.token_hex(8)
        self._connections: set[Connection] = set()
        self._numbers = itertools.count(1)
        self._doors = Doors(config.limits.max_connections, config.limits.max_connections_per_address)
        self._tenants = {token.name: Tenant(token) for token in (ANYONE, *config.access.tokens)}
        self._resumables = ResumableStreams(config.resume, pool.cancel, self._epoch)
        self._listeners: list[Server] = []
        self._unix_identity: tuple[int, int] | None = None
        self._is_draining = False
        self._pages = {**PAGES, **page_files()}
        self._metrics = Metrics([PoolCollector(pool.statistics, self._gauges)])

    # --- starting and stopping ---

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start to listen; calling it again does nothing.

        Raises:
            OSError: the address is taken, or is none of this machine's.
        """
        if self._listeners:
            return
        listen = self._config.listen
        try:
            if listen.tcp:
                context = tls_context(listen)
                self._listeners.append(await self._listen(host=listen.host, port=listen.port, ssl=context))
            if listen.unix_path is not None:
                path = Path(listen.unix_path)
                bound = bind_unix(path)
                self._unix_identity = file_identity(path)
                self._listeners.append(await self._listen(unix=True, sock=bound))
        except BaseException:
            self.abort()
            raise

    async def _listen(self, **where: Any) -> Server:
        limits, deadlines = self._config.limits, self._config.deadlines
        # At its debug level websockets logs headers, and with them tokens.
        logger = logging.getLogger(f"{__name__}.websockets")
        logger.setLevel(logging.WARNING)
        return await serve(
            self._serve,
            select_subprotocol=_select_subprotocol,
            compression=None,
            process_request=self._answer_http,
            server_header=self._version,
            open_timeout=deadlines.open_timeout_s,
            ping_interval=deadlines.ping_interval_s,
            ping_timeout=deadlines.ping_timeout_s,
            close_timeout=deadlines.close_timeout_s,
            max_size=limits.max_frame_bytes,
            max_queue=limits.max_unread_frames,
            write_limit=limits.write_buffer_bytes,
            logger=logger,
            create_connection=cast(type[ServerConnection], self._make_socket),
            backlog=_BACKLOG,
            **where,
        )

    def _make_socket(self, *args: Any, **options: Any) -> GatewaySocket:
        return GatewaySocket(*args, **options).enter(self._doors, self._answer_foreign)

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._listeners, "start it first"
        port: int = self._listeners[0].sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """The WebSocket's URL; without TCP, the path of the Unix socket."""
        listen = self._config.listen
        if not listen.tcp:
            return f"ws+unix://{listen.unix_path}:{STREAM_PATH}"
        scheme = "ws" if listen.tls_cert is None else "wss"
        host = f"[{listen.host}]" if ":" in listen.host else listen.host
        return f"{scheme}://{host}:{self.port}{STREAM_PATH}"

    @property
    def resumables(self) -> ResumeStatistics:
        """Streams that can be resumed."""
        return self._resumables.statistics()

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Requests that have not ended, by the name of the token that they came with."""
        return {name: tenant.in_flight for name, tenant in self._tenants.items()}

    @property
    def num_connections(self) -> int:
        """WebSockets that are open."""
        return len(self._connections)

    async def stop(self) -> None:
        """Stop: say so, let running requests end, cancel the rest, close. Never longer than configured.

        Takes at most `drain_timeout_s` + `cancel_timeout_s` + `goodbye_timeout_s`. Every accepted request
        gets its last frame, if its client reads it within that time. Calling it again does nothing.
        """
        if not self._listeners or self._is_draining:
            return
        self._is_draining = True
        deadlines, loop = self._config.deadlines, asyncio.get_running_loop()
        sent_by_s = loop.time() + deadlines.drain_timeout_s
        self._resumables.begin_stop()  # no connection is let in any more
        for connection in self._connections:
            connection.goaway("shutdown", deadlines.drain_timeout_s)
        if not await self._pool.drain(deadlines.drain_timeout_s):
            sent_by_s = loop.time() + deadlines.cancel_timeout_s
            for connection in self._connections:
                connection.cancel_all("shutdown")
            if not await self._pool.drain(deadlines.cancel_timeout_s):
                for connection in self._connections:
                    connection.end_all("shutdown")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(sent_by_s):
                await asyncio.gather(*(connection.wait_sent() for connection in self._connections))
        for connection in self._connections:
            connection.begin_close(CloseCode.RESTART, "the server stops")
        self._close_listeners()
        try:
            async with asyncio.timeout(deadlines.goodbye_timeout_s):
                await asyncio.gather(*(listener.wait_closed() for listener in self._listeners))
        except TimeoutError:
            self.abort()

    def abort(self) -> None:
        """Drop every connection and stop listening, at once."""
        self._is_draining = True
        for connection in self._connections:
            connection.abort()
        self._close_listeners()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close(close_connections=False)
        self._resumables.close()
        if self._config.listen.unix_path is not None:
            remove_unix(Path(self._config.listen.unix_path), self._unix_identity)

    # --- one client ---

    def _answer_http(self, socket: ServerConnection, request: Request) -> Response | None:
        """Return the response to a request that is no WebSocket of ours; None lets it in."""
        if cast(GatewaySocket, socket).is_refused:
            return self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE, "too_many_connections", "too many connections are open"
            )
        if not self._access.allows_host(request.headers):
            return self._refuse(HTTPStatus.FORBIDDEN, "forbidden_host", "this Host is not allowed here")
        if not self._access.allows_origin(request.headers):
            return self._refuse(HTTPStatus.FORBIDDEN, "forbidden_origin", "this Origin is not allowed here")
        path = request.path.partition("?")[0]
        if path == STREAM_PATH:
            if self._is_draining:
                return self._refuse(
                    HTTPStatus.SERVICE_UNAVAILABLE, ErrorCode.SHUTTING_DOWN, "the server is about to stop"
                )
            return self._answer_full(request)
        page = self._pages.get(path)
        if page is None:
            return self._refuse(HTTPStatus.NOT_FOUND, "not_found", "there is nothing at this path")
        if not page.is_public and self._access.identify(request.headers) is None:
            return self._refuse(
                HTTPStatus.UNAUTHORIZED,
                ErrorCode.UNAUTHORIZED,
                "a valid token is needed",
                **{"WWW-Authenticate": "Bearer"},
            )
        models, metrics = self._pool.list_models(), self._metrics.text
        return page.render(Facts(self._pool.ready, self._is_draining, models, metrics))

    def _answer_foreign(self) -> Response:
        """Return the response to a request with another method than GET."""
        message = f"only GET is served here: this server speaks WebSocket at {STREAM_PATH}"
        return self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed", message, Allow="GET")

    def _refuse(self, status: HTTPStatus, code: str, message: str, **headers: str) -> Response:
        self._metrics.count_refused(code)
        return error_response(status, code, message, headers)

    def _gauges(self) -> dict[str, float]:
        resumables = self._resumables.statistics()
        return {
            "ready": self._pool.ready and not self._is_draining,
            "connections": len(self._connections),
            "streams_resumable": resumables.held,
            "streams_detached": resumables.detached,
        }

    def _answer_full(self, request: Request) -> Response | None:
        """Return the response to a tenant that has all the connections it may have; None lets it in."""
        token = self._access.identify(request.headers)
        if token is None or self._tenants[token.name].may_connect:
            return None  # without a token it is turned away where a browser can see why
        return self._refuse(
            HTTPStatus.TOO_MANY_REQUESTS, "too_many_connections", "too many connections with this token"
        )

    async def _serve(self, socket: ServerConnection) -> None:
        assert isinstance(socket, GatewaySocket)  # create_connection says so
        assert socket.request is not None  # the handshake is done
        token = self._access.identify(socket.request.headers)
        if token is None:
            await self._turn_away(socket)
            return
        tenant = self._tenants[token.name]
        connection = Connection(
            socket,
            self._pool,
            self._config,
            self._hello(),
            key=f"c{next(self._numbers)}",
            tenant=tenant,
            resumables=self._resumables,
            metrics=self._metrics,
        )
        self._connections.add(connection)
        self._metrics.count_connection()
        tenant.begin_connection()
        try:
            if self._is_draining:  # since the handshake
                connection.begin_close(CloseCode.RESTART, "the server stops")
            await connection.run()
        finally:
            tenant.end_connection()
            self._connections.discard(connection)

    async def _turn_away(self, socket: GatewaySocket) -> None:
        """Say why, then close: a browser learns nothing from an HTTP error before the upgrade."""
        error = RequestError(ErrorCode.UNAUTHORIZED, "a valid token is needed")
        self._metrics.count_refused(error.code)
        frame: ErrorFrame = {"type": "error", "id": None, **error.body()}
        try:
            async with asyncio.timeout(self._config.deadlines.close_timeout_s):
                await socket.send(encode(frame), text=True)
                await socket.close(CloseCode.UNAUTHORIZED, "not authorised")
        except ConnectionClosed:
            pass
        except TimeoutError:
            socket.abort()

    def _hello(self) -> HelloFrame:
        limits, resume = self._config.limits, self._config.resume
        return {
            "type": "hello",
            "protocol": PROTOCOL,
            "server": self._version,
            "epoch": self._epoch,
            "models": self._pool.list_models(),
            "limits": {
                "max_frame_bytes": limits.max_frame_bytes,
                "max_in_flight": limits.max_in_flight_per_connection,
                "max_queue": self._max_queue,
                "max_tokens": self._max_tokens,
                "detach_timeout_ms": round(resume.detach_timeout_s * 1000),
                "replay_ms": round(resume.replay_s * 1000),
                "replay_bytes": resume.replay_bytes,
            },
            "heartbeat_s": self._config.deadlines.ping_interval_s,
            "features": list(FEATURES),
        }


def _select_subprotocol(socket: ServerConnection, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    """Take ours where it is offered, else none: a plain client need not offer any."""
    ours = Subprotocol(PROTOCOL)
    return ours if ours in offered else None
