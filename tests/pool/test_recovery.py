"""Streams outlive engines: real processes that are killed, stopped, hang, leak and are replaced."""

import asyncio
import contextlib
import os
import random
import signal
import time
from multiprocessing.context import SpawnProcess
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

from headrace.pool import Pool, WorkerState
from headrace.protocol.errors import HeadraceError
from headrace.protocol.messages import Progress

QUICK = {"hang_timeout_s": 0.5}


def start_many(pool: Pool, num_requests: int, max_tokens: int) -> dict[str, Recorder]:
    """Start requests with prompts of their own, of one client each."""
    recorders = {f"prompt number {index}": Recorder() for index in range(num_requests)}
    for prompt, recorder in recorders.items():
        pool.start(frame(prompt, max_tokens=max_tokens), recorder, client=prompt)
    return recorders


async def assert_all_whole(recorders: dict[str, Recorder], max_tokens: int) -> None:
    """Every stream completes with exactly the tokens of an undisturbed run."""
    for prompt, recorder in recorders.items():
        end = await recorder.end()
        assert (end.status, end.finish_reason) == ("completed", "length")
        assert recorder.text == answer(max_tokens, prompt)
        assert end.usage["completion_tokens"] == max_tokens


def recoveries(recorder: Recorder) -> int:
    return sum(event.phase == "recover" for event in recorder.progress)


def kill_first(pool: Pool, number: signal.Signals) -> None:
    """Send a signal to the process of the first worker."""
    pid = pids(pool)[0]
    assert pid is not None
    os.kill(pid, number)


async def all_ready(pool: Pool) -> None:
    await eventually(
        lambda: {worker.status.state for worker in pool.statistics().workers} == {WorkerState.READY}
    )


async def test_kill_under_200_streams():
    """kill -9 under 200 streams: all complete, and no token is missing or doubled."""
    spec = model(scripted_token_delay_ms=2, max_batch_size=200)
    async with Pool(make_config(spec, max_in_flight=200, max_queue=200)) as pool:
        await all_ready(pool)
        recorders = start_many(pool, 200, 200)
        await asyncio.gather(*(recorder.tokens(20) for recorder in recorders.values()))
        kill_first(pool, signal.SIGKILL)
        killed_s = time.monotonic()
        await assert_all_whole(recorders, 200)
        assert time.monotonic() - killed_s < 2 * LIMIT_S
        assert pool.statistics().recovered_total == 200
        await all_ready(pool)
        assert_idle(pool)
        await engines_idle(pool)


async def test_kill_again_and_again():
    """An engine that is killed every so often: streams that have gone on since are not suspected."""
    async with Pool(make_config(model(scripted_token_delay_ms=1), max_in_flight=8)) as pool:
        await all_ready(pool)
        recorders = start_many(pool, 8, 1000)
        for num_tokens in (20, 110):
            await asyncio.gather(*(recorder.tokens(num_tokens) for recorder in recorders.values()))
            kill_first(pool, signal.SIGKILL)
        await assert_all_whole(recorders, 1000)
        assert pool.statistics().recovered_total == 16


async def test_progress_says_recover_until_tokens_flow():
    """At once, then at least once a second while the engine is restarted and reads the prompt again."""
    spec = model(scripted_token_delay_ms=1, scripted_prefill_tokens_per_s=400, chunk_target_ms=20)
    spec_progress = make_config(spec, restart_backoff_initial_s=0.3)
    async with Pool(spec_progress) as pool:
        await all_ready(pool)
        recorder = Recorder()
        prompt = "word " * 200
        pool.start(frame(prompt, max_tokens=50), recorder)
        await recorder.tokens(5)
        before = len(recorder.progress)
        kill_first(pool, signal.SIGKILL)
        end = await recorder.end()
        assert recorder.text == answer(50, prompt)
        after = recorder.progress[before:]
        assert {event.phase for event in after} == {"recover"}
        assert len(after) >= 5
        assert after[-1].processed > 0
        assert (end.usage["prompt_tokens"], end.usage["completion_tokens"]) == (200, 50)
        timings = end.timings
        assert timings["ttft_ms"] is not None
        assert timings["decode_ms"] is not None
        assert 400 < timings["ttft_ms"] < 2000
        assert timings["decode_ms"] > 700
        assert timings["prefill_ms"] is None


