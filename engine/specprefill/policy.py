"""Speculative prefill, request by request: whether, with which scorer, and what is reported.

`decide` is the meaning of the request's fields (PROTOCOL.md, "SpecPrefill"); `SpecPrefill` is what a loaded
model can do; the work itself is in `sparse_prefill`.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ...protocol.frames import SpecPrefillAbility, SpecPrefillReport
from ...protocol.options import GenerationOptions
from ...protocol.stream import specprefill_not_run
from ..config import SpecPrefillConfig
from ..loading.loader import LoadedModel, LoadProgress, ModelLoadError, load_model
from ..loading.model_files import cache_folder
from ..prefill import DensePrefill, Prefill
from .calibration import load_calibration, model_fingerprint, scorer_for
from .model_support import check_carry_on, draft_mismatch, specprefill_support
from .prompt_runs import Decoder, prompt_runs
from .scoring import Scorer
from .selection import Range, SelectionRule
from .sparse_prefill import SparsePlan, SparsePrefill

logger = logging.getLogger(__name__)

SELF = "self"
NONE = "none"
UNFINISHED = "unfinished"
"""Reason of a request that ended while its prompt was read."""
FAILED = "failed"
"""Reason of a request whose scoring or sparse prefill failed: it was prefilled densely instead."""


def decide(
    options: GenerationOptions, config: SpecPrefillConfig, *, num_new: int, unavailable: str | None
) -> str | None:
    """Return why a prompt is read densely, or None: it is read sparsely.

    Args:
        num_new: tokens of the prompt that no cache holds.
        unavailable: why the model can't, or None.
    """
    if options.specprefill is False:
        return "off_by_request"
    if options.specprefill is None and not config.enabled:
        return "disabled"
    if unavailable is not None:
        return unavailable
    if num_new <= 1:
        return "prompt_cached"
    if options.specprefill is None and num_new <= config.threshold:
        return "below_threshold"
    return None


class SpecPrefill:
    """What a loaded model can do, found out once at load.

    Args:
        scorer: None if no prompt can be read sparsely; `ability` says why then.
        unavailable: the reason that requests are given: `no_draft_model` or `unsupported_model`.
    """

    def __init__(
        self,
        config: SpecPrefillConfig,
        target: Any,
        ability: SpecPrefillAbility,
        *,
        scorer: Scorer | None = None,
        carry_on: bool = False,
        unavailable: str | None = None,
    ) -> None:
        self._config = config
        self._target = target
        self._scorer = scorer
        self._carry_on = carry_on
        self._unavailable = unavailable
        self.ability = ability

    @classmethod
    def load(
        cls, config: SpecPrefillConfig, loaded: LoadedModel, on_progress: Callable[[LoadProgress], None]
    ) -> "SpecPrefill":
        """Check the target, and load the draft model if one is named.

        Raises:
            ModelLoadError: the draft model cannot be loaded, or its tokenizer is not the target's.
        """
        if config.draft_model == NONE:
            ability = SpecPrefillAbility(supported=False, reason="no draft model", draft=None)
            return cls(config, loaded.model, ability, unavailable="no_draft_model")
        if (reason := specprefill_support(loaded.model, loaded.config)) is not None:
            logger.info("SpecPrefill is not available: %s", reason)
            ability = SpecPrefillAbility(supported=False, reason=reason, draft=None)
            return cls(config, loaded.model, ability, unavailable="unsupported_model")
        draft = loaded if config.draft_model == SELF else _load_draft(config.draft_model, loaded, on_progress)
        name = SELF if draft is loaded else draft.name
        fingerprint = model_fingerprint(draft.model, draft.config)
        calibration = load_calibration(fingerprint, cache_folder() / "calibrations")
        if calibration is None:
            logger.warning(
                "SpecPrefill scores with uncalibrated layers of %s; `headrace calibrate --model %s` finds "
                "better ones",
                draft.name,
                draft.path,
            )
        scorer = scorer_for(draft.model, calibration, name)
        carry_on = draft is loaded and check_carry_on(loaded.model, scorer.last_layer, loaded.config)
        ability = SpecPrefillAbility(supported=True, reason=None, draft=name)
        return cls(config, loaded.model, ability, scorer=scorer, carry_on=carry_on)

    def start(
        self,
        options: GenerationOptions,
        tokens: Sequence[int],
        cache: list[Any],
        num_cached: int,
        protected: Sequence[Range] = (),
        *,
        stays_dense: bool = False,
    ) -> tuple[Prefill, SpecPrefillReport]:
        """Return how a prompt is read, and the report as it stands before that.

        Args:
            tokens: the whole prompt; the last one is left to the first decode step.
            cache: holds the first `num_cached` of them.
            protected: ranges of the prompt that are kept whole.
            stays_dense: it has been read densely before, and there are tokens of the answer already.
        """
        num_new = len(tokens) - num_cached
        reason = decide(options, self._config, num_new=num_new, unavailable=self._unavailable)
        if reason is None and stays_dense:
            reason = "prompt_cached" if options.specprefill else "below_threshold"
        if reason is None and self._scorer is not None:
            keep_pct = options.specprefill_keep_pct or self._config.keep_pct
            rule = SelectionRule(
                keep_pct, self._config.chunk_tokens, self._config.sink_tokens, self._config.tail_tokens
            )
            plan = SparsePlan(self._scorer, rule, carry_on=self._carry_on, protected=tuple(protected))
            report = specprefill_not_run(options, UNFINISHED, len(tokens), num_cached)
            return SparsePrefill(self._target, tokens, cache, num_cached, plan), report
        report = specprefill_not_run(options, reason or FAILED, len(tokens), num_cached)
        return DensePrefill(self._target, tokens[num_cached:-1], cache), report


def report_of(
    options: GenerationOptions,
    prefill: SparsePrefill,
    prompt_tokens: Sequence[int],
    new_decoder: Callable[[], Decoder],
) -> SpecPrefillReport:
    """Return what a complete sparse prefill did, as the wire shows it.

    Tokens of the answer that an earlier engine made were read behind the prompt; they don't count.
    """
    done = prefill.report
    report: SpecPrefillReport = {
        "requested": options.specprefill,
        "applied": done.applied,
        "reason": done.reason,
        "keep_pct": done.keep_pct,
        "prompt_tokens": done.prompt_tokens,
        "uncached_tokens": done.sparse_tokens,
        "kept_tokens": done.kept_tokens,
        "score_ms": round(done.score_ms, 3),
        "prefill_ms": round(done.prefill_ms, 3),
        "draft": done.draft,
    }
    if options.specprefill_debug:
        end = len(prompt_tokens)
        kept = [(start, min(stop, end)) for start, stop in done.kept_ranges if start < end]
        num_cached = min(done.prompt_tokens - done.sparse_tokens, end)
        report["kept_ranges"] = [list(each) for each in kept]
        report["prompt_runs"] = prompt_runs(prompt_tokens, num_cached, kept, new_decoder)
    return report


def _load_draft(name: str, target: LoadedModel, on_progress: Callable[[LoadProgress], None]) -> LoadedModel:
    draft = load_model(name, on_progress=on_progress)
    if (mismatch := draft_mismatch(target.tokenizer, draft.tokenizer)) is not None:
        raise ModelLoadError(
            f"{draft.name} cannot be the draft model of {target.name}: {mismatch}. Name a draft model of the "
            f"same family, or use --specprefill-draft-model self."
        )
    return draft
