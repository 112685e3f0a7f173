"""Which layers of a model tell what matters: found by prompts with a known answer, kept in a small file.

Retrieval starts sharply at one depth (arXiv 2409.17422, section 3), and a layer beside a good one may find
nothing, so a fixed share of the depth is a gamble. For each attention layer the recall of the needle's
tokens at each keep rate is measured with the selection that requests use. Scoring stops at the last layer
of a set, so depth has its price: a set of layers that is deeper must find that much more. A layer that finds
everything in short prompts may find nothing in long ones (the default model's layer 8: all at 750 tokens,
half at 2000), so every fourth prompt is long. A model nobody calibrated uses ``scoring.default_layers``.

Files are named by the model's fingerprint: in the cache folder, or shipped in ``engine/calibrations/``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from .passkey import NEEDLES, PasskeyPrompt, passkey_prompt
from .scoring import DEFAULT_NUM_QUERIES, DEFAULT_POOL_TOKENS, PromptReader, Scorer, default_layers
from .seams import layer_list
from .selection import Scores, SelectionRule, select, smooth
from .sparse_cache import has_keys

FORMAT = 2
SHIPPED = Path(__file__).parent / "calibrations"
MAX_LAYERS = 3
RECALL_PER_DEPTH = 0.2
"""What the whole depth of the model is worth in recall: a tenth of the layers saved may cost 0.02 of it."""

LONG_EVERY = 4
"""One prompt of so many is long."""
LONG_TIMES = 4
"""So many times as long as the others."""

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The layers to look at, and the table they were chosen from.

    ``recall``: per single layer, the share of the needles' tokens kept at each of ``keep_pcts``.
    ``chosen_recall``: the same for ``layers`` together. ``num_queries`` and ``pool_tokens``: as measured.
    """

    fingerprint: str
    model_type: str
    num_layers: int
    layers: tuple[int, ...]
    num_queries: int
    pool_tokens: int
    keep_pcts: tuple[float, ...]
    recall: dict[int, tuple[float, ...]]
    chosen_recall: tuple[float, ...]
    num_prompts: int
    prompt_tokens: int
    long_prompt_tokens: int

    def scorer(self, model: Any, name: str = "self") -> Scorer:
        """Return the scorer of the calibrated model."""
        return Scorer(model, self.layers, name, self.num_queries, self.pool_tokens)


def scorer_for(model: Any, calibration: Calibration | None, name: str = "self") -> Scorer:
    """Return the calibrated scorer, or the documented default (``default_layers``) without a calibration."""
    return calibration.scorer(model, name) if calibration else Scorer(model, default_layers(model), name)


def calibrate(
    model: Any,
    tokenizer: Any,
    config: Mapping[str, Any],
    *,
    num_prompts: int = 24,
    prompt_tokens: int = 750,
    long_prompt_tokens: int | None = None,
    keep_pcts: Sequence[float] = (0.15, 0.2, 0.3),
    rule: SelectionRule | None = None,
    max_depth: float = 0.8,
    step_tokens: int = 1024,
    on_progress: OnProgress | None = None,
) -> Calibration:
    """Read ``num_prompts`` prompts up to ``max_depth`` of the layers and choose the best few layers.

    Takes about as long as prefilling them. ``long_prompt_tokens``: of every fourth one; None: four times
    ``prompt_tokens``. ``rule``: the selection requests will use (keep_pct is not read).
    ``on_progress(done, total)`` is called after each prompt. The same model gives the same result.
    """
    layers = candidate_layers(model, max_depth)
    long_prompt_tokens = long_prompt_tokens or LONG_TIMES * prompt_tokens
    prompts = calibration_prompts(tokenizer, num_prompts, prompt_tokens, long_prompt_tokens)
    scores: list[dict[int, Scores]] = []
    for number, prompt in enumerate(prompts, start=1):
        reader = PromptReader(model, prompt.tokens, layers, num_queries=DEFAULT_NUM_QUERIES)
        while not reader.done:
            reader.step(step_tokens)
        scores.append({i: np.array(rows.max(axis=0)) for i, rows in reader.layer_rows().items()})
        if on_progress is not None:
            on_progress(number, len(prompts))
    rules = [_with_keep(rule or SelectionRule(), keep_pct) for keep_pct in keep_pcts]

    def recall(chosen: Sequence[int]) -> tuple[float, ...]:
        merged = [np.max([per_layer[i] for i in chosen], axis=0) for per_layer in scores]
        return tuple(
            float(np.mean([_found(s, p, one) for s, p in zip(merged, prompts, strict=True)])) for one in rules
        )

    table = {layer: recall([layer]) for layer in layers}
    num_layers = len(layer_list(model))
    best = choose_layers(table, recall, num_layers)
    return Calibration(
        fingerprint=model_fingerprint(model, config),
        model_type=str(config.get("model_type", "")),
        num_layers=num_layers,
        layers=best,
        num_queries=DEFAULT_NUM_QUERIES,
        pool_tokens=DEFAULT_POOL_TOKENS,
        keep_pcts=tuple(keep_pcts),
        recall=table,
        chosen_recall=recall(best),
        num_prompts=num_prompts,
        prompt_tokens=prompt_tokens,
        long_prompt_tokens=long_prompt_tokens,
    )


