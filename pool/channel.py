"""The gateway's end of the two pipes to one engine process.

A reader thread and a writer thread, because a pipe blocks: `recv_bytes` on a message that is half written,
`send_bytes` when the other side does not read. The event loop never touches a pipe.

    engine process ==pipe==> reader thread --backlog--> event loop: on_reports(list), in order
    engine process <==pipe== writer thread <--queue--- event loop: send(command)

Reports are bounded by the pipe: a backlog that is full stops the reader, and the engine waits in its next
report. Commands are bounded by a number: who never reads them is not alive. Both threads end when the process
is gone, also in the middle of a message, and close their end of the pipe themselves.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue

from ..protocol.messages import Command, Report, decode_report, encode_command

MAX_BACKLOG_REPORTS = 256
"""Reports that wait for the event loop, at most."""
MAX_REPORTS_PER_CALLBACK = 32
"""Reports that the event loop handles before others have their turn."""
_LOOP_CHECK_S = 1.0

_log = logging.getLogger(__name__)


class ChannelFull(Exception):
    """The process has not taken its commands for too long."""


class Channel:
    """Messages to and from one engine process. Made, used and closed in the event loop.

    Args:
        on_reports: called in the event loop with reports in the order in which they were sent.
        on_closed: called in the event loop, once, after the last `on_reports`: the process has closed its
            end, or has sent something that is no report.
        max_commands: commands that may wait for the process.
    """

    def __init__(
        self,
        name: str,
        read_end: "Connection[bytes, bytes]",
        write_end: "Connection[bytes, bytes]",
        *,
        on_reports: Callable[[list[Report]], None],
        on_closed: Callable[[], None],
        max_commands: int,
    ) -> None:
        self._read_end = read_end
        self._write_end = write_end
        self._on_reports = on_reports
        self._on_closed = on_closed
        self._max_commands = max_commands
        self._loop = asyncio.get_running_loop()
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._backlog: deque[Report] = deque()
        self._changed = threading.Condition()  # guards the next three and the backlog
        self._is_scheduled = False
        self._is_at_end = False
        self._is_closed = False
        self._reader = threading.Thread(target=self._read, name=f"read {name}", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"write {name}", daemon=True)

    def start(self) -> None:
        """Start both threads.

        Raises:
            RuntimeError: the system has no room for them; the process must be killed.
        """
        try:
            self._reader.start()
            self._writer.start()
        except RuntimeError:
            self.close()
            self._write_end.close()
            if not self._reader.is_alive():
                self._read_end.close()
            raise

    def send(self, command: Command) -> None:
        """Put a command on its way. After the process has gone, nothing happens.

        Raises:
            ChannelFull: the process does not read.
        """
        if self._commands.qsize() >= self._max_commands:
            raise ChannelFull
        self._commands.put(command)

    def close(self) -> None:
        """Let both threads end. The process sees the end of its commands; its reports are dropped."""
        self._commands.put(None)
        with self._changed:
            self._is_closed = True
            self._backlog.clear()
            self._changed.notify_all()

    @property
    def has_threads(self) -> bool:
        """Whether one of the threads still runs."""
        return self._reader.is_alive() or self._writer.is_alive()

    # --- threads ---

    def _write(self) -> None:
        try:
            while (command := self._commands.get()) is not None:
                self._write_end.send_bytes(encode_command(command))
        except OSError:
            pass  # The process has gone; its sentinel tells those who need to know.
        finally:
            self._write_end.close()

    def _read(self) -> None:
        try:
            while self._add(decode_report(self._read_end.recv_bytes())):
                pass
        except (EOFError, OSError):
            pass  # The process has gone, perhaps in the middle of a message.
        except Exception:
            _log.exception("a message from an engine process is no report")
        finally:
            self._read_end.close()
            with self._changed:
                self._is_at_end = True
                self._schedule()

    def _add(self, report: Report) -> bool:
        """Take a report into the backlog once there is room; return whether to go on."""
        with self._changed:
            while len(self._backlog) >= MAX_BACKLOG_REPORTS and not self._is_closed:
                self._changed.wait(_LOOP_CHECK_S)
                if self._loop.is_closed():
                    return False
            if self._is_closed:
                return False
            self._backlog.append(report)
            self._schedule()
            return True

    def _schedule(self) -> None:
        """Have the event loop called; `_changed` is held."""
        if not self._is_scheduled:
            self._is_scheduled = True
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody listens any more.
                self._loop.call_soon_threadsafe(self._deliver)

    # --- event loop ---

    def _deliver(self) -> None:
        with self._changed:
            count = min(len(self._backlog), MAX_REPORTS_PER_CALLBACK)
            reports = [self._backlog.popleft() for _ in range(count)]
            is_last = self._is_at_end and not self._backlog
            self._is_scheduled = bool(self._backlog)
            if self._is_scheduled:
                self._loop.call_soon(self._deliver)
            self._changed.notify_all()
        if reports:
            self._on_reports(reports)
        if is_last:
            self._on_closed()
