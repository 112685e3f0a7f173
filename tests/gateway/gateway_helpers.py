"""What the gateway's tests share: a client that keeps the frames of each request, and quick set-up."""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Self

from websockets.asyncio.client import ClientConnection, connect

from headrace.engine.config import EngineConfig
from headrace.gateway.config import (
    AccessConfig,
    DeadlinesConfig,
    GatewayConfig,
    LimitsConfig,
    ListenConfig,
    ResumeConfig,
)
from headrace.gateway.server import Gateway
from headrace.pool import ModelSpec, Pool, PoolConfig

DEADLINE_S = 15.0
"""For anything that a test waits for."""


def scripted_pool_config(*, max_in_flight: int = 64, max_queue: int = 2048, **delays_ms: float) -> PoolConfig:
    """Return a pool of scripted models, by name, with the time that a token takes each."""
    models = tuple(
        ModelSpec(
            name,
            EngineConfig(
                name=name, kind="scripted", scripted_token_delay_ms=delay_ms, max_batch_size=max_in_flight
            ),
        )
        for name, delay_ms in delays_ms.items()
    )
    return PoolConfig(
        models=models,
        max_in_flight=max_in_flight,
        max_queue=max_queue,
        shutdown_cancel_s=0.1,
        stop_timeout_s=0.5,
        terminate_timeout_s=0.1,
    )


def make_gateway(
    pool: Pool,
    *,
    limits: LimitsConfig | None = None,
    deadlines: DeadlinesConfig | None = None,
    access: AccessConfig | None = None,
    resume: ResumeConfig | None = None,
    listen: ListenConfig | None = None,
) -> Gateway:
    """Return a gateway on a free port."""
    config = GatewayConfig(
        listen=listen or ListenConfig(port=0),
        resume=resume or ResumeConfig(),
        limits=limits or LimitsConfig(),
        deadlines=deadlines or replace(DeadlinesConfig(), drain_timeout_s=0.2),
        access=access or AccessConfig(),
    )
    return Gateway(pool, config, server_version="0", max_queue=64, max_tokens=512)


@asynccontextmanager
async def running_gateway(pool: Pool, access: AccessConfig | None = None) -> AsyncIterator[Gateway]:
    """A gateway whose end leaves the pool as it is: a graceful stop would drain it for good."""
    gateway = make_gateway(pool, access=access)
    await gateway.start()
    try:
        yield gateway
    finally:
        gateway.abort()


async def wait_until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Wait for a condition; fail when it has not come true in time."""
    until_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until_s, "the condition has not come true in time"
        await asyncio.sleep(0.002)


class Client:
    """A client; ``async with Client(url) as client``. Frames of requests are kept by id, others in order."""

    def __init__(self, url: str, **options: Any) -> None:
        self._url = url
        self._options = {"compression": None, "proxy": None, **options}
        self.frames: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.others: list[dict[str, Any]] = []
        self.socket: ClientConnection
        self.hello: dict[str, Any]

    async def __aenter__(self) -> Self:
        self.socket = await connect(self._url, **self._options)
        self.hello = await self.receive()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.socket.close()

    async def send(self, **fields: Any) -> None:
        """Send a frame."""
        await self.socket.send(json.dumps(fields))

    async def complete(self, frame_id: str, prompt: str = "one two", **options: Any) -> None:
        """Send a completion frame."""
        await self.send(type="completion", id=frame_id, prompt=prompt, **options)

    async def receive(self) -> dict[str, Any]:
        """Return the next frame, and keep it."""
        async with asyncio.timeout(DEADLINE_S):
            frame: dict[str, Any] = json.loads(await self.socket.recv())
        if isinstance(frame.get("id"), str) and frame["type"] != "models":
            self.frames[frame["id"]].append(frame)
        else:
            self.others.append(frame)
        return frame

    async def receive_type(self, kind: str) -> dict[str, Any]:
        """Return the next frame of a type; keep those before it."""
        while (frame := await self.receive())["type"] != kind:
            pass
        return frame

    async def done(self, frame_id: str) -> dict[str, Any]:
        """Return the last frame of a request, or the error that it was refused with."""
        while not self.frames[frame_id] or self.frames[frame_id][-1]["type"] not in ("done", "error"):
            await self.receive()
        return self.frames[frame_id][-1]

    def deltas(self, frame_id: str) -> list[dict[str, Any]]:
        """Return the deltas of a request so far."""
        return [frame for frame in self.frames[frame_id] if frame["type"] == "delta"]

    def text(self, frame_id: str) -> str:
        """Return the text of a request so far."""
        return "".join(delta["text"] for delta in self.deltas(frame_id))

    async def closed(self) -> int | None:
        """Wait for the end of the connection; return its close code."""
        async with asyncio.timeout(DEADLINE_S):
            await self.socket.wait_closed()
        return self.socket.close_code


def assert_well_formed(frames: list[dict[str, Any]], *, stream: bool = True) -> None:
    """Check what holds for every request, however it went."""
    kinds = [frame["type"] for frame in frames]
    if kinds == ["error"]:
        return
    assert kinds[0] == "accepted"
    assert kinds[-1] == "done"
    assert kinds.count("accepted") == kinds.count("done") == 1
    assert set(kinds) <= {"accepted", "progress", "delta", "done"}
    numbered = [frame["seq"] for frame in frames if "seq" in frame]
    assert numbered == list(range(len(numbered)))
    done = frames[-1]
    usage = done["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if stream:
        assert sum(frame["n"] for frame in frames if frame["type"] == "delta") == usage["completion_tokens"]
    else:
        assert "delta" not in kinds
        assert "text" in done or "message" in done
