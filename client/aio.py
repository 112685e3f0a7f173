"""The asyncio client: a thin shell around `ClientCore`, which decides all that follows from a message.

async with connect("ws://127.0.0.1:8765/v1/stream") as hr:
    async for text in hr.chat("What is the capital of France?").text():
        print(text, end="")
"""

import asyncio
import contextlib
import random
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, Unpack
from weakref import WeakKeyDictionary

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from ..protocol.frames import HelloFrame, ModelInfo
from .aio_stream import Stream
from .core import Answer, ClientCore, CoreState, FlowConfig, Touched
from .dialing import DEFAULT_URL, Address, dial, is_final, is_too_long
from .errors import ClientError, ConnectError, ConnectionLost
from .options import ChatOptions, CompletionOptions, Messages, Prompt, chat_fields, completion_fields
from .stream_core import OnProgress


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """How long a client waits, for everything it waits for."""

    flow: FlowConfig = field(default_factory=FlowConfig)
    open_timeout_s: float = 10.0
    """For one opening handshake, and again for `hello`."""
    send_timeout_s: float = 30.0
    """For the server to take a frame; then the connection is lost."""
    answer_timeout_s: float = 30.0
    """For the answer to `models` and `ping`."""
    cancel_timeout_s: float = 10.0
    """For the end of a stream that was cancelled; then it is left alone."""
    close_timeout_s: float = 5.0
    """For the end of all streams when the client is closed."""
    reconnect: bool = True
    """Make a lost connection anew."""
    reconnect_timeout_s: float = 60.0
    """Then no more attempts are made, and every request ends with `ConnectionLost`."""
    reconnect_first_delay_s: float = 0.1
    """The most that the first attempt waits; twice that for each further one."""
    reconnect_max_delay_s: float = 5.0
    max_message_bytes: int | None = 64 << 20
    """The longest message of a server that is read."""


def connect(
    url: str = DEFAULT_URL,
    *,
    token: str | None = None,
    unix: str | None = None,
    tls: ssl.SSLContext | None = None,
    config: ClientConfig | None = None,
) -> "Client":
    """Return a client; entering it (`async with`) makes the connection.

    Args:
        url: `ws://HOST:PORT/v1/stream`, `wss://…`, or `ws+unix:///SOCKET`.
        token: the server's bearer token.
        unix: the path of a Unix socket, in place of a URL.
        tls: for `wss://`; None: the system's certificates.
        config: deadlines, flow control, reconnecting.
    """
    return Client(Address(url, unix, token, tls), config or ClientConfig())


