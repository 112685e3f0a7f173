"""Tests for engine/prefill_schedule.py. Slices are tested with the engine: test_mlx_engine.py."""

import random

import pytest

from headrace.engine.prefill_schedule import ChunkSizer, Turn, choose


def sizer(**fields) -> ChunkSizer:
    """A machine where a forward pass costs 100 ms and 2 ms for each token."""
    return ChunkSizer(**{"minimum": 16, "maximum": 2048, "overhead_s": 0.1, "token_s": 0.002} | fields)


@pytest.mark.parametrize(("seconds", "expected"), [(0.2, 48), (0.5, 200), (0.0, 16), (1e6, 2048)])
def test_a_chunk_takes_the_time_it_is_given(seconds, expected):
    """In grains of 8 tokens, between the bounds."""
    assert sizer().num_tokens(seconds, 10_000) == expected


@pytest.mark.parametrize(("available", "expected"), [(10, 10), (48, 48), (60, 60), (61, 48)])
def test_a_chunk_leaves_no_crumbs(available, expected):
    """What is left is read along if it is not much: a forward pass for a few tokens costs nearly as much."""
    assert sizer().num_tokens(0.2, available) == expected


def test_the_speed_follows_the_machine():
    """A machine that turned four times slower is known within a few chunks."""
    subject = sizer()
    for _ in range(6):
        size = subject.num_tokens(0.5, 10_000)
        subject.record(size, 4 * (0.1 + 0.002 * size))
    assert subject.tokens_per_s == pytest.approx(125, rel=0.1)
    assert subject.seconds(subject.num_tokens(0.8, 10_000)) == pytest.approx(0.8, rel=0.1)


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