@pytest.mark.parametrize("way", ["SIGSTOP", "a step that never ends"])
async def test_a_hang_is_noticed(way: str):
    """A process that does nothing any more is killed and replaced; only who made it hang twice fails."""
    async with Pool(make_config(model(scripted_token_delay_ms=1), **QUICK)) as pool:
        await all_ready(pool)
        recorders = start_many(pool, 4, 600)
        await asyncio.gather(*(recorder.tokens(5) for recorder in recorders.values()))
        culprit = Recorder()
        if way == "SIGSTOP":
            kill_first(pool, signal.SIGSTOP)
        else:
            pool.start(frame("do [[hang]] now", max_tokens=10), culprit)
        await assert_all_whole(recorders, 600)
        assert "hangs" in (pool.statistics().workers[0].status.last_failure or "")
        if way != "SIGSTOP":
            assert (await culprit.end()).reason == "engine_died"
            assert pool.statistics().workers[0].status.restarts == 2
        assert_idle(pool)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_no_silence_while_an_engine_hangs_before_the_first_token(has_begun: bool):
    """The last progress is said again and again, whether there was any or not."""
    spec = model(scripted_prefill_tokens_per_s=1000)
    async with Pool(make_config(spec, hang_timeout_s=LIMIT_S)) as pool:
        await all_ready(pool)
        recorder = Recorder()
        if not has_begun:
            kill_first(pool, signal.SIGSTOP)
        began_s = time.monotonic()
        pool.start(frame("word " * 5000, max_tokens=5), recorder)
        if has_begun:
            await eventually(lambda: any(event.processed for event in recorder.progress))
            kill_first(pool, signal.SIGSTOP)
            await asyncio.sleep(150 * MS)  # What it had said before is here.
        count = len(recorder.progress)
        await eventually(lambda: len(recorder.progress) >= count + 5)
        assert time.monotonic() - began_s < LIMIT_S / 2
        assert len({(event.phase, event.processed) for event in recorder.progress[count:]}) == 1
        assert recorder.num_tokens == 0


async def test_idle_and_slow_engines_are_no_hang():
    """Nothing to do, or a long wait between tokens within the limit, is not taken for a hang."""
    async with Pool(make_config(model(scripted_token_delay_ms=300), hang_timeout_s=1.5)) as pool:
        await all_ready(pool)
        pid = pids(pool)[0]
        await asyncio.sleep(2)
        recorder = Recorder()
        pool.start(frame(max_tokens=4), recorder)
        await recorder.end()
        assert pids(pool)[0] == pid


async def test_a_load_that_does_not_get_on():
    """A process that is stopped while it loads is replaced after the longer limit."""
    config = make_config(model(scripted_load_s=0.3), hang_timeout_s=0.2, load_timeout_s=3)
    async with Pool(config) as pool:
        await eventually(lambda: pool.statistics().workers[0].status.state is WorkerState.LOADING)
        recorder = Recorder()
        pool.start(frame(max_tokens=3), recorder)
        kill_first(pool, signal.SIGSTOP)
        assert (await recorder.end()).status == "completed"
        assert "loading" in (pool.statistics().workers[0].status.last_failure or "")


async def test_a_restart_that_dies_while_loading(tmp_path: Path):
    """Streams wait through a second death, of a process that had none of them."""
    mark = tmp_path / "mark"
    mark.touch()
    async with Pool(make_config(model(model=f"fault:crash-once:{mark}", scripted_token_delay_ms=1))) as pool:
        await all_ready(pool)
        recorders = start_many(pool, 4, 100)
        await asyncio.gather(*(recorder.tokens(5) for recorder in recorders.values()))
        mark.unlink()
        kill_first(pool, signal.SIGKILL)
        await assert_all_whole(recorders, 100)
        assert pool.statistics().workers[0].status.restarts == 2


@pytest.mark.parametrize(("fault", "workers"), [("[[crash]]", 1), ("[[late]]", 2)])
async def test_a_poisoned_request_and_its_neighbours(fault: str, workers: int):
    """Who kills every engine fails; nobody beside it does, and all their tokens come once."""
    spec = model(workers=workers, scripted_token_delay_ms=1, max_batch_size=16)
    async with Pool(make_config(spec, max_in_flight=16)) as pool:
        await all_ready(pool)
        recorders = start_many(pool, 10, 300)
        await asyncio.gather(*(recorder.tokens(5) for recorder in recorders.values()))
        poison = Recorder()
        pool.start(frame(f"do {fault} now", max_tokens=200), poison)
        end = await poison.end()
        assert (end.status, end.reason) == ("failed", "engine_died")
        assert poison.text == answer(poison.num_tokens, f"do {fault} now")
        await assert_all_whole(recorders, 300)
        num_deaths = sum(worker.status.restarts for worker in pool.statistics().workers)
        assert num_deaths == 2 if fault == "[[crash]]" else num_deaths <= 8
        assert_idle(pool)


