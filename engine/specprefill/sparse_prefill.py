"""Sparse prefill of one request: score the uncached part of its prompt, keep the best of it, fill a cache.

Two ways. Two passes: a scorer reads the prompt, then the target prefills the kept tokens at their positions.
Carrying on (the target scores itself): the hidden states of the kept tokens go on from the last selection
layer through the layers above, and the layers below keep the keys and values they have already made.
Either way the cache holds the cached prefix and N of M tokens, and decoding goes on at position of the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from .scoring import PromptReader, Scorer
from .seams import explicit_positions, layer_list, replaced_layers
from .selection import Range, Selection, SelectionRule, select
from .sparse_cache import arrays_of, as_sparse, is_attention, thinned, working_copy

Phase = Literal["score", "prefill"]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """What to do for one request.

    ``scorer``: the target itself (``name`` "self") or a draft model with the target's tokenizer.
    ``carry_on``: continue from the scorer's hidden states; only with the target as its own scorer, and only
    where ``check_carry_on`` found it exact. ``protected``: half-open ranges of the whole prompt that are
    kept whole.
    """

    scorer: Scorer
    rule: SelectionRule = field(default_factory=SelectionRule)
    carry_on: bool = False
    protected: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class SparseReport:
    """What happened so far. Complete once the prefill is done.

    ``applied``: tokens were dropped. ``reason``: why not ("kept_everything"), or None. ``keep_pct``: as
    asked. ``prompt_tokens``: the whole prompt; ``sparse_tokens``: its uncached part M, to which the keep
    rate applies; ``kept_tokens``: N of those, the last one included. ``kept_ranges``: half-open, positions
    in the prompt. ``score_ms``, ``prefill_ms``: time inside ``step``, without what other streams did
    between.
    """

    applied: bool
    reason: str | None
    keep_pct: float
    prompt_tokens: int
    sparse_tokens: int
    kept_tokens: int
    score_ms: float
    prefill_ms: float
    draft: str
    carried_on: bool
    kept_ranges: tuple[Range, ...]


class SparsePrefill:
    """A prefill in bounded steps, in two phases; everything on the thread that uses MLX.

    ``cache``: when ``done``, one entry per layer for ``BatchGenerator.insert(prompts=[[last_token]],
    caches=[cache])`` with ``prefill_batch_size=1``. The cache given at the start is never changed: after a
    failure or a cancel it is still the dense prefix of ``num_cached`` tokens.
    """

    def __init__(
        self,
        target: Any,
        prompt_tokens: Sequence[int],
        cache: Sequence[Any],
        num_cached: int,
        plan: SparsePlan,
        *,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Plan the prefill of ``prompt_tokens`` (the whole prompt), of which ``cache`` holds ``num_cached``.

        Raises ValueError when nothing is uncached, or ``carry_on`` is asked of another model than the target.
        """
        if not 0 <= num_cached < len(prompt_tokens):
            raise ValueError(f"{num_cached} of {len(prompt_tokens)} tokens cached: nothing to prefill")
        if plan.carry_on and plan.scorer.model is not target:
            raise ValueError("only the target's own hidden states can be carried on")
        self._target = target
        self._prompt = list(prompt_tokens)
        self._num_cached = num_cached
        self._num_new = len(prompt_tokens) - num_cached
        self._plan = plan
        self._clock = clock
        self._given = list(cache)
        self._spent_ms: dict[Phase, float] = {"score": 0.0, "prefill": 0.0}
        self._num_layers = len(layer_list(target))
        self._own_scorer = plan.scorer.model is target
        self._reader: PromptReader | None = None
        self._selection: Selection | None = None
        self._fill: KeptFill | None = None
        self._carried_on = False
        self.cache: list[Any] = []
        if plan.rule.keep_pct == 1:
            self._choose(np.zeros(self._num_new, dtype=np.float32))
        else:
            self._start_reading()

    @property
    def phase(self) -> Phase:
        return "score" if self._fill is None else "prefill"

    @property
    def processed(self) -> int:
        if self._fill is not None:
            return self._fill.processed
        return self._reader.processed if self._reader is not None else 0

    @property
    def total(self) -> int:
        """Tokens of the current phase: what the scorer reads, or the kept tokens without the last."""
        if self._fill is not None:
            return self._fill.total
        return self._reader.total if self._reader is not None else self._num_new

    @property
    def done(self) -> bool:
        return self._fill is not None and self._fill.processed == self._fill.total

    @property
    def selection(self) -> Selection | None:
        """What was selected of the uncached part, once scoring is over."""
        return self._selection

    @property
    def report(self) -> SparseReport:
        """Say what happened so far."""
        chosen = self._selection
        everything = chosen is not None and chosen.kept_everything
        return SparseReport(
            applied=self.done and not everything,
            reason="kept_everything" if everything else None,
            keep_pct=self._plan.rule.keep_pct,
            prompt_tokens=len(self._prompt),
            sparse_tokens=self._num_new,
            kept_tokens=0 if chosen is None else len(chosen.indices),
            score_ms=self._spent_ms["score"],
            prefill_ms=self._spent_ms["prefill"],
            draft=self._plan.scorer.name,
            carried_on=self._carried_on,
            kept_ranges=() if chosen is None else tuple(chosen.ranges(self._num_cached)),
        )

    def step(self, num_tokens: int) -> None:
        """Process work worth at most ``num_tokens`` tokens of a dense prefill; evaluate before returning.

        Where only a part of the layers runs, proportionally more tokens are taken, so that a step takes about
        the time of a dense one. A failure leaves this object useless and the given cache as it was.
        """
        if self.done or num_tokens < 1:
            return
        phase, started = self.phase, self._clock()
        try:
            if self._fill is not None:
                self._fill.step(num_tokens)
            elif self._reader is not None:
                share = self._plan.scorer.cost_share if self._own_scorer else 1.0
                self._reader.step(max(num_tokens, int(num_tokens / share)))
                if self._reader.done:
                    self._choose(self._plan.scorer.scores(self._reader)[-self._num_new :])
        finally:
            self._spent_ms[phase] += (self._clock() - started) * 1000
        if self.done and self._fill is not None and self._selection is not None:
            delta = self._num_new - len(self._selection.indices)
            self.cache = [as_sparse(entry, delta) for entry in self._fill.cache]

    def _start_reading(self) -> None:
        scorer = self._plan.scorer
        if self._own_scorer:
            uncached = self._prompt[self._num_cached :]
            keep = self._plan.carry_on
            self._reader = scorer.start(uncached, self._given, self._num_cached, keep_hidden=keep)
        else:
            # A draft model has no cache of the prefix: it reads the whole prompt.
            self._reader = scorer.start(self._prompt)

    def _choose(self, scores: Any) -> None:
        plan, before = self._plan, self._num_cached
        moved = [(start - before, end - before) for start, end in plan.protected]
        chosen = select(scores, plan.rule, num_cached=before, protected=moved)
        self._selection = chosen
        # The last token is fed by the batch's first decode step.
        kept = chosen.indices[:-1]
        tokens = np.array(self._prompt[self._num_cached :], dtype=np.int32)[kept]
        if plan.carry_on and self._reader is not None:
            self._fill = self._carry_on(self._reader, tokens, kept)
            self._carried_on = True
        else:
            cache = [working_copy(entry) for entry in self._given]
            self._fill = KeptFill(self._target, tokens, kept + self._num_cached, cache)
        self.cache = self._fill.cache
        # Its keys of all M tokens are not needed any more.
        self._reader = None

    def _carry_on(self, reader: PromptReader, tokens: Any, kept: Any) -> KeptFill:
        split, index = reader.last_layer, mx.array(kept, dtype=mx.int32)
        num_tokens = self._num_cached + len(kept)
        lower = [thinned(entry, index, self._num_new, num_tokens) for entry in reader.cache[:split]]
        hidden = mx.take(mx.concatenate(reader.hidden, axis=1), index, axis=1)
        mx.eval(arrays_of(lower), hidden)
        reader.hidden.clear()
        cache = lower + [working_copy(entry) for entry in self._given[split:]]
        share = (len(cache) - split) / len(cache)
        return KeptFill(self._target, tokens, kept + self._num_cached, cache, split, hidden, share)


