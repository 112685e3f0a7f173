"""Clients that read slowly or not at all: merged, bounded, dropped; the others go on."""

import asyncio
import contextlib
import json
import socket
from dataclasses import replace

import pytest
from gateway_helpers import Client, assert_well_formed, make_gateway, wait_until
from websockets.exceptions import ConnectionClosedError

from headrace.gateway.config import DeadlinesConfig, LimitsConfig
from headrace.pool import Pool
from headrace.protocol.frames import RequestId
from headrace.protocol.messages import CancelReason

pytestmark = pytest.mark.asyncio(loop_scope="session")

FLOOD = {"model": "fast", "max_tokens": 2**31 - 1}
NUM_FLOODS = 8
SMALL_BUFFERS = LimitsConfig(socket_send_buffer_bytes=16 << 10, write_buffer_bytes=16 << 10)
HANDSHAKE = (
    "GET /v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def masked_text_frame(data: bytes) -> bytes:
    """Return a client's frame with a mask of zeros (RFC 6455, section 5.2)."""
    assert len(data) < 126
    return bytes([0x81, 0x80 | len(data), 0, 0, 0, 0]) + data


def small_socket(port: int) -> socket.socket:
    """Return a connected socket for which the system buffers little."""
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    small.connect(("127.0.0.1", port))
    return small


def open_raw_flood(port: int) -> socket.socket:
    """Return a socket that has asked for endless text and never reads."""
    raw = small_socket(port)
    raw.sendall(HANDSHAKE.encode())
    for number in range(NUM_FLOODS):
        frame = {"type": "completion", "id": str(number), "prompt": "x", **FLOOD}
        raw.sendall(masked_text_frame(json.dumps(frame).encode()))
    return raw


@pytest.fixture
def cancel_reasons(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reasons of all cancels that reach the pool."""
    reasons: list[str] = []
    cancel = pool.cancel

    def note(rid: RequestId, reason: CancelReason) -> None:
        reasons.append(reason)
        cancel(rid, reason)

    monkeypatch.setattr(pool, "cancel", note)
    return reasons


async def test_a_peer_that_never_reads_is_dropped(pool: Pool, cancel_reasons: list[str]) -> None:
    """Within the stall timeout, with its requests cancelled; another client's stream doesn't notice."""
    deadlines = replace(DeadlinesConfig(), stall_timeout_s=0.4)
    gateway = make_gateway(pool, limits=SMALL_BUFFERS, deadlines=deadlines)
    await gateway.start()
    async with Client(gateway.url) as other:
        await other.complete("a", model="slow", max_tokens=100_000)
        await other.receive_type("delta")
        raw = await asyncio.to_thread(open_raw_flood, gateway.port)
        await wait_until(lambda: pool.statistics().in_flight == 1 + NUM_FLOODS)
        seen = 0
        while pool.statistics().in_flight > 1:
            seen += (await other.receive_type("delta"))["n"]
        assert seen > 20, "the other stream went on meanwhile"
        assert gateway.num_connections == 1
        await other.send(type="cancel", id="a")
        await other.done("a")
        assert_well_formed(other.frames["a"])
    assert cancel_reasons == ["slow_consumer"] * NUM_FLOODS + ["client"]
    raw.close()
    gateway.abort()


async def test_pongs_count_into_what_may_wait(pool: Pool) -> None:
    """A client that pings and reads nothing is dropped at the limit, not after 30 s of pings."""
    gateway = make_gateway(pool, limits=replace(SMALL_BUFFERS, max_buffered_bytes=1 << 20))
    await gateway.start()
    raw = small_socket(gateway.port)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(raw, HANDSHAKE.encode())
    await wait_until(lambda: gateway.num_connections == 1)
    pings = (b"\x89\xfd\0\0\0\0" + b"x" * 125) * 1000
    with contextlib.suppress(OSError):
        for _ in range(100):
            async with asyncio.timeout(10):
                await loop.sock_sendall(raw, pings)
    await wait_until(lambda: gateway.num_connections == 0)
    raw.close()
    gateway.abort()


async def test_whole_answers_count_into_what_may_wait(pool: Pool, cancel_reasons: list[str]) -> None:
    """With `stream: false` too: a client that reads none of them is dropped past the limit."""
    gateway = make_gateway(pool, limits=replace(SMALL_BUFFERS, max_buffered_bytes=1 << 20))
    await gateway.start()
    raw = small_socket(gateway.port)
    await asyncio.to_thread(raw.sendall, HANDSHAKE.encode())
    before = pool.statistics().started_total
    for number in range(400):
        frame = {"type": "completion", "id": str(number), "prompt": "x", "stream": False, "max_tokens": 999}
        try:
            await asyncio.to_thread(raw.sendall, masked_text_frame(json.dumps(frame).encode()))
        except OSError:
            break
        await wait_until(lambda: pool.statistics().in_flight == 0)
    await wait_until(lambda: gateway.num_connections == 0)
    assert pool.statistics().started_total - before < 300, "each answer has about 10 KB"
    raw.close()
    gateway.abort()


@pytest.mark.parametrize("is_busy", [True, False])
async def test_any_sign_of_life_keeps_a_connection(pool: Pool, is_busy: bool) -> None:
    """A pong may wait behind much else; only a peer that sends nothing at all is gone."""
    deadlines = replace(DeadlinesConfig(), ping_interval_s=0.1, ping_timeout_s=0.3)
    gateway = make_gateway(pool, deadlines=deadlines)
    await gateway.start()
    raw = small_socket(gateway.port)
    await asyncio.to_thread(raw.sendall, HANDSHAKE.encode())
    await wait_until(lambda: gateway.num_connections == 1)
    if is_busy:
        for _ in range(30):
            await asyncio.to_thread(raw.sendall, masked_text_frame(b'{"type":"ping"}'))
            await asyncio.sleep(0.05)
        assert gateway.num_connections == 1
    await wait_until(lambda: gateway.num_connections == 0, 5)
    raw.close()
    gateway.abort()


async def test_a_slow_reader_that_goes_on_reading_is_kept(pool: Pool) -> None:
    """Neither the stall rule nor the heartbeat ends a connection whose peer takes a little now and then."""
    deadlines = replace(DeadlinesConfig(), ping_interval_s=0.1, ping_timeout_s=1.2, stall_timeout_s=1.2)
    limits = LimitsConfig(socket_send_buffer_bytes=256 << 10, max_buffered_bytes=1 << 30)
    gateway = make_gateway(pool, deadlines=deadlines, limits=limits)
    await gateway.start()
    raw = await asyncio.to_thread(open_raw_flood, gateway.port)
    raw.setblocking(False)
    await wait_until(lambda: pool.statistics().in_flight == NUM_FLOODS)
    loop = asyncio.get_running_loop()
    for _ in range(70):
        assert await loop.sock_recv(raw, 2000)
        await asyncio.sleep(0.05)
    assert gateway.num_connections == 1
    raw.close()
    gateway.abort()


async def test_a_peer_that_does_not_close_is_dropped(pool: Pool) -> None:
    """After a frame too large the peer ignores the close frame: its request ends, then the connection."""
    deadlines = replace(DeadlinesConfig(), close_timeout_s=0.2)
    gateway = make_gateway(pool, limits=LimitsConfig(max_frame_bytes=120), deadlines=deadlines)
    await gateway.start()
    raw = small_socket(gateway.port)
    frame = {"type": "completion", "id": "a", "prompt": "x", "model": "slow", "max_tokens": 100_000}
    await asyncio.to_thread(raw.sendall, HANDSHAKE.encode() + masked_text_frame(json.dumps(frame).encode()))
    await wait_until(lambda: pool.statistics().in_flight == 1)
    await asyncio.to_thread(raw.sendall, masked_text_frame(b"x" * 121))
    await wait_until(lambda: pool.statistics().in_flight == 0, 2)
    await wait_until(lambda: gateway.num_connections == 0, 2)
    raw.close()
    gateway.abort()


async def test_a_client_too_far_behind_is_told_4508(pool: Pool, cancel_reasons: list[str]) -> None:
    """More waits than may: no more is generated, and a client that reads again learns why."""
    limits = replace(SMALL_BUFFERS, max_buffered_bytes=200_000)
    gateway = make_gateway(pool, limits=limits)
    await gateway.start()
    async with Client(gateway.url, max_queue=1, sock=small_socket(gateway.port)) as client:
        for number in range(NUM_FLOODS):
            await client.complete(str(number), **FLOOD)
        await wait_until(lambda: pool.statistics().in_flight == NUM_FLOODS)
        await wait_until(lambda: pool.statistics().in_flight == 0)
        with pytest.raises(ConnectionClosedError):
            await client.receive_type("done")
        assert client.socket.close_code == 4508
    assert cancel_reasons == ["slow_consumer"] * NUM_FLOODS
    gateway.abort()


async def test_deltas_of_a_slow_client_merge(pool: Pool) -> None:
    """Nothing is lost: fewer frames, gapless, all of the text."""
    num_tokens = 30_000
    gateway = make_gateway(pool, limits=SMALL_BUFFERS)
    await gateway.start()
    async with Client(gateway.url, max_queue=1, sock=small_socket(gateway.port)) as slow:
        await slow.complete("a", model="fast", max_tokens=num_tokens, seed=1)
        async with Client(gateway.url) as other:
            await other.complete("b", model="fast", max_tokens=num_tokens, seed=1)
            await other.done("b")
        await slow.done("a")
    assert slow.text("a") == other.text("b")
    assert len(slow.deltas("a")) < len(other.deltas("b"))
    assert_well_formed(slow.frames["a"])
    gateway.abort()
