"""Tests for engine/mlx_engine.py, with a tiny random model in this process, and with the default model."""

import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from byte_tokenizer import byte_tokenizer
from tiny_models import tiny_model

from headrace.engine.config import EngineConfig, SpecPrefillConfig
from headrace.engine.loading.loader import LoadedModel
from headrace.engine.mlx_engine import MlxEngine
from headrace.engine.prompt import PromptBuilder
from headrace.engine.specprefill.policy import SpecPrefill
from headrace.engine.specprefill.sparse_prefill import SparsePrefill
from headrace.engine.tokenizing import SHORT_LENGTH
from headrace.protocol.frames import RequestId
from headrace.protocol.messages import Delta, End, Progress, Submit
from headrace.protocol.options import ChatInput, CompletionInput, GenerationOptions

VOCABULARY = 261
CONTEXT = 600
END_TOKEN = 256
NO_END = {str(token): -100.0 for token in range(END_TOKEN, VOCABULARY)}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return LoadedModel(
        name="tiny",
        path=Path(),
        model=tiny_model("llama", vocab_size=VOCABULARY),
        tokenizer=byte_tokenizer(),
        config={},
        context_length=CONTEXT,
        vocab_size=VOCABULARY,
        dtype=mx.float32,
        num_parameters=1,
        dequantized=False,
        weight_bytes=1,
    )


@pytest.fixture
def new_engine(loaded):
    """Return a factory; a slice is one chunk of 16 tokens, so that a prompt of 60 takes several."""

    def build(**config) -> MlxEngine:
        defaults = {"max_chunk_tokens": 16, "chunk_target_ms": 1e-3, "progress_interval_s": 0.0}
        config_ = EngineConfig(**(defaults | config))
        return MlxEngine(config_, loaded, SpecPrefill.load(config_.specprefill, loaded, lambda p: None), 0.0)

    return build


def submit(
    engine,
    rid: str,
    prompt,
    tenant: str = "",
    default_limit: bool = False,
    generated=(),
    credit=None,
    stays_dense=False,
    **options,
) -> None:
    fields = {"max_tokens": 12, "temperature": 0.0, "seed": 1, "logit_bias": NO_END} | options
    request = prompt
    if isinstance(prompt, tuple):
        request = ChatInput.model_validate({"messages": [{"role": "user", "content": prompt[0]}]})
    elif not isinstance(prompt, ChatInput):
        request = CompletionInput(prompt=prompt)
    options_ = GenerationOptions(**fields)
    engine.submit(
        Submit(
            RequestId(rid),
            request,
            options_,
            tenant,
            0.0,
            default_limit,
            list(generated),
            credit,
            stays_dense,
        )
    )


def run(engine, events=None, until=lambda events: False) -> list:
    """Step until nothing is left to do, or until a condition holds."""
    events = [] if events is None else events
    for _ in range(5000):
        if not engine.busy or until(events):
            return events
        events += engine.step()
    raise AssertionError("the engine never came to an end")


def text(events, rid: str) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta) and e.rid == rid)


def tokens_of(events, rid: str) -> list[int]:
    return [token for e in events if isinstance(e, Delta) and e.rid == rid for token in e.tokens]


def end(events, rid: str) -> End:
    [found] = [e for e in events if isinstance(e, End) and e.rid == rid]
    assert [e for e in events if e.rid == rid][-1] is found, "nothing comes after the end"
    carried = sum(e.n for e in events if isinstance(e, Delta) and e.rid == rid)
    assert len(tokens_of(events, rid)) == carried
    assert found.usage["completion_tokens"] == carried
    assert found.usage["total_tokens"] == found.usage["prompt_tokens"] + carried
    return found


def idle(engine) -> bool:
    stats = engine.stats
    return not engine.busy and stats.in_flight == 0


# --- generating ---


def test_greedy_tokens_are_those_of_a_plain_loop(new_engine, loaded):
    """Prefill in chunks, cache and batch change nothing about the text."""
    engine = new_engine()
    prompt = list(range(1, 51))
    submit(engine, "a", prompt)
    events = run(engine)
    tokens = list(prompt)
    for _ in range(12):
        logits = loaded.model(mx.array(tokens)[None])[0, -1]
        tokens.append(mx.argmax(logits[:END_TOKEN]).item())
    assert text(events, "a") == loaded.tokenizer.decode(tokens)[len(loaded.tokenizer.decode(prompt)) :]
    assert end(events, "a").finish_reason == "length"
    assert idle(engine)


def test_the_same_text_alone_and_in_a_batch(new_engine):
    """Greedy and seeded requests, with penalties and without, get the same tokens whoever is beside them."""
    kinds = [
        {},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 1.3, "seed": 6, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"temperature": 0.7, "seed": 7, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3},
        {"temperature": 0.9, "seed": 8},
    ]
    alone = {}
    for number, kind in enumerate(kinds):
        engine = new_engine()
        submit(engine, str(number), f"prompt {number} " * (number + 1), **kind)
        alone[number] = text(run(engine), str(number))
    engine = new_engine()
    for number, kind in enumerate(kinds):
        submit(engine, str(number), f"prompt {number} " * (number + 1), **kind)
    together = run(engine)
    assert {number: text(together, str(number)) for number in alone} == alone
    assert len(set(alone.values())) == len(kinds)


