"""What the way from an engine process to a client costs, without a model.

    python benchmarks/wire.py                       # about 1 minute on 2 cores
    python benchmarks/wire.py --rounds 9 --json wire.json

1. Throughput of 1 and of 32 streams, a connection each, from a scripted engine that makes tokens as fast as
   it can, and at a pace at which most tokens come alone. Beside it a bare websockets server in a process of
   its own pushes the same text to the same client, all frames ready before it starts: in frames of one token
   (what a gateway that merges nothing would send), and in the very frames that Headrace has sent. Rounds come
   in threes, one after the other. Headrace's side includes the engine process, the pipe, the pool and the
   building of frames; tokens that come together share a frame. So the ratio of tokens/s compares the whole
   ways, and frames/s tell how near the wire is. The processor time a token of the gateway's process and of
   the bare server's says the same on a machine that has other things to do.
2. Latency at a steady rate (a token of every stream each 5 ms): from the moment when a token was made in the
   engine process, which its text tells, to the client's receive.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from servers import cpu_s, free_port, headrace, headrace_process, machine, running_socket, save
from websockets.asyncio.client import ClientConnection, connect

BARE_SERVER = Path(__file__).parent / "bare_server.py"
NUM_STREAMS = (1, 32)
PACE_MS = {1: 0.1, 32: 2.0}
"""Time between tokens of a stream at which most tokens have a frame of their own."""
TOKEN_DELAY_MS = 5.0


@dataclass
class Stream:
    """What one connection received: the bytes of all frames of its request from the first delta on."""

    frames: list[str] = field(default_factory=list)
    num_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    delays_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Round:
    """All streams of a round."""

    streams: list[Stream]

    @property
    def seconds(self) -> float:
        """From the first frame of any stream to the last of any."""
        return max(s.last_s for s in self.streams) - min(s.first_s for s in self.streams)

    @property
    def num_frames(self) -> int:
        """Frames of all streams."""
        return sum(len(s.frames) for s in self.streams)

    @property
    def num_tokens(self) -> int:
        """Tokens of all streams."""
        return sum(s.num_tokens for s in self.streams)


@dataclass(frozen=True)
class Server:
    """Where to connect, and the process that answers."""

    url: str
    pid: int


async def receive(socket: ClientConnection, stream: Stream) -> None:
    """Receive and read frames until `done`; keep the bytes."""
    while True:
        data = await socket.recv()
        now_s = time.perf_counter()
        frame = orjson.loads(data)
        kind = frame["type"]
        if kind == "delta":
            stream.num_tokens += frame["n"]
        elif kind != "done":
            if kind == "error":
                raise SystemExit(f"headrace answered {frame}")
            continue
        if not stream.frames:
            stream.first_s = now_s
        assert isinstance(data, str)
        stream.frames.append(data)
        if kind == "done":
            stream.last_s = now_s
            return


@contextmanager
def bare() -> Iterator[Server]:
    """Run the bare server."""
    port = free_port()
    with running_socket([sys.executable, str(BARE_SERVER), str(port)], port) as process:
        yield Server(f"ws://127.0.0.1:{port}", process.pid)


async def connected(url: str, count: int) -> list[ClientConnection]:
    """Return so many connections."""
    return [await connect(url, compression=None, max_queue=None, proxy=None) for _ in range(count)]


async def headrace_round(sockets: list[ClientConnection], num_tokens: int, ids: Iterator[int]) -> Round:
    """Run a stream on each connection."""
    streams = [Stream() for _ in sockets]
    for socket in sockets:
        frame = {"type": "completion", "id": f"w{next(ids)}", "prompt": "x", "max_tokens": num_tokens}
        await socket.send(orjson.dumps(frame), text=True)
    await asyncio.gather(*map(receive, sockets, streams))
    return Round(streams)


def one_token_frames(stream: Stream) -> list[str]:
    """Return the frames of a stream as they would be with a token in each; scripted tokens have one space."""
    *deltas, done = map(orjson.loads, stream.frames)
    tokens = [f" {token}" for delta in deltas for token in delta["text"].split()]
    assert len(tokens) == stream.num_tokens
    frames = [{**deltas[0], "seq": seq, "text": token, "n": 1} for seq, token in enumerate(tokens)]
    return [orjson.dumps(frame).decode() for frame in (*frames, {**done, "seq": len(tokens)})]


async def bare_round(sockets: list[ClientConnection], frames: list[list[str]], folder: Path) -> Round:
    """Let the bare server push frames, a list to each connection."""
    streams = [Stream() for _ in sockets]
    for number, of_stream in enumerate(frames):
        (folder / str(number)).write_text("\n".join(of_stream))
    for number, socket in enumerate(sockets):
        await socket.send(str(folder / str(number)))
    await asyncio.gather(*map(receive, sockets, streams))
    assert [stream.frames for stream in streams] == frames
    return Round(streams)


async def throughput(
    ours: Server, theirs: Server, count: int, rounds: int, num_tokens: int
) -> dict[str, Any]:
    """Compare the same text, in turn."""
    mine, other, ids = await connected(ours.url, count), await connected(theirs.url, count), itertools.count()
    threes, cpu_us = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            used = [cpu_s(ours.pid)]
            sent = await headrace_round(mine, num_tokens, ids)
            used += [cpu_s(ours.pid), cpu_s(theirs.pid)]
            alone = await bare_round(other, [one_token_frames(s) for s in sent.streams], Path(folder))
            used.append(cpu_s(theirs.pid))
            same = await bare_round(other, [s.frames for s in sent.streams], Path(folder))
            if number:  # the first warms everything up
                threes.append((sent, alone, same))
                per_token = 1e6 / sent.num_tokens
                cpu_us.append(((used[1] - used[0]) * per_token, (used[3] - used[2]) * per_token))
    for socket in (*mine, *other):
        await socket.close()
    ratios = [alone.seconds / sent.seconds for sent, alone, _ in threes]
    return {
        "streams": count,
        "tokens/s": round(statistics.median(s.num_tokens / s.seconds for s, _, _ in threes)),
        "bare tokens/s": round(statistics.median(a.num_tokens / a.seconds for _, a, _ in threes)),
        "ratio": round(statistics.median(ratios), 2),
        "min": round(min(ratios), 2),
        "max": round(max(ratios), 2),
        "CPU, us a token": round(statistics.mean(mine for mine, _ in cpu_us), 1),
        "bare CPU": round(statistics.mean(bare for _, bare in cpu_us), 1),
        "tokens a frame": round(statistics.median(s.num_tokens / s.num_frames for s, _, _ in threes), 2),
        "frames/s": round(statistics.median(s.num_frames / s.seconds for s, _, _ in threes)),
        "same frames/s, bare": round(statistics.median(e.num_frames / e.seconds for _, _, e in threes)),
    }


async def latency(url: str, count: int, num_tokens: int) -> dict[str, Any]:
    """Measure from the making of each token to its receive: both clocks are CLOCK_MONOTONIC."""
    sockets, delays_ms = await connected(url, count), []

    async def listen(socket: ClientConnection) -> None:
        while (frame := orjson.loads(data := await socket.recv()))["type"] != "done":
            now_s = time.monotonic()
            if frame["type"] == "delta":
                delays_ms.extend((now_s - float(made)) * 1000 for made in frame["text"].split())
            del data

    for number, socket in enumerate(sockets):
        frame = {"type": "completion", "id": f"l{number}", "prompt": "[[clock]]", "max_tokens": num_tokens}
        await socket.send(orjson.dumps(frame), text=True)
    await asyncio.gather(*map(listen, sockets))
    for socket in sockets:
        await socket.close()
    delays_ms.sort()
    return {
        "streams": count,
        "tokens": len(delays_ms),
        "p50_ms": round(delays_ms[len(delays_ms) // 2], 3),
        "p99_ms": round(delays_ms[len(delays_ms) * 99 // 100], 3),
        "max_ms": round(delays_ms[-1], 3),
    }


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows as a table."""
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)


