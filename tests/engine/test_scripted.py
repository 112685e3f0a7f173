"""Tests for engine/scripted.py, in this process. Its faults are in tests/pool/test_faults.py."""

import time
from pathlib import Path

import pytest

from headrace.engine.config import EngineConfig
from headrace.engine.interface import Engine, EngineLoadError
from headrace.engine.scripted import ROUNDS_PER_STEP, ScriptedEngine, scripted_token
from headrace.protocol.frames import RequestId
from headrace.protocol.messages import Delta, End, EngineStats, Event, Loading, Progress, Submit
from headrace.protocol.options import ChatInput, CompletionInput, GenerationOptions


def load(**fields) -> ScriptedEngine:
    return ScriptedEngine.load(EngineConfig(kind="scripted", name="words", **fields), lambda loading: None)


def submit(
    engine: Engine,
    rid: str,
    prompt="one two three",
    max_tokens: int = 5,
    seed: int = 7,
    generated: tuple[int, ...] = (),
    credit: int | None = None,
) -> None:
    source = prompt if isinstance(prompt, ChatInput) else CompletionInput(prompt=prompt)
    options = GenerationOptions().resolve(model="words", max_tokens=max_tokens, temperature=0, seed=seed)
    engine.submit(Submit(RequestId(rid), source, options, "", 10.0, False, list(generated), credit))


def run(engine: Engine, max_steps: int = 10_000) -> list[Event]:
    events: list[Event] = []
    for _ in range(max_steps):
        if not engine.busy:
            break
        events += engine.step()
    return events


def text_of(events: list[Event], rid: str) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta) and event.rid == rid)


def ends_of(events: list[Event]) -> dict[str, End]:
    ends = [event for event in events if isinstance(event, End)]
    assert len({end.rid for end in ends}) == len(ends)
    return {end.rid: end for end in ends}


def test_the_answer_depends_on_prompt_and_seed_only():
    """The same request gives the same text, alone and in a batch; another prompt or seed another."""
    alone = load()
    submit(alone, "a")
    text = text_of(run(alone), "a")
    assert text == "".join(scripted_token("one two three", 7, index) for index in range(5))
    batch = load()
    submit(batch, "x", "something else")
    submit(batch, "a")
    submit(batch, "y", seed=8)
    events = run(batch)
    assert text_of(events, "a") == text
    assert len({text_of(events, rid) for rid in "axy"}) == 3


@pytest.mark.parametrize("max_tokens", [1, 2, ROUNDS_PER_STEP, 3 * ROUNDS_PER_STEP + 1])
def test_an_answer_ends_at_its_limit(max_tokens: int):
    """`max_tokens` deltas of one token, then the end that counts them."""
    engine = load()
    submit(engine, "a", "a b c d", max_tokens)
    events = run(engine)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [delta.n for delta in deltas] == [1] * max_tokens
    end = events[-1]
    assert isinstance(end, End)
    assert (end.status, end.finish_reason) == ("completed", "length")
    assert end.usage == {
        "prompt_tokens": 4,
        "cached_tokens": 0,
        "completion_tokens": max_tokens,
        "total_tokens": 4 + max_tokens,
    }
    assert engine.stats == EngineStats(
        prefill_tokens_total=4, completion_tokens_total=max_tokens, steps_total=max_tokens
    )
    assert not engine.busy


@pytest.mark.parametrize("num_generated", [1, 4, 5])
def test_goes_on_after_what_an_earlier_engine_made(num_generated: int):
    """The rest of the answer, with its ids; usage counts the whole, also when nothing is left to make."""
    engine = load()
    submit(engine, "a", generated=tuple(range(num_generated)))
    events = run(engine)
    rest = range(num_generated, 5)
    assert text_of(events, "a") == "".join(scripted_token("one two three", 7, index) for index in rest)
    assert [event.tokens for event in events if isinstance(event, Delta)] == [[index] for index in rest]
    end = ends_of(events)["a"]
    assert (end.finish_reason, end.usage["completion_tokens"]) == ("length", 5)


def test_pauses_without_credit():
    """As many tokens as were allowed, then nothing to do until there is credit or a cancel."""
    engine = load()
    submit(engine, "a", credit=2)
    submit(engine, "b", credit=1)
    events = run(engine)
    assert (len([e for e in events if isinstance(e, Delta) and e.rid == "a"]), engine.stats.paused) == (2, 2)
    assert engine.stats.in_flight == 2
    engine.credit(RequestId("a"), 3)
    engine.credit(RequestId("unknown"), 3)
    assert ends_of(run(engine)).keys() == {"a"}
    engine.cancel(RequestId("b"), "client")
    assert engine.busy
    assert ends_of(engine.step())["b"].status == "cancelled"
    assert engine.stats.in_flight == 0
    assert not engine.busy


def test_chat_and_token_ids():
    """Words of all messages count, and so do token ids."""
    engine = load()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say it"}]
    submit(engine, "chat", ChatInput.model_validate({"messages": messages}))
    submit(engine, "ids", [5, 6, 7])
    ends = ends_of(run(engine))
    assert ends["chat"].usage["prompt_tokens"] == 4
    assert ends["ids"].usage["prompt_tokens"] == 3


