"""A server for tests of programs that use this client: it speaks the protocol, and says what it is told to.

    async with FakeServer(["Paris.", Reply(refuse="queue_full")]) as server:
        async with connect(server.url) as hr:
            assert (await hr.chat("What is the capital of France?").result()).text == "Paris."
        assert server.requests[0].input.messages[0].text.startswith("What")

What it sends comes from the same `Session` that the real gateway uses. No model, no other process.
"""

import asyncio
import contextlib
import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from ..protocol.actions import CancelRequest, CloseConnection, CreditRequest, StartRequest
from ..protocol.errors import RETRYABLE, ErrorBody, ErrorCode, HeadraceError
from ..protocol.frames import (
    PROTOCOL,
    FinishReason,
    HelloFrame,
    ModelInfo,
    RequestFrame,
    RequestId,
    Timings,
    ToolCallDelta,
    Usage,
)
from ..protocol.messages import Delta, End, Event, Progress
from ..protocol.session import Session, SessionLimits
from ..protocol.stream import specprefill_not_run
from .dialing import STREAM_PATH
from .loop_thread import LoopThread

MODEL = "fake"
_SUBPROTOCOL = Subprotocol(PROTOCOL)
_WORD = re.compile(r"\s*\S+\s*?")


@dataclass(frozen=True)
class Reply:
    """What the server does with one request.

    Args:
        text: the answer; each word is a token.
        reasoning: comes before it.
        tool_calls: names and JSON arguments of calls that come after it.
        refuse: an error code: the request is not taken.
        fail: an error code: the request fails after the text.
        finish_reason: None: `tool_calls` if there are any, else `stop`; `length` where `max_tokens` ends it.
        delay_s: before each token.
        progress: steps of prefill progress before the first token.
        cut: drop the TCP connection after the text, in place of the last frame.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[tuple[str, str]] = ()
    refuse: str | None = None
    fail: str | None = None
    finish_reason: FinishReason | None = None
    delay_s: float = 0.0
    progress: int = 1
    cut: bool = False

    def tokens(self) -> list[str]:
        """Return the answer's tokens."""
        words = _WORD.findall(self.text)
        rest = self.text[sum(map(len, words)) :]
        return [*words[:-1], words[-1] + rest] if words else [rest] * bool(rest)


@dataclass
class _Connection:
    socket: ServerConnection
    session: Session
    tasks: dict[RequestId, asyncio.Task[None]] = field(default_factory=dict)
    client_ids: dict[RequestId, str] = field(default_factory=dict)

    async def flush(self) -> None:
        while (data := self.session.next_frame()) is not None:
            await self.socket.send(data, text=True)


class FakeServer:
    """An in-process server on a free port. A request gets the next reply; without one, its prompt back.

    Args:
        replies: what to answer, in order; a string is a `Reply` with this text.
    """

    def __init__(self, replies: Iterable[Reply | str] = ()) -> None:
        self.requests: list[RequestFrame] = []
        """Every request frame that was accepted or refused, in order."""
        self.cancelled: list[str] = []
        """The ids of the requests that clients have cancelled."""
        self._replies = deque(Reply(reply) if isinstance(reply, str) else reply for reply in replies)
        self._numbers = itertools.count(1)
        self._server: Server | None = None

    def add(self, reply: Reply | str) -> None:
        """Add a reply to the ones that are left."""
        self._replies.append(Reply(reply) if isinstance(reply, str) else reply)

    @property
    def url(self) -> str:
        """Where a client finds it."""
        assert self._server is not None, "enter it first"
        return f"ws://127.0.0.1:{self._server.sockets[0].getsockname()[1]}{STREAM_PATH}"

    async def __aenter__(self) -> Self:
        self._server = await serve(
            self._serve,
            "127.0.0.1",
            0,
            subprotocols=[_SUBPROTOCOL],
            compression=None,
            select_subprotocol=_select,
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, socket: ServerConnection) -> None:
        session = Session(_hello(), SessionLimits(256, 16), _models)
        connection = _Connection(socket, session)
        try:
            await connection.flush()
            async for data in socket:
                for action in session.receive(data):
                    await self._do(connection, action)
                await connection.flush()
        except ConnectionClosed:
            pass
        finally:
            for task in connection.tasks.values():
                task.cancel()

    async def _do(self, connection: _Connection, action: object) -> None:
        match action:
            case StartRequest(frame):
                self._start(connection, frame)
            case CancelRequest(rid):
                self._cancel(connection, rid)
            case CloseConnection(code, reason):
                await connection.flush()
                await connection.socket.close(code, reason)
            case CreditRequest():
                pass  # it does not hold back

    def _start(self, connection: _Connection, frame: RequestFrame) -> None:
        self.requests.append(frame)
        reply = self._replies.popleft() if self._replies else Reply(_prompt(frame))
        if reply.refuse is not None:
            error = HeadraceError(ErrorCode(reply.refuse), "the test wants it so", retry_after_ms=None)
            connection.session.refuse(frame, error)
            return
        rid = RequestId(f"r-{next(self._numbers)}")
        options = frame.options.resolve(model=MODEL, max_tokens=512, temperature=0.0, seed=0)
        connection.session.accept(frame, rid, options, 0)
        connection.client_ids[rid] = frame.id
        play = _Play(connection, frame, rid, reply)
        connection.tasks[rid] = asyncio.get_running_loop().create_task(play.run())

    def _cancel(self, connection: _Connection, rid: RequestId) -> None:
        task = connection.tasks.get(rid)
        if task is not None and not task.done():
            task.cancel()
            self.cancelled.append(connection.client_ids[rid])


