"""The one writer of a connection: takes frames from its session, in order, as the socket has room.

No task and no queue of its own. Frames stay in the session, where the deltas of a slow socket merge, until
the moment they are written; so what is written is always the newest, and memory is bounded.
"""

import asyncio
import logging
from collections.abc import Callable

from ..protocol.session import Session
from .sockets import GatewaySocket

_BATCH_BYTES = 64 << 10
"""Frames that are ready together go out with one system call, up to about this many bytes."""

_log = logging.getLogger(__name__)


class Outbox:
    """Writes what a session has to send.

    Args:
        socket: where to.
        session: where from.
        max_buffered_bytes: what may wait, in the session and in the transport together.
        on_overflow: called when more waits.
        on_closing: called when there is something to write and the closing handshake has begun.
        on_written: called with the frames of each write.

    The first two are called again and again, until nothing waits in the session any more.
    """

    def __init__(
        self,
        socket: GatewaySocket,
        session: Session,
        *,
        max_buffered_bytes: int,
        on_overflow: Callable[[], None],
        on_closing: Callable[[], None],
        on_written: Callable[[list[bytes]], None],
    ) -> None:
        self._socket = socket
        self._session = session
        self._max_buffered_bytes = max_buffered_bytes
        self._on_overflow = on_overflow
        self._on_closing = on_closing
        self._on_written = on_written
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._emptied = asyncio.Event()

    def wake(self) -> None:
        """Write what there is, soon: once for all that happens in this turn of the event loop."""
        if not self._scheduled:
            self._scheduled = True
            self._emptied.clear()
            self._loop.call_soon(self._pump)

    async def wait_emptied(self) -> None:
        """Wait until everything is written, or nothing can be any more; the caller sets a deadline."""
        self.wake()
        await self._emptied.wait()

    def _pump(self) -> None:
        self._scheduled = False
        try:
            self._write_ready_frames()
        except Exception:
            _log.exception("a frame could not be written; the connection is dropped")
            self._socket.abort()
            self._emptied.set()

    def _write_ready_frames(self) -> None:
        socket, session = self._socket, self._session
        while socket.is_open and socket.is_writable and (frames := self._next_batch()):
            socket.write_frames(frames)
            self._on_written(frames)
        if not session.has_outgoing:
            self._emptied.set()
        elif not socket.is_open:
            self._emptied.set()
            self._on_closing()
        elif session.buffered_bytes + socket.unsent_bytes > self._max_buffered_bytes:
            self._on_overflow()

    def _next_batch(self) -> list[bytes]:
        frames: list[bytes] = []
        num_bytes, now_s = 0, self._loop.time()
        while num_bytes < _BATCH_BYTES and (frame := self._session.next_frame(now_s)) is not None:
            frames.append(frame)
            num_bytes += len(frame)
        return frames