@pytest.mark.parametrize("is_poisoned", [False, True])
async def test_cancel_while_recovering(is_poisoned: bool):
    """A request without an engine is cancelled at once, and nobody starts it again."""
    config = make_config(model(scripted_token_delay_ms=1), restart_backoff_initial_s=0.3)
    async with Pool(config) as pool:
        await all_ready(pool)
        recorder = Recorder()
        prompt = "do [[crash]] now" if is_poisoned else "go on"
        rid = pool.start(frame(prompt, max_tokens=LONG), recorder).rid
        await recorder.tokens(2)
        if not is_poisoned:
            kill_first(pool, signal.SIGKILL)
        await eventually(lambda: recoveries(recorder) > 0)
        cancelled_s = time.monotonic()
        pool.cancel(rid, "client")
        end = await recorder.end()
        assert time.monotonic() - cancelled_s < 0.2
        assert (end.status, end.reason, end.error) == ("cancelled", "client", None)
        await all_ready(pool)
        assert_idle(pool)
        await engines_idle(pool)


async def test_a_cancel_that_is_not_confirmed():
    """An engine that does not let a request go is replaced; the request ends as cancelled."""
    config = make_config(model(scripted_token_delay_ms=1), cancel_timeout_s=0.2)
    async with Pool(config) as pool:
        await all_ready(pool)
        recorder, neighbour = Recorder(), Recorder()
        rid = pool.start(frame("do [[hang]] now", max_tokens=10), recorder).rid
        pool.start(frame(max_tokens=20), neighbour)
        await recorder.tokens(2)
        pool.cancel(rid, "client")
        assert (await recorder.end()).status == "cancelled"
        assert (await neighbour.end()).status == "completed"
        assert neighbour.text == answer(20)


async def test_a_receiver_may_cancel_when_it_hears_of_the_loss():
    """From within the event; the request ends once, and its neighbours go on."""
    async with Pool(make_config(model(scripted_token_delay_ms=1))) as pool:
        await all_ready(pool)
        recorder, rids = Recorder(), []

        def sink(event) -> None:
            recorder(event)
            if isinstance(event, Progress) and event.phase == "recover":
                pool.cancel(rids[0], "client")

        rids.append(pool.start(frame(max_tokens=LONG), sink).rid)
        neighbours = start_many(pool, 3, 100)
        await recorder.tokens(5)
        kill_first(pool, signal.SIGKILL)
        assert (await recorder.end()).reason == "client"
        await assert_all_whole(neighbours, 100)
        assert_idle(pool)


async def test_a_killed_pool_leaves_no_request_without_an_end():
    """Leaving the pool while streams have no engine ends them as cancelled."""
    async with Pool(make_config(model(scripted_token_delay_ms=1), restart_backoff_initial_s=60)) as pool:
        await all_ready(pool)
        recorder = Recorder()
        pool.start(frame(max_tokens=LONG), recorder)
        await recorder.tokens(2)
        kill_first(pool, signal.SIGKILL)
        await eventually(lambda: recoveries(recorder) > 0)
    assert (await recorder.end()).reason == "shutdown"


# --- memory -------------------------------------------------------------------------------------------------


async def test_a_process_over_its_memory_limit_is_replaced():
    """It gets no new requests and is stopped; its streams go on elsewhere, and nobody is blamed."""
    config = make_config(
        model(workers=2, scripted_token_delay_ms=5),
        memory_limit_bytes=200 << 20,
        replace_drain_s=0.2,
        hang_timeout_s=1,
        max_engine_deaths_per_request=1,
    )
    async with Pool(config) as pool:
        await all_ready(pool)
        leaking_pid = pids(pool)[0]
        leak = Recorder()
        pool.start(frame("do [[leak]] now", max_tokens=60), leak)
        neighbours = start_many(pool, 3, 150)
        await eventually(lambda: WorkerState.DRAINING in {w.status.state for w in pool.statistics().workers})
        assert pool.ready
        late = Recorder()
        pool.start(frame(max_tokens=5), late)
        assert pool.statistics().workers[1].in_flight > 0
        await assert_all_whole(neighbours, 150)
        assert (await leak.end()).status == "completed"
        assert leak.text == answer(60, "do [[leak]] now")
        assert (await late.end()).status == "completed"
        await all_ready(pool)
        assert pids(pool)[0] != leaking_pid
        assert not (leaking_pid and is_running(leaking_pid))
        assert "more than its limit" in (pool.statistics().workers[0].status.last_failure or "")
        assert_idle(pool)