class _Play:
    """Gives one reply to one request."""

    def __init__(self, connection: _Connection, frame: RequestFrame, rid: RequestId, reply: Reply) -> None:
        self._connection = connection
        self._frame = frame
        self._rid = rid
        self._reply = reply
        self._num_prompt = max(1, len(_prompt(frame).split()))
        self._num_tokens = 0

    async def run(self) -> None:
        """Play it to the end; cancelled, end it as a cancelled request ends."""
        try:
            await self._play()
        except asyncio.CancelledError:
            with contextlib.suppress(ConnectionClosed):
                await self._send(self._end("cancelled"))
        except ConnectionClosed:
            pass

    async def _play(self) -> None:
        reply, rid = self._reply, self._rid
        for step in range(1, reply.progress + 1):
            done = self._num_prompt * step // reply.progress
            await self._send(Progress(rid, "prefill", done, self._num_prompt))
        if reply.reasoning:
            await self._send_token(Delta(rid, "", 1, reasoning=reply.reasoning))
        limit = self._frame.options.max_tokens or 512
        tokens = reply.tokens()
        for token in tokens[:limit]:
            await self._send_token(Delta(rid, token, 1))
        if reply.tool_calls:
            await self._send_token(Delta(rid, "", 1, tool_calls=list(_calls(reply))))
        if reply.cut:
            self._connection.socket.transport.abort()
        elif reply.fail is not None:
            await self._send(self._end("failed"))
        else:
            await self._send(self._end("completed", is_long=len(tokens) > limit))

    async def _send_token(self, delta: Delta) -> None:
        await asyncio.sleep(self._reply.delay_s)
        self._num_tokens += 1
        await self._send(delta)

    async def _send(self, event: Event) -> None:
        self._connection.session.deliver(event)
        await self._connection.flush()

    def _end(self, status: str, *, is_long: bool = False) -> End:
        reply = self._reply
        finish: FinishReason = reply.finish_reason or ("tool_calls" if reply.tool_calls else "stop")
        return End(
            rid=self._rid,
            status="completed" if status == "completed" else "failed" if status == "failed" else "cancelled",
            finish_reason=None if status != "completed" else "length" if is_long else finish,
            reason=None if status == "completed" else "client" if status == "cancelled" else reply.fail,
            error=_error(reply.fail) if status == "failed" and reply.fail else None,
            usage=_usage(self._num_prompt, self._num_tokens),
            timings=_timings(),
            specprefill=specprefill_not_run(self._frame.options, "disabled", self._num_prompt),
        )


@contextlib.contextmanager
def fake_server(replies: Iterable[Reply | str] = ()) -> Iterator[FakeServer]:
    """Run a `FakeServer` on a background thread, for blocking programs and their tests."""
    thread = LoopThread()
    server = FakeServer(replies)
    try:
        thread.call(server.__aenter__())
        yield server
        thread.call(server.__aexit__(None, None, None), 5.0)
    finally:
        thread.stop()


def _prompt(frame: RequestFrame) -> str:
    source = frame.input
    if hasattr(source, "messages"):
        return str(source.messages[-1].text)
    return source.prompt if isinstance(source.prompt, str) else " ".join(map(str, source.prompt))


def _calls(reply: Reply) -> Iterator[ToolCallDelta]:
    for index, (name, arguments) in enumerate(reply.tool_calls):
        function = {"name": name, "arguments": arguments}
        yield {"index": index, "id": f"call_{index}", "type": "function", "function": function}  # type: ignore[typeddict-item]


def _error(code: str) -> ErrorBody:
    return {"code": code, "message": "the test wants it so", "param": None, "retryable": code in RETRYABLE}


def _usage(num_prompt: int, num_tokens: int) -> Usage:
    return {
        "prompt_tokens": num_prompt,
        "cached_tokens": 0,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
    }


def _timings() -> Timings:
    return {
        "queue_ms": 0.0,
        "score_ms": None,
        "prefill_ms": 1.0,
        "ttft_ms": 1.0,
        "decode_ms": 1.0,
        "tokens_per_s": 1000.0,
    }


def _models() -> list[ModelInfo]:
    return [
        {
            "name": MODEL,
            "state": "ready",
            "context_length": 8192,
            "chat": True,
            "specprefill": {"supported": False, "reason": "unsupported_model", "draft": None},
            "default": True,
        }
    ]


def _hello() -> HelloFrame:
    return {
        "type": "hello",
        "protocol": PROTOCOL,
        "server": "headrace/fake",
        "epoch": "0",
        "models": _models(),
        "limits": {
            "max_frame_bytes": 8 << 20,
            "max_in_flight": 256,
            "max_queue": 64,
            "max_tokens": 512,
            "detach_timeout_ms": 0,
            "replay_ms": 0,
            "replay_bytes": 0,
        },
        "heartbeat_s": 20.0,
        "features": ["completion", "chat", "tools", "logprobs"],
    }


def _select(socket: ServerConnection, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    return _SUBPROTOCOL if _SUBPROTOCOL in offered else None