def test_another_seed_gives_another_text(new_engine):
    """And the same seed the same one."""
    engine = new_engine()
    for rid, seed in (("a", 1), ("b", 2), ("c", 1)):
        submit(engine, rid, "once upon", temperature=1.0, seed=seed)
    events = run(engine)
    assert text(events, "a") == text(events, "c") != text(events, "b")


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_is_exact(new_engine, max_tokens):
    """From 1 up."""
    engine = new_engine()
    submit(engine, "a", "hello", max_tokens=max_tokens)
    last = end(run(engine), "a")
    assert (last.usage["completion_tokens"], last.finish_reason) == (max_tokens, "length")


def test_the_end_token_ends_the_answer_and_is_not_text(new_engine):
    """It counts as a token."""
    engine = new_engine()
    submit(engine, "a", "hello", logit_bias={str(END_TOKEN): 100.0})
    events = run(engine)
    assert text(events, "a") == ""
    assert end(events, "a").finish_reason == "stop"
    assert end(events, "a").usage["completion_tokens"] == 1


def test_a_stop_string_ends_the_answer(new_engine):
    """Before it; the others in the batch go on."""
    engine = new_engine()
    submit(engine, "whole", "hello", max_tokens=30)
    whole = text(run(engine), "whole")
    stop = whole[10:12]
    submit(engine, "stopped", "hello", max_tokens=30, stop=[stop])
    submit(engine, "other", "hello", max_tokens=30)
    events = run(engine)
    assert text(events, "stopped") == whole[: whole.index(stop)]
    assert end(events, "stopped").finish_reason == "stop"
    assert text(events, "other") == whole
    assert idle(engine)


@pytest.mark.parametrize("beside", [{}, {"temperature": 1e-39}, {"temperature": 1e-320, "top_p": 1e-300}])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_the_lowest_temperatures_and_shares_take_the_likeliest_token(loaded, dtype, beside):
    """Whatever the precision that the model computes in."""
    model = tiny_model("llama", dtype, vocab_size=VOCABULARY)
    model_ = replace(loaded, model=model, dtype=dtype)
    config = EngineConfig(specprefill=SpecPrefillConfig(draft_model="none"))
    engine = MlxEngine(config, model_, SpecPrefill.load(config.specprefill, model_, lambda p: None), 0.0)
    submit(engine, "greedy", "hello", cache_prompt=False)
    likeliest = tokens_of(run(engine), "greedy")
    for number, kind in enumerate(({"temperature": 1e-5}, {"temperature": 1.0, "top_p": 1e-46}, beside)):
        submit(engine, str(number), "hello", cache_prompt=False, **kind)
        assert tokens_of(run(engine), str(number)) == likeliest


def test_a_stop_string_that_the_last_token_completes_is_the_reason(new_engine):
    """Not the limit: the answer is whole."""
    engine = new_engine()
    submit(engine, "whole", "hello", max_tokens=6)
    whole = text(run(engine), "whole")
    first = whole.index(whole[-1])
    submit(engine, "a", "hello", max_tokens=first + 1, stop=[whole[-1]])
    events = run(engine)
    assert (text(events, "a"), end(events, "a").finish_reason) == (whole[:first], "stop")


def test_echo_repeats_the_prompt_first(new_engine):
    """In a delta that carries no tokens."""
    engine = new_engine()
    submit(engine, "a", "hello", echo=True, max_tokens=2)
    events = run(engine)
    first = next(e for e in events if isinstance(e, Delta))
    assert (first.text, first.n) == ("hello", 0)
    assert end(events, "a").usage["completion_tokens"] == 2


def test_logprobs_belong_to_the_tokens(new_engine):
    """One entry for each token, the chosen one first among its alternatives when greedy."""
    engine = new_engine()
    submit(engine, "a", "hello", logprobs=True, top_logprobs=3, max_tokens=6)
    entries = [entry for e in run(engine) if isinstance(e, Delta) for entry in e.logprobs]
    assert len(entries) == 6
    for entry in entries:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert entry["top_logprobs"][0]["token_id"] == entry["token_id"]
        assert entry["logprob"] == values[0] <= 0


# --- refusing ---


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(new_engine):
    """The error names them, and the field at fault."""
    engine = new_engine()
    submit(engine, "long", [1] * CONTEXT)
    submit(engine, "limit", [1] * (CONTEXT - 10), max_tokens=11)
    submit(engine, "fits", [1] * (CONTEXT - 10), max_tokens=10)
    submit(engine, "default", [1] * (CONTEXT - 10), max_tokens=11, default_limit=True)
    events = run(engine)
    for rid, param in (("long", "prompt"), ("limit", "max_tokens")):
        error = end(events, rid).error
        assert (error["code"], error["param"]) == ("context_too_long", param)
        assert str(CONTEXT) in error["message"]
    assert end(events, "fits").usage["completion_tokens"] == 10
    assert end(events, "default").usage["completion_tokens"] == 10


