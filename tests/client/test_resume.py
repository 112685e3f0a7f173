"""Connections that are cut in mid-stream, by a proxy between client and server."""

import asyncio

import pytest
from cutting_proxy import CuttingProxy
from gateway_helpers import wait_until

from headrace.client import ClientConfig, ConnectionLost, FlowConfig, ResumeFailed, TextDelta, connect
from headrace.engine.scripted import scripted_token
from headrace.gateway.server import Gateway
from headrace.pool import Pool

pytestmark = pytest.mark.asyncio(loop_scope="session")

FAST_BACK = ClientConfig(reconnect_first_delay_s=0.02)


def answer(prompt: str, count: int) -> str:
    """Return what the scripted engine says with seed 0."""
    return "".join(scripted_token(prompt, 0, index) for index in range(count))


async def test_a_cut_in_mid_stream_is_not_noticed(gateway: Gateway, pool: Pool) -> None:
    """The text is complete, each token once, however often it is cut; nothing is started twice."""
    started = pool.statistics().started_total
    async with (
        CuttingProxy(gateway.url) as proxy,
        connect(proxy.url, config=FAST_BACK) as hr,
        hr.complete("cut", model="slow", max_tokens=120, seed=0) as stream,
    ):
        pieces, cuts = [], 0
        async for event in stream:
            if isinstance(event, TextDelta):
                pieces.append(event.text)
                if len(pieces) in (5, 25, 45):
                    proxy.cut()
                    cuts += 1
        result = await stream.result()
    assert cuts == 3
    assert proxy.num_connections == 4
    assert "".join(pieces) == result.text == answer("cut", 120)
    assert result.usage["completion_tokens"] == 120
    assert pool.statistics().started_total == started + 1


@pytest.mark.parametrize("after_bytes", [2222, 3001, 4999])
async def test_a_cut_within_a_frame(gateway: Gateway, after_bytes: int) -> None:
    """Half a frame is no frame."""
    async with CuttingProxy(gateway.url) as proxy:
        proxy.cut_after_bytes = after_bytes
        async with connect(proxy.url, config=FAST_BACK) as hr:
            result = await hr.complete("half", max_tokens=300, seed=0).result()
    assert result.text == answer("half", 300)


async def test_the_last_frame_is_had_again(gateway: Gateway, pool: Pool) -> None:
    """The stream ends while nobody is there."""
    async with CuttingProxy(gateway.url) as proxy, connect(proxy.url, config=FAST_BACK) as hr:
        stream = hr.complete("away", model="slow", max_tokens=20, seed=0)
        await stream.accepted()
        proxy.is_down = True
        proxy.cut()
        await wait_until(lambda: pool.statistics().in_flight == 0)
        assert not stream.is_ended
        proxy.is_down = False
        assert (await stream.result()).text == answer("away", 20)


async def test_many_streams_and_one_cut(gateway: Gateway) -> None:
    """With small windows: credit goes on as well."""
    config = ClientConfig(reconnect_first_delay_s=0.02, flow=FlowConfig(window_tokens=16))
    async with CuttingProxy(gateway.url) as proxy, connect(proxy.url, config=config) as hr:
        streams = [hr.complete(f"s{number}", model="slow", max_tokens=60, seed=0) for number in range(16)]
        results = [asyncio.create_task(stream.result()) for stream in streams]
        await asyncio.gather(*(stream.accepted() for stream in streams))
        proxy.cut()
        for number, result in enumerate(await asyncio.gather(*results)):
            assert result.text == answer(f"s{number}", 60)


async def test_a_cancel_while_there_is_no_connection(gateway: Gateway, pool: Pool) -> None:
    """Is said when there is one again."""
    async with CuttingProxy(gateway.url) as proxy, connect(proxy.url, config=FAST_BACK) as hr:
        stream = hr.complete("endless", model="slow", max_tokens=100_000)
        await stream.accepted()
        proxy.is_down = True
        proxy.cut()
        await wait_until(lambda: not hr.is_connected)
        stream.cancel()
        proxy.is_down = False
        assert (await stream.result()).status == "cancelled"
        assert pool.statistics().in_flight == 0


async def test_a_request_made_while_there_is_no_connection_waits(gateway: Gateway) -> None:
    """It has not been sent, so it may be."""
    async with CuttingProxy(gateway.url) as proxy, connect(proxy.url, config=FAST_BACK) as hr:
        proxy.is_down = True
        proxy.cut()
        await wait_until(lambda: not hr.is_connected)
        stream = hr.complete("patient", max_tokens=5, seed=0)
        cancelled = hr.complete("impatient", max_tokens=5)
        cancelled.cancel()
        assert (await cancelled.result()).usage["total_tokens"] == 0
        await asyncio.sleep(0.02)
        proxy.is_down = False
        assert (await stream.result()).text == answer("patient", 5)


async def test_without_resume_a_cut_is_an_error(gateway: Gateway, pool: Pool) -> None:
    """Which says that the request had been started; the server ends it."""
    config = ClientConfig(reconnect_first_delay_s=0.02, flow=FlowConfig(resume=False))
    async with CuttingProxy(gateway.url) as proxy, connect(proxy.url, config=config) as hr:
        stream = hr.complete("endless", model="slow", max_tokens=100_000)
        await stream.accepted()
        proxy.cut()
        with pytest.raises(ConnectionLost) as caught:
            await stream.result()
        error = caught.value
        assert (error.started, error.retryable, error.rid) == (True, True, stream.rid)
        await wait_until(lambda: pool.statistics().in_flight == 0)
        # The connection is made anew.
        assert (await hr.complete("next", max_tokens=2, seed=0).result()).text == answer("next", 2)


async def test_a_server_that_has_forgotten_the_stream(gateway: Gateway) -> None:
    """`ResumeFailed`, and why."""
    async with CuttingProxy(gateway.url) as proxy, connect(proxy.url, config=FAST_BACK) as hr:
        stream = hr.complete("endless", model="slow", max_tokens=100_000)
        await stream.accepted()
        stream._core.resume_token = "nobody.knows.it"
        proxy.cut()
        with pytest.raises(ResumeFailed) as caught:
            await stream.result()
        assert (caught.value.code, caught.value.reason) == ("resume_failed", "unknown_token")
        assert caught.value.started


async def test_a_server_that_does_not_come_back(gateway: Gateway) -> None:
    """Attempts end; every request ends with the same."""
    config = ClientConfig(reconnect_first_delay_s=0.01, reconnect_timeout_s=0.1)
    async with CuttingProxy(gateway.url) as proxy, connect(proxy.url, config=config) as hr:
        streams = [hr.complete("endless", model="slow", max_tokens=100_000) for _ in range(2)]
        await asyncio.gather(*(stream.accepted() for stream in streams))
        proxy.is_down = True
        proxy.cut()
        for stream in streams:
            with pytest.raises(ConnectionLost) as caught:
                await stream.result()
            assert caught.value.started
    # The streams outlive a client that could not say goodbye, and end with the gateway.
