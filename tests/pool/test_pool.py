"""Tests for pool/pool.py and pool/group.py: requests through real engine processes."""

import asyncio
import multiprocessing
import random
import time

import pytest
from pool_helpers import (
    LIMIT_S,
    LONG,
    MS,
    Recorder,
    answer,
    assert_idle,
    chat_frame,
    engines_idle,
    eventually,
    frame,
    make_config,
    model,
)

from headrace.pool import ModelLoadFailed, Pool, WorkerState
from headrace.pool.group import WorkerGroup
from headrace.protocol.errors import ErrorCode, HeadraceError
from headrace.protocol.messages import Delta, End, Progress


async def test_streams_the_answer_and_one_end():
    """A request's events are progress, its tokens in order, and one end that counts them."""
    async with Pool(make_config()) as pool:
        recorder = Recorder()
        ticket = pool.start(frame(max_tokens=40), recorder)
        end = await recorder.end()
        assert recorder.text == answer(40)
        assert (end.status, end.finish_reason, end.reason, end.error) == ("completed", "length", None, None)
        assert end.usage["prompt_tokens"] == 3
        assert ticket.options.model == "words"
        assert ticket.queue_position == 0
        assert_idle(pool)
        await engines_idle(pool)


async def test_fills_in_defaults():
    """What a frame leaves out is in the ticket's options; the seed differs from request to request."""
    async with Pool(make_config(default_max_tokens=5, default_temperature=0.25)) as pool:
        first, second = Recorder(), Recorder()
        options = pool.start(frame(seed=None), first).options
        other = pool.start(frame(seed=None), second).options
        assert (options.max_tokens, options.temperature) == (5, 0.25)
        assert options.seed is not None
        assert options.seed != other.seed
        assert (await first.end()).usage["completion_tokens"] == 5
        await second.end()


async def test_is_usable_without_a_gateway():
    """The pool is a library: frames in, events out."""
    async with Pool(make_config()) as pool:
        events = [event async for event in pool.submit(chat_frame("hello there", "you", max_tokens=20))]
    text = "".join(event.text for event in events if isinstance(event, Delta))
    assert text == answer(20, "hello there\nyou")
    assert isinstance(events[-1], End)
    assert events[-1].status == "completed"


async def test_waits_for_loading_and_says_so():
    """A request that comes before its model is loaded hears of the load, then is answered."""
    async with Pool(make_config(model(scripted_load_s=300 * MS))) as pool:
        recorder = Recorder()
        pool.start(frame(max_tokens=3), recorder)
        assert not pool.ready
        assert pool.list_models()[0]["state"] == "loading"
        assert (await recorder.end()).status == "completed"
        loads = [event for event in recorder.progress if event.phase == "load"]
        assert len(loads) >= 3
        assert loads[-1].total == 6
        assert pool.ready
        assert pool.list_models()[0]["state"] == "ready"


async def test_wait_ready_and_changes():
    """`wait_ready` returns when a model can answer; `on_change` has told every state until then."""
    states = []
    async with Pool(make_config(), on_change=lambda status: states.append(status.state)) as pool:
        await pool.wait_ready(LIMIT_S)
        assert states[0] is WorkerState.STARTING
        assert states[-1] is WorkerState.READY
        info = pool.list_models()[0]
        assert (info["name"], info["context_length"], info["default"]) == ("words", 1 << 20, True)
    assert states[-1] is WorkerState.STOPPED


async def test_names_the_models_there_are():
    """A frame picks its model by name or alias; an unknown name is refused with those there are."""
    config = make_config(model("a", aliases=("first",)), model("b"))
    async with Pool(config) as pool:
        with pytest.raises(HeadraceError) as caught:
            pool.start(frame(model="c"), Recorder())
        assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
        assert caught.value.param == "model"
        assert caught.value.message.endswith("a, b")
        recorders = {name: Recorder() for name in ("first", "b", None)}
        for name, recorder in recorders.items():
            pool.start(frame(model=name, max_tokens=2), recorder)
        for recorder in recorders.values():
            await recorder.end()
        assert [worker.status.stats.completion_tokens_total for worker in pool.statistics().workers] == [4, 2]
        assert pool.statistics().refused_total == {"model_not_found": 1}


