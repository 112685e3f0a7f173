"""Many connections: what an idle one costs, a thousand active streams, and one that stops reading.

    python benchmarks/connections.py        # 10,000 idle ones, 1,000 streams; about 2 minutes on 2 cores

Both ends of a connection need a descriptor, each in its own process: `ulimit -n` must allow so many
(the hard limit counts; this script raises the soft one).
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import socket
import time
from pathlib import Path
from typing import Any

import orjson
from servers import CountingServer, machine, save
from websockets.asyncio.client import ClientConnection, connect

CONNECT_AT_ONCE = 100
TOKENS = 60
SPARE_FILES = 200
HONEST_STREAMS = 50
STALLED_STREAMS = 50
STALL_DELAY_MS = 10.0
STALL_LIMIT_S = 90.0
SETTLE_S = 5.0


async def open_connections(url: str, count: int) -> list[ClientConnection]:
    """Return so many connections that have had their `hello`."""
    gate = asyncio.Semaphore(CONNECT_AT_ONCE)

    async def open_one() -> ClientConnection:
        async with gate:
            client = await connect(
                url, compression=None, proxy=None, max_queue=None, ping_interval=None, open_timeout=60
            )
            await client.recv()
            return client

    return await asyncio.gather(*(open_one() for _ in range(count)))


async def close_connections(sockets: list[ClientConnection]) -> None:
    """Drop them all."""
    for client in sockets:
        client.transport.abort()
    await asyncio.gather(*(client.wait_closed() for client in sockets))


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

    async def stream(number: int, client: ClientConnection) -> None:
        nonlocal num_frames
        frame = {"type": "completion", "id": f"a{number}", "prompt": "[[clock]]", "max_tokens": TOKENS}
        await client.send(orjson.dumps(frame), text=True)
        while (frame := orjson.loads(await client.recv()))["type"] != "done":
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
    await asyncio.gather(*(stream(number, client) for number, client in enumerate(sockets)))
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


def open_stalled(url: str) -> socket.socket:
    """Return a raw socket that has asked for endless text in many streams, and never reads."""
    host, port = url.removeprefix("ws://").partition("/")[0].split(":")
    raw = socket.create_connection((host, int(port)))
    raw.sendall(
        f"GET /v1/stream HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
    )
    for number in range(STALLED_STREAMS):
        frame = {"type": "completion", "id": str(number), "prompt": "x", "max_tokens": 2**31 - 1}
        data = orjson.dumps(frame)
        raw.sendall(bytes([0x81, 0x80 | len(data), 0, 0, 0, 0]) + data)  # a mask of zeros
    return raw


async def stalled(server: CountingServer, count: int) -> dict[str, Any]:
    """Measure the gaps in others' streams before and while a socket with many streams reads nothing."""
    sockets = await open_connections(server.url, count)
    gaps_ms: dict[str, list[float]] = {"before": [], "while it stalls": []}
    phase = "before"

    async def stream(number: int, client: ClientConnection) -> None:
        frame = {"type": "completion", "id": f"h{number}", "prompt": "x", "max_tokens": 2**31 - 1}
        await client.send(orjson.dumps(frame), text=True)
        last_s = None
        while orjson.loads(await client.recv())["type"] != "done":
            now_s = time.monotonic()
            if last_s is not None:
                gaps_ms[phase].append((now_s - last_s) * 1000)
            last_s = now_s

    tasks = [asyncio.create_task(stream(number, client)) for number, client in enumerate(sockets)]
    await asyncio.sleep(SETTLE_S)
    memory = [await asyncio.to_thread(server.memory_mib)]
    phase, began_s = "while it stalls", time.monotonic()
    raw = await asyncio.to_thread(open_stalled, server.url)
    dropped_s = None
    while dropped_s is None and time.monotonic() - began_s < STALL_LIMIT_S:
        await asyncio.sleep(0.2)
        counters = await asyncio.to_thread(server.counters)
        memory.append(await asyncio.to_thread(server.memory_mib))
        if counters["connections"] == count:
            dropped_s = round(time.monotonic() - began_s, 1)
    for task in tasks:
        task.cancel()
    raw.close()
    await close_connections(sockets)
    p99_ms = {name: round(sorted(gaps)[len(gaps) * 99 // 100], 1) for name, gaps in gaps_ms.items()}
    return {
        "a socket that reads nothing, dropped after, s": dropped_s,
        "p99 of the gaps of others, ms": p99_ms,
        "gateway, MiB, before and most": (memory[0]["gateway"], max(m["gateway"] for m in memory)),
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
    with CountingServer(token_delay_ms=STALL_DELAY_MS, max_in_flight=args.active) as server:
        results["stalled"] = asyncio.run(stalled(server, HONEST_STREAMS))
    for part in results.values():
        for name, value in part.items():
            print(f"{name}: {value}")
    save({"machine": machine(), **results}, args.json)


if __name__ == "__main__":
    main()