def test_what_only_the_model_can_refuse_is_refused_by_name(new_engine):
    """Others are served."""
    engine = new_engine()
    submit(engine, "token", [1, VOCABULARY])
    submit(engine, "bias", "x", logit_bias={str(VOCABULARY): 1.0})
    submit(engine, "fine", "x")
    events = run(engine)
    assert end(events, "token").error["param"] == "prompt[1]"
    assert end(events, "bias").error["param"] == "logit_bias"
    assert end(events, "fine").status == "completed"


@pytest.mark.parametrize("where", ["admission", "token"])
def test_a_fault_of_one_request_is_no_fault_of_the_others(new_engine, monkeypatch, where):
    """It ends with an error that tells nothing of our insides; the engine lives."""
    engine = new_engine()
    submit(engine, "other", "hello", max_tokens=30)
    events = run(engine, until=lambda ev: text(ev, "other") != "")
    if where == "admission":
        monkeypatch.setattr(engine._admission, "prepare", lambda *args: 1 / 0)
    submit(engine, "bad", "hi", max_tokens=30)
    events += engine.step()
    monkeypatch.undo()
    if where == "token":
        [request] = [r for r in (*engine._decoding.values(), *engine._prefills.requests) if r.rid == "bad"]
        request.answer.push = lambda token: 1 / 0
    run(engine, events)
    last = end(events, "bad")
    assert (last.status, last.error["code"]) == ("failed", "engine_error")
    assert "zero" not in last.error["message"]
    assert end(events, "other").status == "completed"
    assert idle(engine)


# --- cancelling ---


def test_cancel_in_line_in_prefill_and_in_decode(new_engine):
    """Nothing but the end comes after the step under way, and the neighbour's text is undisturbed."""
    engine = new_engine(max_prefills=1)
    submit(engine, "neighbour", "hello", max_tokens=60)
    undisturbed = text(run(engine), "neighbour")

    submit(engine, "neighbour", "hello", max_tokens=60)
    submit(engine, "decoding", "hi", max_tokens=500)
    events = run(engine, until=lambda ev: text(ev, "decoding") != "")
    submit(engine, "reading", [7] * 300)
    submit(engine, "waiting", [8] * 300)
    run(engine, events, until=lambda ev: any(isinstance(e, Progress) and e.processed > 32 for e in ev))
    for rid in ("decoding", "reading", "waiting"):
        engine.cancel(RequestId(rid), "client")
    after = engine.step()
    for rid in ("decoding", "reading", "waiting"):
        last = end(events + after, rid)
        assert [e for e in after if e.rid == rid] == [last]
        assert (last.status, last.reason, last.error) == ("cancelled", "client", None)
    assert end(events + after, "decoding").usage["completion_tokens"] > 0
    assert text(run(engine, events + after), "neighbour") == undisturbed
    assert idle(engine)


def test_a_cancelled_request_reads_no_further_chunk(new_engine):
    """However long its prompt is."""
    engine = new_engine()
    submit(engine, "a", [7] * 500)
    run(engine, until=lambda ev: any(isinstance(e, Progress) and e.processed >= 16 for e in ev))
    engine.cancel(RequestId("a"), "connection_lost")
    read = engine.stats.prefill_tokens_total
    run(engine)
    assert engine.stats.prefill_tokens_total == read < 500


def test_the_reason_of_a_cancel_is_reported(new_engine):
    """A deadline is an error that says so; a client's wish is none."""
    engine = new_engine()
    submit(engine, "a", [7] * 300)
    engine.step()
    engine.cancel(RequestId("a"), "deadline")
    last = end(run(engine), "a")
    assert (last.status, last.reason, last.error["code"]) == ("cancelled", "deadline", "deadline_exceeded")


def test_random_requests_and_cancels_end_once_each_and_leave_nothing(new_engine):
    """Whatever happens in which order."""
    rng, engine, events = random.Random(2), new_engine(max_prefills=2, max_batch_size=4), []
    alive: list[str] = []
    for number in range(120):
        rid = f"r{number}"
        alive.append(rid)
        temperature = rng.choice([0.0, 0.8])
        submit(
            engine, rid, [rng.randrange(256)] * rng.randrange(1, 120), max_tokens=rng.randrange(1, 20),
            temperature=temperature,
        )  # fmt: skip
        for _ in range(rng.randrange(4)):
            events += engine.step()
        if rng.random() < 0.4:
            engine.cancel(RequestId(rng.choice(alive)), "client")
    run(engine, events)
    for rid in alive:
        end(events, rid)
    assert idle(engine)
    assert engine.cancel(RequestId("never"), "client") is None


# --- prompts in chunks, and the prompt cache ---


def test_others_get_a_token_between_any_two_chunks(new_engine):
    """A long prompt never stops them for longer than one chunk."""
    engine = new_engine()
    submit(engine, "talker", "hello", max_tokens=200)
    run(engine, until=lambda ev: text(ev, "talker") != "")
    submit(engine, "long", [9] * 400)
    engine.step()
    while engine.stats.prefilling:
        read = engine.stats.prefill_tokens_total
        spoken = engine.stats.completion_tokens_total
        engine.step()
        assert engine.stats.prefill_tokens_total - read <= 16
        assert engine.stats.completion_tokens_total == spoken + 1


