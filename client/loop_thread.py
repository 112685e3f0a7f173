"""An event loop on a thread of its own, for blocking programs."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError as FutureCancelled
from typing import Any, TypeVar

from .errors import ClientError

_T = TypeVar("_T")
JOIN_TIMEOUT_S = 5.0
"""For what runs on the thread to end, and again for the thread."""


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="headrace-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def call(self, coroutine: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """Run a coroutine there, and return what it does. An interrupt (Ctrl-C) cancels it."""
        if self._loop.is_closed() or not self._thread.is_alive():
            coroutine.close()
            raise ClientError("client_closed", "the client is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except FutureCancelled:
            raise ClientError("client_closed", "the client is closed") from None
        except BaseException:
            future.cancel()
            raise

    def call_soon(self, function: Callable[[], object]) -> None:
        """Have a function called there; once the loop is closed: do nothing."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """End the loop and the thread, within a deadline."""

        async def cancel_rest() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        if self._thread.is_alive():
            with contextlib.suppress(ClientError, TimeoutError):
                self.call(cancel_rest(), JOIN_TIMEOUT_S)
            self.call_soon(self._loop.stop)
            self._thread.join(JOIN_TIMEOUT_S)
