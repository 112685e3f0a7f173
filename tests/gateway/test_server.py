"""The gateway as a whole: HTTP pages, subprotocols, readiness, and the ways it stops."""

import asyncio
import http.client
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from gateway_helpers import Client, assert_well_formed, make_gateway, scripted_pool_config, wait_until
from websockets.exceptions import ConnectionClosed

from headrace.engine.config import EngineConfig
from headrace.gateway.config import DeadlinesConfig, LimitsConfig
from headrace.gateway.server import Gateway
from headrace.pool import ModelSpec, Pool, PoolConfig

pytestmark = pytest.mark.asyncio(loop_scope="session")


def _get(port: int, path: str, method: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path)
    response = connection.getresponse()
    assert response.headers["Content-Type"] == "application/json"
    body = json.loads(response.read())
    connection.close()
    return response.status, body


async def get(gateway: Gateway, path: str, method: str = "GET") -> tuple[int, Any]:
    """Return the status and the JSON of a page."""
    return await asyncio.to_thread(_get, gateway.port, path, method)


async def test_http_pages(gateway: Gateway) -> None:
    """Health, readiness, models; everything else is 404 in JSON."""
    assert await get(gateway, "/healthz") == (200, {"status": "ok"})
    assert await get(gateway, "/readyz?verbose") == (200, {"status": "ready"})
    status, models = await get(gateway, "/v1/models")
    assert (status, models["object"]) == (200, "list")
    assert [(model["id"], model["state"]) for model in models["data"]] == [
        ("fast", "ready"),
        ("slow", "ready"),
    ]
    for path in ("/page", "/v1", "/v1/stream/", "/%2e%2e"):
        status, body = await get(gateway, path)
        assert (status, body["error"]["code"]) == (404, "not_found")
    status, body = await get(gateway, "/healthz", "POST")
    assert (status, body["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize("body", [b"", b'{"model": "fast"}', b"x" * (1 << 20)])
async def test_a_client_of_another_api_is_told_what_this_is(gateway: Gateway, body: bytes) -> None:
    """A POST gets an answer whether it has a body or not."""

    def post() -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=10)
        connection.request("POST", "/v1/chat/completions", body)
        response = connection.getresponse()
        answer = response.status, json.loads(response.read())
        connection.close()
        return answer

    status, answer = await asyncio.to_thread(post)
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
    assert "WebSocket" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("offered", "selected"),
    [(None, None), (["headrace.v1"], "headrace.v1"), (["x", "headrace.v1"], "headrace.v1"), (["x"], None)],
)
async def test_the_subprotocol_is_optional(
    gateway: Gateway, offered: list[str] | None, selected: str | None
) -> None:
    """Selected where it is offered; a plain client is served as well. Nothing is compressed."""
    async with Client(gateway.url, subprotocols=offered, compression="deflate") as client:
        assert client.socket.subprotocol == selected
        assert client.socket.protocol.extensions == []


async def test_it_listens_before_the_models_are_loaded() -> None:
    """Healthy and not ready; a request waits, hears of the loading, and is answered."""
    engine = EngineConfig(name="m", kind="scripted", scripted_load_s=0.3)
    config = PoolConfig(models=(ModelSpec("m", engine),), progress_interval_s=0.05)
    async with Pool(config) as pool:
        gateway = make_gateway(pool)
        await gateway.start()
        assert (await get(gateway, "/healthz"))[0] == 200
        assert (await get(gateway, "/readyz"))[0] == 503
        async with Client(gateway.url) as client:
            assert client.hello["models"][0]["state"] == "loading"
            await client.complete("a", max_tokens=3)
            done = await client.done("a")
            assert done["status"] == "completed"
            assert client.frames["a"][1]["phase"] == "load"
            assert_well_formed(client.frames["a"])
        assert (await get(gateway, "/readyz"))[0] == 200
        gateway.abort()


async def test_a_dead_engine_fails_its_requests_and_no_connection() -> None:
    """By name; then it is back, and the next request is answered."""
    config = PoolConfig(
        models=(ModelSpec("m", EngineConfig(name="m", kind="scripted")),), restart_backoff_initial_s=0.05
    )
    async with Pool(config) as pool:
        await pool.wait_ready(20)
        gateway = make_gateway(pool)
        await gateway.start()
        async with Client(gateway.url) as client:
            await client.complete("a", "[[crash]]")
            done = await client.done("a")
            assert (done["status"], done["reason"], done["error"]["code"]) == ("failed", *["engine_died"] * 2)
            assert_well_formed(client.frames["a"])
            assert (await get(gateway, "/readyz"))[0] == 503
            await client.complete("b", max_tokens=1)
            assert (await client.done("b"))["status"] == "completed"
        assert (await get(gateway, "/readyz"))[0] == 200
        gateway.abort()


