"""One client's connection: a thin shell around `protocol.session`, which decides all that a client observes.

The reader parses and dispatches and never waits for work, so that cancels and pings are seen at once. The
outbox writes. Whatever way a connection ends, `run` tells the pool that its requests have nobody left.
"""

import asyncio
import logging

from websockets.exceptions import ConnectionClosed

from ..pool import Pool
from ..protocol.actions import (
    Action,
    CancelRequest,
    CloseConnection,
    CreditRequest,
    ResumeStream,
    StartRequest,
)
from ..protocol.errors import CloseCode, ErrorCode, HeadraceError, ServerError
from ..protocol.frames import HelloFrame, RequestFrame, RequestId, ResumeFrame
from ..protocol.messages import CancelReason, End, Event
from ..protocol.session import Session, SessionLimits, SessionState
from ..protocol.stream import Stream
from .config import GatewayConfig
from .metrics import Metrics
from .outbox import Outbox
from .request_watch import RequestWatch
from .resumables import Resumable, ResumableStreams
from .sockets import GatewaySocket
from .tenants import Tenant

_FRAMES_PER_TURN = 16
"""Messages of one client that are handled before others have their turn."""
_SENT_INTERVAL_S = 0.01

_log = logging.getLogger(__name__)


class Connection:
    """Serves one WebSocket from its first frame to its last.

    Args:
        socket: the WebSocket, its opening handshake done.
        pool: where requests go.
        config: limits and deadlines.
        hello: the first frame.
        key: tells it from other connections, for a pool that is fair between them.
        tenant: whose prompts the connection's requests may share a cache with.
        resumables: where streams are kept that outlive the connection.
        metrics: where what happens here is counted.
    """

    def __init__(
        self,
        socket: GatewaySocket,
        pool: Pool,
        config: GatewayConfig,
        hello: HelloFrame,
        *,
        key: str,
        tenant: Tenant,
        resumables: ResumableStreams,
        metrics: Metrics,
    ) -> None:
        self._socket = socket
        self._pool = pool
        self._key = key
        self._tenant = tenant
        self._resumables = resumables
        self._metrics = metrics
        self._deadlines = config.deadlines
        self._limits = limits = config.limits
        self._session = Session(
            hello,
            SessionLimits(limits.max_in_flight_per_connection, limits.max_bad_frames),
            pool.list_models,
            on_refusal=metrics.count_refused,
        )
        self._outbox = Outbox(
            socket,
            self._session,
            max_buffered_bytes=limits.max_buffered_bytes,
            on_overflow=self._drop_slow_consumer,
            on_closing=self._stop_serving,
            on_written=metrics.count_written,
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
            max_unsent_bytes=self._limits.max_buffered_bytes,
            on_stall=self._note_stall,
            on_writable=self._outbox.wake,
        )
        if self._limits.socket_send_buffer_bytes is not None:
            self._socket.limit_send_buffer(self._limits.socket_send_buffer_bytes)
        self._outbox.wake()
        try:
            while True:
                for _ in range(_FRAMES_PER_TURN):
                    self._do(self._session.receive(await self._socket.recv()))
                await asyncio.sleep(0)  # `recv` doesn't wait while there are messages
        except ConnectionClosed:
            pass
        finally:
            self._lose("connection_lost")
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

    async def wait_sent(self) -> None:
        """Wait until the system has taken everything, or nothing can be sent any more.

        The caller sets a deadline.
        """
        await self._outbox.wait_emptied()
        # asyncio tells of room in the buffer, not of its end.
        while self._socket.is_open and self._socket.unsent_bytes:  # noqa: ASYNC110
            await asyncio.sleep(_SENT_INTERVAL_S)

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
                case CreditRequest(rid, tokens):
                    self._pool.credit(rid, tokens)
                case ResumeStream(frame):
                    self._resume(frame)
                case CloseConnection(code, reason):
                    self.begin_close(code, reason)
        if self._session.has_outgoing:
            self._outbox.wake()

    def _start(self, frame: RequestFrame) -> None:
        try:
            self._tenant.begin_request()
            try:
                self._give_to_pool(frame)
            except BaseException:
                self._tenant.end_request()
                raise
        except HeadraceError as error:
            self._session.refuse(frame, error)
        except Exception:
            _log.exception("the pool could not take a request")
            self._session.refuse(frame, ServerError(ErrorCode.INTERNAL, "the request could not be started"))

    def _give_to_pool(self, frame: RequestFrame) -> None:
        resumable: Resumable | None = None
        if frame.options.detach:
            resumable = self._resumables.reserve(self, self._tenant)
        try:
            watch = RequestWatch(
                self._metrics,
                frame,
                self._take if resumable is None else resumable.take,
                connection=self._key,
                tenant=self._tenant.name,
            )
            ticket = self._pool.start(frame, watch.take, tenant=self._tenant.name, client=self._key)
            watch.begin(ticket)
        except BaseException:
            if resumable is not None:
                self._resumables.forget(resumable)
            raise
        stream = self._session.accept(
            frame,
            ticket.rid,
            ticket.options,
            ticket.queue_position,
            replay=None if resumable is None else self._resumables.new_replay(),
            resume_token=None if resumable is None else resumable.token,
        )
        if resumable is not None:
            resumable.begin(stream)

    def _resume(self, frame: ResumeFrame) -> None:
        try:
            stream, missed = self._resumables.resume(frame, self, self._tenant)
        except HeadraceError as error:
            self._session.refuse(frame, error)
        else:
            self._session.attach(stream, frame, missed)

    # --- from the pool to the session ---

    def _take(self, event: Event) -> None:
        """Take an event of a request that ends with this connection."""
        if isinstance(event, End):
            self._tenant.end_request()
        self.deliver(event)

    def release(self, stream: Stream, *, is_elsewhere: bool) -> None:
        """Let a stream go, to another connection or to be attached here again."""
        self._session.release(stream, is_elsewhere=is_elsewhere)
        self._outbox.wake()

    def deliver(self, event: Event) -> None:
        """Take an event of one of the session's streams."""
        flush_ms = self._session.deliver(event)
        if flush_ms:
            self._loop.call_later(flush_ms / 1000, self._flush, event.rid)
        elif self._session.has_outgoing:
            self._outbox.wake()

    def _flush(self, rid: RequestId) -> None:
        self._session.flush(rid)
        self._outbox.wake()

    # --- the end ---

    def _lose(self, reason: CancelReason) -> None:
        """Nothing can be sent any more: end what ends with the connection, and let the rest go on."""
        self._do(self._session.lost(reason))
        self._resumables.lose(self)

    def _note_stall(self) -> None:
        """The client has taken nothing for `stall_timeout_s`; the socket aborts, so nothing can be said."""
        _log.info("a client stopped reading; its connection is dropped")
        self._lose("slow_consumer")

    def _drop_slow_consumer(self) -> None:
        """More waits than may. The client still reads, or may: say why, within the close timeout."""
        if self._session.state is not SessionState.CLOSED:
            _log.info("a client reads too slowly; its connection is dropped")
            self._lose("slow_consumer")
            self.begin_close(CloseCode.SLOW_CONSUMER, "too much waits for this connection")

    def _stop_serving(self) -> None:
        """The closing handshake has begun, by either side: nothing can be sent, so nothing need run."""
        self._lose("connection_lost")
        # A peer that doesn't answer ours, say after a frame too large, must not keep the connection.
        self.begin_close(CloseCode.NORMAL, "")

    async def _close(self, code: CloseCode, reason: str) -> None:
        try:
            async with asyncio.timeout(self._deadlines.close_timeout_s):
                await self._outbox.wait_emptied()
                await self._socket.close(code, reason)
        except TimeoutError:
            self._socket.abort()
