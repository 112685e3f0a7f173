"""A TCP proxy that cuts: after so many bytes of the server's, or when told to."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class CuttingProxy:
    """Stands between a client and a server; ``async with CuttingProxy(url) as proxy``."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.num_connections = 0
        self.is_down = False
        """While it is, new connections are dropped."""
        self.cut_after_bytes: int | None = None
        """From the server, over one connection; used once."""

    @property
    def url(self) -> str:
        """Where clients find it."""
        assert self._server is not None
        return f"ws://127.0.0.1:{self._server.sockets[0].getsockname()[1]}{self._target.path}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Cut every connection, without a word."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if self.is_down:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(self._target.hostname, self._target.port)
        mine = {writer, back}
        self._writers |= mine
        try:
            up = asyncio.create_task(self._copy(reader, back, None))
            await self._copy(there, writer, self.cut_after_bytes)
            up.cancel()
        finally:
            for one in mine:
                one.transport.abort()
            self._writers -= mine

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if limit is not None and len(data) >= limit:
                    self.cut_after_bytes = None
                    writer.write(data[:limit])
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(writer.drain(), 1)
                    await asyncio.sleep(0.01)  # let the part arrive before the cut
                    return
                limit = None if limit is None else limit - len(data)
                writer.write(data)
                await writer.drain()
