"""The blocking twin: the same client on a background thread's event loop.

    with connect_blocking("ws://127.0.0.1:8765/v1/stream") as hr:
        for text in hr.chat("What is the capital of France?").text():
            print(text, end="")

Any thread may use the client; a stream belongs to one reader. Callbacks run on the background thread.
"""

import contextlib
import ssl
from collections.abc import Iterator
from types import TracebackType
from typing import Self, Unpack

from ..protocol.frames import HelloFrame, ModelInfo
from .aio import Client, ClientConfig
from .aio_stream import Stream
from .dialing import DEFAULT_URL, Address
from .errors import ClientError
from .events import Accepted, Done, Event, Result, TextDelta
from .loop_thread import JOIN_TIMEOUT_S, LoopThread
from .options import ChatOptions, CompletionOptions, Messages, Prompt
from .stream_core import OnProgress


def connect_blocking(
    url: str = DEFAULT_URL,
    *,
    token: str | None = None,
    unix: str | None = None,
    tls: ssl.SSLContext | None = None,
    config: ClientConfig | None = None,
) -> "BlockingClient":
    """Return a client; entering it (`with`) makes the connection. Arguments are those of `connect`."""
    return BlockingClient(Address(url, unix, token, tls), config or ClientConfig())


class BlockingClient:
    """`Client` for programs without asyncio."""

    def __init__(self, address: Address, config: ClientConfig) -> None:
        self._address = address
        self._config = config
        self._thread: LoopThread | None = None
        self._client: Client | None = None

    def __enter__(self) -> Self:
        """Connect.

        Raises:
            ConnectError: there is no such server, or it does not let this client in.
        """
        thread = LoopThread()

        async def enter() -> Client:
            return await Client(self._address, self._config).__aenter__()

        try:
            self._client = thread.call(enter())
        except BaseException:
            thread.stop()
            raise
        self._thread = thread
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def hello(self) -> HelloFrame:
        """What the server said first: its models, limits and features."""
        return self._open()[1].hello

    @property
    def in_flight(self) -> int:
        """Requests of this client that have not ended."""
        return 0 if self._client is None else self._client.in_flight

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now."""
        return self._client is not None and self._client.is_connected

    def chat(
        self, messages: Messages, *, on_progress: OnProgress | None = None, **options: Unpack[ChatOptions]
    ) -> "BlockingStream":
        """Start a chat: see `Client.chat`."""
        thread, client = self._open()

        async def start() -> Stream:
            return client.chat(messages, on_progress=on_progress, **options)

        return BlockingStream(thread.call(start()), thread)

    def complete(
        self, prompt: Prompt, *, on_progress: OnProgress | None = None, **options: Unpack[CompletionOptions]
    ) -> "BlockingStream":
        """Start a completion: see `Client.complete`."""
        thread, client = self._open()

        async def start() -> Stream:
            return client.complete(prompt, on_progress=on_progress, **options)

        return BlockingStream(thread.call(start()), thread)

    def models(self) -> list[ModelInfo]:
        """Return the models as they stand now."""
        thread, client = self._open()
        return thread.call(client.models())

    def ping(self) -> float:
        """Return how many seconds the server's gateway takes to answer."""
        thread, client = self._open()
        return thread.call(client.ping())

    def close(self) -> None:
        """Cancel what runs, wait for its end, close, and end the thread, each within a deadline."""
        thread, client = self._thread, self._client
        self._thread = None
        if thread is None or client is None:
            return
        try:
            with contextlib.suppress(TimeoutError):
                thread.call(client.close(), self._config.close_timeout_s + JOIN_TIMEOUT_S)
        finally:
            thread.stop()

    def _open(self) -> tuple[LoopThread, Client]:
        if self._thread is None or self._client is None:
            raise ClientError("client_closed", "the client is not connected")
        return self._thread, self._client


class BlockingStream:
    """`Stream` for programs without asyncio: an iterator of events."""

    def __init__(self, stream: Stream, thread: LoopThread) -> None:
        self._stream = stream
        self._thread = thread

    @property
    def id(self) -> str:
        """The id that the client gave the request."""
        return self._stream.id

    @property
    def rid(self) -> str | None:
        """The server's id for it; None before it is accepted."""
        return self._stream.rid

    @property
    def is_ended(self) -> bool:
        """Whether the request has ended; events may still wait for the reader."""
        return self._stream.is_ended

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        """Return the next event.

        Raises:
            ClientError: the request was refused or has failed.
        """
        event = self._thread.call(self._next())
        if event is None:
            raise StopIteration
        return event

    async def _next(self) -> Event | None:
        # A coroutine must not raise StopAsyncIteration.
        return await anext(self._stream, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def text(self) -> Iterator[str]:
        """Yield the answer's text as it comes; reasoning and tool calls are not part of it."""
        is_empty = True
        for event in self:
            if isinstance(event, TextDelta) and event.text:
                is_empty = False
                yield event.text
            elif isinstance(event, Done) and is_empty and event.result.text:
                yield event.result.text  # `stream: false`

    def accepted(self) -> Accepted:
        """Wait until the server has taken the request."""
        return self._thread.call(self._stream.accepted())

    def result(self, timeout_s: float | None = None) -> Result:
        """Read to the end, and return the whole answer: see `Stream.result`.

        Raises:
            TimeoutError: it has not ended in time; it goes on.
        """
        return self._thread.call(self._stream.result(), timeout_s)

    def cancel(self) -> None:
        """Ask for the end; does not wait. A signal handler may call it."""
        self._thread.call_soon(self._stream.cancel)

    def close(self) -> None:
        """Cancel the request if it runs, and wait for its end."""
        if not self._stream.is_ended:
            self._thread.call(self._stream.aclose())
