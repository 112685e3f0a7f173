"""What the tests of the pool share. Times are multiples of `MS`."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from headrace.engine.config import EngineConfig
from headrace.engine.scripted import scripted_token
from headrace.pool import ModelSpec, Pool, PoolConfig
from headrace.protocol.frames import ClientId, RequestFrame
from headrace.protocol.messages import Delta, End, Event, Progress
from headrace.protocol.options import ChatInput, CompletionInput, GenerationOptions

MS = 0.001
LIMIT_S = 10.0
"""How long a test waits for what must come, on a machine that does other things too."""
LONG = 1_000_000
"""`max_tokens` of a request that does not end by itself."""


def scripted(**fields) -> EngineConfig:
    return EngineConfig(**{"kind": "scripted", "name": "words", **fields})


def model(name: str = "words", workers: int = 1, aliases: tuple[str, ...] = (), **fields) -> ModelSpec:
    return ModelSpec(name, scripted(name=name, **fields), workers=workers, aliases=aliases)


def make_config(*models: ModelSpec, **fields) -> PoolConfig:
    quick = {
        "progress_interval_s": 50 * MS,
        "restart_backoff_initial_s": 50 * MS,
        "restart_backoff_max_s": 200 * MS,
        "preload_blas": "off",
    }
    return PoolConfig(models=models or (model(),), **{**quick, **fields})


def frame(prompt: str = "one two three", **options) -> RequestFrame:
    source = CompletionInput(prompt=prompt)
    return RequestFrame(ClientId("test"), source, GenerationOptions(**{"seed": 7, **options}))


def chat_frame(*contents: str, **options) -> RequestFrame:
    messages = [{"role": "user", "content": content} for content in contents]
    source = ChatInput.model_validate({"messages": messages})
    return RequestFrame(ClientId("test"), source, GenerationOptions(**{"seed": 7, **options}))


def answer(num_tokens: int, prompt: str = "one two three", seed: int = 7) -> str:
    return "".join(scripted_token(prompt, seed, index) for index in range(num_tokens))


class Recorder:
    """A sink that keeps all events and can be waited for."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Delta))

    @property
    def num_tokens(self) -> int:
        return sum(event.n for event in self.events if isinstance(event, Delta))

    @property
    def progress(self) -> list[Progress]:
        return [event for event in self.events if isinstance(event, Progress)]

    @property
    def ends(self) -> list[End]:
        return [event for event in self.events if isinstance(event, End)]

    async def end(self) -> End:
        """Wait for the end; check that it is the only one, the last event, and counts right."""
        await eventually(lambda: bool(self.ends))
        end = self.ends[0]
        assert self.ends == [end]
        assert self.events[-1] is end
        assert end.usage["completion_tokens"] == self.num_tokens
        return end

    async def tokens(self, num_tokens: int) -> None:
        await eventually(lambda: self.num_tokens >= num_tokens)


async def eventually(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Wait for a condition; fail if it does not come."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "what the test waits for did not come"
        await asyncio.sleep(MS)


def assert_idle(pool: Pool) -> None:
    """Fail unless every counter of things under way is zero."""
    statistics = pool.statistics()
    assert statistics.in_flight == 0
    assert set(statistics.queued.values()) == {0}
    assert [worker.in_flight for worker in statistics.workers] == [0] * len(statistics.workers)
    assert sum(statistics.ended_total.values()) == statistics.started_total


async def engines_idle(pool: Pool) -> None:
    """Wait until the engines' own gauges are zero."""
    await eventually(lambda: all(w.status.stats.in_flight == 0 for w in pool.statistics().workers))


def pids(pool: Pool) -> list[int | None]:
    return [worker.status.pid for worker in pool.statistics().workers]


def is_running(pid: int) -> bool:
    """Tell whether a process is there and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z" if stat.parent.parent.is_dir() else True
    except (FileNotFoundError, ProcessLookupError):
        return not stat.parent.parent.joinpath("self").exists()