async def test_spreads_over_workers():
    """Requests go where the fewest tokens are in flight."""
    async with Pool(make_config(model(workers=2, scripted_token_delay_ms=1))) as pool:
        await eventually(lambda: all(w.status.state is WorkerState.READY for w in pool.statistics().workers))
        for _ in range(4):
            pool.start(frame(max_tokens=LONG), Recorder())
        assert [worker.in_flight for worker in pool.statistics().workers] == [2, 2]


# --- the queue ----------------------------------------------------------------------------------------------


async def test_queue_is_bounded_and_first_come_first_served():
    """A worker gets so many at a time; so many wait, in order; the next is refused with a hint."""
    config = make_config(model(scripted_token_delay_ms=1), max_in_flight=1, max_queue=3)
    async with Pool(config) as pool:
        await pool.wait_ready(LIMIT_S)
        recorders = [Recorder() for _ in range(4)]
        tickets = [pool.start(frame(max_tokens=150), recorder) for recorder in recorders]
        assert [ticket.queue_position for ticket in tickets] == [0, 0, 1, 2]
        with pytest.raises(HeadraceError) as caught:
            pool.start(frame(), Recorder())
        assert caught.value.code is ErrorCode.QUEUE_FULL
        assert caught.value.retryable
        assert caught.value.retry_after_ms is not None
        for index, recorder in enumerate(recorders):
            await recorder.end()
            assert all(not later.ends for later in recorders[index + 1 :])
        waited = [event for event in recorders[3].progress if event.phase == "queue"]
        places = [(event.processed, event.total) for event in waited]
        assert places == sorted(places)
        assert (places[0], places[-1]) == ((0, 2), (2, 2))
        assert_idle(pool)


async def test_max_queue_zero_still_runs():
    """Without a queue a request is taken when a worker has room, and refused otherwise."""
    config = make_config(model(scripted_token_delay_ms=1), max_in_flight=1, max_queue=0)
    async with Pool(config) as pool:
        await pool.wait_ready(LIMIT_S)
        pool.start(frame(max_tokens=LONG), Recorder())
        with pytest.raises(HeadraceError):
            pool.start(frame(), Recorder())


# --- cancel -------------------------------------------------------------------------------------------------


async def test_cancel_while_queued():
    """A queued request ends at once, not from within `cancel`, and its place is free."""
    async with Pool(make_config(model(scripted_token_delay_ms=1), max_in_flight=1, max_queue=1)) as pool:
        await pool.wait_ready(LIMIT_S)
        running, queued, next_one = Recorder(), Recorder(), Recorder()
        pool.start(frame(max_tokens=100), running)
        rid = pool.start(frame(), queued).rid
        pool.cancel(rid, "client")
        assert queued.ends == []
        pool.start(frame(max_tokens=2), next_one)
        await asyncio.sleep(0)
        end = await queued.end()
        assert (end.status, end.reason, end.error) == ("cancelled", "client", None)
        assert end.usage["total_tokens"] == 0
        assert (await next_one.end()).status == "completed"


async def test_cancel_in_prefill():
    """A prompt of many chunks is let go within a chunk; nothing but the end comes after."""
    spec = model(scripted_prefill_tokens_per_s=1000, chunk_target_ms=20, scripted_token_delay_ms=1)
    async with Pool(make_config(spec)) as pool:
        await pool.wait_ready(LIMIT_S)
        recorder, after = Recorder(), Recorder()
        rid = pool.start(frame("word " * 5000), recorder).rid
        await eventually(lambda: any(event.phase == "prefill" for event in recorder.progress))
        started_s = time.monotonic()
        pool.cancel(rid, "client")
        end = await recorder.end()
        assert time.monotonic() - started_s < 1
        assert (end.status, end.reason, recorder.num_tokens) == ("cancelled", "client", 0)
        pool.start(frame(max_tokens=3), after)
        assert (await after.end()).status == "completed"
        assert_idle(pool)
        await engines_idle(pool)


@pytest.mark.parametrize("num_cancels", [1, 3])
async def test_cancel_in_decode(num_cancels: int):
    """A running request ends once however often it is cancelled; the first reason counts."""
    async with Pool(make_config(model(scripted_token_delay_ms=1))) as pool:
        recorder = Recorder()
        rid = pool.start(frame(max_tokens=LONG), recorder).rid
        await recorder.tokens(3)
        for reason in ("connection_lost", "client", "slow_consumer")[:num_cancels]:
            pool.cancel(rid, reason)
        end = await recorder.end()
        assert (end.status, end.reason, end.error) == ("cancelled", "connection_lost", None)
        assert recorder.text == answer(recorder.num_tokens)
        pool.cancel(rid, "client")
        assert_idle(pool)
        await engines_idle(pool)
        assert len(recorder.ends) == 1


