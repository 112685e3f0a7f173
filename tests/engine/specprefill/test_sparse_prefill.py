"""sparse_prefill.py and sparse_cache.py: a thinned prompt gives what hiding the same tokens gives.

The oracle is one dense forward of full length with the dropped tokens masked (``tiny_models``); it shares no
code with the implementation but the seam that shows it the attention calls.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache
from tiny_models import CONFIGS, decode_logits, dense_cache, masked_dense_logits, tiny_model, tokens

from headrace.engine.specprefill.scoring import Scorer, default_layers
from headrace.engine.specprefill.seams import SeamError, explicit_positions
from headrace.engine.specprefill.selection import SelectionRule
from headrace.engine.specprefill.sparse_cache import arrays_of, as_sparse, holds_all, is_sparse
from headrace.engine.specprefill.sparse_prefill import KeptFill, SparsePlan, SparsePrefill

PURE = [name for name in CONFIGS if name != "qwen3_next"]
SPLIT = 2
RULE = SelectionRule(keep_pct=0.4, chunk_tokens=8, sink_tokens=2, tail_tokens=6)


def sparse(
    model: Any,
    prompt: list[int],
    num_cached: int = 0,
    *,
    carry_on: bool = False,
    rule: SelectionRule = RULE,
    step: int = 13,
    **plan: Any,
) -> SparsePrefill:
    """Run a sparse prefill of the model by itself to its end."""
    layers = (SPLIT,) if carry_on else default_layers(model)
    scorer = Scorer(model, layers, num_queries=6)
    run = SparsePrefill(
        model,
        prompt,
        dense_cache(model, prompt[:num_cached]),
        num_cached,
        SparsePlan(scorer, rule, carry_on=carry_on, **plan),
    )
    while not run.done:
        before = (run.phase, run.processed)
        run.step(step)
        assert (run.phase, run.processed) != before
        assert run.processed <= run.total
    return run


def dropped_of(run: SparsePrefill, num_cached: int, length: int) -> list[int]:
    assert run.selection is not None
    kept = set((run.selection.indices + num_cached).tolist())
    return [i for i in range(num_cached, length) if i not in kept]


def oracle_difference(
    model: Any, prompt: list[int], run: SparsePrefill, num_cached: int, carry_on: bool
) -> float:
    """The largest difference in logits at the last prompt token and 8 teacher-forced steps, in a batch."""
    after = tokens(8, seed=5)
    dropped = dropped_of(run, num_cached, len(prompt))
    assert dropped
    expected = masked_dense_logits(model, prompt, dropped, after, SPLIT if carry_on else 0)
    given = decode_logits(model, run.cache, [prompt[-1], *after], neighbour=tokens(40, seed=9))
    return float(mx.abs(given.astype(mx.float32) - expected.astype(mx.float32)).max())


@pytest.mark.parametrize("name", PURE)
@pytest.mark.parametrize("carry_on", [False, True], ids=["two_passes", "carry_on"])
@pytest.mark.parametrize("num_cached", [0, 30])
def test_masked_dense_oracle(name: str, carry_on: bool, num_cached: int) -> None:
    """Each RoPE variant, windows, NoPE, experts; a dense prefix; 75 tokens are no multiple of the chunk (8)
    or the step (13); a dense neighbour in the batch.
    """
    model, prompt = tiny_model(name), tokens(num_cached + 75)
    run = sparse(model, prompt, num_cached, carry_on=carry_on)
    assert oracle_difference(model, prompt, run, num_cached, carry_on) <= 1e-4


@pytest.mark.parametrize("name", ["llama", "traditional", "longrope", "qwen3", "gemma3"])
@pytest.mark.parametrize("carry_on", [False, True], ids=["two_passes", "carry_on"])
def test_bfloat16(name: str, carry_on: bool) -> None:
    """The same in bfloat16, to its rounding; keys stay bfloat16."""
    model, prompt = tiny_model(name, mx.bfloat16), tokens(75)
    run = sparse(model, prompt, carry_on=carry_on)
    assert {array.dtype for array in arrays_of(run.cache)} == {mx.bfloat16}
    expected = oracle_difference(model, prompt, run, 0, carry_on)
    wrong = oracle_difference(model, prompt, _renumbered(model, prompt, run), 0, False)
    assert expected < 0.4 < wrong


@pytest.mark.parametrize("carry_on", [False, True], ids=["two_passes", "carry_on"])
def test_gap_at_the_start_and_right_before_the_tail(carry_on: bool) -> None:
    """Nothing kept but a middle and the last token."""
    model, prompt = tiny_model("llama"), tokens(64)
    rule = SelectionRule(keep_pct=0.01, chunk_tokens=8, sink_tokens=0, tail_tokens=1)
    run = sparse(model, prompt, carry_on=carry_on, rule=rule, protected=((21, 40),))
    assert run.report.kept_ranges == ((21, 40), (63, 64))
    assert oracle_difference(model, prompt, run, 0, carry_on) <= 1e-4


def _renumbered(model: Any, prompt: list[int], run: SparsePrefill) -> SparsePrefill:
    """The same run with its kept tokens at positions 0, 1, 2, ..., as one that forgets positions makes it."""
    assert run.selection is not None
    kept = run.selection.indices[:-1]
    fill = KeptFill(model, np.array(prompt)[kept], np.arange(len(kept)), dense_cache(model, []))
    fill.step(1000)
    run.cache = fill.cache
    return run


@pytest.mark.parametrize("name", [name for name in PURE if name != "smollm3"])
def test_negative_control_contiguous_renumbering(name: str) -> None:
    """The oracle tells true positions from renumbered ones: keeping everything alone would not."""
    model, prompt = tiny_model(name), tokens(75)
    run = _renumbered(model, prompt, sparse(model, prompt))
    assert oracle_difference(model, prompt, run, 0, False) > 0.1


def test_negative_control_forgotten_delta() -> None:
    """Decoding at the number of tokens held instead of the true position fails the oracle too."""
    model, prompt = tiny_model("llama"), tokens(75)
    run = sparse(model, prompt)
    run.cache = [as_sparse(entry, 0) for entry in run.cache]
    for entry in run.cache:
        entry.position_delta = 0
    assert oracle_difference(model, prompt, run, 0, False) > 0.1


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("num_cached", [0, 30])
def test_keep_everything_is_dense_bit_for_bit(name: str, num_cached: int) -> None:
    """keep_pct 1: no scoring, an ordinary cache, the very bits of a dense prefill in the same steps."""
    model, prompt = tiny_model(name), tokens(num_cached + 41)
    run = sparse(model, prompt, num_cached, rule=SelectionRule(keep_pct=1.0), step=20)
    dense = dense_cache(model, prompt[:num_cached])
    for start in range(num_cached, len(prompt) - 1, 20):
        model(mx.array([prompt[start : min(start + 20, len(prompt) - 1)]]), cache=dense)
    for given, expected in zip(arrays_of(run.cache), arrays_of(dense), strict=True):
        np.testing.assert_array_equal(np.array(given), np.array(expected))
    assert not run.report.applied
    assert run.report.reason == "kept_everything"
    assert not is_sparse(run.cache)
    assert holds_all(run.cache, len(prompt) - 1)


@pytest.mark.parametrize("name", PURE)
def test_everything_kept_through_the_cut_is_dense(name: str) -> None:
    """Carrying on with all tokens gives the dense logits: the cut between two layers loses nothing."""
    model, prompt = tiny_model(name), tokens(75)
    rule = SelectionRule(keep_pct=0.01, chunk_tokens=8, sink_tokens=0, tail_tokens=1)
    run = sparse(model, prompt, 30, carry_on=True, rule=rule, protected=((0, 75),))
    given = decode_logits(model, run.cache, [prompt[-1]], neighbour=tokens(8))
    expected = model(mx.array([prompt]))[0, -1]
    assert float(mx.abs(given[0] - expected).max()) <= 1e-4
    assert run.report.reason == "kept_everything"


@pytest.mark.parametrize("step", [1, 3, 8, 29, 500])
@pytest.mark.parametrize("carry_on", [False, True], ids=["two_passes", "carry_on"])
def test_step_boundaries_do_not_matter(step: int, carry_on: bool) -> None:
    """Boundaries inside a chunk, in either phase, change no result."""
    model, prompt = tiny_model("gemma3"), tokens(105)
    run = sparse(model, prompt, 30, carry_on=carry_on, step=step)
    assert oracle_difference(model, prompt, run, 30, carry_on) <= 1e-4


def test_a_draft_model_scores_the_whole_prompt() -> None:
    """Another model chooses; the target prefills the uncached part; the report names the draft."""
    model, draft = tiny_model("qwen3"), tiny_model("llama", seed=8, num_hidden_layers=3)
    prompt = tokens(105)
    plan = SparsePlan(Scorer(draft, (1,), "tiny-draft", num_queries=6), RULE)
    run = SparsePrefill(model, prompt, dense_cache(model, prompt[:30]), 30, plan)
    assert (run.phase, run.total) == ("score", 105)
    while not run.done:
        run.step(16)
    assert oracle_difference(model, prompt, run, 30, False) <= 1e-4
    report = run.report
    assert (report.draft, report.applied, report.carried_on) == ("tiny-draft", True, False)
    assert (report.prompt_tokens, report.sparse_tokens) == (105, 75)
    assert abs(report.kept_tokens - 30) <= RULE.chunk_tokens
    assert sum(end - start for start, end in report.kept_ranges) == report.kept_tokens
    assert report.kept_ranges[0][0] >= 30


def test_hybrid_model_against_the_kept_tokens_alone() -> None:
    """Recurrent layers have no masked-dense oracle: the reference is the model run on the kept tokens at
    their positions, in one call.
    """
    model, prompt = tiny_model("qwen3_next"), tokens(105)
    run = sparse(model, prompt, 30)
    assert run.selection is not None
    kept = run.selection.indices + 30
    after = tokens(8, seed=5)
    cache = dense_cache(model, prompt[:30])
    fed = [prompt[i] for i in kept] + after
    with explicit_positions(mx.array([*kept.tolist(), *range(105, 113)])):
        expected = model(mx.array([fed]), cache=cache)[0, len(kept) - 1 :]
        mx.eval(expected)
    given = decode_logits(model, run.cache, [prompt[-1], *after], neighbour=tokens(40, seed=9))
    assert float(mx.abs(given - expected).max()) <= 1e-4


class Alone:
    """Greedy tokens of requests through one BatchGenerator, as the engine inserts them."""

    def __init__(self, model: Any) -> None:
        self.generator = BatchGenerator(model, max_tokens=12, prefill_batch_size=1)
        self.tokens: dict[int, list[int]] = {}
        self.last_cache: dict[int, Any] = {}

    def insert(self, prompt: list[int], cache: list[Any]) -> int:
        (uid,) = self.generator.insert([prompt[-1:]], caches=[cache], all_tokens=[prompt[:-1]])
        self.tokens[uid] = []
        return int(uid)

    def run(self, steps: int = 1000) -> None:
        for _ in range(steps):
            progress, responses = self.generator.next()
            for response in responses:
                self.tokens[response.uid].append(response.token)
                if response.finish_reason is not None:
                    self.last_cache[response.uid] = (response.prompt_cache, response.all_tokens)
            if not responses and not progress:
                return


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "smollm3", "qwen3_next"])
def test_batch_neighbours_give_what_each_gives_alone(name: str) -> None:
    """Sparse and dense requests that join and leave a real BatchGenerator at different times."""
    model = tiny_model(name)
    first, second, third = tokens(60, seed=1), tokens(105, seed=2), tokens(90, seed=3)

    def makers() -> list[tuple[list[int], list[Any]]]:
        return [
            (first, dense_cache(model, first[:-1])),
            (second, sparse(model, second, 30, carry_on=name != "qwen3_next").cache),
            (third, sparse(model, third).cache),
        ]

    alone = []
    for prompt, cache in makers():
        single = Alone(model)
        uid = single.insert(prompt, cache)
        single.run()
        alone.append(single.tokens[uid])
    together, uids = Alone(model), []
    for prompt, cache in makers():
        uids.append(together.insert(prompt, cache))
        together.run(steps=4)
    together.run()
    assert [together.tokens[uid] for uid in uids] == alone
    assert all(len(row) == 12 for row in alone)
    for uid, prompt in zip(uids, (first, second, third), strict=True):
        cache, fed = together.last_cache[uid]
        assert len(fed) == len(prompt) + 12
        assert holds_all(cache, len(fed)) == (prompt is first)


def test_given_cache_stays_a_dense_prefix() -> None:
    """Whatever the run does, the cache it was given still holds the same tokens, for a dense fallback."""
    for name, carry_on in (("llama", True), ("gemma3", True), ("gemma3", False), ("qwen3_next", False)):
        model, prompt = tiny_model(name), tokens(105)
        cache = dense_cache(model, prompt[:30])
        before = [np.array(array) for array in arrays_of(cache)]
        layers = (SPLIT,) if carry_on else default_layers(model)
        run = SparsePrefill(
            model, prompt, cache, 30, SparsePlan(Scorer(model, layers), RULE, carry_on=carry_on)
        )
        while not run.done:
            run.step(17)
        for array, kept in zip(arrays_of(cache), before, strict=True):
            np.testing.assert_array_equal(np.array(array), kept)
        assert all(entry.offset == 30 for entry in cache if isinstance(entry, KVCache))


def test_failure_in_scoring_leaves_everything_as_it_was() -> None:
    """A fault in the scorer comes out of ``step``; the next forward is that of a fresh model."""
    model, prompt = tiny_model("llama"), tokens(60)
    expected = np.array(model(mx.array([prompt])))
    original = model.layers[1]

    class Broken:
        use_sliding = False

        def __call__(self, *_: Any, **__: Any) -> Any:
            raise ZeroDivisionError

    run = SparsePrefill(model, prompt, dense_cache(model, []), 0, SparsePlan(Scorer(model, (2,)), RULE))
    run.step(10)
    model.layers[1] = Broken()
    with pytest.raises(ZeroDivisionError):
        run.step(10)
    model.layers[1] = original
    np.testing.assert_array_equal(np.array(model(mx.array([prompt]))), expected)


def test_a_sparse_cache_can_not_be_prefilled_further() -> None:
    """Its offset is not its position: using it unmerged raises instead of decoding at wrong positions."""
    model, prompt = tiny_model("llama"), tokens(75)
    run = sparse(model, prompt)
    assert is_sparse(run.cache)
    assert not holds_all(run.cache, len(prompt) - 1)
    with pytest.raises(RuntimeError, match="sparse"):
        model(mx.array([[1]]), cache=run.cache)


def test_plan_errors() -> None:
    """Nothing to prefill, or another model's hidden states: refused."""
    model, other = tiny_model("llama"), tiny_model("qwen3")
    with pytest.raises(ValueError, match="nothing to prefill"):
        SparsePrefill(model, tokens(5), [], 5, SparsePlan(Scorer(model, (1,))))
    with pytest.raises(ValueError, match="own hidden states"):
        SparsePrefill(model, tokens(5), [], 0, SparsePlan(Scorer(other, (1,)), carry_on=True))


@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_tiny_prompts(length: int) -> None:
    """Prompts of a few tokens end too, with the last token left for the first decode step."""
    model, prompt = tiny_model("llama"), tokens(length)
    run = sparse(model, prompt, carry_on=length > 2)
    assert run.cache[0].offset == run.report.kept_tokens - 1


def test_seam_error_when_attention_is_not_seen() -> None:
    """A scorer whose layer never attends through mx.fast fails before anything is chosen."""
    model = tiny_model("qwen3_next")
    run = SparsePrefill(model, tokens(40), dense_cache(model, []), 0, SparsePlan(Scorer(model, (0,)), RULE))
    with pytest.raises(SeamError):
        run.step(100)
