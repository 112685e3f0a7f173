"""Tests for engine/prompt_cache.py."""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import tiny_model

from headrace.engine.prompt_cache import PromptCache


def filled(tokens: list[int]):
    model = tiny_model("llama")
    cache = make_prompt_cache(model)
    model(mx.array(tokens)[None], cache=cache)
    mx.eval([layer.state for layer in cache])
    return cache


def test_the_longest_prefix_is_found():
    """But never the last token: the first decode step has to read one."""
    subject = PromptCache(8, 1 << 30)
    subject.store("", [1, 2, 3, 4], filled([1, 2, 3, 4]))
    assert subject.fetch("", [1, 2, 3, 4, 5, 6])[1] == 4
    assert subject.fetch("", [1, 2, 8, 9])[1] == 2
    cache, num_cached = subject.fetch("", [1, 2, 3, 4])
    assert cache is not None
    assert cache[0].offset == num_cached < 4


def test_a_fetched_cache_is_a_copy():
    """Its user extends it; the entry stays."""
    subject = PromptCache(8, 1 << 30)
    subject.store("", [1, 2, 3, 4], filled([1, 2, 3, 4]))
    cache, _ = subject.fetch("", [1, 2, 3, 4, 5])
    tiny_model("llama")(mx.array([[5, 6]]), cache=cache)
    again, num_cached = subject.fetch("", [1, 2, 3, 4, 5])
    assert (num_cached, again[0].offset) == (4, 4)


def test_tenants_never_see_each_others_prompts():
    """What one has cached does not even change another's timing."""
    subject = PromptCache(8, 1 << 30)
    subject.store("alice", [1, 2, 3, 4], filled([1, 2, 3, 4]))
    assert subject.fetch("bob", [1, 2, 3, 4, 5]) == (None, 0)


def test_bytes_are_bounded():
    """The oldest entries make room; an entry larger than the bound is not kept at all."""
    size = sum(layer.nbytes for layer in filled([1, 2, 3]))
    subject = PromptCache(100, 3 * size)
    for first in range(10):
        tokens = [first, 50, 51]
        subject.store("", tokens, filled(tokens))
    assert subject.nbytes <= 3 * size
    assert subject.num_entries == 3
    small = PromptCache(100, size - 1)
    small.store("", [1, 2, 3], filled([1, 2, 3]))
    assert (small.num_entries, small.nbytes) == (0, 0)
    assert small.fetch("", [1, 2, 3, 4]) == (None, 0)


def test_one_token_needs_no_cache():
    """There is nothing to prefill."""
    assert PromptCache(8, 1 << 30).fetch("", [1]) == (None, 0)