def choose_layers(
    table: Mapping[int, Sequence[float]], recall: Callable[[Sequence[int]], Sequence[float]], num_layers: int
) -> tuple[int, ...]:
    """Return the set of at most three layers with the best mean recall, less the price of its depth.

    For each depth the candidates are the best one, two and three single layers up to there, taken together.
    Of equals the smaller, then the shallower set wins.
    """
    found: list[tuple[float, int, tuple[int, ...]]] = []
    for deepest in sorted(table):
        ranked = sorted((i for i in table if i <= deepest), key=lambda i: (-float(np.mean(table[i])), i))
        for count in range(1, min(MAX_LAYERS, len(ranked)) + 1):
            chosen = tuple(sorted(ranked[:count]))
            worth = float(np.mean(recall(chosen))) - RECALL_PER_DEPTH * max(chosen) / num_layers
            found.append((-round(worth, 6), count, chosen))
    return min(found)[2]


def calibration_prompts(
    tokenizer: Any, num_prompts: int, prompt_tokens: int, long_prompt_tokens: int
) -> list[PasskeyPrompt]:
    """Return prompts of the three kinds of needle in turn, every fourth long, the depths spread evenly."""
    depths = [(number + 0.5) / num_prompts for number in range(num_prompts)]
    # Any kind of needle should meet all depths: walk them in steps that share no factor with their number.
    stride = next(step for step in (5, 7, 11, 1) if math.gcd(step, num_prompts) == 1)
    return [
        passkey_prompt(
            tokenizer,
            num_tokens=long_prompt_tokens if number % LONG_EVERY == LONG_EVERY - 1 else prompt_tokens,
            depth=depths[number * stride % num_prompts],
            seed=100 + number,
            needle=NEEDLES[number % len(NEEDLES)],
        )
        for number in range(num_prompts)
    ]


def candidate_layers(model: Any, max_depth: float = 0.8) -> list[int]:
    """Return the layers that could score: attention, full if there is any, no deeper than worth its cost."""
    kinds = make_prompt_cache(model)
    usable = [i for i, kind in enumerate(kinds) if has_keys(kind)]
    full = [i for i in usable if not hasattr(kinds[i], "max_size")] or usable
    return [i for i in full if i < max_depth * len(kinds)] or full[:1]


def model_fingerprint(model: Any, config: Mapping[str, Any]) -> str:
    """Return 16 hex digits that name the model: its shape and its norm weights.

    Norms are never quantized, so a quantized model and its dequantized copy share their calibration. Rounded
    to bfloat16, so that the dtype they are held in makes no difference.
    """
    digest = hashlib.sha256()
    for key in ("model_type", "num_hidden_layers", "hidden_size", "vocab_size"):
        digest.update(f"{key}={config.get(key)};".encode())
    weights: list[Any] = list(tree_flatten(model.parameters()))
    for name, value in sorted(weights, key=lambda pair: str(pair[0])):
        if value.ndim == 1 and "norm" in name:
            rounded = value.astype(mx.bfloat16).astype(mx.float32)
            digest.update(name.encode() + np.array(rounded).tobytes())
    return digest.hexdigest()[:16]


def load_calibration(fingerprint: str, folder: Path | None = None) -> Calibration | None:
    """Return the calibration of a model from ``folder``, else the shipped one, else None.

    A file that can't be read or is of another format counts as absent.
    """
    for place in (folder, SHIPPED):
        if place is None:
            continue
        try:
            stored = json.loads((place / f"{fingerprint}.json").read_text(encoding="utf-8"))
            if stored.pop("format") == FORMAT and stored["fingerprint"] == fingerprint:
                return _from_stored(stored)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def save_calibration(calibration: Calibration, folder: Path) -> Path:
    """Write the calibration into ``folder`` (made if absent), whole or not at all; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{calibration.fingerprint}.json"
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps({"format": FORMAT, **asdict(calibration)}, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)
    return path


def _from_stored(stored: dict[str, Any]) -> Calibration:
    fields: dict[str, Any] = {key: tuple(stored[key]) for key in ("layers", "keep_pcts", "chosen_recall")}
    fields["recall"] = {int(layer): tuple(values) for layer, values in stored["recall"].items()}
    calibration = Calibration(**(stored | fields))
    if not calibration.layers or not all(0 <= i < calibration.num_layers for i in calibration.layers):
        raise ValueError("layers out of range")
    return calibration


def _with_keep(rule: SelectionRule, keep_pct: float) -> SelectionRule:
    return SelectionRule(keep_pct, rule.chunk_tokens, rule.sink_tokens, rule.tail_tokens)


def _found(scores: Scores, prompt: PasskeyPrompt, rule: SelectionRule) -> float:
    """The share of the needle's tokens that the selection keeps."""
    kept = select(smooth(scores, DEFAULT_POOL_TOKENS), rule).indices
    return float(np.isin(np.arange(*prompt.needle), kept).mean())
