"""Whatever is sent, the answer is documented, and everybody else is served.

`HEADRACE_FUZZ_FRAMES=1000000 pytest tests/gateway/test_fuzz.py` for more than the tests' own 20,000.
"""

import asyncio
import json
import os
from typing import Any

import pytest
from fuzzing import frames
from gateway_helpers import Client, assert_well_formed, make_gateway, wait_until
from pydantic import TypeAdapter

from headrace.gateway.config import LimitsConfig
from headrace.pool import Pool
from headrace.protocol.codec import decode_client_frame, encode
from headrace.protocol.errors import ErrorCode, FrameError
from headrace.protocol.frames import ServerFrame

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_FRAMES = int(os.environ.get("HEADRACE_FUZZ_FRAMES", "20000"))
NUM_LIVE_CONNECTIONS = 4
SERVER_FRAME: TypeAdapter[Any] = TypeAdapter(ServerFrame)


def outcome_of(data: str | bytes) -> str:
    """Return the kind of a frame, or the code of the error; check what an error says."""
    try:
        return type(decode_client_frame(data)).__name__
    except FrameError as error:
        refusal = error
    assert refusal.code in ErrorCode
    assert refusal.param is None or len(refusal.param) <= 256
    encode(refusal.body())
    return refusal.code.value


async def test_decoding_gives_a_frame_or_one_documented_error() -> None:
    """Never another exception; the message fits into a frame and the code is one of the page."""
    outcomes: dict[str, int] = {}
    for data in frames(1, NUM_FRAMES):
        outcome = outcome_of(data)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert {"RequestFrame", "CreditFrame", "ResumeFrame", "invalid_json", "invalid_param"} <= set(outcomes)


async def _bombard(client: Client, seed: int, count: int, kinds: dict[str, int]) -> None:
    """Send generated messages and read all answers; each must be a frame of the page."""

    async def send() -> None:
        for number, data in enumerate(frames(seed, count)):
            await client.socket.send(data)
            if number % 50 == 49:
                await asyncio.sleep(0)
        await client.send(type="ping", nonce=f"end-{seed}")

    sending = asyncio.create_task(send())
    open_ids: dict[str, int] = {}
    is_over = False
    while not (is_over and not open_ids):
        async with asyncio.timeout(30):
            frame = json.loads(await client.socket.recv())
        SERVER_FRAME.validate_python(frame, extra="forbid")
        kinds[frame["type"]] = kinds.get(frame["type"], 0) + 1
        match frame["type"]:
            case "accepted" | "resumed":
                assert frame["id"] not in open_ids, "one at a time of each id"
                open_ids[frame["id"]] = -1
            case "delta" | "done":
                open_ids[frame["id"]] += 1
                assert frame["seq"] == open_ids[frame["id"]]
                if frame["type"] == "done":
                    del open_ids[frame["id"]]
            case "progress":
                assert frame["id"] in open_ids
            case "pong":
                is_over = is_over or frame["nonce"] == f"end-{seed}"
                for frame_id in open_ids if is_over else ():  # what waits for credit would wait for ever
                    await client.send(type="cancel", id=frame_id)
            case "error":
                assert frame["code"] in set(ErrorCode)
    await sending


async def test_a_live_connection_keeps_its_rules(pool: Pool) -> None:
    """Every answer is a frame of the page, every stream is gapless and has its end; others go on."""
    gateway = make_gateway(pool, limits=LimitsConfig(max_bad_frames=1 << 60, max_buffered_bytes=1 << 30))
    await gateway.start()
    kinds: dict[str, int] = {}
    async with Client(gateway.url) as honest:
        await honest.complete("h", model="slow", max_tokens=10_000_000)
        reading = asyncio.create_task(honest.done("h"))
        clients = [
            # Without pings: the server's pong would wait behind all that is sent here.
            await Client(gateway.url, max_queue=None, max_size=None, ping_interval=None).__aenter__()
            for _ in range(NUM_LIVE_CONNECTIONS)
        ]
        count = NUM_FRAMES // 2 // NUM_LIVE_CONNECTIONS
        await asyncio.gather(*(_bombard(c, 100 + n, count, kinds) for n, c in enumerate(clients)))
        for client in clients:
            await client.socket.close()
        await honest.send(type="cancel", id="h")
        assert (await reading)["status"] == "cancelled"
        assert_well_formed(honest.frames["h"])
    assert {"accepted", "delta", "done", "error", "pong"} <= set(kinds)
    await wait_until(lambda: pool.statistics().in_flight == 0)
    gateway.abort()