DEADLINES = DeadlinesConfig(drain_timeout_s=0.5, cancel_timeout_s=0.4, goodbye_timeout_s=0.3)


async def test_stopping_lets_requests_end() -> None:
    """Goaway, no new requests or connections, the running one ends by itself, 1012."""
    async with Pool(scripted_pool_config(slow=5.0)) as pool:
        await pool.wait_ready(20)
        gateway = make_gateway(pool, deadlines=DeadlinesConfig(drain_timeout_s=10))
        await gateway.start()
        async with Client(gateway.url) as client:
            await client.complete("a", max_tokens=40)
            await client.receive_type("delta")
            stopping = asyncio.create_task(gateway.stop())
            goaway = await client.receive_type("goaway")
            assert goaway == {"type": "goaway", "reason": "shutdown", "deadline_ms": 10_000}
            await client.complete("b")
            assert (await client.done("b"))["code"] == "shutting_down"
            assert (await get(gateway, "/readyz")) == (503, {"status": "draining"})
            assert (await get(gateway, "/healthz"))[0] == 200
            assert (await get(gateway, "/v1/stream"))[0] == 503
            assert (await client.done("a"))["status"] == "completed"
            assert await client.closed() == 1012
            await stopping
        assert_well_formed(client.frames["a"])


async def test_stopping_cancels_what_does_not_end() -> None:
    """After the drain timeout, each with its last frame, within the time that was promised."""
    async with Pool(scripted_pool_config(max_in_flight=20, slow=5.0)) as pool:
        await pool.wait_ready(20)
        gateway = make_gateway(pool, deadlines=DEADLINES)
        await gateway.start()
        async with Client(gateway.url) as client:
            for number in range(50):
                await client.complete(str(number), max_tokens=100_000, stream=number % 2 == 0)
            await client.receive_type("delta")
            started_s = time.monotonic()
            stopping = asyncio.create_task(gateway.stop())
            for number in range(50):
                done = await client.done(str(number))
                assert (done["status"], done["reason"]) == ("cancelled", "shutdown")
                assert_well_formed(client.frames[str(number)], stream=number % 2 == 0)
            assert await client.closed() == 1012
            await stopping
        assert time.monotonic() - started_s < DEADLINES.drain_timeout_s + 1
        assert pool.statistics().in_flight == 0


async def test_stopping_waits_for_no_stuck_engine() -> None:
    """An engine that hangs doesn't keep a request from its last frame."""
    async with Pool(scripted_pool_config(slow=5.0)) as pool:
        await pool.wait_ready(20)
        gateway = make_gateway(pool, deadlines=DEADLINES)
        await gateway.start()
        async with Client(gateway.url) as client:
            await client.complete("a", "[[hang]]")
            await client.receive_type("delta")
            started_s = time.monotonic()
            stopping = asyncio.create_task(gateway.stop())
            done = await client.done("a")
            assert (done["status"], done["reason"]) == ("cancelled", "shutdown")
            assert_well_formed(client.frames["a"])
            assert await client.closed() == 1012
            await stopping
        assert time.monotonic() - started_s < DEADLINES.drain_timeout_s + 1


@pytest.mark.parametrize("num_requests", [1, 2, 20])
async def test_what_has_ended_reaches_a_client_that_reads_later(num_requests: int) -> None:
    """All requests have ended, and there is time to drain: a pause of the client loses no `done`."""
    async with Pool(scripted_pool_config(fast=0.0)) as pool:
        await pool.wait_ready(20)
        gateway = make_gateway(
            pool,
            deadlines=replace(DeadlinesConfig(), drain_timeout_s=20.0),
            limits=LimitsConfig(socket_send_buffer_bytes=16 << 10),
        )
        await gateway.start()
        async with Client(gateway.url, max_queue=1) as client:
            for number in range(num_requests):
                await client.complete(str(number), max_tokens=10_000)
            await wait_until(lambda: pool.statistics().started_total == num_requests)
            await wait_until(lambda: pool.statistics().in_flight == 0)
            stopping = asyncio.create_task(gateway.stop())
            await asyncio.sleep(0.8)
            for number in range(num_requests):
                assert (await client.done(str(number)))["status"] == "completed"
            with pytest.raises(ConnectionClosed):
                await client.receive_type("nothing more")
            assert client.socket.close_code == 1012
        async with asyncio.timeout(5):
            await stopping


async def test_stopping_twice_is_stopping_once() -> None:
    """And a gateway without connections stops at once."""
    async with Pool(scripted_pool_config(slow=5.0)) as pool:
        async with make_gateway(pool) as gateway:
            await asyncio.gather(gateway.stop(), gateway.stop())
        await wait_until(lambda: gateway.num_connections == 0)
