"""A WebSocket that never waits to write, and that notices a peer which has stopped reading, or is gone.

websockets' `send`, `close` and keepalive all wait until the transport's buffer has drained, without a
deadline: against a peer that has stopped reading they wait for ever. So writing here is a plain call, the
transport says when there is room again, and a timer watches the buffer while there is none.

Its keepalive takes nothing but the pong for a sign of life. A pong waits behind all that the peer has sent
before it, and the ping behind all that it has not read yet: busy and slow peers would be dropped. Here
whatever comes from the peer counts, and so does room that it makes.
"""

import asyncio
import fcntl
import sys
import termios
from asyncio.trsock import TransportSocket
from collections.abc import Awaitable, Callable, Iterable
from socket import SO_SNDBUF, SOL_SOCKET

from websockets.asyncio.server import ServerConnection
from websockets.frames import CloseCode
from websockets.http11 import Response
from websockets.protocol import State

from .doors import Doors, Verdict

_LOOKS_PER_TIMEOUT = 4
_SO_NWRITE = 0x1024
"""Of macOS (sys/socket.h); Python has no name for it."""
_FOREIGN_LINGER_S = 1.0
"""How long the rest of a request is read that is no WebSocket's: else its sender never sees the answer."""


def system_unsent_bytes(socket: TransportSocket | None) -> int:
    """Return what the system has taken and the peer's has not (Linux, macOS); 0: nobody knows."""
    if socket is None:
        return 0
    try:
        if sys.platform == "darwin":
            return socket.getsockopt(SOL_SOCKET, _SO_NWRITE)
        left = fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # closed meanwhile, or of a kind that cannot say
        return 0
    return int.from_bytes(left, sys.byteorder)