def test_prefill_in_chunks_with_progress():
    """A long prompt is read in chunks of the configured time, between the tokens of others."""
    engine = load(scripted_prefill_tokens_per_s=1000.0, chunk_target_ms=20.0, progress_interval_s=0.0)
    submit(engine, "short", "a", max_tokens=10_000)
    engine.step()
    submit(engine, "long", "word " * 100, max_tokens=1)
    started_s = time.monotonic()
    events: list[Event] = []
    while "long" not in ends_of(events):
        new = engine.step()
        assert text_of(new, "short")
        events += new
    assert 0.08 < time.monotonic() - started_s < 1.0
    progress = [event for event in events if isinstance(event, Progress)]
    assert [event.processed for event in progress] == [20, 40, 60, 80, 100]
    assert all((event.phase, event.total, event.prompt_tokens) == ("prefill", 100, 100) for event in progress)
    timings = ends_of(events)["long"].timings
    assert timings["prefill_ms"] is not None
    assert 80 < timings["prefill_ms"] < 1000


def test_decode_takes_its_time_for_the_whole_batch():
    """A delay is spent once a round, however many requests decode."""
    engine = load(scripted_token_delay_ms=5.0)
    for index in range(8):
        submit(engine, str(index), max_tokens=10)
    started_s = time.monotonic()
    run(engine)
    assert 0.045 < time.monotonic() - started_s < 0.5


def test_the_batch_is_bounded():
    """What does not fit waits, and hears of it."""
    engine = load(max_batch_size=2)
    for rid in "abc":
        submit(engine, rid, max_tokens=100)
    events = engine.step()
    stats = engine.stats
    assert (stats.waiting, stats.decoding, stats.in_flight) == (1, 2, 3)
    assert [event.rid for event in events if isinstance(event, Progress) and event.phase == "queue"] == ["c"]
    assert set(ends_of(run(engine))) == {"a", "b", "c"}
    assert engine.stats.in_flight == 0


def test_cancel_in_every_phase():
    """Waiting, in prefill and in decode: an end at the next step and nothing else of it."""
    engine = load(max_batch_size=2, scripted_prefill_tokens_per_s=10_000.0, chunk_target_ms=1.0)
    submit(engine, "decode", "a", max_tokens=1000)
    engine.step()
    submit(engine, "prefill", "word " * 200)
    submit(engine, "waiting")
    before = engine.step()
    stats = engine.stats
    assert (stats.waiting, stats.prefilling, stats.decoding) == (1, 1, 1)
    assert "decode" in {event.rid for event in before}
    for rid in ("decode", "prefill", "waiting"):
        engine.cancel(RequestId(rid), "deadline")
        engine.cancel(RequestId(rid), "client")
    engine.cancel(RequestId("unknown"), "client")
    events = engine.step()
    assert len(events) == 3
    for end in ends_of(events).values():
        assert (end.status, end.reason, end.finish_reason) == ("cancelled", "deadline", None)
        assert end.error is not None
    assert ends_of(events)["prefill"].usage["prompt_tokens"] == 200
    assert ends_of(events)["waiting"].usage["prompt_tokens"] == 0
    assert ends_of(events)["decode"].usage["completion_tokens"] > 0
    assert engine.stats.in_flight == 0
    assert not engine.busy


def test_a_raise_comes_from_the_step():
    """`[[raise]]` fails the step in which its third token is due."""
    engine = load()
    submit(engine, "a", "[[raise]] please")
    assert text_of(engine.step() + engine.step(), "a").count("-") == 2
    with pytest.raises(RuntimeError):
        engine.step()


@pytest.mark.parametrize(("fault", "permanent"), [("permanent", True), ("transient", False)])
def test_load_failures(fault: str, permanent: bool):
    """The configuration can ask for a load that fails."""
    with pytest.raises(EngineLoadError) as caught:
        load(model=f"fault:{fault}")
    assert caught.value.permanent is permanent


def test_crashes_once_only(tmp_path: Path):
    """The second load of `fault:crash-once` succeeds."""
    mark = tmp_path / "mark"
    mark.touch()
    assert load(model=f"fault:crash-once:{mark}").info.model == "words"


def test_loading_takes_its_time_and_says_so():
    """Loading reports its steps up to the last."""
    reports: list[Loading] = []
    config = EngineConfig(kind="scripted", scripted_load_s=0.1)
    started_s = time.monotonic()
    ScriptedEngine.load(config, reports.append)
    assert time.monotonic() - started_s >= 0.1
    assert [(report.done, report.total) for report in reports] == [(0, 2), (1, 2), (2, 2)]


def test_is_fast_enough_to_measure_others():
    """Far more events a second than a socket takes."""
    engine = load(max_batch_size=32)
    for index in range(32):
        submit(engine, str(index), max_tokens=2000)
    started_s = time.process_time()
    num_events = len(run(engine))
    assert num_events / (time.process_time() - started_s) > 100_000
