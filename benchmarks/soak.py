"""Random requests, cancels, disconnects, resumes and credits against a scripted engine, for as long as asked.

    python benchmarks/soak.py --seconds 60          # exits with 1 when a rule was broken
    python benchmarks/soak.py --seconds 3600 --json soak.json

Every stream is followed to its end, over as many connections as it takes: `seq` without gaps, the text that
the scripted engine must make, as many tokens as counted, exactly one last frame. At the end every counter of
the gateway, the pool and the engine must be back at zero.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from servers import CountingServer, machine, save
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from headrace.engine.scripted import scripted_token

DETACH_TIMEOUT_S = 4.0
REPLAY_S = 8.0
SETTLE_S = 30.0
MAX_LIVE = 10
WINDOW = 20
ENDLESS = 50_000
PARTS = 6


class Broken(Exception):
    """A rule of the protocol was broken."""


@dataclass
class Tracked:
    """One stream, over all of its connections."""

    id: str
    seed: int
    max_tokens: int
    detach: bool
    window: int | None
    resume_token: str | None = None
    next_seq: int = 0
    num_tokens: int = 0
    texts: list[str] = field(default_factory=list)

    def request(self) -> dict[str, Any]:
        """Return its frame."""
        frame = {"type": "completion", "id": self.id, "prompt": "soak", "seed": self.seed}
        options = {"max_tokens": self.max_tokens, "detach": self.detach, "window": self.window}
        return {**frame, **options}

    def take(self, frame: dict[str, Any]) -> bool:
        """Take a frame of the stream; return whether it was the last."""
        if frame["type"] == "accepted":
            self.resume_token = frame.get("resume_token")
        if "seq" not in frame:
            return False
        if frame["seq"] != self.next_seq:
            raise Broken(f"{self.id}: seq {frame['seq']} in place of {self.next_seq}")
        self.next_seq += 1
        if frame["type"] == "delta":
            self.num_tokens += frame["n"]
            self.texts.append(frame["text"])
            return False
        self._check_end(frame)
        return True

    def _check_end(self, done: dict[str, Any]) -> None:
        if done["usage"]["completion_tokens"] != self.num_tokens:
            raise Broken(f"{self.id}: {self.num_tokens} tokens, and {done['usage']} in done")
        if done["status"] == "completed" and self.num_tokens != self.max_tokens:
            raise Broken(f"{self.id}: completed with {self.num_tokens} of {self.max_tokens} tokens")
        if done["status"] == "failed":
            raise Broken(f"{self.id}: {done['error']}")
        expected = "".join(scripted_token("soak", self.seed, index) for index in range(self.num_tokens))
        if "".join(self.texts) != expected:
            raise Broken(f"{self.id}: not the text that the engine makes")


class Actor:
    """A client without manners."""

    def __init__(self, url: str, seed: int, numbers: Iterator[int], events: Counter[str]) -> None:
        self._url = url
        self._rng = random.Random(seed)
        self._numbers = numbers
        self._events = events
        self._live: dict[str, Tracked] = {}
        """Running, as far as this client knows, on the connection that there is or waiting to be resumed."""

    async def run(self, until_s: float) -> None:
        """Connect, play, vanish, again and again; in the end see every stream to its end."""
        while time.monotonic() < until_s:
            async with connect(self._url, compression=None, proxy=None, max_queue=None) as socket:
                await self._come_back(socket)
                for _ in range(self._rng.randint(3, 40)):
                    await self._act(socket)
                    await self._read(socket, self._rng.choice((0.0, 0.001, 0.01, 0.05)))
                self._events["disconnects"] += 1
                if self._rng.random() < 0.5:
                    socket.transport.abort()
            self._forget_lost()
        async with connect(self._url, compression=None, proxy=None, max_queue=None) as socket:
            await self._come_back(socket)
            limit_s = time.monotonic() + SETTLE_S
            while self._live:
                if time.monotonic() > limit_s:
                    raise Broken(f"no last frame of {sorted(self._live)}")
                for frame_id in self._live:
                    await self._send(socket, {"type": "cancel", "id": frame_id})
                await self._read(socket, 0.2)

    async def _come_back(self, socket: ClientConnection) -> None:
        for stream in self._live.values():
            self._events["resumes"] += 1
            after = {"token": stream.resume_token, "after_seq": stream.next_seq - 1}
            await self._send(socket, {"type": "resume", "id": stream.id, **after})

    def _forget_lost(self) -> None:
        """Streams without a token end with their connection; the server sees to them."""
        lost = [frame_id for frame_id, stream in self._live.items() if stream.resume_token is None]
        for frame_id in lost:
            del self._live[frame_id]

    async def _act(self, socket: ClientConnection) -> None:
        rng = self._rng
        what = rng.choice(("start", "start", "cancel", "credit", "credit", "nothing"))
        if what == "start" and len(self._live) < MAX_LIVE:
            max_tokens = rng.choice((1, 5, 40, 300, ENDLESS))
            window = rng.choice((None, None, WINDOW))
            stream = Tracked(
                f"s{next(self._numbers)}", rng.randrange(1 << 30), max_tokens, rng.random() < 0.6, window
            )
            self._live[stream.id] = stream
            self._events["starts"] += 1
            await self._send(socket, stream.request())
        elif what == "cancel" and self._live:
            self._events["cancels"] += 1
            await self._send(socket, {"type": "cancel", "id": rng.choice(list(self._live))})
        elif what == "credit":
            windowed = [stream.id for stream in self._live.values() if stream.window is not None]
            if windowed:
                self._events["credits"] += 1
                frame = {"type": "credit", "id": rng.choice(windowed), "tokens": rng.randint(1, 100)}
                await self._send(socket, frame)

    async def _send(self, socket: ClientConnection, frame: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionClosed):
            await socket.send(orjson.dumps(frame), text=True)

    async def _read(self, socket: ClientConnection, for_s: float) -> None:
        """Take frames until none has come for so long, or long enough."""
        limit_s = time.monotonic() + max(for_s, 0.02)
        with contextlib.suppress(TimeoutError, ConnectionClosed):
            while time.monotonic() < limit_s:
                async with asyncio.timeout(for_s + 0.001):
                    data = await socket.recv()
                self._take(orjson.loads(data))

    def _take(self, frame: dict[str, Any]) -> None:
        self._events["frames"] += 1
        stream = self._live.get(frame.get("id", ""))
        match frame["type"]:
            case "error" if frame["code"] == "resume_failed" and frame["reason"] in ("expired", "gap"):
                # It was away for too long, or had read too little before it vanished: the server forgets
                # what a slow client has not read, and ends what nobody comes back for.
                self._events[f"resume_failed {frame['reason']}"] += 1
                del self._live[frame["id"]]
            case "error" if frame["code"] == "too_many_in_flight" and stream is not None:
                self._events["refused"] += 1
                del self._live[frame["id"]]
            case "error":
                raise Broken(f"{frame}")
            case "hello" | "resumed" | "pong":
                pass
            case _ if stream is None:
                raise Broken(f"a frame of no running stream: {frame}")
            case _:
                if stream.take(frame):
                    self._events[f"ended {frame['status']}"] += 1
                    del self._live[stream.id]


async def soak(server: CountingServer, seconds: float, num_clients: int, seed: int) -> Counter[str]:
    """Let clients play; return what they did."""
    events: Counter[str] = Counter()
    numbers = itertools.count()
    until_s = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for number in range(num_clients):
            group.create_task(Actor(server.url, seed * 1000 + number, numbers, events).run(until_s))
    return events


def settle(server: CountingServer) -> dict[str, int]:
    """Wait until all counters are at zero; return those that are not."""
    limit_s = time.monotonic() + SETTLE_S
    while True:
        left = {name: value for name, value in server.counters().items() if name != "ended_total" and value}
        if not left or time.monotonic() > limit_s:
            return left
        time.sleep(0.1)


def main() -> None:
    """Soak, and tell what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()

    options = {"token_delay_ms": 1.0, "detach_timeout_s": DETACH_TIMEOUT_S, "replay_s": REPLAY_S}
    memory, events, left = [], Counter[str](), {}
    with CountingServer(**options) as server:
        # Each part begins with nothing running; memory is what allocators keep, and must level off.
        for part in range(PARTS + 1):
            events += asyncio.run(soak(server, args.seconds / PARTS, args.clients, args.seed * 100 + part))
            left |= settle(server)
            memory.append(server.memory_mib())
            if part == 0:
                events.clear()  # only to warm up
    actions = sum(events[name] for name in ("cancels", "disconnects", "resumes", "credits"))
    result = {
        "seconds": args.seconds,
        "cancels, disconnects, resumes and credits": actions,
        **dict(sorted(events.items())),
        "counters that are not zero": left,
        "memory at the start and after each part, MiB": memory,
    }
    for name, value in result.items():
        print(f"{name}: {value}")
    save({"machine": machine(), "result": result}, args.json)
    if left:
        sys.exit("counters are not back at zero")


if __name__ == "__main__":
    main()