class GatewaySocket(ServerConnection):
    """One client's WebSocket. Call `watch` once, when the opening handshake is through."""

    _stall_timeout_s: float | None = None
    _on_stall: Callable[[], None] | None = None
    _on_writable: Callable[[], None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _is_writable = True
    _max_unsent_bytes: int | None = None
    _alive_at_s = 0.0
    _is_first = True
    _is_foreign = False
    _doors: Doors | None = None
    _answer_foreign: Callable[[], Response] | None = None
    _is_counted = False
    address: str | None = None
    """The client's address; None on a Unix socket."""
    is_refused = False
    """Whether too many connections were open when this one was made."""

    def enter(self, doors: Doors, answer_foreign: Callable[[], Response]) -> "GatewaySocket":
        """Tell who counts the connection once it is made, and who answers a request that is no WebSocket's.

        Returns:
            Itself.
        """
        self._doors = doors
        self._answer_foreign = answer_foreign
        return self

    def watch(
        self,
        *,
        stall_timeout_s: float,
        max_unsent_bytes: int,
        on_stall: Callable[[], None],
        on_writable: Callable[[], None],
    ) -> None:
        """Tell what to call when the peer reads again, and when it does not.

        `on_stall` is called right before the transport is aborted: the peer has taken nothing for too long,
        or more waits than may though nobody has written it: answers to its pings.
        """
        self._max_unsent_bytes = max_unsent_bytes
        self._stall_timeout_s = stall_timeout_s
        self._on_stall = on_stall
        self._on_writable = on_writable
        if not self._is_writable:
            self._start_watching()

    def limit_send_buffer(self, size_bytes: int) -> None:
        """Bound what the system buffers for the peer (SO_SNDBUF)."""
        socket: TransportSocket | None = self.transport.get_extra_info("socket")
        if socket is not None:
            socket.setsockopt(SOL_SOCKET, SO_SNDBUF, size_bytes)

    @property
    def is_open(self) -> bool:
        """Whether frames may be written: the closing handshake has not begun."""
        return self.state is State.OPEN

    @property
    def is_writable(self) -> bool:
        """Whether the transport's buffer has room."""
        return self._is_writable

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were written and that the system has not taken yet."""
        return self.transport.get_write_buffer_size()

    @property
    def _waiting_bytes(self) -> int:
        """What the peer's system has not taken, about."""
        return self.unsent_bytes + system_unsent_bytes(self.transport.get_extra_info("socket"))

    def write_frames(self, frames: Iterable[bytes]) -> None:
        """Write text frames, all with one system call. Call it while `is_open` and `is_writable`."""
        for frame in frames:
            self.protocol.send_text(frame)
        self.transport.write(b"".join(self.protocol.data_to_send()))

    def abort(self) -> None:
        """Drop the connection, and what it has not taken, at once."""
        self.transport.abort()

    async def keepalive(self) -> None:
        """Ping the peer again and again; close the connection when it is silent. websockets starts this."""
        assert self.ping_interval is not None
        while True:
            await asyncio.sleep(self.ping_interval)
            pong = await self.ping()
            if self.ping_timeout is not None and not await self._shows_life(pong, self.ping_timeout):
                async with self.send_context():
                    self.protocol.fail(CloseCode.INTERNAL_ERROR, "keepalive ping timeout")

    async def _shows_life(self, pong: Awaitable[float], timeout_s: float) -> bool:
        """Wait for a pong; return False if for so long nothing has come, and nothing has gone."""
        self._alive_at_s = max(self._alive_at_s, self.loop.time())
        answer = asyncio.ensure_future(pong)
        waiting_bytes = self._waiting_bytes
        while not answer.done():
            if self.loop.time() - self._alive_at_s >= timeout_s:
                return False
            await asyncio.wait([answer], timeout=timeout_s / _LOOKS_PER_TIMEOUT)
            before, waiting_bytes = waiting_bytes, self._waiting_bytes
            if waiting_bytes < before:
                self._alive_at_s = self.loop.time()
        return True

    # --- called by the transport ---

    def data_received(self, data: bytes) -> None:
        """Take what the peer sends."""
        self._alive_at_s = self.loop.time()
        if self._is_first:
            self._is_first = False
            self._is_foreign = not b"GET ".startswith(data[:4])
            if self._is_foreign and self._answer_foreign is not None:
                self._send_foreign(self._answer_foreign(), is_head=data.startswith(b"HEAD "))
        if self._is_foreign:
            return
        super().data_received(data)
        if self._max_unsent_bytes is not None and self.unsent_bytes > self._max_unsent_bytes:
            if self._on_stall is not None:
                self._on_stall()
            self.abort()

    def _send_foreign(self, response: Response, *, is_head: bool) -> None:
        """Answer a request with another method, which websockets drops without a word if it has a body."""
        data = response.serialize()
        self.transport.write(data.removesuffix(response.body) if is_head else data)
        self.loop.call_later(_FOREIGN_LINGER_S, self.transport.close)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note that there is a client, before its handshake."""
        super().connection_made(transport)
        # Now: a TLS transport doesn't know it any more when it is lost.
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) else None
        if self._doors is not None:
            verdict = self._doors.enter(self.address)
            self._is_counted = True
            self.is_refused = verdict is not Verdict.ADMIT
            if verdict is Verdict.DROP:
                self.abort()

    def pause_writing(self) -> None:
        """Note that the buffer is full."""
        super().pause_writing()
        self._is_writable = False
        self._start_watching()

    def resume_writing(self) -> None:
        """Note that the buffer has room again."""
        super().resume_writing()
        self._alive_at_s = self.loop.time()
        self._is_writable = True
        self._stop_watching()
        if self._on_writable is not None:
            self._on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the transport is gone."""
        self._stop_watching()
        if self._doors is not None and self._is_counted:
            self._is_counted = False
            self._doors.leave(self.address)
        super().connection_lost(exc)

    # --- the watch ---

    def _start_watching(self) -> None:
        if self._stall_timeout_s is not None and self._timer is None:
            self._look(self._waiting_bytes, self.loop.time())

    def _look(self, least_bytes: int, progress_at_s: float) -> None:
        """Compare the buffers with what they were; one that shrinks is progress."""
        assert self._stall_timeout_s is not None  # _start_watching checked
        waiting_bytes, now_s = self._waiting_bytes, self.loop.time()
        if waiting_bytes < least_bytes:
            least_bytes, progress_at_s = waiting_bytes, now_s
        if now_s - progress_at_s >= self._stall_timeout_s:
            self._timer = None
            if self._on_stall is not None:
                self._on_stall()
            self.abort()
            return
        delay_s = self._stall_timeout_s / _LOOKS_PER_TIMEOUT
        self._timer = self.loop.call_later(delay_s, self._look, least_bytes, progress_at_s)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