def test_progress_tells_how_far_a_prompt_is_read(new_engine):
    """From the first chunk to the last, with the prompt's length."""
    engine = new_engine()
    submit(engine, "a", [7] * 101)
    seen = [e for e in run(engine) if isinstance(e, Progress)]
    assert [e.processed for e in seen] == sorted(e.processed for e in seen)
    assert {(e.phase, e.total, e.prompt_tokens, e.cached) for e in seen} == {("prefill", 100, 101, 0)}
    assert len(seen) >= 6


def test_the_next_turn_reads_only_what_is_new(new_engine):
    """And says so; its text is that of a fresh engine."""
    engine = new_engine()
    first = list(range(1, 100))
    submit(engine, "one", first, max_tokens=10, logprobs=True)
    answer = [entry["token_id"] for e in run(engine) if isinstance(e, Delta) for entry in e.logprobs]
    second = [*first, *answer, 65, 66, 67]
    submit(engine, "two", second)
    events = run(engine)
    assert end(events, "two").usage["cached_tokens"] >= len(first) + 9
    fresh = new_engine()
    submit(fresh, "two", second)
    assert text(run(fresh), "two") == text(events, "two")
    assert engine.stats.cached_tokens_total >= len(first)


def test_a_request_can_stay_out_of_the_cache(new_engine):
    """`cache_prompt: false` neither reads nor writes it."""
    engine = new_engine()
    prompt = list(range(1, 60))
    submit(engine, "silent", prompt, cache_prompt=False)
    run(engine)
    assert engine.stats.prompt_cache_entries == 0
    submit(engine, "writes", prompt)
    run(engine)
    submit(engine, "blind", prompt, cache_prompt=False)
    assert end(run(engine), "blind").usage["cached_tokens"] == 0
    submit(engine, "reads", prompt)
    assert end(run(engine), "reads").usage["cached_tokens"] >= len(prompt) - 2


def test_tenants_do_not_share_prompts(new_engine):
    """Nobody can find out what another asked."""
    engine = new_engine()
    prompt = list(range(1, 60))
    submit(engine, "a", prompt, tenant="alice")
    run(engine)
    submit(engine, "b", prompt, tenant="bob")
    assert end(run(engine), "b").usage["cached_tokens"] == 0


def test_a_cancelled_prompt_is_not_read_again(new_engine):
    """A client that gave up and asks again finds the part that was read."""
    engine = new_engine()
    submit(engine, "a", [7] * 200)
    run(engine, until=lambda ev: any(isinstance(e, Progress) and e.processed >= 64 for e in ev))
    engine.cancel(RequestId("a"), "client")
    run(engine)
    submit(engine, "b", [7] * 200)
    assert end(run(engine), "b").usage["cached_tokens"] >= 64


def test_the_prompt_cache_keeps_to_its_bytes(new_engine):
    """Different prompts by the dozen do not add up."""
    bound = 200_000
    engine = new_engine(prompt_cache_bytes=bound)
    for number in range(30):
        submit(engine, str(number), [number] * 100, max_tokens=2)
        run(engine)
        assert engine.stats.prompt_cache_bytes <= bound
    assert engine.stats.prompt_cache_entries > 0


def test_what_the_prompt_cache_holds_is_all_that_stays(new_engine):
    """Its rows do not keep the batches alive that they were part of."""
    engine = new_engine(max_chunk_tokens=64, chunk_target_ms=50.0)
    before = mx.get_active_memory()
    for number in range(16):
        submit(engine, str(number), [(number * 13 + i) % 250 for i in range(300)], max_tokens=5 + number)
    run(engine)
    assert engine.stats.prompt_cache_entries == 16
    assert mx.get_active_memory() - before < 1.5 * engine.stats.prompt_cache_bytes


def test_a_prompt_that_waits_in_line_says_so(new_engine):
    """While others are read there is something to hear."""
    engine = new_engine(max_prefills=1)
    submit(engine, "first", [7] * 300)
    submit(engine, "second", [8] * 300)
    events = run(engine, until=lambda ev: engine.stats.prefill_tokens_total >= 64)
    heard = [e for e in events if isinstance(e, Progress) and e.rid == "second"]
    assert len(heard) >= 2
    assert {(e.phase, e.total) for e in heard} == {("queue", None)}


def test_a_long_text_is_tokenized_beside_the_steps(new_engine, monkeypatch):
    """Others get tokens meanwhile, a short prompt overtakes it, and it can be cancelled."""
    go_on = threading.Event()
    build = PromptBuilder.build

    def slow_build(self, request):
        if len(request.prompt) > SHORT_LENGTH:
            go_on.wait(20)
        return build(self, request)

    monkeypatch.setattr(PromptBuilder, "build", slow_build)
    engine = new_engine()
    text_ = "x" * (SHORT_LENGTH + 1)
    submit(engine, "long", text_)
    submit(engine, "gone", text_)
    began_s = time.monotonic()
    assert engine.busy
    engine.step()
    assert time.monotonic() - began_s < 5
    submit(engine, "short", "hello")
    engine.cancel(RequestId("gone"), "client")
    events = run(engine, until=lambda ev: any(isinstance(e, End) and e.rid == "short" for e in ev))
    assert end(events, "gone").status == "cancelled"
    assert engine.stats.waiting == 1
    go_on.set()
    assert end(run(engine, events), "long").error["code"] == "context_too_long"
    assert idle(engine)
    engine.close()