class KeptFill:
    """Runs the kept tokens through the target at their positions, in steps, into ``cache``.

    ``tokens`` and ``positions``: int arrays (n,). With ``hidden`` (1, n, hidden size): only the layers from
    ``split`` on, which it enters; ``cost_share`` is the share of the layers that are.
    """

    def __init__(
        self,
        target: Any,
        tokens: Any,
        positions: Any,
        cache: list[Any],
        split: int = 0,
        hidden: mx.array | None = None,
        cost_share: float = 1.0,
    ) -> None:
        self.cache = cache
        self.processed = 0
        self.total = len(tokens)
        self._target = target
        self._tokens = mx.array(tokens, dtype=mx.int32)
        self._positions = positions
        self._split = split
        self._hidden = hidden
        self._cost_share = cost_share

    def step(self, num_tokens: int) -> None:
        start = self.processed
        end = min(self.total, start + max(num_tokens, int(num_tokens / self._cost_share)))
        where = self._positions[start:end]
        consecutive = int(where[-1]) - int(where[0]) == end - start - 1
        positions = int(where[0]) if consecutive else mx.array(where, dtype=mx.int32)
        replaced = {}
        if self._hidden is not None:
            states = self._hidden[:, start:end]
            replaced = {layer: lambda *_, **__: states for layer in range(self._split)}
        with explicit_positions(positions), replaced_layers(self._target, replaced):
            self._target(self._tokens[None, start:end], cache=self._caches_of_call())
        mx.eval(arrays_of(self.cache[self._split :]))
        mx.clear_cache()
        self.processed = end

    def _caches_of_call(self) -> list[Any]:
        """The caches; those below the split replaced by ones of the same kind from above it.

        A model makes its masks from the cache of the first layer of a kind, which may lie below the split and
        hold all kept tokens already.
        """
        if self._split == 0:
            return self.cache
        above = self.cache[self._split :]
        stand_ins = [
            next((upper for upper in above if type(upper) is type(entry)), above[0])
            for entry in self.cache[: self._split]
        ]
        return stand_ins + above


def can_carry_on(cache: Sequence[Any], split: int) -> bool:
    """Say whether the layers below ``split`` hold keys only: recurrent states can't be thinned."""
    return 0 < split < len(cache) and all(is_attention(entry) for entry in cache[:split])