async def test_a_memory_limit_that_cannot_be_kept():
    """A process that is over its limit as soon as it is ready is given up in the end, by name."""
    config = make_config(memory_limit_bytes=1 << 20, max_restarts_in_a_row=1, hang_timeout_s=0.5)
    async with Pool(config) as pool:
        await eventually(lambda: pool.list_models()[0]["state"] == "failed")
        failure = pool.statistics().workers[0].status.last_failure or ""
        assert "more than its limit" in failure
        assert "given up" in failure


async def test_a_prompt_that_no_engine_has_the_memory_for_ends():
    """Each engine is replaced while it reads it: not for ever."""
    config = make_config(
        model(scripted_prefill_tokens_per_s=1000),
        memory_limit_bytes=1 << 20,
        replace_drain_s=0.1,
        hang_timeout_s=0.4,
    )
    async with Pool(config) as pool:
        recorder = Recorder()
        pool.start(frame("word " * 5000, max_tokens=5), recorder)
        end = await recorder.end()
        assert (end.status, end.reason) == ("failed", "engine_died")
        assert pool.statistics().recovered_total == 2
        assert_idle(pool)


async def test_a_process_that_cannot_be_killed_is_left(monkeypatch):
    """Its streams go on in another one after the deadline."""
    config = make_config(model(scripted_token_delay_ms=1), **QUICK, kill_timeout_s=0.2)
    async with Pool(config) as pool:
        await all_ready(pool)
        recorder, pid = Recorder(), pids(pool)[0]
        assert pid is not None
        pool.start(frame(max_tokens=100), recorder)
        await recorder.tokens(5)
        with monkeypatch.context() as patch:
            patch.setattr(SpawnProcess, "kill", lambda process: None)
            kill_first(pool, signal.SIGSTOP)
            assert (await recorder.end()).status == "completed"
        assert recorder.text == answer(100)
        assert is_running(pid)
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: not is_running(pid))


# --- credit -------------------------------------------------------------------------------------------------


async def test_credit_holds_the_engine_back():
    """As many tokens as were allowed, and a paused stream leaves its place to others."""
    async with Pool(make_config(model(scripted_token_delay_ms=1), max_in_flight=1)) as pool:
        paused, others = Recorder(), Recorder()
        rid = pool.start(frame(max_tokens=30, window=5), paused).rid
        await paused.tokens(5)
        pool.start(frame(max_tokens=10), others)
        assert (await others.end()).status == "completed"
        assert paused.num_tokens == 5
        assert pool.statistics().workers[0].status.stats.paused == 1
        for _ in range(1000):
            pool.credit(rid, 1)
        assert (await paused.end()).status == "completed"
        assert paused.text == answer(30)
        pool.credit(rid, 1)
        assert_idle(pool)
        await engines_idle(pool)


async def test_recovery_of_a_paused_stream():
    """It needs no engine until there is credit, then goes on in another one; the credit is kept."""
    async with Pool(make_config(model(scripted_token_delay_ms=1))) as pool:
        await all_ready(pool)
        paused, running, cancelled = Recorder(), Recorder(), Recorder()
        rid = pool.start(frame(max_tokens=30, window=5), paused).rid
        cancelled_rid = pool.start(frame(max_tokens=30, window=5), cancelled).rid
        pool.start(frame(max_tokens=200, window=150), running)
        await asyncio.gather(paused.tokens(5), cancelled.tokens(5), running.tokens(20))
        kill_first(pool, signal.SIGKILL)
        await running.tokens(150)
        assert pool.statistics().queued == {"words": 2}
        assert recoveries(paused) == 1
        pool.cancel(cancelled_rid, "client")
        assert (await cancelled.end()).reason == "client"
        pool.credit(rid, 10)
        await paused.tokens(15)
        await asyncio.sleep(50 * MS)
        assert (paused.num_tokens, running.num_tokens) == (15, 150)
        pool.credit(rid, 100)
        assert (await paused.end()).status == "completed"
        assert paused.text == answer(30)
        await eventually(lambda: pool.statistics().workers[0].status.stats.paused == 1)


