"""`headrace.client` against a real gateway and real engine processes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_helpers import make_gateway, scripted_pool_config, wait_until
from websockets.asyncio.server import ServerConnection, serve

from headrace.client import (
    Accepted,
    Client,
    ClientConfig,
    ClientError,
    ConnectError,
    ConnectionLost,
    DeadlineExceeded,
    Done,
    FlowConfig,
    InvalidRequest,
    RequestFailed,
    ServerBusy,
    Stream,
    TextDelta,
    Unauthorized,
    connect,
)
from headrace.engine.scripted import scripted_token
from headrace.gateway.config import AccessConfig, LimitsConfig, ListenConfig, TokenConfig
from headrace.gateway.server import Gateway
from headrace.pool import Pool

pytestmark = pytest.mark.asyncio(loop_scope="session")


def answer(prompt: str, count: int, seed: int = 0) -> str:
    """Return what the scripted engine says."""
    return "".join(scripted_token(prompt, seed, index) for index in range(count))


@contextlib.asynccontextmanager
async def running(pool: Pool, **config: Any) -> AsyncIterator[Gateway]:
    """Run a gateway of a test's own; its end leaves the pool alone."""
    gateway = make_gateway(pool, **config)
    await gateway.start()
    try:
        yield gateway
    finally:
        gateway.abort()


@contextlib.asynccontextmanager
async def connect_to_new(pool: Pool, config: ClientConfig) -> AsyncIterator[tuple[Gateway, Client]]:
    """Run a gateway, and connect to it."""
    async with running(pool) as gateway, connect(gateway.url, config=config) as hr:
        yield gateway, hr


async def test_events_come_in_order_and_end_with_done(gateway: Gateway) -> None:
    """Their text is the result's, their tokens the usage's."""
    async with connect(gateway.url) as hr:
        stream = hr.chat("one two three", max_tokens=40, seed=3)
        events = [event async for event in stream]
        result = await stream.result()
    assert isinstance(events[0], Accepted)
    assert events[0].options["seed"] == 3
    assert isinstance(events[-1], Done)
    assert events[-1].result is result
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert "".join(event.text for event in deltas) == result.text == answer("one two three", 40, 3)
    assert sum(event.num_tokens for event in deltas) == result.usage["completion_tokens"] == 40
    assert result.message == {"role": "assistant", "content": result.text}
    assert (result.status, result.finish_reason, result.reason) == ("completed", "length", None)
    assert result.specprefill["reason"] == "disabled"


async def test_text_is_the_short_way(gateway: Gateway) -> None:
    """And what is not streamed comes whole."""
    async with connect(gateway.url) as hr:
        pieces = [text async for text in hr.complete("x y", max_tokens=30, seed=0).text()]
        unstreamed = hr.complete([1, 2], max_tokens=5, seed=0, stream=False)
        assert [text async for text in unstreamed.text()] == [answer("1 2", 5)]
        whole = await unstreamed.result()
    assert "".join(pieces) == answer("x y", 30)
    assert whole.text == answer("1 2", 5)
    assert whole.message is None


async def test_32_streams_and_one_that_nobody_reads(gateway: Gateway, pool: Pool) -> None:
    """It stops at its window, the others end; read later, it is whole."""
    config = ClientConfig(flow=FlowConfig(window_tokens=64))
    async with connect(gateway.url, config=config) as hr:
        lazy = hr.complete("lazy", max_tokens=2000, seed=0)
        streams = [hr.complete(f"stream {number}", max_tokens=200, seed=0) for number in range(31)]
        results = await asyncio.gather(*(stream.result() for stream in streams))
        for number, result in enumerate(results):
            assert result.text == answer(f"stream {number}", 200)
        await wait_until(lambda: lazy.rid is not None)
        assert (hr.in_flight, pool.statistics().in_flight) == (1, 1)
        text = "".join([text async for text in lazy.text()])
    assert text == answer("lazy", 2000)


async def test_without_credit_an_unread_stream_merges(gateway: Gateway) -> None:
    """Its text waits in few events."""
    async with connect(gateway.url, config=ClientConfig(flow=FlowConfig(window_tokens=None))) as hr:
        stream = hr.complete("unread", max_tokens=3000, seed=0)
        await wait_until(lambda: stream.is_ended)
        deltas = [event async for event in stream if isinstance(event, TextDelta)]
    assert len(deltas) == 1
    assert deltas[0].num_tokens == 3000
    assert deltas[0].text == answer("unread", 3000)


