"""Can this model prefill sparsely, and be cut between two layers? Decided by a list of names and by evidence.

The evidence is a probe of a few short forward passes at load: a thinned prompt must give the logits of a
masked-dense forward (dropped tokens hidden from every row). Names are for what a short probe can't see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from .scoring import Scorer
from .seams import AttentionCall, SeamError, layer_list, observed_attention
from .selection import SelectionRule
from .sparse_cache import as_sparse, has_keys, is_attention, unsupported_cache
from .sparse_prefill import KeptFill, SparsePlan, SparsePrefill, can_carry_on

_ABSOLUTE_SCALING = "scales attention by the absolute position, read from the cache"
_ABSOLUTE_EMBEDDING = "adds embeddings of absolute positions"
_INDEXER = "chooses its keys by an indexer of its own, which the short probe can't see"
_NAMED = {
    "deepseek_v32": _INDEXER,
    "glm_moe_dsa": _INDEXER,
    "llama4": _ABSOLUTE_SCALING,
    "llama4_text": _ABSOLUTE_SCALING,
    "ministral3": _ABSOLUTE_SCALING,
    "mistral4": _ABSOLUTE_SCALING,
    "gpt2": _ABSOLUTE_EMBEDDING,
    "gpt_bigcode": _ABSOLUTE_EMBEDDING,
}
_PROBE_TOKENS = 40
_PROBE_DROPPED = (*range(3, 9), 14, *range(22, 33))
_PROBE_SHIFT = 64
_FLOAT32_TOLERANCE = 1e-3
_HALF_TOLERANCE = 0.05


def specprefill_support(model: Any, config: Mapping[str, Any]) -> str | None:
    """Return why ``model`` can't prefill sparsely, or None. ``config``: its config.json.

    Runs a few forward passes of 40 tokens; call it on the MLX thread, once, after loading.
    """
    nested = config.get("text_config") or {}
    for model_type in (config.get("model_type"), nested.get("model_type")):
        if model_type in _NAMED:
            return f"{model_type} {_NAMED[model_type]}"
    if any(isinstance(module, DynamicNTKScalingRoPE) for module in model.modules()):
        return "dynamic NTK RoPE turns by the length of the whole prompt"
    cache = make_prompt_cache(model)
    if (kind := unsupported_cache(cache)) is not None:
        return f"its {kind} can't be thinned and batched"
    if not any(has_keys(entry) for entry in cache):
        return "it has no attention layers"
    try:
        return _probe(model, cache, _vocabulary(config))
    except Exception as error:
        return f"the probe failed: {type(error).__name__}: {error}"


def check_carry_on(model: Any, split: int, config: Mapping[str, Any] | None = None) -> bool:
    """Say whether the hidden states that enter layer ``split`` can be carried on: exactly, by evidence.

    Everything kept must equal dense, and a part kept the masked-dense forward. False where layers below hold
    recurrent states, share keys with layers above, or the model does more between layers than call them.
    Hybrid models whose recurrent layers all lie above are checked with everything kept only.
    """
    cache = make_prompt_cache(model)
    if not can_carry_on(cache, split):
        return False
    tokens = _probe_tokens(_vocabulary(config or {}))
    scorer = Scorer(model, (split,), num_queries=4)
    try:
        for dropped in ((), _PROBE_DROPPED):
            if dropped and not all(is_attention(entry) for entry in cache):
                continue
            kept = tuple((i, i + 1) for i in range(_PROBE_TOKENS) if i not in dropped)
            rule = SelectionRule(keep_pct=1e-6, sink_tokens=0, tail_tokens=1)
            plan = SparsePlan(scorer, rule, carry_on=True, protected=kept)
            run = SparsePrefill(model, tokens, make_prompt_cache(model), 0, plan)
            while not run.done:
                run.step(16)
            expected = _masked_dense(model, tokens, dropped, dense_below=split)
            if not _close(_first_step(model, run.cache, tokens[-1]), expected, run.cache):
                return False
    except Exception:
        return False
    return True


def _probe(model: Any, cache: Sequence[Any], vocabulary: int) -> str | None:
    tokens = _probe_tokens(vocabulary)
    last = _PROBE_TOKENS - 1
    if all(is_attention(entry) for entry in cache):
        kept = np.array([i for i in range(last) if i not in _PROBE_DROPPED])
        expected = _masked_dense(model, tokens, _PROBE_DROPPED)
        positions = kept
    else:
        # Recurrent layers have no masked-dense reference. But RoPE is relative: moved as a whole, all stays.
        kept = np.arange(last)
        expected = model(mx.array([tokens]))[0, -1]
        positions = kept + _PROBE_SHIFT
    fill = KeptFill(model, np.array(tokens)[kept], positions, make_prompt_cache(model))
    while fill.processed < fill.total:
        fill.step(7)
    delta = int(positions[-1]) + 1 - len(kept)
    sparse = [as_sparse(entry, delta) for entry in fill.cache]
    if not _close(_first_step(model, sparse, tokens[-1]), expected, sparse):
        return "thinned prompts don't give what hiding the same tokens gives"
    return None


def _masked_dense(model: Any, tokens: list[int], dropped: Sequence[int], dense_below: int = 0) -> mx.array:
    """Return logits (V,) of the last token with ``dropped`` hidden; below ``dense_below`` only from its row.

    A sliding window counts the tokens that are left, as a cache of the kept tokens does.
    """
    kept = np.ones(len(tokens), dtype=bool)
    kept[list(dropped)] = False
    order = np.arange(len(tokens))
    causal = order[:, None] >= order
    hidden = causal & (kept | np.eye(len(tokens), dtype=bool))
    windows = [getattr(entry, "max_size", None) for entry in make_prompt_cache(model)]
    calls = 0

    def hide(call: AttentionCall) -> mx.array:
        nonlocal calls
        window = windows[calls] or len(tokens)
        visible = hidden & _within(np.cumsum(kept), window)
        if calls < dense_below:
            visible[:-1] = (causal & _within(order, window))[:-1]
        calls += 1
        shown = mx.array(visible)[None, None]
        if isinstance(call.mask, mx.array) and call.mask.dtype != mx.bool_:
            return mx.where(shown, call.mask, mx.array(mx.finfo(call.mask.dtype).min, call.mask.dtype))
        return shown

    if not dropped:
        return model(mx.array([tokens]))[0, -1]  # type: ignore[no-any-return]
    with observed_attention(hide):
        logits: mx.array = model(mx.array([tokens]))[0, -1]
        mx.eval(logits)
    if calls != len(layer_list(model)):
        raise SeamError(f"{calls} attention calls through mx.fast in {len(layer_list(model))} layers")
    return logits


def _within(order: npt.NDArray[np.int64], window: int) -> npt.NDArray[np.bool_]:
    return (order[:, None] - order) < window


def _first_step(model: Any, cache: Sequence[Any], token: int) -> mx.array:
    """Decode one token as ``BatchGenerator`` will."""
    batch = [entry.merge([entry]) for entry in cache]
    return model(mx.array([[token]]), cache=batch)[0, -1]  # type: ignore[no-any-return]


def _close(given: mx.array, expected: mx.array, cache: Sequence[Any]) -> bool:
    first = cache[0]
    while isinstance(first, CacheList):
        first = first.caches[-1]
    single = isinstance(first, ArraysCache) or first.keys.dtype == mx.float32
    tolerance = _FLOAT32_TOLERANCE if single and given.dtype == mx.float32 else _HALF_TOLERANCE
    scale = float(mx.abs(expected).max())
    return float(mx.abs(given - expected).max()) <= tolerance * max(scale, 1e-6)


def _probe_tokens(vocabulary: int) -> list[int]:
    drawn = np.random.default_rng(0).integers(1, vocabulary, _PROBE_TOKENS)
    return [int(token) for token in drawn]


def _vocabulary(config: Mapping[str, Any]) -> int:
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or 64
    return min(int(size), 4096)


def draft_mismatch(target_tokenizer: Any, draft_tokenizer: Any) -> str | None:
    """Return why a draft model can't score for the target, or None: both must give the same tokens.

    Compares the two vocabularies and a sample with spaces, digits, code and other scripts.
    """
    target, draft = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if target != draft:
        differing = sum(1 for token, number in target.items() if draft.get(token) != number)
        return (
            f"the draft model's tokenizer differs: {differing} of {len(target)} tokens have another number "
            f"or none, and it has {len(draft)} tokens"
        )
    sample = "Hello  world\n\tdef f(x): return x**2  # 1234567890 ärger 你好 🙂"
    if list(target_tokenizer.encode(sample)) != list(draft_tokenizer.encode(sample)):
        return "the draft model's tokenizer splits text in another way"
    return None