def main() -> None:
    """Measure, and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="pairs of rounds for each comparison")
    parser.add_argument("--tokens", type=int, default=60_000, help="tokens of a round, over all streams")
    parser.add_argument("--latency-tokens", type=int, default=400, help="tokens of each stream")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()

    flags = ("--engine", "scripted", "--max-in-flight", "64")
    wire = []
    with bare() as theirs:
        for count in NUM_STREAMS:
            for pace_ms in (0.0, PACE_MS[count]):
                num_tokens = (args.tokens if pace_ms == 0 else args.tokens // 4) // count
                with headrace_process(*flags, "--scripted-token-delay-ms", str(pace_ms)) as (url, pid):
                    ours = Server(url, pid)
                    row = asyncio.run(throughput(ours, theirs, count, args.rounds, num_tokens))
                wire.append({"pace, ms": pace_ms, **row})
    show("From the engine process to the client, beside a bare server that pushes the same text", wire)
    with headrace(*flags, "--scripted-token-delay-ms", str(TOKEN_DELAY_MS)) as url:
        delays = [asyncio.run(latency(url, count, args.latency_tokens)) for count in NUM_STREAMS]
    show(f"From a token's making to its receive, a token of each stream every {TOKEN_DELAY_MS:g} ms", delays)
    save({"machine": machine(), "wire": wire, "latency": delays}, args.json)


if __name__ == "__main__":
    main()
