"""Flow control by credit, from the client down to the engine."""

import pytest
from gateway_helpers import Client, assert_well_formed, wait_until

from headrace.engine.scripted import scripted_token
from headrace.gateway.server import Gateway
from headrace.pool import Pool

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def receive_tokens(client: Client, frame_id: str, count: int) -> None:
    """Wait until a stream has so many tokens, and no more."""
    while sum(delta["n"] for delta in client.deltas(frame_id)) < count:
        await client.receive()
    assert sum(delta["n"] for delta in client.deltas(frame_id)) == count


async def test_a_stream_pauses_without_credit(gateway: Gateway, pool: Pool) -> None:
    """Exactly as many tokens as allowed, then nothing until there is more; others go on meanwhile."""
    async with Client(gateway.url) as client:
        await client.complete("a", seed=1, max_tokens=100, window=10)
        await receive_tokens(client, "a", 10)
        await client.complete("b", max_tokens=500)
        await client.done("b")
        await receive_tokens(client, "a", 10)
        await wait_until(lambda: any(worker.status.stats.paused == 1 for worker in pool.statistics().workers))
        for total in (25, 40):
            await client.send(type="credit", id="a", tokens=15)
            await receive_tokens(client, "a", total)
        await client.send(type="credit", id="a", tokens=10_000)
        assert (await client.done("a"))["status"] == "completed"
        assert_well_formed(client.frames["a"])
    assert client.text("a") == "".join(scripted_token("one two", 1, index) for index in range(100))


async def test_a_paused_stream_can_be_cancelled(gateway: Gateway, pool: Pool) -> None:
    """By a frame, by its deadline, by a lost connection: nothing stays behind."""
    async with Client(gateway.url) as client:
        for frame_id, options in (("a", {}), ("b", {"timeout_ms": 100}), ("c", {})):
            await client.complete(frame_id, max_tokens=100, window=3, **options)
        await client.receive_type("delta")
        await client.send(type="cancel", id="a")
        assert (await client.done("a"))["reason"] == "client"
        assert (await client.done("b"))["reason"] == "deadline"
    await wait_until(lambda: pool.statistics().in_flight == 0)
    await wait_until(lambda: all(worker.status.stats.in_flight == 0 for worker in pool.statistics().workers))


async def test_credit_is_for_requests_with_a_window(gateway: Gateway) -> None:
    """Refused for others, by name; an unknown or ended id is no error, as with `cancel`."""
    async with Client(gateway.url) as client:
        await client.complete("a", model="slow", max_tokens=10)
        await client.receive_type("accepted")
        await client.send(type="credit", id="a", tokens=5)
        error = await client.receive_type("error")
        assert (error["code"], error["param"], error["id"]) == ("invalid_param", "id", "a")
        await client.receive_type("done")
        for frame_id in ("a", "never"):
            await client.send(type="credit", id=frame_id, tokens=5)
        await client.send(type="ping", nonce=1)
        assert (await client.receive())["type"] == "pong"


async def test_credit_may_come_before_the_first_token(gateway: Gateway) -> None:
    """It is added to the window."""
    async with Client(gateway.url) as client:
        await client.complete("a", model="slow", max_tokens=20, window=1)
        await client.send(type="credit", id="a", tokens=19)
        assert (await client.done("a"))["status"] == "completed"
