"""Streams of a real model outlive its engine: greedy ones, and seeded ones at a temperature."""

import asyncio
import contextlib
import os
import random
import signal
import time

import pytest
from pool_helpers import Recorder, assert_idle, eventually, frame, pids

from headrace.engine.config import EngineConfig
from headrace.pool import ModelSpec, Pool, PoolConfig
from headrace.protocol.frames import ClientId, RequestFrame
from headrace.protocol.messages import Delta
from headrace.protocol.options import ChatInput, CompletionInput, GenerationOptions

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


async def run(pool: Pool, number: signal.Signals | None, after_tokens: int = 8) -> list[Recorder]:
    """Run all four; send the engine a signal when each has so many tokens."""
    recorders = [Recorder() for _ in PROMPTS]
    for request, recorder in zip(frames(), recorders, strict=True):
        pool.start(request, recorder)
    if number is not None:
        await eventually(lambda: all(r.num_tokens >= after_tokens for r in recorders), LOAD_LIMIT_S)
        pid = pool.statistics().workers[0].status.pid
        assert pid is not None
        os.kill(pid, number)
        killed_s = time.monotonic()
        before = [recorder.num_tokens for recorder in recorders]
        for recorder, count in zip(recorders, before, strict=True):
            await eventually(lambda r=recorder, n=count: r.num_tokens > n + 1, LOAD_LIMIT_S)
            print(f"went on {time.monotonic() - killed_s:.1f} s after {number.name}")
    await eventually(lambda: all(recorder.ends for recorder in recorders), LOAD_LIMIT_S)
    await asyncio.sleep(0)
    return recorders


@pytest.mark.model
async def test_texts_are_those_of_an_undisturbed_run(default_model_path):
    """kill -9 or SIGSTOP in mid-sentence: the same texts, and usage that counts every token once."""
    config = PoolConfig(
        models=(ModelSpec("default", EngineConfig(model=str(default_model_path))),),
        restart_backoff_initial_s=0.1,
        hang_timeout_s=5.0,
    )
    async with Pool(config) as pool:
        await pool.wait_ready(LOAD_LIMIT_S)
        undisturbed = await run(pool, None)
        disturbed = [await run(pool, signal.SIGKILL), await run(pool, signal.SIGSTOP)]
        assert pool.statistics().recovered_total >= 8
        assert pool.statistics().workers[0].status.restarts >= 2
    for recorders in disturbed:
        for quiet, killed in zip(undisturbed, recorders, strict=True):
            assert killed.text == quiet.text
            assert killed.ends[0].usage["completion_tokens"] == quiet.ends[0].usage["completion_tokens"]
            assert killed.num_tokens == quiet.num_tokens
            assert killed.ends[0].finish_reason == quiet.ends[0].finish_reason


# --- a tiny model, anything at any time ---------------------------------------------------------------------


def random_frame(rng: random.Random) -> RequestFrame:
    """Return a request with whatever an engine must take up again."""
    options: dict[str, object] = {
        "max_tokens": rng.randint(1, 60),
        "temperature": rng.choice([0.0, 0.7, 1.5]),
        "seed": rng.randint(-9, 9),
        "cache_prompt": rng.random() < 0.5,
    }
    if rng.random() < 0.4:
        options["stop"] = rng.sample(["a", "e ", "th", "é", "\ufffd", "<"], 2)
    if rng.random() < 0.3:
        options |= {"logprobs": True, "top_logprobs": 2}
    if rng.random() < 0.3:
        options |= {"repetition_penalty": 1.3, "frequency_penalty": -0.5}
    if rng.random() < 0.5:
        content = "hi " * rng.randint(1, 40)
        source = ChatInput.model_validate({"messages": [{"role": "user", "content": content}]})
        return RequestFrame(ClientId("t"), source, GenerationOptions.model_validate(options))
    options["echo"] = rng.random() < 0.5
    prompt = rng.choice(["hé", "some words here " * 9, [100, 150, 31, 7]])
    return RequestFrame(
        ClientId("t"), CompletionInput(prompt=prompt), GenerationOptions.model_validate(options)
    )


def story(recorder: Recorder) -> tuple[object, ...]:
    """Return all of a stream that must be the same whatever happened to its engines."""
    deltas = [event for event in recorder.events if isinstance(event, Delta)]
    [end] = recorder.ends
    return (
        recorder.text,
        [token for delta in deltas for token in delta.tokens],
        [entry["token_id"] for delta in deltas for entry in delta.logprobs],
        (end.status, end.finish_reason),
        {name: value for name, value in end.usage.items() if name != "cached_tokens"},
    )


@pytest.mark.parametrize("seed", [1, 2])
async def test_any_request_outlives_any_number_of_engines(tiny_model_dir, seed):
    """Stop strings, penalties, log probabilities, echo, credit: each text is that of an undisturbed run."""
    rng = random.Random(seed)
    requests = [random_frame(rng) for _ in range(24)]
    config = PoolConfig(
        models=(ModelSpec("tiny", EngineConfig(model=str(tiny_model_dir()), max_held_caches=3), workers=2),),
        restart_backoff_initial_s=0.05,
        max_engine_deaths_per_request=100,
    )
    async with Pool(config) as pool:
        await pool.wait_ready(LOAD_LIMIT_S)
        quiet = [Recorder() for _ in requests]
        for request, recorder in zip(requests, quiet, strict=True):
            pool.start(request, recorder)
        await eventually(lambda: all(recorder.ends for recorder in quiet), LOAD_LIMIT_S)

        # Few tokens at a time, so that engines are killed in every state of a stream.
        killed: list[tuple[str, Recorder]] = []
        for request in requests:
            options = request.options.model_copy(update={"window": rng.randint(1, 6)})
            recorder = Recorder()
            ticket = pool.start(RequestFrame(request.id, request.input, options), recorder)
            killed.append((ticket.rid, recorder))
        num_kills, next_kill_s, limit_s = 0, 0.0, time.monotonic() + LOAD_LIMIT_S
        while not all(recorder.ends for _, recorder in killed):
            assert time.monotonic() < limit_s
            await asyncio.sleep(0.01)
            for rid, _ in rng.sample(killed, 6):
                pool.credit(rid, rng.randint(1, 3))
            if num_kills < 5 and pool.ready and time.monotonic() > next_kill_s:
                num_kills, next_kill_s = num_kills + 1, time.monotonic() + 0.3 * rng.random()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice([pid for pid in pids(pool) if pid is not None]), signal.SIGKILL)
        assert pool.statistics().recovered_total >= 10
        assert_idle(pool)
    for undisturbed, (_, recorder) in zip(quiet, killed, strict=True):
        assert story(recorder) == story(undisturbed)
