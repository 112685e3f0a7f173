"""Engine processes that die, hang, flood and fail to load; and a parent that is killed."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pool_helpers import (
    LIMIT_S,
    LONG,
    MS,
    Recorder,
    answer,
    assert_idle,
    engines_idle,
    eventually,
    frame,
    is_running,
    make_config,
    model,
    pids,
)

from headrace.pool import ModelLoadFailed, Pool, WorkerState
from headrace.protocol.errors import ErrorCode, HeadraceError
from headrace.protocol.messages import End


def states(pool: Pool) -> list[WorkerState]:
    return [worker.status.state for worker in pool.statistics().workers]


async def all_ready(pool: Pool) -> None:
    await eventually(lambda: set(states(pool)) == {WorkerState.READY})


def assert_engine_died(end: End) -> None:
    assert end.error is not None
    assert (end.status, end.reason, end.error["code"]) == ("failed", "engine_died", "engine_died")
    assert end.error["retryable"]


async def test_kill_in_mid_stream():
    """kill -9: its stream goes on in the other process, others don't notice, and it comes back."""
    async with Pool(make_config(model(workers=2, scripted_token_delay_ms=1))) as pool:
        await all_ready(pool)
        victim_pid, other_pid = pids(pool)
        victim, bystander, after = Recorder(), Recorder(), Recorder()
        pool.start(frame(max_tokens=400), victim)
        pool.start(frame(max_tokens=400), bystander)
        await victim.tokens(5)
        os.kill(victim_pid, signal.SIGKILL)
        await eventually(lambda: any(event.phase == "recover" for event in victim.progress), 1)
        assert pool.ready
        for recorder in (victim, bystander):
            assert (await recorder.end()).status == "completed"
            assert recorder.text == answer(400)
        assert not any(event.phase == "recover" for event in bystander.progress)
        await all_ready(pool)
        assert pids(pool)[1] == other_pid
        assert pids(pool)[0] not in (victim_pid, None)
        statistics = pool.statistics()
        assert statistics.workers[0].status.restarts == 1
        assert "SIGKILL" in (statistics.workers[0].status.last_failure or "")
        assert statistics.recovered_total == 1
        pool.start(frame(max_tokens=3), after)
        assert (await after.end()).status == "completed"
        assert_idle(pool)
        await engines_idle(pool)


async def test_readiness_and_queue_across_a_restart():
    """With its only worker gone a pool is not ready; what ran goes on first, then what waits."""
    async with Pool(make_config(model(scripted_token_delay_ms=1), max_in_flight=1)) as pool:
        running, waiting = Recorder(), Recorder()
        await pool.wait_ready(LIMIT_S)
        pool.start(frame(max_tokens=100), running)
        pool.start(frame(max_tokens=3), waiting)
        await running.tokens(1)
        os.kill(pids(pool)[0], signal.SIGKILL)
        await eventually(lambda: not pool.ready)
        assert pool.list_models()[0]["state"] == "restarting"
        assert pool.list_models()[0]["context_length"] == 1 << 20
        assert (await running.end()).status == "completed"
        assert (await waiting.end()).status == "completed"
        assert pool.ready


async def test_kill_while_the_pipe_is_full_of_messages():
    """kill -9 in the middle of writing, again and again: nothing is torn, each request ends once.

    With a limit of one death nothing is tried again.
    """
    config = make_config(
        model(max_batch_size=32), max_in_flight=32, max_engine_deaths_per_request=1, max_restarts_in_a_row=3
    )
    async with Pool(config) as pool:
        for _ in range(3):
            await pool.wait_ready(LIMIT_S)
            recorders = [Recorder() for _ in range(32)]
            for recorder in recorders:
                pool.start(frame(max_tokens=LONG), recorder)
            await recorders[0].tokens(100)
            os.kill(pids(pool)[0], signal.SIGKILL)
            for recorder in recorders:
                assert_engine_died(await recorder.end())
                assert recorder.text == answer(recorder.num_tokens)
            assert_idle(pool)


@pytest.mark.parametrize("fault", ["[[crash]]", "[[raise]]"])
async def test_a_prompt_that_kills_its_engines(fault: str):
    """What kills every engine fails after two; the tokens before that were delivered, once."""
    async with Pool(make_config(model(scripted_token_delay_ms=1))) as pool:
        recorder, after = Recorder(), Recorder()
        pool.start(frame(f"do {fault} now", max_tokens=10), recorder)
        assert_engine_died(await recorder.end())
        assert recorder.num_tokens == 2
        assert pool.statistics().workers[0].status.restarts == 1
        pool.start(frame(max_tokens=3), after)
        assert (await after.end()).status == "completed"