async def test_paused_streams_in_excess_are_let_go():
    """Those of whoever has the most of them, so that an engine always has places for others."""
    config = make_config(model(scripted_token_delay_ms=1), max_in_flight=2, max_paused=4)
    async with Pool(config) as pool:
        await all_ready(pool)
        honest = Recorder()
        pool.start(frame("honest", window=1, max_tokens=5), honest, client="honest")
        await honest.tokens(1)
        many = [Recorder() for _ in range(8)]
        for number, recorder in enumerate(many):
            pool.start(frame(f"p{number}", window=1, max_tokens=LONG), recorder, client="greedy")
            await recorder.tokens(1)
        other = Recorder()
        pool.start(frame("other", max_tokens=20), other, client="other")
        assert (await other.end()).status == "completed"
        assert [bool(recorder.ends) for recorder in many] == [True] * 5 + [False] * 3
        assert {recorder.ends[0].reason for recorder in many[:5]} == {"slow_consumer"}
        assert not honest.ends


async def test_as_many_as_are_in_excess_are_let_go_when_all_pause_at_once():
    """And none that has been given credit meanwhile."""
    spec = model(scripted_token_delay_ms=20, max_batch_size=8)
    async with Pool(make_config(spec, max_in_flight=8, max_paused=2)) as pool:
        await all_ready(pool)
        many = [Recorder() for _ in range(8)]
        rids = [
            pool.start(frame(f"p{number}", window=3, max_tokens=LONG), recorder, client="greedy").rid
            for number, recorder in enumerate(many)
        ]
        pool.credit(rids[0], LONG)
        await asyncio.gather(*(recorder.tokens(3) for recorder in many))
        await eventually(lambda: sum(bool(recorder.ends) for recorder in many) == 5)
        await asyncio.sleep(100 * MS)
        assert sum(bool(recorder.ends) for recorder in many) == 5
        assert not many[0].ends
        others = [Recorder() for _ in range(7)]
        for number, recorder in enumerate(others):
            pool.start(frame(f"o{number}", max_tokens=LONG), recorder, client=f"o{number}")
        await asyncio.gather(*(recorder.tokens(1) for recorder in others))


@pytest.mark.parametrize("is_lost", [False, True])
async def test_who_gets_no_credit_is_let_go_in_the_end(is_lost: bool):
    """Paused in its engine or parked without one; credit starts the time anew."""
    async with Pool(make_config(model(scripted_token_delay_ms=1), paused_timeout_s=0.4)) as pool:
        await all_ready(pool)
        paused, credited = Recorder(), Recorder()
        rids = [pool.start(frame(max_tokens=30, window=5), sink).rid for sink in (paused, credited)]
        await asyncio.gather(paused.tokens(5), credited.tokens(5))
        if is_lost:
            kill_first(pool, signal.SIGKILL)
            await eventually(lambda: pool.statistics().queued == {"words": 2})
        assert not paused.ends
        await asyncio.sleep(200 * MS)
        pool.credit(rids[1], 1)
        end = await paused.end()
        assert (end.status, end.reason, end.usage["completion_tokens"]) == ("cancelled", "slow_consumer", 5)
        assert not credited.ends
        pool.credit(rids[1], 100)
        assert (await credited.end()).status == "completed"
        assert_idle(pool)
        await engines_idle(pool)


async def test_a_cancelled_suspect_leaves_its_room_to_others():
    """Room was kept for one that had to wait beside a long prompt; without it, nobody waits."""
    spec = model(scripted_token_delay_ms=20, scripted_prefill_tokens_per_s=1000, max_chunk_tokens=50)
    async with Pool(make_config(spec, max_in_flight=2)) as pool:
        await all_ready(pool)
        reading, waiting, fresh = Recorder(), Recorder(), Recorder()
        rid = pool.start(frame("two", max_tokens=LONG), waiting).rid
        await waiting.tokens(1)
        pool.start(frame("word " * 3000, max_tokens=LONG), reading)
        await eventually(lambda: pool.statistics().queued == {"words": 0})
        kill_first(pool, signal.SIGKILL)
        await eventually(lambda: recoveries(waiting) == recoveries(reading) == 1)
        await all_ready(pool)
        await eventually(lambda: pool.statistics().queued == {"words": 1})
        assert reading.num_tokens == 0
        pool.start(frame("three", max_tokens=3), fresh)
        assert pool.statistics().queued == {"words": 2}
        pool.cancel(rid, "client")
        assert (await fresh.end()).status == "completed"
        assert not reading.ends


