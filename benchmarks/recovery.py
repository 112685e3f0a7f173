"""Streams of the default model whose engine is taken from them: which texts change, how long they pause.

    python benchmarks/recovery.py                  # all ways, about 4 minutes on 2 cores
    python benchmarks/recovery.py --ways kill stop --json recovery.json

Half of the streams are greedy, half are seeded at temperature 0.8. They run once undisturbed, then once for
each way, on real sockets: `seq` must have no gap, `usage` must count every token once, and the text should be
that of the undisturbed run.

    kill     SIGKILL, in mid-sentence
    stop     SIGSTOP: the watchdog must notice it
    load     SIGKILL, and again while the next process loads
    memory   a memory limit a little over that of the empty engine: it is drained and replaced
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from servers import engine_pids, headrace_process, machine, resident_bytes, save
from websockets.asyncio.client import connect

WAYS = ("kill", "stop", "load", "memory")
HANG_TIMEOUT_S = 5
STREAM_LIMIT_S = 600
LOADING_S = 1.0
"""After the start of a process: Python has started, and the model is being read."""
MIN_TOKENS = 8
"""Tokens that every stream has before anything happens."""
OPENINGS = (
    "The headrace leads the water from the weir to the turbine, and",
    "Once upon a time there was a miller who",
    "The three largest rivers of Europe are",
    "A good gateway between two programs should",
    "To bake bread without an oven you need",
    "The history of the steam engine begins with",
    "Dear Anna, yesterday we walked along the river and",
    "In mathematics, a group is",
)


@dataclass
class Streamed:
    """What one stream has brought."""

    text: str = ""
    num_tokens: int = 0
    arrivals_s: list[float] = field(default_factory=list)
    recoveries: int = 0
    done: dict[str, Any] = field(default_factory=dict)


async def stream(url: str, number: int, max_tokens: int, into: Streamed) -> None:
    """Run one stream to its end; check what must hold whatever happens."""
    temperature = 0.8 if number % 2 else 0.0
    frame = {
        "type": "completion",
        "id": f"r{number}",
        "prompt": OPENINGS[number % len(OPENINGS)],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": 1000 + number,
        "cache_prompt": False,
    }
    next_seq = 0
    async with connect(url, proxy=None) as socket, asyncio.timeout(STREAM_LIMIT_S):
        await socket.recv()
        await socket.send(orjson.dumps(frame), text=True)
        async for message in socket:
            answer = orjson.loads(message)
            if answer["type"] == "progress":
                into.recoveries += answer["phase"] == "recover"
            if "seq" not in answer:
                continue
            assert answer["seq"] == next_seq, f"seq {answer['seq']} in place of {next_seq}"
            next_seq += 1
            if answer["type"] == "done":
                into.done = answer
                break
            into.text += answer["text"]
            into.num_tokens += answer["n"]
            into.arrivals_s.append(time.monotonic())
    assert into.done["status"] == "completed", into.done
    assert into.done["usage"]["completion_tokens"] == into.num_tokens


async def until(condition: Callable[[], bool], limit_s: float) -> None:
    """Wait for a condition; fail if it does not come."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "what the benchmark waits for did not come"
        await asyncio.sleep(0.02)


async def disturb(way: str, gateway_pid: int) -> None:
    """Do to the engine what the way is called after."""
    pid = engine_pids(gateway_pid)[0]
    os.kill(pid, signal.SIGSTOP if way == "stop" else signal.SIGKILL)
    if way == "load":
        await until(lambda: any(other != pid for other in engine_pids(gateway_pid)), 60)
        await asyncio.sleep(LOADING_S)
        os.kill(engine_pids(gateway_pid)[0], signal.SIGKILL)


async def run(url: str, gateway_pid: int, way: str, num_streams: int, max_tokens: int) -> dict[str, Any]:
    """Run all streams at once, and disturb them."""
    streams = [Streamed() for _ in range(num_streams)]
    peak_bytes = 0
    engines: set[int] = set()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(url, number, max_tokens, s)) for number, s in enumerate(streams)]
        await until(lambda: all(s.num_tokens >= MIN_TOKENS for s in streams), STREAM_LIMIT_S)
        if way in ("kill", "stop", "load"):
            await disturb(way, gateway_pid)
        while not all(task.done() for task in tasks):
            pids = engine_pids(gateway_pid)
            peak_bytes = max(peak_bytes, resident_bytes(pids))
            engines.update(pids)
            await asyncio.sleep(0.2)
    return {
        "texts": [s.text for s in streams],
        "carried over": sum(s.recoveries > 0 for s in streams),
        "pauses_s": [max(b - a for a, b in itertools.pairwise(s.arrivals_s)) for s in streams],
        "engines": len(engines),
        "peak_bytes": peak_bytes,
    }


def server(*flags: str) -> AbstractContextManager[tuple[str, int]]:
    """Return a server that notices a hang soon, to be run."""
    return headrace_process("--hang-timeout", str(HANG_TIMEOUT_S), *flags)


def compare(quiet: dict[str, Any], disturbed: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the result; show where texts part."""
    for number, (text, other) in enumerate(zip(quiet["texts"], disturbed["texts"], strict=True)):
        if text != other:
            same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), 0)
            print(f"stream {number} parts at character {same} of {len(text)}:", repr(text[same - 40 : same]))
            print("  undisturbed:", repr(text[same : same + 60]))
            print("  disturbed:  ", repr(other[same : same + 60]))
    same = sum(a == b for a, b in zip(quiet["texts"], disturbed["texts"], strict=True))
    pauses_s = sorted(disturbed["pauses_s"])
    return {
        "texts equal": f"{same} of {len(quiet['texts'])}",
        "streams carried over": disturbed["carried over"],
        "longest pause of a stream, s": {
            "least": round(pauses_s[0], 2),
            "median": round(statistics.median(pauses_s), 2),
            "most": round(pauses_s[-1], 2),
        },
    }


def main() -> None:
    """Measure, and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=240)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()

    results: dict[str, Any] = {}
    with server() as (url, pid):
        empty_bytes = resident_bytes(engine_pids(pid))
        quiet = asyncio.run(run(url, pid, "none", args.streams, args.max_tokens))
        results["undisturbed"] = compare(quiet, quiet)
        print("undisturbed:", results["undisturbed"], flush=True)
        for way in args.ways:
            if way != "memory":
                results[way] = compare(quiet, asyncio.run(run(url, pid, way, args.streams, args.max_tokens)))
                print(f"{way}:", results[way], flush=True)
    if "memory" in args.ways:
        limit_mib = (empty_bytes + (quiet["peak_bytes"] - empty_bytes) // 5) >> 20
        with server("--memory-limit", f"{limit_mib}M") as (url, pid):
            outcome = asyncio.run(run(url, pid, "memory", args.streams, args.max_tokens))
        results["memory"] = compare(quiet, outcome) | {
            "engine processes": outcome["engines"],
            "limit, empty, busy, MiB": (limit_mib, empty_bytes >> 20, quiet["peak_bytes"] >> 20),
        }
        print("memory:", results["memory"], flush=True)
    save({"machine": machine(), **results}, args.json)
    if any(way["texts equal"].split()[0] != str(args.streams) for way in results.values()):
        sys.exit("not all texts are those of the undisturbed run")


if __name__ == "__main__":
    main()
