"""One request, for an asyncio program: its events, its text, its result."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from .core import ClientCore
from .errors import ClientError, ConnectionLost, ProtocolError
from .events import Accepted, Done, Event, Result, TextDelta
from .stream_core import StreamCore


class Stream:
    """The answer to a request: an asynchronous iterator of events that belongs to one reader.

    The last event is `Done`. A request that was refused, failed, or was cancelled by the server raises in its
    place: an answer that is not whole never looks like one. Leaving `async with stream:` early cancels the
    request and waits for its end.
    """

    def __init__(
        self,
        core: StreamCore,
        client: ClientCore,
        changed: asyncio.Event,
        wake_writer: Callable[[], None],
        cancel_timeout_s: float,
    ) -> None:
        self._core = core
        self._client = client
        self._changed = changed
        self._wake_writer = wake_writer
        self._cancel_timeout_s = cancel_timeout_s

    @property
    def id(self) -> str:
        """The id that the client gave the request."""
        return self._core.id

    @property
    def rid(self) -> str | None:
        """The server's id for it; None before it is accepted."""
        return self._core.rid

    @property
    def is_ended(self) -> bool:
        """Whether the request has ended; events may still wait for the reader."""
        return self._core.is_ended

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Return the next event.

        Raises:
            ClientError: the request was refused or has failed.
        """
        while (event := self._core.take()) is None:
            if self._core.is_ended:
                if self._core.error is not None:
                    raise self._core.error
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        self._note_read()
        return event

    def _note_read(self) -> None:
        self._client.note_read(self._core)
        if self._client.has_outgoing:
            self._wake_writer()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def text(self) -> AsyncIterator[str]:
        """Yield the answer's text as it comes; reasoning and tool calls are not part of it."""
        is_empty = True
        async for event in self:
            if isinstance(event, TextDelta) and event.text:
                is_empty = False
                yield event.text
            elif isinstance(event, Done) and is_empty and event.result.text:
                yield event.result.text  # `stream: false`

    async def accepted(self) -> Accepted:
        """Wait until the server has taken the request; events stay for the reader.

        Raises:
            RequestRefused: it has not.
        """
        while (accepted := self._core.accepted) is None:
            if self._core.is_ended:
                raise self._core.error or ConnectionLost("client_closed", "cancelled before it was sent")
            self._changed.clear()
            await self._changed.wait()
        return accepted

    async def result(self) -> Result:
        """Read to the end, and return the whole answer. May be called again.

        Cancelled by `cancel`, it is what had come until then, with `status` `cancelled`.

        Raises:
            ClientError: the request was refused or has failed; `RequestFailed.result` has what there is.
        """
        while not self._core.is_ended:
            self._core.drop_unread()
            self._note_read()
            self._changed.clear()
            await self._changed.wait()
        self._core.drop_unread()
        if self._core.error is not None:
            raise self._core.error
        result = self._core.result
        assert result is not None  # it has ended, and without an error
        return result

    def cancel(self) -> None:
        """Ask for the end; events go on until `Done`. Calling it again, or too late, does nothing."""
        self._client.cancel(self._core)
        self._changed.set()
        self._wake_writer()

    async def aclose(self) -> None:
        """Cancel the request if it runs, and wait for its end: the engine has let it go then."""
        if self._core.is_ended:
            return
        self.cancel()
        try:
            async with asyncio.timeout(self._cancel_timeout_s):
                with contextlib.suppress(ClientError):
                    await self.result()
        except TimeoutError:
            message = "the server has not ended the cancelled request in time"
            error = ProtocolError("protocol_error", message, started=True, request_id=self.id, rid=self.rid)
            self._client.abandon(self._core, error)
