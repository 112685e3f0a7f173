"""One request inside the engine: what is known of it, and the events that tell its story."""

import time
from dataclasses import dataclass, field

from ..protocol.frames import FinishReason, RequestId, SpecPrefillReport, Status, TokenLogprob
from ..protocol.messages import CancelReason, Delta, End, Progress, Submit
from ..protocol.stream import cancelled_error
from .prefill import Prefill
from .prompt import Prompt
from .sampling import LogitsProcessor, Sampler
from .text import Answer, Piece


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
    num_cached: int
    specprefill: SpecPrefillReport
    arrived_s: float
    admitted_s: float
    phase_began_s: float
    phase_ms: dict[str, float] = field(default_factory=dict)
    last_progress_s: float = 0.0
    uid: int = -1
    """The batch's name for the request, while it decodes."""
    first_token_s: float | None = None
    num_sent: int = 0
    """Tokens that deltas have carried."""
    held: Delta | None = None
    """Tokens whose text is held back."""

    @property
    def rid(self) -> RequestId:
        """The server's name for the request."""
        return self.message.rid

    @property
    def may_store(self) -> bool:
        """Whether the request's cache may serve later ones. A sparse one never may: it lacks tokens."""
        return self.message.options.cache_prompt and not self.specprefill["applied"]

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

    def emit(
        self, piece: Piece, logprobs: list[TokenLogprob], num_tokens: int, *, last: bool = False
    ) -> list[Delta]:
        """Return a piece with the tokens before it whose text was held back, or nothing: it is held back too.

        With the last piece all tokens go out, also those without any text.
        """
        delta = Delta(self.rid, piece.text, num_tokens, piece.reasoning, piece.tool_calls, logprobs)
        if self.held is not None:
            self.held.merge(delta)
            delta, self.held = self.held, None
        if piece or (last and delta.n):
            self.num_sent += delta.n
            return [delta]
        self.held = delta
        return []

    def end(
        self, status: Status, *, finish: FinishReason | None = None, reason: CancelReason | None = None
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
            reason=reason,
            error=None if reason is None else cancelled_error(reason),
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
            specprefill=self.specprefill,
        )


def _rounded(value: float | None) -> float | None:
    """Microseconds are enough for a client."""
    return None if value is None else round(value, 3)
