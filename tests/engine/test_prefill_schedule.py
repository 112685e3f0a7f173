"""Tests for engine/prefill_schedule.py. Slices are tested with the engine: test_mlx_engine.py."""

import random

import pytest

from headrace.engine.prefill_schedule import ChunkSizer, Turn, choose


def sizer(**fields) -> ChunkSizer:
    return ChunkSizer(**{"minimum": 16, "maximum": 2048, "tokens_per_s": 500.0} | fields)


def test_a_chunk_takes_the_time_it_is_given():
    """At 500 tokens/s: 96 tokens in 200 ms, in grains of 8."""
    assert sizer().num_tokens(0.2) == 96
    assert sizer().num_tokens(0.5) == 248


@pytest.mark.parametrize(("speed", "expected"), [(1.0, 16), (1e9, 2048)])
def test_chunks_stay_between_their_bounds(speed, expected):
    """However slow or fast the machine."""
    assert sizer(tokens_per_s=speed).num_tokens(0.2) == expected


def test_the_speed_follows_the_machine():
    """A machine that turned ten times slower is known within a few chunks."""
    subject = sizer()
    for _ in range(5):
        size = subject.num_tokens(0.2)
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
