"""The fake server, and with it the asyncio and the blocking client, as a user's tests would have them."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from headrace.client import (
    ClientConfig,
    ClientError,
    ConnectError,
    ConnectionLost,
    Done,
    Progress,
    ReasoningDelta,
    RequestFailed,
    ServerBusy,
    ToolCall,
    connect,
    connect_blocking,
)
from headrace.client.testing import FakeServer, Reply, fake_server
from headrace.protocol.options import ChatInput


async def test_replies_come_in_order() -> None:
    """Then prompts come back; requests are kept."""
    async with FakeServer(
        ["Paris.", Reply(refuse="queue_full"), Reply("half", fail="engine_error")]
    ) as server:
        async with connect(server.url) as hr:
            assert (await hr.chat("What is the capital of France?").result()).text == "Paris."
            with pytest.raises(ServerBusy) as busy:
                await hr.chat("x").result()
            with pytest.raises(RequestFailed) as failed:
                await hr.chat("x").result()
            assert (await hr.complete("and  back", max_tokens=1).result()).finish_reason == "length"
        assert busy.value.retryable
        assert failed.value.result is not None
        assert (failed.value.result.text, failed.value.retryable, failed.value.started) == (
            "half",
            False,
            True,
        )
        source = server.requests[0].input
        assert isinstance(source, ChatInput)
        assert source.messages[0].text.startswith("What")


async def test_reasoning_tools_and_progress() -> None:
    """Each an event; the message is fit for the next turn."""
    seen: list[Progress] = []
    reply = Reply("", reasoning="Hm.", tool_calls=[("weather", '{"city": "Paris"}')], progress=4)
    async with FakeServer([reply]) as server, connect(server.url) as hr:
        stream = hr.chat("one two three four", on_progress=seen.append)
        kinds = [type(event) for event in [event async for event in stream]]
        result = await stream.result()
        assert kinds[-3:] == [ReasoningDelta, ToolCall, Done]
        assert seen[-1] == Progress("prefill", 4, 4, 0)
        assert result.tool_calls[0].name == "weather"
        assert result.finish_reason == "tool_calls"
        assert result.message is not None
        await hr.chat([{"role": "user", "content": "x"}, result.message]).result()


async def test_a_callback_that_raises_stops_nothing() -> None:
    """It is logged."""
    async with FakeServer() as server, connect(server.url) as hr:
        result = await hr.chat("a b", on_progress=lambda progress: 1 / 0).result()  # type: ignore[arg-type,return-value]
        assert result.text == "a b"


async def test_cut_and_cancelled() -> None:
    """The fake can't resume: the error says so."""
    replies = [Reply("x", cut=True), Reply("a b c d", delay_s=0.02)]
    config = ClientConfig(reconnect_first_delay_s=0.01)
    async with FakeServer(replies) as server, connect(server.url, config=config) as hr:
        with pytest.raises(ConnectionLost):
            await hr.chat("x").result()
        async with hr.chat("x") as stream:
            async for _ in stream.text():
                break
        assert server.cancelled == [stream.id]


async def test_a_message_that_is_too_long_to_read() -> None:
    """Ends the client: it would come again and again."""
    config = ClientConfig(max_message_bytes=4096, reconnect_first_delay_s=0.01)
    async with FakeServer(["x" * 10_000]) as server, connect(server.url, config=config) as hr:
        with pytest.raises(ConnectionLost, match="longer than max_message_bytes"):
            await hr.chat("x").result()


def test_the_blocking_twin() -> None:
    """The same, without asyncio; another thread may use the client too."""
    with fake_server(["one two three"]) as server, connect_blocking(server.url) as hr:
        stream = hr.complete("x")
        assert "".join(stream.text()) == "one two three"
        assert stream.result().usage["completion_tokens"] == 3
        assert hr.models()[0]["name"] == hr.hello["models"][0]["name"]
        assert hr.ping() < 5
        texts: list[str] = []
        threads = [
            threading.Thread(target=lambda n=n: texts.append(hr.complete(f"t{n}").result().text))  # type: ignore[misc]
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(texts) == [f"t{n}" for n in range(8)]


def test_the_blocking_twin_leaves_early() -> None:
    """Breaking out of a block cancels; closing ends the thread, also with streams that run."""
    slow = Reply("word " * 1000, delay_s=0.01)
    before = threading.active_count()
    with fake_server([slow, slow]) as server:
        hr = connect_blocking(server.url).__enter__()
        with hr.complete("x") as stream:
            next(stream.text())
        assert stream.result().status == "cancelled"
        running = hr.complete("y")
        with pytest.raises(TimeoutError):
            running.result(timeout_s=0.05)
        started_s = time.monotonic()
        hr.close()
        assert time.monotonic() - started_s < 3
        assert len(server.cancelled) == 2
        with pytest.raises(ClientError, match="client_closed"):
            hr.complete("z")
    assert threading.active_count() == before


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Take Ctrl-C as an interactive program does: a shell's background jobs start with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_blocking_wait() -> None:
    """And leaving the block cancels the request."""
    with fake_server([Reply("word " * 1000, delay_s=0.01)]) as server, connect_blocking(server.url) as hr:
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt), hr.complete("x") as stream:
            stream.result()
        assert server.cancelled == [stream.id]
        timer.join()


def test_a_blocking_client_without_a_server() -> None:
    """Raises, and leaves no thread behind."""
    before = threading.active_count()
    with pytest.raises(ConnectError), connect_blocking("ws://127.0.0.1:1"):
        pass
    assert threading.active_count() == before