async def test_a_cancelled_request_ends_as_cancelled_when_its_engine_dies():
    """Who wanted a request to end gets that, not a failure."""
    async with Pool(make_config(model(scripted_token_delay_ms=1))) as pool:
        recorder = Recorder()
        rid = pool.start(frame("do [[hang]] now", max_tokens=10), recorder).rid
        await recorder.tokens(2)
        pool.cancel(rid, "client")
        os.kill(pids(pool)[0], signal.SIGKILL)
        end = await recorder.end()
        assert (end.status, end.reason, end.error) == ("cancelled", "client", None)


async def test_floods_of_output_harm_nothing():
    """A child that prints megabytes to both of its streams goes on answering."""
    async with Pool(make_config()) as pool:
        recorder = Recorder()
        pool.start(frame("do [[print]] now", max_tokens=20), recorder)
        end = await recorder.end()
        assert end.status == "completed"
        assert recorder.text == answer(20, "do [[print]] now")


async def test_ctrl_c_is_the_parents_affair():
    """SIGINT, which a terminal sends to the whole group, does not end an engine process."""
    async with Pool(make_config(model(scripted_token_delay_ms=1))) as pool:
        recorder = Recorder()
        pool.start(frame(max_tokens=100), recorder)
        await recorder.tokens(1)
        os.kill(pids(pool)[0], signal.SIGINT)
        assert (await recorder.end()).status == "completed"


# --- exit with processes that do not listen -----------------------------------------------------------------


async def test_exit_with_a_hanging_step():
    """A step that never ends delays the exit by the deadline for cancels and a grace, no more."""
    async with Pool(make_config(model(scripted_token_delay_ms=1), shutdown_cancel_s=100 * MS)) as pool:
        recorder = Recorder()
        pool.start(frame("do [[hang]] now", max_tokens=10), recorder)
        await recorder.tokens(2)
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 1.5
    assert (await recorder.end()).reason == "shutdown"


async def test_exit_with_a_stopped_process():
    """A process under SIGSTOP takes neither commands nor SIGTERM: it is killed."""
    limits = {"shutdown_cancel_s": 50 * MS, "stop_timeout_s": 100 * MS, "terminate_timeout_s": 100 * MS}
    async with Pool(make_config(model(scripted_token_delay_ms=1), **limits)) as pool:
        recorder = Recorder()
        pool.start(frame(max_tokens=LONG), recorder)
        await recorder.tokens(1)
        pid = pids(pool)[0]
        os.kill(pid, signal.SIGSTOP)
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 1.5
    assert not is_running(pid)
    assert (await recorder.end()).reason == "shutdown"


async def test_an_interrupted_exit_leaves_nothing():
    """An exit that is cancelled itself kills the processes instead of waiting for them."""
    recorder, reached = Recorder(), asyncio.Event()

    async def use() -> None:
        async with Pool(make_config(model(scripted_token_delay_ms=1), shutdown_cancel_s=60)) as pool:
            pool.start(frame("do [[hang]] now", max_tokens=10), recorder)
            await recorder.tokens(2)
            reached.set()

    task = asyncio.create_task(use())
    await reached.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await recorder.end()).reason == "shutdown"
    await asyncio.sleep(50 * MS)


# --- load failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["read", "write"])
async def test_a_process_without_its_threads_is_started_again(monkeypatch, name: str):
    """The system had no room for one; the streams wait, and the half-started process is killed."""
    others = set(multiprocessing.active_children())
    async with Pool(make_config(model(scripted_token_delay_ms=5))) as pool:
        await pool.wait_ready(LIMIT_S)
        recorder = Recorder()
        pool.start(frame(max_tokens=50), recorder)
        await recorder.tokens(3)
        start, failed = threading.Thread.start, []

        def fail_once(thread: threading.Thread) -> None:
            if not failed and thread.name.startswith(name):
                failed.append(thread)
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", fail_once)
        pid = pids(pool)[0]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert (await recorder.end()).status == "completed"
        assert failed
        assert recorder.text == answer(50)
        await eventually(lambda: len(set(multiprocessing.active_children()) - others) == 1)


async def test_a_crash_during_load_backs_off_and_is_tried_again(tmp_path: Path):
    """A process that dies while loading is started again; what waits for it is answered."""
    async with Pool(make_config(model(model=f"fault:crash-once:{tmp_path / 'mark'}"))) as pool:
        recorder = Recorder()
        pool.start(frame(max_tokens=3), recorder)
        assert (await recorder.end()).status == "completed"
        assert pool.statistics().workers[0].status.restarts == 1


