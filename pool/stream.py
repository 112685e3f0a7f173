"""The events of one request as an async iterator, for programs that use the pool without the gateway."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from ..protocol.delta_buffer import DeltaBuffer
from ..protocol.messages import CancelReason, Delta, End, Event, Progress
from .request import Sink, Ticket


class PoolStream:
    """An async iterator over a request's events. The last one is its only `End`, which may be a failure.

    A consumer that is slow gets what came meanwhile as one `Delta`, and of several `Progress` the newest, so
    that no more waits than the text itself. One consumer only.

    ``async with pool.submit(frame) as stream`` cancels the request when the block is left early. A loop that
    is left without that must call `aclose`, or the engine goes on for nobody.
    """

    def __init__(
        self, start: Callable[[Sink], Ticket], cancel: Callable[[Ticket, CancelReason], None]
    ) -> None:
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._progress: Progress | None = None
        self._deltas = DeltaBuffer()
        self._end: End | None = None
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None
        self.ticket = start(self._push)

    def cancel(self) -> None:
        """Ask for the end of the request; the events up to its `End` still come."""
        self._cancel(self.ticket, "client")

    async def aclose(self) -> None:
        """Cancel the request if it has not ended, and drop what is left of its events."""
        if not self._is_over:
            self._is_over = True
            self._progress = self._end = None
            self._deltas = DeltaBuffer()
            self.cancel()
            self._wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._waiter is not None:
            raise RuntimeError("a PoolStream has one consumer")
        while (event := self._take()) is None:
            if self._is_over:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return event

    def _take(self) -> Event | None:
        if self._progress is not None:
            progress, self._progress = self._progress, None
            return progress
        if (delta := self._deltas.take()) is not None:
            return delta
        if self._end is not None:
            end, self._end = self._end, None
            self._is_over = True
            return end
        return None

    def _push(self, event: Event) -> None:
        if self._is_over:
            return
        match event:
            case Progress():
                self._progress = event
            case Delta():
                self._deltas.add(event)
            case End():
                self._end = event
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