class Client:
    """One connection that carries any number of requests at once.

    Belongs to one event loop. A lost connection is made anew, after random and growing delays; streams go on
    where they were if the server has kept them.
    """

    def __init__(self, address: Address, config: ClientConfig) -> None:
        self._address = address
        self._config = config
        self._core = ClientCore(config.flow)
        self._socket: ClientConnection | None = None
        self._runner: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._woken = asyncio.Event()
        """Something has come, or the connection has gone."""
        self._waiters: WeakKeyDictionary[Touched, asyncio.Event] = WeakKeyDictionary()
        self._random = random.Random()
        self._delay_s = config.reconnect_first_delay_s

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            ConnectError: there is no such server, or it does not let this client in.
        """
        await self._open()
        self._runner = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # --- requests ---

    @property
    def hello(self) -> HelloFrame:
        """What the server said first: its models, limits and features."""
        hello = self._core.hello
        assert hello is not None, "connect first"
        return hello

    @property
    def in_flight(self) -> int:
        """Requests of this client that have not ended."""
        return self._core.in_flight

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now."""
        return self._core.state is CoreState.OPEN

    def chat(
        self, messages: Messages, *, on_progress: OnProgress | None = None, **options: Unpack[ChatOptions]
    ) -> Stream:
        """Start a chat. The request is sent at once; the answer is read from the stream.

        Args:
            messages: as in OpenAI's API; or a string: one message of the user's.
            on_progress: told of progress at once, also while nobody reads the stream.
            options: PROTOCOL.md, "Options"; what is left out, the server decides.

        Raises:
            RequestRefused: the server would refuse it; nothing was sent.
            ConnectionLost: the client is closed, or has lost its server.
        """
        return self._start(chat_fields(messages, options), on_progress)

    def complete(
        self, prompt: Prompt, *, on_progress: OnProgress | None = None, **options: Unpack[CompletionOptions]
    ) -> Stream:
        """Start a completion of a text, or of token ids; otherwise as `chat`."""
        return self._start(completion_fields(prompt, options), on_progress)

    def _start(self, fields: dict[str, object], on_progress: OnProgress | None) -> Stream:
        core = self._core.start(fields, on_progress)
        stream = Stream(
            core, self._core, self._waiter(core), self._wake_writer, self._config.cancel_timeout_s
        )
        self._wake_writer()
        return stream

    async def models(self) -> list[ModelInfo]:
        """Return the models as they stand now.

        Raises:
            ConnectionLost: there is no connection now, or no answer in time.
        """
        return (await self._ask(self._core.ask_models)).models or []

    async def ping(self) -> float:
        """Return how many seconds the server's gateway takes to answer."""
        started_s = time.perf_counter()
        await self._ask(self._core.ping)
        return time.perf_counter() - started_s

    async def _ask(self, question: Callable[[], Answer]) -> Answer:
        answer = question()
        waiter = self._waiter(answer)
        self._wake_writer()
        try:
            async with asyncio.timeout(self._config.answer_timeout_s):
                await waiter.wait()
        except TimeoutError:
            raise ConnectionLost("connection_lost", "the server has not answered", retryable=True) from None
        if answer.error is not None:
            raise answer.error
        return answer

    async def close(self) -> None:
        """Cancel what runs, wait for its end, and close the connection. Calling it again does nothing."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        waiting = [touched for touched in self._waiters if not isinstance(touched, Answer)]
        for stream in waiting:
            self._core.cancel(stream)
        self._wake_writer()
        if self._core.state is CoreState.OPEN:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.close_timeout_s):
                    while self._core.in_flight and self._core.state is CoreState.OPEN:
                        self._woken.clear()
                        await self._woken.wait()
        self._wake(self._core.give_up(ClientError("client_closed", "the client is closed")))
        await _end(runner)
        await self._close_socket()

    # --- the connection ---

    async def _open(self) -> None:
        config = self._config
        socket = await dial(
            self._address, timeout_s=config.open_timeout_s, max_message_bytes=config.max_message_bytes
        )
        try:
            async with asyncio.timeout(config.open_timeout_s):
                self._core.receive(await socket.recv())
        except TimeoutError:
            socket.transport.abort()
            raise ConnectError("connect_failed", "the server has said no hello", retryable=True) from None
        except ConnectionClosed as closed:
            retryable = not is_final(closed)
            raise ConnectError("connect_failed", _say_closed(closed), retryable=retryable) from closed
        except ClientError as error:
            await socket.close()
            if isinstance(error, ConnectError):
                raise
            raise ConnectError(error.code, error.message, retryable=error.retryable) from error
        except BaseException:
            socket.transport.abort()  # Nobody else knows of it.
            raise
        self._socket = socket
        self._wake_writer()

    async def _run(self) -> None:
        """Serve one connection after the other, until there is none to be had."""
        while True:
            opened_s = time.monotonic()
            error = await self._serve()
            if time.monotonic() - opened_s > self._config.reconnect_max_delay_s:
                # It held; one that is lost again at once does not start anew with short delays.
                self._delay_s = self._config.reconnect_first_delay_s
            if error is None and self._config.reconnect:
                self._wake(self._core.lost())
                error = await self._reconnect()
                if error is None:
                    continue
            lost = ConnectionLost("connection_lost", "the connection was lost", retryable=True)
            self._wake(self._core.give_up(error or lost))
            return

    async def _serve(self) -> ClientError | None:
        """Read and write until the connection is gone; return why there must be no other one."""
        assert self._socket is not None
        socket = self._socket
        writer = asyncio.get_running_loop().create_task(self._write(socket))
        try:
            while True:
                self._wake(self._core.receive(await socket.recv(decode=False)))
                if self._core.has_outgoing:
                    self._wake_writer()
        except ConnectionClosed as closed:
            return ConnectError("connection_lost", _say_closed(closed)) if is_final(closed) else None
        except ClientError as error:
            return error
        finally:
            await _end(writer)
            await self._close_socket()

    async def _write(self, socket: ClientConnection) -> None:
        try:
            while True:
                while (frame := self._core.next_frame()) is not None:
                    async with asyncio.timeout(self._config.send_timeout_s):
                        await socket.send(frame)
                self._writable.clear()
                if not self._core.has_outgoing:
                    await self._writable.wait()
        except ConnectionClosed:
            pass  # the reader sees it too
        except TimeoutError:
            socket.transport.abort()

    async def _reconnect(self) -> ClientError | None:
        """Try until there is a connection; return why there is none."""
        config = self._config
        until_s = time.monotonic() + config.reconnect_timeout_s
        while True:
            # Anywhere in the interval, so that a server that comes back isn't met by all clients at once.
            await asyncio.sleep(self._random.uniform(0, self._delay_s))
            self._delay_s = min(2 * self._delay_s, config.reconnect_max_delay_s)
            try:
                await self._open()
            except ClientError as error:
                if not error.retryable or time.monotonic() >= until_s:
                    return error
            else:
                return None

    async def _close_socket(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()  # at most dialing's close_timeout

    # --- waking ---

    def _waiter(self, touched: Touched) -> asyncio.Event:
        return self._waiters.setdefault(touched, asyncio.Event())

    def _wake(self, touched: list[Touched]) -> None:
        self._woken.set()
        for one in touched:
            waiter = self._waiters.get(one)
            if waiter is not None:
                waiter.set()

    def _wake_writer(self) -> None:
        self._writable.set()


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end; raise what it has failed with.

    A cancellation of the caller meanwhile is not taken for the task's.
    """
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


def _say_closed(closed: ConnectionClosed) -> str:
    if is_too_long(closed):
        return "the server sent a message longer than max_message_bytes"
    if closed.rcvd is None:
        return "the connection was cut"
    reason = f": {closed.rcvd.reason}" if closed.rcvd.reason else ""
    return f"the server closed the connection ({closed.rcvd.code}{reason})"
