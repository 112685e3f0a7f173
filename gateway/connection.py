"""One client's connection: a thin shell around `protocol.session`, which decides all that a client observes.

The reader parses and dispatches and never waits for work, so that cancels and pings are seen at once. The
outbox writes. Whatever way a connection ends, `run` tells the pool that its requests have nobody left.
"""

import asyncio
import logging

from websockets.exceptions import ConnectionClosed

from ..pool import Pool
from ..protocol.errors import CloseCode, ErrorCode, HeadraceError, ServerError
from ..protocol.frames import HelloFrame, RequestFrame, RequestId
from ..protocol.messages import CancelReason, Event
from ..protocol.session import (
    Action,
    CancelRequest,
    CloseConnection,
    Session,
    SessionLimits,
    SessionState,
    StartRequest,
)
from .config import GatewayConfig
from .outbox import Outbox
from .sockets import GatewaySocket

_log = logging.getLogger(__name__)


class Connection:
    """Serves one WebSocket from its first frame to its last.

    Args:
        socket: the WebSocket, its opening handshake done.
        pool: where requests go.
        config: limits and deadlines.
        hello: the first frame.
        tenant: whose prompts the connection's requests may share a cache with.
    """

    def __init__(
        self, socket: GatewaySocket, pool: Pool, config: GatewayConfig, hello: HelloFrame, *, tenant: str = ""
    ) -> None:
        self._socket = socket
        self._pool = pool
        self._tenant = tenant
        self._deadlines = config.deadlines
        limits = config.limits
        self._send_buffer_bytes = limits.socket_send_buffer_bytes
        self._session = Session(
            hello,
            SessionLimits(limits.max_in_flight_per_connection, limits.max_bad_frames),
            pool.list_models,
        )
        self._outbox = Outbox(
            socket,
            self._session,
            max_buffered_bytes=limits.max_buffered_bytes,
            on_overflow=self._drop_slow_consumer,
            on_closing=self._stop_serving,
        )
        self._loop = asyncio.get_running_loop()
        self._closing: asyncio.Task[None] | None = None

    # --- used by the server ---

    @property
    def in_flight(self) -> int:
        """Requests that have no last frame yet."""
        return self._session.in_flight

    async def run(self) -> None:
        """Serve until the WebSocket is closed, by whoever."""
        self._socket.watch(
            stall_timeout_s=self._deadlines.stall_timeout_s,
            on_stall=self._note_stall,
            on_writable=self._outbox.wake,
        )
        if self._send_buffer_bytes is not None:
            self._socket.limit_send_buffer(self._send_buffer_bytes)
        self._outbox.wake()
        try:
            while True:
                self._do(self._session.receive(await self._socket.recv()))
        except ConnectionClosed:
            pass
        finally:
            self._do(self._session.lost())
            if self._closing is not None:
                await self._closing

    def goaway(self, reason: str, deadline_s: float) -> None:
        """Tell the client that the server is about to stop; new requests are refused from now on."""
        self._session.goaway(reason, round(deadline_s * 1000))
        self._outbox.wake()

    def cancel_all(self, reason: CancelReason) -> None:
        """Cancel every request of the connection; their last frames still go out."""
        self._do(self._session.cancel_all(reason))

    def end_all(self, reason: CancelReason) -> None:
        """End every request of the connection now, whether its engine has let go or not."""
        self._session.end_all(reason)
        self._outbox.wake()

    def begin_close(self, code: CloseCode, reason: str) -> None:
        """Send what is buffered, then close; abort when that takes longer than `close_timeout_s`."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(code, reason))

    def abort(self) -> None:
        """Drop the connection at once."""
        self._socket.abort()

    # --- from the session to the pool ---

    def _do(self, actions: list[Action] | list[CancelRequest]) -> None:
        for action in actions:
            match action:
                case StartRequest(frame):
                    self._start(frame)
                case CancelRequest(rid, reason):
                    self._pool.cancel(rid, reason)
                case CloseConnection(code, reason):
                    self.begin_close(code, reason)
        if self._session.has_outgoing:
            self._outbox.wake()

    def _start(self, frame: RequestFrame) -> None:
        try:
            ticket = self._pool.start(frame, self._deliver, tenant=self._tenant)
        except HeadraceError as error:
            self._session.refuse(frame, error)
        except Exception:
            _log.exception("the pool could not take a request")
            self._session.refuse(frame, ServerError(ErrorCode.INTERNAL, "the request could not be started"))
        else:
            self._session.accept(frame, ticket.rid, ticket.options, ticket.queue_position)

    # --- from the pool to the session ---

    def _deliver(self, event: Event) -> None:
        flush_ms = self._session.deliver(event)
        if flush_ms:
            self._loop.call_later(flush_ms / 1000, self._flush, event.rid)
        elif self._session.has_outgoing:
            self._outbox.wake()

    def _flush(self, rid: RequestId) -> None:
        self._session.flush(rid)
        self._outbox.wake()

    # --- the end ---

    def _note_stall(self) -> None:
        """The client has taken nothing for `stall_timeout_s`; the socket aborts, so nothing can be said."""
        _log.info("a client stopped reading; its connection is dropped")
        self._do(self._session.lost("slow_consumer"))

    def _drop_slow_consumer(self) -> None:
        """More waits than may. The client still reads, or may: say why, within the close timeout."""
        if self._session.state is not SessionState.CLOSED:
            _log.info("a client reads too slowly; its connection is dropped")
            self._do(self._session.lost("slow_consumer"))
            self.begin_close(CloseCode.SLOW_CONSUMER, "too much waits for this connection")

    def _stop_serving(self) -> None:
        """The closing handshake has begun, by either side: nothing can be sent, so nothing need run."""
        self._do(self._session.lost())
        # A peer that doesn't answer ours, say after a frame too large, must not keep the connection.
        self.begin_close(CloseCode.NORMAL, "")

    async def _close(self, code: CloseCode, reason: str) -> None:
        try:
            async with asyncio.timeout(self._deadlines.close_timeout_s):
                await self._outbox.wait_emptied()
                await self._socket.close(code, reason)
        except TimeoutError:
            self._socket.abort()