async def test_breaking_out_of_a_stream_ends_it_in_the_server(gateway: Gateway, pool: Pool) -> None:
    """When the block is left, the engine has let go already."""
    async with connect(gateway.url) as hr:
        async with hr.complete("endless", model="slow", max_tokens=100_000) as stream:
            async for _ in stream.text():
                break
        assert pool.statistics().in_flight == 0
        result = await stream.result()
        assert (result.status, result.reason) == ("cancelled", "client")
        assert result.usage["completion_tokens"] > 0
        assert hr.in_flight == 0


async def test_cancel_is_no_error(gateway: Gateway) -> None:
    """The events go on to `Done`."""
    async with connect(gateway.url) as hr:
        stream = hr.complete("endless", model="slow", max_tokens=100_000)
        seen = 0
        async for event in stream:
            seen += isinstance(event, TextDelta)
            if seen == 3:
                stream.cancel()
                stream.cancel()
        assert isinstance(event, Done)
        assert event.result.status == "cancelled"


async def test_closing_the_client_ends_its_streams(gateway: Gateway, pool: Pool) -> None:
    """Also those whose reader waits."""
    async with connect(gateway.url) as hr:
        streams = [hr.complete("endless", model="slow", max_tokens=100_000) for _ in range(8)]
        readers = [asyncio.create_task(stream.result()) for stream in streams]
        await asyncio.gather(*(stream.accepted() for stream in streams))
    assert pool.statistics().in_flight == 0
    results = await asyncio.gather(*readers)
    assert {result.status for result in results} == {"cancelled"}
    with pytest.raises(ClientError, match="client_closed"):
        hr.complete("too late")


async def test_a_task_that_is_cancelled_cancels_its_stream(gateway: Gateway, pool: Pool) -> None:
    """With `async with stream`."""
    async with connect(gateway.url) as hr:

        async def read() -> None:
            async with hr.complete("endless", model="slow", max_tokens=100_000) as stream:
                await stream.result()

        task = asyncio.create_task(read())
        await wait_until(lambda: pool.statistics().in_flight == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.statistics().in_flight == 0


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": ""}, "prompt"),
    ],
)
async def test_a_request_that_would_be_refused_is_not_sent(
    gateway: Gateway, options: dict[str, object], param: str
) -> None:
    """The error names the field."""
    async with connect(gateway.url) as hr:
        with pytest.raises(InvalidRequest) as caught:
            hr.complete(**{"prompt": "x", **options})  # type: ignore[arg-type]
        error = caught.value
        assert (error.code, error.param, error.started, error.retryable) == (
            "invalid_param",
            param,
            False,
            False,
        )
        assert hr.in_flight == 0


async def test_a_frame_that_is_too_long_is_not_sent(pool: Pool) -> None:
    """The connection lives on."""
    limits = LimitsConfig(max_frame_bytes=2048)
    async with running(pool, limits=limits) as gateway, connect(gateway.url) as hr:
        with pytest.raises(InvalidRequest, match=r"the server takes 2,048"):
            hr.complete("x" * 4096)
        assert (await hr.complete("short", max_tokens=2).result()).status == "completed"


async def test_refusals_are_typed(gateway: Gateway) -> None:
    """Nothing was started."""
    async with connect(gateway.url) as hr:
        with pytest.raises(InvalidRequest) as caught:
            await hr.complete("x", model="nobody").result()
        assert (caught.value.code, caught.value.started) == ("model_not_found", False)
        assert caught.value.request_id == "c1"


async def test_too_many_requests_are_refused_here(pool: Pool) -> None:
    """As the server's `hello` says."""
    limits = LimitsConfig(max_in_flight_per_connection=2)
    async with running(pool, limits=limits) as gateway, connect(gateway.url) as hr:
        streams = [hr.complete("x", model="slow", max_tokens=1000) for _ in range(2)]
        with pytest.raises(ServerBusy) as caught:
            hr.complete("x")
        assert (caught.value.code, caught.value.retryable) == ("too_many_in_flight", True)
        assert not caught.value.started
        await streams[0].aclose()
        assert (await hr.complete("x", max_tokens=1).result()).text