# --- everything at once -------------------------------------------------------------------------------------


async def test_random_requests_credits_cancels_and_kills():
    """Whatever happens in whatever order: one end each, no token doubled or missing, counters at zero."""
    rng = random.Random(4)
    spec = model(workers=2, scripted_token_delay_ms=0.5, max_batch_size=8)
    limits = {"max_in_flight": 8, "max_queue": 300, "max_engine_deaths_per_request": 10}
    async with Pool(make_config(spec, **limits)) as pool:
        await all_ready(pool)

        def kill(pid: int, number: signal.Signals) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

        loop = asyncio.get_running_loop()
        recorders: list[tuple[Recorder, int]] = []
        for index in range(200):
            recorder, max_tokens = Recorder(), rng.randint(1, 120)
            window = rng.choice([None, None, rng.randint(1, 30)])
            ticket = pool.start(
                frame(max_tokens=max_tokens, window=window), recorder, client=rng.choice("abc")
            )
            recorders.append((recorder, max_tokens))
            if window is not None:
                loop.call_later(rng.random(), pool.credit, ticket.rid, 200)
            if rng.random() < 0.3:
                loop.call_later(rng.random() * 1.5, pool.cancel, ticket.rid, "client")
            if index % 50 == 25 and (pid := rng.choice(pids(pool))) is not None:
                loop.call_later(0.3, kill, pid, rng.choice([signal.SIGKILL, signal.SIGTERM]))
                await asyncio.sleep(0.2)
        for recorder, max_tokens in recorders:
            end = await recorder.end()
            assert end.status in ("completed", "cancelled")
            assert recorder.text == answer(recorder.num_tokens)
            assert recorder.num_tokens == max_tokens or end.status == "cancelled"
        assert_idle(pool)
        assert pool.statistics().recovered_total > 0
        await engines_idle(pool)


# --- turns --------------------------------------------------------------------------------------------------


async def test_clients_take_turns():
    """One client's hundred requests do not keep another's one waiting."""
    async with Pool(make_config(model(scripted_token_delay_ms=1), max_in_flight=1)) as pool:
        await pool.wait_ready(LIMIT_S)
        greedy = [Recorder() for _ in range(20)]
        for recorder in greedy:
            pool.start(frame(max_tokens=10), recorder, client="greedy")
        modest = Recorder()
        assert pool.start(frame(max_tokens=10), modest, client="modest").queue_position == 1
        await modest.end()
        assert sum(bool(recorder.ends) for recorder in greedy) <= 3
        for recorder in greedy:
            assert (await recorder.end()).status == "completed"


async def test_a_full_queue_has_a_place_for_who_has_none_waiting():
    """One client that fills the queue is refused; another is not."""
    async with Pool(make_config(model(scripted_token_delay_ms=1), max_in_flight=1, max_queue=2)) as pool:
        await pool.wait_ready(LIMIT_S)
        for _ in range(3):
            pool.start(frame(max_tokens=LONG), Recorder(), client="greedy")
        with pytest.raises(HeadraceError):
            pool.start(frame(), Recorder(), client="greedy")
        for name in ("one", "two"):
            pool.start(frame(), Recorder(), client=name)
        for name in ("one", "three"):
            with pytest.raises(HeadraceError):
                pool.start(frame(), Recorder(), client=name)


async def test_a_conversation_goes_back_to_its_worker():
    """The next turn runs where the last one was read, though the other worker comes first by name."""
    async with Pool(make_config(model(workers=2, scripted_token_delay_ms=1))) as pool:
        await all_ready(pool)
        first, filler, again, other = (Recorder() for _ in range(4))
        history = "word " * 2000
        pool.start(frame("short", max_tokens=20), filler)
        pool.start(frame(history, max_tokens=5), first)
        assert [worker.in_flight for worker in pool.statistics().workers] == [1, 1]
        await filler.end()
        await first.end()
        pool.start(frame(history + "and now?", max_tokens=20), again)
        assert [worker.in_flight for worker in pool.statistics().workers] == [0, 1]
        pool.start(frame(history + "and now?", max_tokens=20), other, tenant="another")
        assert [worker.in_flight for worker in pool.statistics().workers] == [1, 1]
        await again.end()
        await other.end()