@pytest.mark.parametrize(
    ("fault", "failure"), [("transient", "this model did not load: try again"), ("crash", "SIGKILL")]
)
async def test_load_failures_that_may_pass(fault: str, failure: str):
    """Transient failures and crashes are tried again, ever more slowly; `wait_ready` says what happened."""
    async with Pool(make_config(model(model=f"fault:{fault}"))) as pool:
        await eventually(lambda: pool.statistics().workers[0].status.restarts >= 2)
        with pytest.raises(TimeoutError, match=failure):
            await pool.wait_ready(10 * MS)
        recorder = Recorder()
        pool.start(frame(timeout_ms=1), recorder)
        assert (await recorder.end()).reason == "deadline"


async def test_restarts_have_a_budget():
    """A worker that never comes up is given up: what waits fails, and the state says so."""
    config = make_config(model(model="fault:crash"), max_restarts_in_a_row=2)
    async with Pool(config) as pool:
        recorder = Recorder()
        pool.start(frame(), recorder)
        assert (await recorder.end()).reason == "engine_error"
        status = pool.statistics().workers[0].status
        assert (status.state, status.restarts) == (WorkerState.FAILED, 2)
        assert "given up after 2 restarts in a row" in (status.last_failure or "")
        assert not pool.ready
        assert pool.list_models()[0]["state"] == "failed"
        with pytest.raises(ModelLoadFailed, match="given up"):
            await pool.wait_ready(LIMIT_S)
        with pytest.raises(HeadraceError):
            pool.start(frame(), Recorder())


async def test_a_permanent_load_failure():
    """It is not tried again; what waits fails by name, what comes is refused, and nobody sees the details."""
    config = make_config(model("bad", model="fault:permanent", workers=2), model("good"))
    async with Pool(config) as pool:
        recorder, other = Recorder(), Recorder()
        pool.start(frame(model="bad"), recorder)
        pool.start(frame(model="good", max_tokens=3), other)
        end = await recorder.end()
        assert end.error is not None
        assert (end.status, end.reason, end.error["code"]) == ("failed", "engine_error", "engine_error")
        assert "never loads" not in end.error["message"]
        with pytest.raises(HeadraceError) as caught:
            pool.start(frame(model="bad"), Recorder())
        assert caught.value.code is ErrorCode.ENGINE_ERROR
        assert (await other.end()).status == "completed"
        assert [info["state"] for info in pool.list_models()] == ["failed", "ready"]
        bad = [worker.status for worker in pool.statistics().workers if worker.status.model == "bad"]
        assert [status.restarts for status in bad] == [0, 0]
        assert_idle(pool)


async def test_wait_ready_tells_the_operator():
    """If no model can ever be loaded, `wait_ready` raises with the engine's own words."""
    async with Pool(make_config(model(model="fault:permanent"))) as pool:
        with pytest.raises(ModelLoadFailed, match="this model never loads: name another"):
            await pool.wait_ready(LIMIT_S)
        assert not pool.ready


# --- the parent ---------------------------------------------------------------------------------------------

PARENT = """
import asyncio, sys
from headrace.engine.config import EngineConfig
from headrace.pool import ModelSpec, Pool, PoolConfig
from headrace.protocol.frames import ClientId, RequestFrame
from headrace.protocol.options import CompletionInput, GenerationOptions

async def main():
    def spec(name, **fields):
        return ModelSpec(name, EngineConfig(kind="scripted", name=name, **fields))

    models = (
        spec("busy", scripted_token_delay_ms=1.0),
        spec("hanging", scripted_token_delay_ms=1.0),
        spec("idle"),
        spec("loading", scripted_load_s=60.0),
    )
    async with Pool(PoolConfig(models=models, preload_blas="off")) as pool:
        counts = dict.fromkeys(("busy", "hanging"), 0)

        async def read(name, prompt):
            options = GenerationOptions(model=name, max_tokens=1000000)
            frame = RequestFrame(ClientId(name), CompletionInput(prompt=prompt), options)
            async for event in pool.submit(frame):
                counts[name] += 1

        def all_started():
            workers = [worker.status for worker in pool.statistics().workers]
            return all(worker.loading or worker.info for worker in workers) and min(counts.values()) >= 3

        tasks = [asyncio.create_task(read(*work)) for work in (("busy", "go on"), ("hanging", "[[hang]]"))]
        while not all_started():
            await asyncio.sleep(0.01)
        print(*(worker.status.pid for worker in pool.statistics().workers), flush=True)
        await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_no_child_outlives_a_killed_parent(tmp_path: Path):
    """kill -9 of the parent: engine processes that are busy, hanging, idle or loading are gone within 5 s."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = await asyncio.create_subprocess_exec(sys.executable, script, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    try:
        line = await asyncio.wait_for(parent.stdout.readline(), 2 * LIMIT_S)
        children = [int(pid) for pid in line.split()]
        assert len(children) == 4
        assert all(is_running(pid) for pid in children)
    finally:
        parent.kill()
        await parent.wait()
    await eventually(lambda: not any(is_running(pid) for pid in children), 5)
