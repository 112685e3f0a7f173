"""Tests for engine/prefill.py."""

import random

import pytest
from tiny_models import tiny_model

from headrace.engine.prefill import ChunkSizer, DensePrefill, Turn, choose


def sizer(**fields) -> ChunkSizer:
    return ChunkSizer(0.2, **{"minimum": 16, "maximum": 2048, "tokens_per_s": 500.0} | fields)


def test_a_chunk_takes_the_target_time():
    """At 500 tokens/s and 200 ms: 96 tokens, in grains of 8; more when nobody waits."""
    assert sizer().num_tokens(others_wait=True) == 96
    assert sizer().num_tokens(others_wait=False) == 248


@pytest.mark.parametrize(("speed", "expected"), [(1.0, 16), (1e9, 2048)])
def test_chunks_stay_between_their_bounds(speed, expected):
    """However slow or fast the machine."""
    assert sizer(tokens_per_s=speed).num_tokens(others_wait=True) == expected


def test_the_speed_follows_the_machine():
    """A machine that turned ten times slower is known within a few chunks."""
    subject = sizer()
    for _ in range(5):
        size = subject.num_tokens(others_wait=True)
        subject.record(size, size / 50.0)
    assert subject.tokens_per_s == pytest.approx(50, rel=0.5)


def test_short_last_chunks_are_not_measured():
    """Their time is mostly overhead."""
    subject = sizer()
    subject.record(3, 10.0)
    assert subject.tokens_per_s == 500.0


def test_a_short_prompt_overtakes_a_long_one():
    """Its user waits for less."""
    assert choose([Turn(10_000, 1.0), Turn(50, 0.0)], tokens_per_s=100) == 1


def test_a_long_prompt_is_overtaken_only_so_long():
    """Once it has waited for as long as it takes alone, new ones come after it."""
    assert choose([Turn(10_000, 100.0), Turn(50, 0.0)], tokens_per_s=100) == 0


def test_no_prompt_starves():
    """Under a stream of short prompts that fills the machine a long one is still read to its end."""
    rng, speed, clock = random.Random(0), 100.0, 0.0
    waiting = [[3_000, 0.0]]
    for _ in range(2000):
        if rng.random() < 0.5:
            waiting.append([rng.randrange(10, 80), clock])
        if not waiting:
            break
        index = choose([Turn(left, clock - since) for left, since in waiting], speed)
        waiting[index][0] -= 20
        clock += 0.2
        if waiting[index][0] <= 0 and waiting.pop(index)[1] == 0.0:
            break
    assert clock < 150


@pytest.mark.parametrize("sizes", [[100], [1] * 12, [5, 7], [16]])
def test_chunks_of_any_size_fill_the_same_cache(sizes):
    """What the model says after the prompt does not depend on how it was cut."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    model, tokens = tiny_model("llama"), list(range(1, 13))
    prefill = DensePrefill(model, tokens, make_prompt_cache(model))
    for size in sizes:
        prefill.step(size)
    assert prefill.done
    assert prefill.processed == prefill.total == 12
    expected = model(mx.array([*tokens, 13])[None])[:, -1]
    got = model(mx.array([[13]]), cache=prefill.cache)[:, -1]
    assert mx.allclose(got, expected, atol=1e-5)


def test_nothing_to_read_is_done_at_once():
    """A prompt of one token, or one that is cached whole."""
    assert DensePrefill(tiny_model("llama"), [], []).done