async def test_a_deadline_raises_with_what_there_is(gateway: Gateway) -> None:
    """A stream that is not whole does not end like one that is."""
    async with connect(gateway.url) as hr:
        stream = hr.complete("endless", model="slow", max_tokens=100_000, timeout_ms=100, seed=0)
        pieces: list[str] = []

        async def read() -> None:
            async for text in stream.text():
                pieces.append(text)

        with pytest.raises(DeadlineExceeded) as caught:
            await read()
        result = caught.value.result
        assert result is not None
        assert result.text == "".join(pieces)
        assert (result.status, result.reason) == ("cancelled", "deadline")
        assert (caught.value.started, caught.value.retryable, caught.value.rid) == (True, True, stream.rid)


async def test_an_engine_that_dies_is_not_noticed(gateway: Gateway, pool: Pool) -> None:
    """Another goes on: the text is complete."""
    async with connect(gateway.url) as hr:
        result = await hr.complete("[[late]]", max_tokens=12, seed=0).result()
        assert result.text == answer("[[late]]", 12)
        await wait_until(lambda: all(model["state"] == "ready" for model in pool.list_models()))


async def test_models_and_ping(gateway: Gateway) -> None:
    """Asked for on the same connection."""
    async with connect(gateway.url) as hr:
        assert [model["name"] for model in await hr.models()] == ["fast", "slow"]
        assert 0 < await hr.ping() < 5


async def test_the_token_is_shown(pool: Pool) -> None:
    """Without it, or with another: `Unauthorized`; it is in no repr."""
    access = AccessConfig(tokens=(TokenConfig.of_secret("alice", "hush"),))
    async with running(pool, access=access) as gateway:
        async with connect(gateway.url, token="hush") as hr:
            assert (await hr.complete("x", max_tokens=1).result()).text
            assert "hush" not in repr(vars(hr))
        for token in (None, "wrong"):
            with pytest.raises(Unauthorized) as caught:
                await connect(gateway.url, token=token).__aenter__()
            assert (caught.value.code, caught.value.retryable) == ("unauthorized", False)


@pytest.mark.parametrize("url", ["ws://127.0.0.1:1", "ws+unix:///nowhere.sock", "http://x", "nonsense"])
async def test_no_server_is_a_connect_error(url: str) -> None:
    """Which says where."""
    with pytest.raises(ConnectError) as caught:
        await connect(url).__aenter__()
    assert (caught.value.code, caught.value.started) == ("connect_failed", False)


async def test_giving_up_on_a_server_without_hello_leaves_no_connection() -> None:
    """Cancelled while it waits: nobody else knows of the socket."""
    is_open, is_gone = asyncio.Event(), asyncio.Event()

    async def say_nothing(socket: ServerConnection) -> None:
        is_open.set()
        await socket.wait_closed()
        is_gone.set()

    async with serve(say_nothing, "127.0.0.1", 0) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/stream"
        entering = asyncio.create_task(connect(url).__aenter__())
        await is_open.wait()
        await asyncio.sleep(0.05)
        entering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await entering
        async with asyncio.timeout(2):
            await is_gone.wait()


async def test_a_stopping_server_ends_the_client() -> None:
    """Requests that ran are cancelled by it, and new ones find nobody."""
    config = ClientConfig(reconnect_timeout_s=0.0, reconnect_first_delay_s=0.01)
    async with Pool(scripted_pool_config(slow=5.0)) as pool, connect_to_new(pool, config) as (gateway, hr):
        stream = hr.complete("endless", model="slow", max_tokens=100_000)
        await stream.accepted()
        await gateway.stop()
        with pytest.raises(RequestFailed, match="shutting_down"):
            await stream.result()
        started_s = time.monotonic()
        with pytest.raises((ConnectionLost, ConnectError)):
            await hr.complete("x").result()
        assert time.monotonic() - started_s < 5


async def test_names_are_complete() -> None:
    """Every option of the protocol is a keyword argument."""
    from headrace.client.options import ChatOptions, CompletionOptions
    from headrace.protocol.options import ChatInput, GenerationOptions

    options = set(GenerationOptions.model_fields)
    assert set(CompletionOptions.__annotations__) == options
    assert set(ChatOptions.__annotations__) == options - {"echo"} | set(ChatInput.model_fields) - {"messages"}
    assert Client.chat.__annotations__["return"] is Stream


async def test_over_a_unix_socket(pool: Pool, tmp_path: Path) -> None:
    """By its URL, which the server prints, and by its path."""
    listen = ListenConfig(tcp=False, unix_path=str(tmp_path / "headrace.sock"))
    async with running(pool, listen=listen) as gateway:
        for client in (connect(gateway.url), connect(unix=str(listen.unix_path))):
            async with client as hr:
                assert (await hr.complete("x", max_tokens=3, seed=0).result()).text == answer("x", 3)
