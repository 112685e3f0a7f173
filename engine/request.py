"""One request inside the engine: what is known of it, and the events that tell its story."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..protocol.errors import ErrorBody
from ..protocol.frames import FinishReason, RequestId, SpecPrefillReport, Status, TokenLogprob
from ..protocol.messages import CancelReason, Delta, End, Progress, Submit
from ..protocol.stream import cancelled_error, specprefill_not_run
from .prefill import Prefill
from .prompt import Prompt
from .sampling import LogitsProcessor, Sampler
from .specprefill.policy import FAILED, report_of
from .specprefill.prompt_runs import Decoder
from .specprefill.selection import Range
from .specprefill.sparse_prefill import SparsePrefill
from .text import Answer, Piece

logger = logging.getLogger(__name__)


@dataclass
class Request:
    """A request from its admission on. Times are `time.monotonic()` in seconds."""

    message: Submit
    prompt: Prompt
    max_tokens: int
    sampler: Sampler
    processors: list[LogitsProcessor]
    answer: Answer
    prefill: Prefill
    dense_again: Callable[[], Prefill]
    """Starts over densely, on the cache as it was: for a sparse prefill that failed."""
    new_decoder: Callable[[], Decoder]
    """For the prompt's own text."""
    num_cached: int
    specprefill: SpecPrefillReport
    protected: list[Range]
    """Parts of the prompt that are never left out."""
    arrived_s: float
    asked_s: float
    """When it last came to be read: at its arrival, or when credit came."""
    admitted_s: float
    phase_began_s: float
    generated: list[int] = field(default_factory=list)
    """All tokens of the answer so far, those of earlier engines included."""
    credit: int | None = None
    """Tokens that may come before the client allows more; None: no limit."""
    held_cache: list[Any] | None = None
    """While paused: the cache of all tokens but the last."""
    phase_ms: dict[str, float] = field(default_factory=dict)
    last_progress_s: float = 0.0
    uid: int = -1
    """The batch's name for the request, while it decodes."""
    first_token_s: float | None = None
    num_sent: int = 0
    """Tokens that deltas have carried."""
    held: Delta | None = None
    """Tokens whose text is held back."""
    held_since_s: float = 0.0

    @property
    def rid(self) -> RequestId:
        """The server's name for the request."""
        return self.message.rid

    @property
    def may_store(self) -> bool:
        """Whether the request's cache may serve later ones. A sparse one never may: it lacks tokens."""
        return self.message.options.cache_prompt and not self.specprefill["applied"]

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer so far."""
        return self.prompt.tokens + self.generated

    def prefill_failed(self, error: Exception) -> None:
        """Start over densely. Nothing was sent yet, so the client only finds it in the report.

        Raises:
            Exception: the error itself, if the prefill was dense: a model that cannot read is no use.
        """
        if not isinstance(self.prefill, SparsePrefill):
            raise error
        logger.error(
            "SpecPrefill of %s failed, going on densely: %s",
            self.rid,
            error,
            exc_info=error,
            extra={"rid": self.rid},
        )
        self.prefill = self.dense_again()
        options, num_tokens = self.message.options, len(self.tokens)
        self.specprefill = specprefill_not_run(options, FAILED, num_tokens, self.num_cached)

    def prefill_complete(self) -> None:
        """Note what became of the prompt.

        One that is read again after a pause is no news, unless that made the cache a sparse one.
        """
        if not isinstance(self.prefill, SparsePrefill):
            return
        report = report_of(self.message.options, self.prefill, self.prompt.tokens, self.new_decoder)
        if self.first_token_s is None or report["applied"] > self.specprefill["applied"]:
            self.specprefill = report

    def progress(self) -> Progress:
        """Return how far the prompt has been read."""
        prefill = self.prefill
        return Progress(
            self.rid,
            prefill.phase,
            prefill.processed,
            prefill.total,
            self.num_cached,
            len(self.prompt.tokens),
        )

    def _prompt_report(self) -> SpecPrefillReport:
        """Return the report without the tokens that an earlier engine made: they were read too."""
        num_generated, report = len(self.message.generated), self.specprefill
        if not num_generated:
            return report
        return {
            **report,
            "prompt_tokens": len(self.prompt.tokens),
            "uncached_tokens": max(0, report["uncached_tokens"] - num_generated),
            "kept_tokens": max(0, report["kept_tokens"] - num_generated),
        }

    def emit(
        self, piece: Piece, logprobs: list[TokenLogprob], num_tokens: int, *, last: bool = False
    ) -> list[Delta]:
        """Return a piece with the tokens before it whose text was held back, or nothing: it is held back too.

        With the last piece all tokens go out, also those without any text.
        """
        tokens = self.generated[len(self.generated) - num_tokens :]
        is_thinned = self.specprefill["applied"]
        delta = Delta(
            self.rid,
            piece.text,
            num_tokens,
            piece.reasoning,
            piece.tool_calls,
            logprobs,
            tokens,
            is_thinned,
        )
        if self.held is not None:
            self.held.merge(delta)
            delta, self.held = self.held, None
        if piece or (last and delta.n):
            self.num_sent += delta.n
            return [delta]
        self.held = delta
        if delta.n == num_tokens:
            self.held_since_s = time.monotonic()
        return []

    def emit_held(self, longest_s: float) -> list[Delta]:
        """Return tokens without their text if it has been held back for so long: a tool call, mostly."""
        if self.held is None or not self.held.n or time.monotonic() - self.held_since_s < longest_s:
            return []
        return self.emit(Piece(), [], 0, last=True)

    def end(
        self,
        status: Status,
        *,
        finish: FinishReason | None = None,
        reason: CancelReason | None = None,
        error: ErrorBody | None = None,
    ) -> End:
        """Return the request's end. `completion_tokens` counts what deltas have carried, and nothing else."""
        num_prompt = len(self.prompt.tokens)
        queue_ms = self.message.queue_ms + (self.admitted_s - self.arrived_s) * 1e3
        ttft_ms = decode_ms = tokens_per_s = None
        if self.first_token_s is not None:
            ttft_ms = self.message.queue_ms + (self.first_token_s - self.arrived_s) * 1e3
            decode_ms = (time.monotonic() - self.first_token_s) * 1e3
            if self.num_sent > 1 and decode_ms > 0:
                tokens_per_s = (self.num_sent - 1) / decode_ms * 1e3
        return End(
            rid=self.rid,
            status=status,
            finish_reason=finish,
            reason=reason if error is None else error["code"],
            error=error or (None if reason is None else cancelled_error(reason)),
            usage={
                "prompt_tokens": num_prompt,
                "cached_tokens": self.num_cached,
                "completion_tokens": self.num_sent,
                "total_tokens": num_prompt + self.num_sent,
            },
            timings={
                "queue_ms": _rounded(queue_ms),
                "score_ms": _rounded(self.phase_ms.get("score")),
                "prefill_ms": _rounded(self.phase_ms.get("prefill")),
                "ttft_ms": _rounded(ttft_ms),
                "decode_ms": _rounded(decode_ms),
                "tokens_per_s": _rounded(tokens_per_s),
            },
            specprefill=self._prompt_report(),
        )


def _rounded(value: float | None) -> float | None:
    """Microseconds are enough for a client."""
    return None if value is None else round(value, 3)