async def test_deadline_while_queued_and_running():
    """`timeout_ms` counts from acceptance, in the queue and in the engine."""
    async with Pool(make_config(model(scripted_token_delay_ms=1), max_in_flight=1)) as pool:
        await pool.wait_ready(LIMIT_S)
        running, queued = Recorder(), Recorder()
        started_s = time.monotonic()
        pool.start(frame(max_tokens=LONG, timeout_ms=300), running)
        pool.start(frame(max_tokens=LONG, timeout_ms=100), queued)
        for recorder, limit_s in ((queued, 0.1), (running, 0.3)):
            end = await recorder.end()
            assert limit_s <= time.monotonic() - started_s < limit_s + 1
            assert (end.status, end.reason) == ("cancelled", "deadline")
            assert end.error is not None
            assert end.error["code"] == "deadline_exceeded"
        assert queued.num_tokens == 0
        assert running.num_tokens > 0
        assert_idle(pool)


async def test_random_requests_with_random_cancels():
    """300 requests over two workers, many cancelled at random times: one end each, and counters at zero."""
    rng = random.Random(2)
    spec = model(workers=2, scripted_token_delay_ms=0.2, max_batch_size=8)
    async with Pool(make_config(spec, max_queue=300)) as pool:
        recorders = []
        loop = asyncio.get_running_loop()
        for _ in range(300):
            recorder = Recorder()
            timeout_ms = rng.choice([None, None, None, rng.randint(1, 300)])
            options = {"max_tokens": rng.randint(1, 60), "timeout_ms": timeout_ms}
            rid = pool.start(frame("word " * rng.randint(1, 50), **options), recorder).rid
            recorders.append(recorder)
            for _ in range(rng.choice([0, 0, 1, 2])):
                reason = rng.choice(["client", "connection_lost", "slow_consumer"])
                loop.call_later(rng.random() * 0.5, pool.cancel, rid, reason)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 5 * MS)
        statuses = [(await recorder.end()).status for recorder in recorders]
        assert_idle(pool)
        await engines_idle(pool)
        assert statuses.count("completed") > 30
        assert statuses.count("cancelled") > 30
        assert all(len(recorder.ends) == 1 for recorder in recorders)


# --- sinks and streams --------------------------------------------------------------------------------------


async def test_a_broken_sink_harms_nobody_else():
    """A sink that raises hears nothing more; its request still ends and is released."""

    def broken(event: object) -> None:
        raise RuntimeError("a broken sink")

    async with Pool(make_config(model(scripted_token_delay_ms=1))) as pool:
        whole = Recorder()
        pool.start(frame(max_tokens=20), broken)
        pool.start(frame(max_tokens=20), whole)
        assert (await whole.end()).status == "completed"
        await eventually(lambda: pool.statistics().in_flight == 0)
        assert_idle(pool)


async def test_leaving_a_stream_cancels_it():
    """Leaving `async with` early cancels the request."""
    async with Pool(make_config(model(scripted_token_delay_ms=1))) as pool:
        async with pool.submit(frame(max_tokens=LONG)) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    break
        await eventually(lambda: pool.statistics().in_flight == 0)
        assert pool.statistics().ended_total == {"cancelled": 1}
        await engines_idle(pool)


async def test_a_slow_consumer_gets_merged_deltas():
    """What came while nobody read is one delta, and no token is lost."""
    async with Pool(make_config()) as pool:
        stream = pool.submit(frame(max_tokens=500))
        await eventually(lambda: pool.statistics().ended_total.get("completed") == 1)
        events = [event async for event in stream]
        assert [type(event) for event in events] == [Progress, Delta, End]
        assert isinstance(events[1], Delta)
        assert (events[1].n, events[1].text) == (500, answer(500))
        assert [event async for event in stream] == []


async def test_cancelling_a_stream_lets_it_end():
    """`PoolStream.cancel` ends the stream by its `End`."""
    async with Pool(make_config(model(scripted_token_delay_ms=1))) as pool:
        stream = pool.submit(frame(max_tokens=LONG))
        events = []
        async for event in stream:
            events.append(event)
            stream.cancel()
        assert isinstance(events[-1], End)
        assert events[-1].status == "cancelled"


