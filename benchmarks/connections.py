"""Many connections: what an idle one costs, and a thousand active streams.

    python benchmarks/connections.py        # 10,000 idle ones, 1,000 streams; about 2 minutes on 2 cores

Both ends of a connection need a descriptor, each in its own process: `ulimit -n` must allow so many
(the hard limit counts; this script raises the soft one).
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import time
from pathlib import Path
from typing import Any

import orjson
from servers import CountingServer, machine, save
from websockets.asyncio.client import ClientConnection, connect

CONNECT_AT_ONCE = 100
TOKENS = 60
SPARE_FILES = 200


async def open_connections(url: str, count: int) -> list[ClientConnection]:
    """Return so many connections that have had their `hello`."""
    gate = asyncio.Semaphore(CONNECT_AT_ONCE)

    async def open_one() -> ClientConnection:
        async with gate:
            socket = await connect(
                url, compression=None, proxy=None, max_queue=None, ping_interval=None, open_timeout=60
            )
            await socket.recv()
            return socket

    return await asyncio.gather(*(open_one() for _ in range(count)))


async def close_connections(sockets: list[ClientConnection]) -> None:
    """Drop them all."""
    for socket in sockets:
        socket.transport.abort()
    await asyncio.gather(*(socket.wait_closed() for socket in sockets))


async def idle(server: CountingServer, count: int) -> dict[str, Any]:
    """Measure what idle connections take in the gateway's process."""
    warm = await open_connections(server.url, 200)  # so that pools of objects are there
    before = server.memory_mib()["gateway"]
    began_s = time.perf_counter()
    sockets = await open_connections(server.url, count)
    opened_s = time.perf_counter() - began_s
    after = server.memory_mib()["gateway"]
    assert server.counters()["connections"] == count + len(warm)
    began_s = time.perf_counter()
    await sockets[0].send('{"type": "ping", "nonce": 1}')
    await sockets[0].recv()
    answer_ms = (time.perf_counter() - began_s) * 1000
    await close_connections([*sockets, *warm])
    return {
        "connections": count,
        "KiB each": round((after - before) * 1024 / count, 1),
        "gateway, MiB": after,
        "opened per second": round(count / opened_s),
        "answer to a ping among them, ms": round(answer_ms, 2),
    }


async def active(server: CountingServer, count: int) -> dict[str, Any]:
    """Run a stream on each of many connections; every token tells when it was made."""
    sockets = await open_connections(server.url, count)
    delays_ms: list[float] = []
    num_frames = 0
    peak: list[dict[str, float]] = []

    async def stream(number: int, socket: ClientConnection) -> None:
        nonlocal num_frames
        frame = {"type": "completion", "id": f"a{number}", "prompt": "[[clock]]", "max_tokens": TOKENS}
        await socket.send(orjson.dumps(frame), text=True)
        while (frame := orjson.loads(await socket.recv()))["type"] != "done":
            if frame["type"] == "delta":
                now_s = time.monotonic()
                num_frames += 1
                delays_ms.extend((now_s - float(made)) * 1000 for made in frame["text"].split())
        assert frame["status"] == "completed"

    async def watch() -> None:
        await asyncio.sleep(2)
        peak.append(await asyncio.to_thread(server.memory_mib))

    watching = asyncio.create_task(watch())
    began_s = time.perf_counter()
    await asyncio.gather(*(stream(number, socket) for number, socket in enumerate(sockets)))
    took_s = time.perf_counter() - began_s
    await watching
    await close_connections(sockets)
    delays_ms.sort()
    assert len(delays_ms) == count * TOKENS
    return {
        "streams": count,
        "tokens/s": round(len(delays_ms) / took_s),
        "frames/s": round(num_frames / took_s),
        "tokens a frame": round(len(delays_ms) / num_frames, 2),
        "from making to receive, p50, ms": round(delays_ms[len(delays_ms) // 2], 1),
        "p99, ms": round(delays_ms[len(delays_ms) * 99 // 100], 1),
        "memory under load, MiB": peak[0],
    }


def main() -> None:
    """Measure, and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--active", type=int, default=1_000)
    parser.add_argument("--token-delay-ms", type=float, default=100.0, help="between tokens of each stream")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < args.idle + SPARE_FILES:
        args.idle = hard - SPARE_FILES
        print(f"only {args.idle} connections: ulimit -n allows no more")
    results = {}
    with CountingServer() as server:
        results["idle"] = asyncio.run(idle(server, args.idle))
    with CountingServer(token_delay_ms=args.token_delay_ms, max_in_flight=args.active) as server:
        results["active"] = asyncio.run(active(server, args.active))
    for part in results.values():
        for name, value in part.items():
            print(f"{name}: {value}")
    save({"machine": machine(), **results}, args.json)


if __name__ == "__main__":
    main()
