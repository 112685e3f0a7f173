"""Streams of a real model outlive its engine: greedy ones, and seeded ones at a temperature."""

import asyncio
import os
import signal
import time

import pytest
from pool_helpers import Recorder, eventually, frame

from headrace.engine.config import EngineConfig
from headrace.pool import ModelSpec, Pool, PoolConfig
from headrace.protocol.frames import RequestFrame

LOAD_LIMIT_S = 120
NUM_TOKENS = 40
PROMPTS = (
    "The headrace leads the water to the turbine, and",
    "Once upon a time there was a miller who",
    "The three largest rivers of Europe are",
    "A good gateway between programs should",
)


def frames() -> list[RequestFrame]:
    """Two greedy ones, two seeded at 0.8."""
    return [
        frame(prompt, max_tokens=NUM_TOKENS, temperature=0.8 * (index >= 2), seed=100 + index)
        for index, prompt in enumerate(PROMPTS)
    ]


async def run(pool: Pool, kill_after_tokens: int | None) -> list[Recorder]:
    """Run all four; kill the engine when each has so many tokens."""
    recorders = [Recorder() for _ in PROMPTS]
    for request, recorder in zip(frames(), recorders, strict=True):
        pool.start(request, recorder)
    if kill_after_tokens is not None:
        await eventually(lambda: all(r.num_tokens >= kill_after_tokens for r in recorders), LOAD_LIMIT_S)
        pid = pool.statistics().workers[0].status.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        before = [recorder.num_tokens for recorder in recorders]
        for recorder, count in zip(recorders, before, strict=True):
            await eventually(lambda r=recorder, n=count: r.num_tokens > n + 1, LOAD_LIMIT_S)
            print(f"went on {time.monotonic() - killed_s:.1f} s after the kill")
    await eventually(lambda: all(recorder.ends for recorder in recorders), LOAD_LIMIT_S)
    await asyncio.sleep(0)
    return recorders


@pytest.mark.model
async def test_texts_are_those_of_an_undisturbed_run(default_model_path):
    """kill -9 in mid-sentence: the same texts, and usage that counts every token once."""
    config = PoolConfig(
        models=(ModelSpec("default", EngineConfig(model=str(default_model_path))),),
        restart_backoff_initial_s=0.1,
    )
    async with Pool(config) as pool:
        await pool.wait_ready(LOAD_LIMIT_S)
        undisturbed = await run(pool, None)
        disturbed = await run(pool, 8)
        assert pool.statistics().recovered_total == 4
        assert pool.statistics().workers[0].status.restarts == 1
    for quiet, killed in zip(undisturbed, disturbed, strict=True):
        assert killed.text == quiet.text
        assert killed.ends[0].usage["completion_tokens"] == quiet.ends[0].usage["completion_tokens"]
        assert killed.num_tokens == quiet.num_tokens
        assert killed.ends[0].finish_reason == quiet.ends[0].finish_reason