def test_tokens_whose_text_is_held_back_are_sent_in_time(new_engine):
    """So that a tool call, which has no text until it is complete, is no silence."""
    engine = new_engine(progress_interval_s=0.0)
    submit(engine, "free", "hello there", max_tokens=10)
    whole = text(run(engine), "free")
    submit(engine, "a", "hello there", max_tokens=10, stop=[whole + "!"])
    events = run(engine)
    deltas = [e for e in events if isinstance(e, Delta)]
    assert all(delta.n <= 2 for delta in deltas)
    assert [delta.text for delta in deltas[:-1]] == [""] * (len(deltas) - 1)
    assert text(events, "a") == whole
    assert end(events, "a").usage["completion_tokens"] == 10


# --- going on with a stream ---

KINDS = [
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.8, "seed": 6, "presence_penalty": 0.7, "stop": ["zz"]},
    {"temperature": 0.8, "seed": 7, "logprobs": True, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("kind", KINDS)
def test_another_engine_goes_on_where_one_died(new_engine, kind):
    """After any token that the client has: the rest of the text is that of the undisturbed run."""
    engine = new_engine()
    submit(engine, "a", "hello there", max_tokens=20, **kind)
    whole = run(engine)
    deltas = [e for e in whole if isinstance(e, Delta)]
    for cut in range(1, len(deltas)):
        sent = [token for e in deltas[:cut] for token in e.tokens]
        submit(engine, "b", "hello there", max_tokens=20, generated=sent, cache_prompt=False, **kind)
        rest = run(engine)
        assert text(deltas[:cut], "a") + text(rest, "b") == text(whole, "a")
        [last] = [e for e in rest if isinstance(e, End)]
        assert last.usage == end(whole, "a").usage | {"cached_tokens": 0}
        assert last.finish_reason == end(whole, "a").finish_reason
        assert last.specprefill["prompt_tokens"] == last.usage["prompt_tokens"]


@pytest.mark.parametrize("why", ["length", "end token", "stop string"])
def test_an_answer_that_was_complete_only_ends(new_engine, why):
    """An engine that died between the last token and the end."""
    engine = new_engine()
    generated = {"length": [65] * 12, "end token": [65, END_TOKEN], "stop string": [65, 66]}[why]
    stop = [engine._tokenizer.decode(generated)] if why == "stop string" else []
    submit(engine, "a", "hello", generated=generated, stop=stop)
    last = next(e for e in run(engine) if isinstance(e, End))
    assert last.finish_reason == ("length" if why == "length" else "stop")
    assert last.usage["completion_tokens"] == len(generated)
    assert idle(engine)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_stream_pauses_without_credit_and_goes_on_with_it(new_engine, kind):
    """Its place in the batch is free meanwhile, and its text is the same in the end."""
    engine = new_engine(max_batch_size=1)
    submit(engine, "free", "hello there", max_tokens=20, **kind)
    undisturbed = text(run(engine), "free")
    submit(engine, "a", "hello there", max_tokens=20, credit=3, **kind)
    events = run(engine)
    assert len(tokens_of(events, "a")) == 3
    assert (engine.stats.paused, engine.stats.decoding, engine.busy) == (1, 0, False)
    submit(engine, "other", "somebody else", max_tokens=5)
    assert text(run(engine), "other")
    for allowed in (1, 7, 100):
        engine.credit(RequestId("a"), allowed)
        run(engine, events)
    assert text(events, "a") == undisturbed
    assert end(events, "a").finish_reason == "length"
    assert idle(engine)


def test_caches_of_paused_streams_are_bounded(new_engine):
    """The one that has paused longest is read again when it goes on; its text is the same."""
    engine = new_engine(max_held_caches=2)
    submit(engine, "free", "hello there", max_tokens=10)
    undisturbed = text(run(engine), "free")
    events = []
    for number in range(5):
        submit(engine, f"p{number}", "hello there", max_tokens=10, credit=2, cache_prompt=False)
        run(engine, events)
    held = [request.held_cache is not None for request in engine._paused.values()]
    assert held == [False, False, False, True, True]
    for number in range(5):
        engine.credit(RequestId(f"p{number}"), 100)
    run(engine, events)
    assert {text(events, f"p{number}") for number in range(5)} == {undisturbed}
    assert idle(engine)


def test_a_stream_that_goes_on_does_not_overtake_a_new_prompt_for_its_age(new_engine):
    """What it waited before its first token is not a reason to read it again first."""
    engine = new_engine(max_held_caches=0)
    for number in range(3):
        submit(engine, f"old{number}", LONG, max_tokens=50, credit=1, cache_prompt=False)
    events = run(engine)
    time.sleep(0.5)
    for number in range(3):
        engine.credit(RequestId(f"old{number}"), 1)
    submit(engine, "new", LONG[:100], cache_prompt=False)
    run(engine, events, lambda ev: bool(tokens_of(ev, "new")))
    assert all(len(tokens_of(events, f"old{number}")) == 1 for number in range(3))


@pytest.mark.parametrize("why", ["client", "a fault"])
def test_who_waits_in_a_second_engine_has_the_tokens_of_the_first(new_engine, why):
    """Its end counts what its client has, whether it is cancelled or cannot be admitted."""
    engine = new_engine(max_prefills=1)
    submit(engine, "first", LONG)
    engine.step()
    generated = [65, 66, 67]
    if why == "client":
        submit(engine, "a", "hello", generated=generated)
        engine.cancel(RequestId("a"), "client")
    else:
        submit(engine, "a", [VOCABULARY], generated=generated)
    last = next(e for e in run(engine) if isinstance(e, End) and e.rid == "a")
    assert last.status == ("cancelled" if why == "client" else "failed")
    assert last.usage["completion_tokens"] == 3


def test_a_paused_stream_can_be_cancelled(new_engine):
    """And leaves nothing."""
    engine = new_engine()
    submit(engine, "a", "hello", credit=2)
    events = run(engine)
    engine.cancel(RequestId("a"), "client")
    assert engine.busy, "or nobody would call step"
    assert end(events + engine.step(), "a").status == "cancelled"
    assert idle(engine)


def test_a_stream_that_is_cancelled_as_it_goes_on_leaves_a_cache_of_its_tokens(new_engine):
    """And not of fewer: what it found in the cache at first is not what it holds now."""
    engine = new_engine()
    prompt = list(range(1, 40))
    submit(engine, "warm", prompt[:20], max_tokens=1)
    run(engine)
    submit(engine, "a", prompt, credit=3)
    run(engine)
    engine.credit(RequestId("a"), 5)
    engine.cancel(RequestId("a"), "client")
    run(engine)
    for subject in (engine, fresh := new_engine()):
        submit(subject, "next", [*prompt[:20], 90, 91, 92])
    assert text(run(engine), "next") == text(run(fresh), "next")


# --- SpecPrefill ---


def ends(engine, **requests) -> dict[str, End]:
    """Run requests in one batch, given by their options; return their ends."""
    for rid, options in requests.items():
        submit(engine, rid, LONG, **options)
    events = run(engine)
    return {rid: end(events, rid) for rid in requests}


LONG = [token % 250 for token in range(7, 407)]
SPARSE = {"specprefill": True, "cache_prompt": False}


def test_the_fields_mean_the_same_in_every_row_of_the_table(new_engine):
    """Nothing said, true, false and a rate of one's own, under each of the server's switches."""
    for enabled, threshold in ((False, 0), (True, 0), (True, 10_000)):
        engine = new_engine(specprefill=SpecPrefillConfig(enabled=enabled, threshold=threshold, keep_pct=0.4))
        got = ends(
            engine,
            silent={"cache_prompt": False},
            null={"cache_prompt": False, "specprefill": None},
            on=SPARSE,
            off={"cache_prompt": False, "specprefill": False, "specprefill_keep_pct": 0.2},
            rate=SPARSE | {"specprefill_keep_pct": 0.2},
        )
        reports = {rid: last.specprefill for rid, last in got.items()}
        by_default = enabled and threshold < len(LONG)
        reason = None if by_default else "below_threshold" if enabled else "disabled"
        for rid in ("silent", "null"):
            assert (reports[rid]["applied"], reports[rid]["reason"]) == (by_default, reason)
        assert (reports["off"]["applied"], reports["off"]["reason"]) == (False, "off_by_request")
        assert reports["off"]["kept_tokens"] == reports["off"]["uncached_tokens"] == len(LONG)
        for rid, rate in (("on", 0.4), ("rate", 0.2)):
            assert reports[rid]["applied"]
            assert reports[rid]["keep_pct"] == rate
            assert abs(reports[rid]["kept_tokens"] - rate * len(LONG)) <= 8


@pytest.mark.parametrize("draft", ["none"])
def test_without_a_draft_model_it_is_dense_and_says_so(new_engine, draft):
    """Whoever asks for it is told; who doesn't is not bothered."""
    engine = new_engine(specprefill=SpecPrefillConfig(draft_model=draft))
    got = ends(engine, on=SPARSE, silent={"cache_prompt": False})
    assert got["on"].specprefill["reason"] == "no_draft_model"
    assert got["silent"].specprefill["reason"] == "disabled"
    assert not engine.info.specprefill["supported"]


def test_sparse_and_dense_requests_in_one_batch_get_what_each_gets_alone(new_engine):
    """Whoever is beside them."""
    kinds = {
        "dense": {"cache_prompt": False},
        "sparse": SPARSE | {"specprefill_keep_pct": 0.3},
        "sparser": SPARSE | {"specprefill_keep_pct": 0.15, "temperature": 0.8, "seed": 3},
        "seeded": {"cache_prompt": False, "temperature": 0.8, "seed": 3},
    }
    alone = {}
    for rid, options in kinds.items():
        engine = new_engine()
        submit(engine, rid, LONG, **options)
        alone[rid] = text(run(engine), rid)
    for order in (list(kinds), list(reversed(kinds))):
        engine = new_engine(chunk_target_ms=1e3)
        for rid in order:
            submit(engine, rid, LONG, **kinds[rid])
        together = run(engine)
        assert {rid: text(together, rid) for rid in alone} == alone
    assert alone["dense"] != alone["sparse"]


def test_streams_that_go_on_in_a_full_batch_do_not_move_a_sparse_one(new_engine):
    """It decodes at its own positions, whoever waits for a place before it."""
    engine = new_engine(max_batch_size=2)
    submit(engine, "sparse", LONG, **SPARSE)
    alone = text(run(engine), "sparse")
    for rid in ("p", "q"):
        submit(engine, rid, f"paused {rid}", credit=1, max_tokens=20)
    run(engine)
    submit(engine, "a", "hello there", max_tokens=60)
    events = run(engine, until=lambda ev: text(ev, "a") != "")
    submit(engine, "sparse", LONG, **SPARSE)
    events += engine.step()
    for rid in ("p", "q"):
        engine.credit(RequestId(rid), 20)
        events += engine.step() + engine.step()
    for _ in range(30):
        events += engine.step()
    assert engine.stats.scoring == 0
    for rid in ("a", "p"):
        engine.cancel(RequestId(rid), "client")
    assert text(run(engine, events), "sparse") == alone
    assert idle(engine)


def test_the_report_of_a_paused_stream_is_that_of_its_prompt(new_engine):
    """What is read again after a pause is longer, and its time is not the prompt's."""
    engine = new_engine()
    submit(engine, "a", LONG, credit=4, max_tokens=8, **SPARSE)
    events = run(engine)
    time.sleep(0.1)
    engine.credit(RequestId("a"), 100)
    last = end(run(engine, events), "a")
    assert last.specprefill["prompt_tokens"] == last.usage["prompt_tokens"] == len(LONG)
    assert last.timings["score_ms"] + last.timings["prefill_ms"] <= last.timings["ttft_ms"]


@pytest.mark.parametrize("how", ["another engine", "a pause"])
def test_a_dense_stream_stays_dense(new_engine, how):
    """Though prompt and answer together are longer than the threshold."""
    config = SpecPrefillConfig(enabled=True, threshold=len(LONG) + 5)
    engine = new_engine(specprefill=config, max_held_caches=0)
    submit(engine, "free", LONG, max_tokens=20, cache_prompt=False)
    undisturbed = run(engine)
    tokens = tokens_of(undisturbed, "free")
    if how == "a pause":
        submit(engine, "a", LONG, max_tokens=20, cache_prompt=False, credit=10)
        events = run(engine)
        engine.credit(RequestId("a"), 100)
        run(engine, events)
    else:
        submit(engine, "a", LONG, max_tokens=20, cache_prompt=False, generated=tokens[:10], stays_dense=True)
        events = run(engine)
    assert tokens_of(events, "a")[-10:] == tokens[10:]
    last = next(e for e in events if isinstance(e, End))
    assert (last.specprefill["applied"], last.specprefill["reason"]) == (False, "below_threshold")
    assert last.specprefill["prompt_tokens"] == len(LONG)


@pytest.mark.parametrize("fails", [True, False])
def test_deltas_say_whether_the_prompt_was_thinned(new_engine, monkeypatch, fails):
    """That it was to be thinned is not enough: scoring may fail."""
    if fails:
        monkeypatch.setattr(SparsePrefill, "step", lambda *_: 1 / 0)
    engine = new_engine()
    submit(engine, "a", LONG, max_tokens=3, **SPARSE)
    events = run(engine)
    assert {e.is_thinned for e in events if isinstance(e, Delta)} == {not fails}
    assert end(events, "a").specprefill["applied"] == (not fails)


def test_no_room_for_a_thread_is_no_fault(new_engine, monkeypatch):
    """The text is tokenized when its turn comes."""

    def fail(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    engine = new_engine()
    submit(engine, "a", "x" * (SHORT_LENGTH + 1))
    assert end(run(engine), "a").error["code"] == "context_too_long"


def test_what_was_kept_is_told_of_the_prompt_alone(new_engine):
    """Not of the tokens that an earlier engine made, which are read behind it."""
    engine = new_engine()
    options = {"specprefill_debug": True, "max_tokens": 30, **SPARSE}
    submit(engine, "a", LONG, generated=[65] * 20, **options)
    report = next(e for e in run(engine) if isinstance(e, End)).specprefill
    assert report["applied"]
    assert sum(each["tokens"] for each in report["prompt_runs"]) == report["prompt_tokens"] == len(LONG)
    assert sum(stop - start for start, stop in report["kept_ranges"]) == report["kept_tokens"]
    assert report["kept_ranges"][-1][1] == len(LONG)


def test_the_system_prompt_is_kept_after_a_pause_too(new_engine):
    """`keep_system_prompt` is a promise about the stream, not about its first reading."""
    system = "".join(chr(97 + index * 7 % 26) for index in range(120))
    user = "".join(chr(65 + index * 11 % 26) for index in range(300))
    chat = ChatInput.model_validate(
        {"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]}
    )
    engine = new_engine(specprefill=SpecPrefillConfig(keep_system_prompt=True, keep_pct=0.4))
    submit(engine, "a", chat, credit=3, max_tokens=6, **SPARSE)
    run(engine)
    [request] = engine._paused.values()
    engine.credit(RequestId("a"), 100)
    again = request.prefill
    run(engine)
    start, stop = again.report.kept_ranges[0]
    assert start == 0
    assert stop >= len(system)
    assert again.report.kept_tokens < len(request.prompt.tokens)


def test_a_sparse_request_leaves_no_trace_in_the_prompt_cache(new_engine):
    """The next turn is what a server without SpecPrefill gives."""
    engine, plain = new_engine(), new_engine()
    submit(engine, "one", LONG, specprefill=True, specprefill_keep_pct=0.3)
    assert end(run(engine), "one").specprefill["applied"]
    assert engine.stats.prompt_cache_entries == 0
    for subject in (engine, plain):
        submit(subject, "two", [*LONG, 1, 2, 3])
    assert text(run(engine), "two") == text(run(plain), "two")


def test_only_the_uncached_part_is_thinned(new_engine):
    """Behind a dense cached prefix the rate applies to what is new."""
    engine = new_engine()
    submit(engine, "warm", LONG[:200])
    run(engine)
    submit(engine, "a", LONG, specprefill=True, specprefill_keep_pct=0.25, specprefill_debug=True)
    last = end(run(engine), "a")
    report, cached = last.specprefill, last.usage["cached_tokens"]
    assert cached >= 198
    assert report["uncached_tokens"] == len(LONG) - cached
    assert abs(report["kept_tokens"] - 0.25 * report["uncached_tokens"]) <= 8
    assert report["kept_ranges"][0][0] >= cached
    assert sum(stop - start for start, stop in report["kept_ranges"]) == report["kept_tokens"]
    by_fate = {"cached": 0, "kept": 0, "left_out": 0}
    for part in report["prompt_runs"]:
        by_fate[part["fate"]] += part["tokens"]
    assert by_fate == {
        "cached": cached,
        "kept": report["kept_tokens"],
        "left_out": report["uncached_tokens"] - report["kept_tokens"],
    }


def test_a_prompt_that_is_cached_whole_needs_no_prefill(new_engine):
    """And the reason says so."""
    engine = new_engine()
    submit(engine, "warm", [*LONG, 9])
    run(engine)
    submit(engine, "a", [*LONG, 9][:-1], specprefill=True)
    assert end(run(engine), "a").specprefill["reason"] in ("prompt_cached", "kept_everything")


def test_scoring_is_a_phase_that_can_be_cancelled(new_engine):
    """Within one chunk, and nothing stays behind."""
    engine = new_engine()
    submit(engine, "a", LONG, **SPARSE)
    events = run(engine, until=lambda ev: any(isinstance(e, Progress) and e.phase == "score" for e in ev))
    assert engine.stats.scoring == 1
    engine.cancel(RequestId("a"), "client")
    last = end(events + engine.step(), "a")
    assert (last.status, last.specprefill["applied"], last.specprefill["reason"]) == (
        "cancelled",
        False,
        "unfinished",
    )
    assert idle(engine)


@pytest.mark.parametrize("phase", ["score", "prefill"])
def test_a_fault_in_it_means_a_dense_answer_that_says_so(new_engine, phase):
    """Before anything was sent; with one token asked for, one comes."""
    engine = new_engine()
    submit(engine, "dense", LONG, cache_prompt=False, max_tokens=1)
    dense = text(run(engine), "dense")
    submit(engine, "a", LONG, max_tokens=1, **SPARSE)
    events = run(engine, until=lambda ev: any(isinstance(e, Progress) and e.phase == phase for e in ev))
    [request] = engine._prefills.requests

    def fail(num_tokens):
        raise RuntimeError("injected")

    request.prefill.step = fail
    run(engine, events)
    last = end(events, "a")
    assert (last.status, last.specprefill["reason"]) == ("completed", "failed")
    assert text(events, "a") == dense
    assert last.usage["completion_tokens"] == 1
    submit(engine, "next", LONG, cache_prompt=False, max_tokens=1)
    assert text(run(engine), "next") == dense


def test_others_get_tokens_while_a_prompt_is_scored_and_thinned(new_engine):
    """One for each chunk."""
    engine = new_engine()
    submit(engine, "talker", "hello", max_tokens=200)
    run(engine, until=lambda ev: text(ev, "talker") != "")
    submit(engine, "long", LONG, **SPARSE)
    engine.step()
    phases = set()
    while engine.stats.scoring or engine.stats.prefilling:
        phases.add("score" if engine.stats.scoring else "prefill")
        spoken = engine.stats.completion_tokens_total
        engine.step()
        assert engine.stats.completion_tokens_total == spoken + 1
    assert phases == {"score", "prefill"}


# --- a real model ---


@pytest.mark.model
def test_the_default_model_answers_in_a_batch():
    """Real text, alone and beside others, through the real chat template."""
    engine = MlxEngine.load(EngineConfig(), lambda loading: None)
    question = "What is the capital of France?"
    submit(engine, "paris", (question,), logit_bias=None, max_tokens=24)
    for number in range(3):
        submit(
            engine, f"other{number}", (f"Write about {number}",), logit_bias=None, max_tokens=16,
            temperature=0.8, seed=number,
        )  # fmt: skip
    events = run(engine)
    assert "Paris" in text(events, "paris")
    assert end(events, "paris").finish_reason == "stop"
    assert all(text(events, f"other{number}") for number in range(3))
    assert engine.info.chat
