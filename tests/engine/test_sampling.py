"""Tests for engine/sampling.py."""

import math
import random
import time

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import apply_min_p

from headrace.engine.sampling import _apply_min_p, make_processors, make_sampler, token_key
from headrace.protocol.errors import RequestError
from headrace.protocol.options import GenerationOptions

VOCABULARY = 32


def options(**fields) -> GenerationOptions:
    return GenerationOptions(**{"temperature": 1.0, "seed": 7} | fields)


def logits() -> mx.array:
    values = mx.random.normal((1, VOCABULARY), key=mx.random.key(3)) * 2
    return values - mx.logsumexp(values, axis=-1, keepdims=True)


def draws(count: int, **fields) -> list[int]:
    sampler, values = make_sampler(options(**fields), VOCABULARY), logits()
    return [sampler(values).item() for _ in range(count)]


def test_keys_differ_by_seed_and_by_index():
    """And are the same on every machine: the values are pinned."""
    keys = {tuple(token_key(seed, index).tolist()) for seed in (-1, 0, 1, 2**62) for index in range(100)}
    assert len(keys) == 400
    assert token_key(0, 0).tolist() == [0xE220A839, 0x7B1DCDAF]


def test_the_same_seed_draws_the_same_tokens_whatever_others_draw_between():
    """Nothing global is involved."""
    alone = draws(50)
    sampler, values, mixed = make_sampler(options(), VOCABULARY), logits(), []
    for _ in range(50):
        mx.random.normal((3,))
        make_sampler(options(seed=8), VOCABULARY)(values)
        mixed.append(sampler(values).item())
    assert mixed == alone
    assert draws(50, seed=8) != alone


def test_a_sampler_can_begin_in_the_middle():
    """Another engine can go on with a stream after its 20th token."""
    sampler, values = make_sampler(options(), VOCABULARY, first_index=20), logits()
    assert [sampler(values).item() for _ in range(30)] == draws(50)[20:]


def test_draws_follow_the_distribution():
    """Over many draws the share of the likeliest token is its probability."""
    best = mx.argmax(logits()).item()
    expected = mx.exp(logits())[0, best].item()
    tokens = draws(2000)
    assert tokens.count(best) / 2000 == pytest.approx(expected, abs=0.05)


def test_a_new_share_costs_no_compilation():
    """A compiler that runs for each number that clients think of would stop everybody's tokens."""
    make_sampler(options(top_p=0.5, min_p=0.5), VOCABULARY)(logits()).item()
    began_s = time.monotonic()
    for _ in range(40):
        top_p, min_p = random.uniform(0.1, 0.9), random.uniform(0.1, 0.9)
        make_sampler(options(top_p=top_p, min_p=min_p), VOCABULARY)(logits()).item()
    assert time.monotonic() - began_s < 8.0


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_min_p_is_that_of_mlx_lm(dtype):
    """The same tokens are left."""
    values = logits().astype(dtype)
    for min_p in (1e-9, 0.01, 0.2, 1.0):
        left = set(draws(300, min_p=min_p))
        kept = apply_min_p(values, min_p)[0].tolist()
        assert left <= {token for token, value in enumerate(kept) if value > -mx.inf}
        ours = _apply_min_p(values, math.log(min_p))
        assert ours.dtype == dtype
        assert ours[0].tolist() == kept


def test_greedy_requests_share_one_sampler():
    """Which lets mlx-lm sample the whole batch in one call."""
    assert make_sampler(options(temperature=0), VOCABULARY) is make_sampler(
        options(temperature=0.0, seed=9), VOCABULARY
    )


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [({"top_k": 1}, 1), ({"top_k": 3}, 3), ({"top_p": 1e-6}, 1), ({"min_p": 1.0}, 1), ({"top_k": 10**6}, 32)],
)
def test_filters_limit_the_choice(fields, allowed):
    """Only the best tokens remain; a top_k above the vocabulary is no limit."""
    best = mx.argsort(-logits()[0]).tolist()[:allowed]
    assert set(draws(200, **fields)) <= set(best)


def test_no_option_needs_no_processor():
    """The common case costs nothing."""
    assert make_processors(options(), VOCABULARY) == []


@pytest.mark.parametrize(
    ("fields", "seen_twice", "unseen"),
    [
        ({"logit_bias": {"5": -100.0}}, -100.0, 0.0),
        ({"presence_penalty": 1.5}, -1.5, 0.0),
        ({"frequency_penalty": 1.5}, -3.0, 0.0),
        ({"repetition_penalty": 2.0}, -0.5, 0.0),
    ],
)
def test_penalties_and_biases(fields, seen_twice, unseen):
    """Token 5 stands twice in the context with a logit of 1; token 6 does not stand there."""
    values = mx.ones((1, VOCABULARY))
    for processor in make_processors(options(**fields), VOCABULARY):
        values = processor(mx.array([1, 5, 5]), values)
    assert values[0, 5].item() == pytest.approx(1 + seen_twice)
    assert values[0, 6].item() == pytest.approx(1 + unseen)


def test_a_bias_outside_the_vocabulary_is_refused():
    """By name."""
    with pytest.raises(RequestError, match="logit_bias"):
        make_processors(options(logit_bias={"32": 1.0}), VOCABULARY)