async def test_refusals_come_from_the_call():
    """`submit` refuses at the call, not at the first iteration."""
    async with Pool(make_config()) as pool:
        with pytest.raises(HeadraceError):
            pool.submit(frame(model="unknown"))


# --- the end of a pool --------------------------------------------------------------------------------------


async def test_drain_waits_for_those_that_are_in():
    """A draining pool refuses new requests, ends the old ones, and says whether all have ended."""
    async with Pool(make_config(model(scripted_token_delay_ms=1))) as pool:
        short, endless = Recorder(), Recorder()
        pool.start(frame(max_tokens=30), short)
        rid = pool.start(frame(max_tokens=LONG), endless).rid
        assert not await pool.drain(10 * MS)
        with pytest.raises(HeadraceError) as caught:
            pool.start(frame(), Recorder())
        assert caught.value.code is ErrorCode.SHUTTING_DOWN
        assert (await short.end()).status == "completed"
        pool.cancel(rid, "shutdown")
        assert await pool.drain(LIMIT_S)
        end = await endless.end()
        assert end.error is not None
        assert (end.status, end.reason, end.error["code"]) == ("cancelled", "shutdown", "shutting_down")


async def test_exit_with_running_and_queued_requests_is_quick():
    """Leaving the pool ends every request as cancelled and takes no longer than a step."""
    async with Pool(make_config(model(scripted_token_delay_ms=1), max_in_flight=2)) as pool:
        recorders = [Recorder() for _ in range(6)]
        for recorder in recorders:
            pool.start(frame(max_tokens=LONG), recorder)
        await recorders[1].tokens(2)
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 1
    assert [(await recorder.end()).reason for recorder in recorders] == ["shutdown"] * 6
    assert_idle(pool)
    with pytest.raises(HeadraceError):
        pool.start(frame(), Recorder())


async def test_exit_while_loading_is_quick():
    """Leaving the pool does not wait for a model to be loaded."""
    async with Pool(make_config(model(scripted_load_s=60))) as pool:
        recorder = Recorder()
        pool.start(frame(), recorder)
        await eventually(lambda: pool.statistics().workers[0].status.state is WorkerState.LOADING)
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 1.5
    assert (await recorder.end()).reason == "shutdown"


async def test_whoever_is_told_of_changes_may_fail():
    """It hears nothing more, and the pool goes on."""
    heard = []

    def fail(status):
        heard.append(status)
        raise RuntimeError("a fault of the program's")

    async with Pool(make_config(), on_change=fail) as pool:
        recorder = Recorder()
        pool.start(frame(max_tokens=3), recorder)
        assert (await recorder.end()).status == "completed"
    assert len(heard) == 1


async def test_a_pool_that_cannot_be_entered_leaves_nothing(monkeypatch):
    """Neither processes nor a state in which requests are taken."""
    others = set(multiprocessing.active_children())
    pool = Pool(make_config(model("a"), model("b")))
    start = WorkerGroup.start

    def fail_second(group):
        if group.workers[0].model == "b":
            raise RuntimeError("no more")
        start(group)

    monkeypatch.setattr(WorkerGroup, "start", fail_second)
    with pytest.raises(RuntimeError, match="no more"):
        async with pool:
            pass
    await eventually(lambda: set(multiprocessing.active_children()) <= others)
    with pytest.raises(HeadraceError, match="about to stop"):
        pool.start(frame(), Recorder())


async def test_closing_a_pool_ends_those_that_wait_for_it():
    """At once, and not after their own deadline."""
    pool = Pool(make_config(model(scripted_load_s=30)))
    with pytest.raises(RuntimeError, match="enter the pool"):
        await pool.wait_ready(1)
    async with pool:
        waiting = asyncio.create_task(pool.wait_ready(60))
        await asyncio.sleep(0.05)
    with pytest.raises(ModelLoadFailed, match="closed"):
        async with asyncio.timeout(1):
            await waiting


async def test_a_pool_must_be_entered():
    """Using a pool that was not entered is a mistake of the program."""
    pool = Pool(make_config())
    with pytest.raises(RuntimeError):
        pool.start(frame(), Recorder())
