"""Sampling per request inside one batch.

mlx-lm filters the distribution; the draw itself is ours, because its generator is global: two requests in
one batch would draw from one stream of random numbers. Here the key of token `i` is a function of the
request's seed and of `i` alone (a counter-based generator), so that the text does not depend on who else is
in the batch.
"""

import math
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import (
    apply_top_k,
    apply_top_p,
    greedy_sampler,
    make_logits_processors,
)

from ..protocol.errors import ErrorCode, RequestError
from ..protocol.options import GenerationOptions

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

PENALTY_CONTEXT_TOKENS = 256
"""The penalties for repetition, presence and frequency look at so many last tokens, prompt included."""
MAX_INVERSE_TEMPERATURE = 1e30
MIN_TOP_P = 1e-30
"""Temperatures and shares below what float32 can hold mean what the smallest ones do: the likeliest token."""

_MASK64 = (1 << 64) - 1


def token_key(seed: int, index: int) -> mx.array:
    """Return the random key of the `index`-th generated token.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) over the pair, as two 32-bit words.

    Returns:
        uint32 array of shape (2,).
    """
    z = (seed + 0x9E3779B97F4A7C15 * (index + 1)) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return mx.array([z >> 32, z & 0xFFFFFFFF], dtype=mx.uint32)


class SeededSampler:
    """Draws one token for each call, the `i`-th with the key of `i`.

    Args:
        filters: applied in order to log probabilities of shape (1, vocabulary).
        first_index: tokens drawn before, where another engine takes a stream over.
    """

    def __init__(
        self,
        seed: int,
        temperature: float,
        filters: list[Callable[[mx.array], mx.array]],
        first_index: int = 0,
    ) -> None:
        self._seed = seed
        self._inverse_temperature = min(1.0 / temperature, MAX_INVERSE_TEMPERATURE)
        self._filters = filters
        self._index = first_index

    def __call__(self, logprobs: mx.array) -> mx.array:
        for apply in self._filters:
            logprobs = apply(logprobs)
        key = token_key(self._seed, self._index)
        self._index += 1
        # In half precision a low temperature would make every one of them minus infinity.
        return mx.random.categorical(logprobs.astype(mx.float32) * self._inverse_temperature, key=key)


def _apply_min_p(logprobs: mx.array, log_min_p: float) -> mx.array:
    """Drop what is less likely than a share of the likeliest; mlx-lm's is compiled anew for each share."""
    likeliest = mx.max(logprobs, axis=-1, keepdims=True)
    return mx.where(logprobs < likeliest + log_min_p, -mx.inf, logprobs)


def make_sampler(options: GenerationOptions, vocab_size: int, first_index: int = 0) -> Sampler:
    """Return the sampler of a request: (1, vocabulary) log probabilities in, (1,) token ids out.

    All greedy requests share one sampler, so that mlx-lm picks their tokens in one call for the whole batch.
    """
    if not options.temperature:
        greedy: Sampler = greedy_sampler
        return greedy
    filters: list[Callable[[mx.array], mx.array]] = []
    if options.top_p < 1.0:
        # An array, not a number: mlx-lm compiles this filter anew for each number, which takes a second.
        top_p = mx.array(max(options.top_p, MIN_TOP_P))
        filters.append(lambda x: apply_top_p(x, top_p))
    if options.min_p > 0.0:
        log_min_p = math.log(options.min_p)
        filters.append(lambda x: _apply_min_p(x, log_min_p))
    if 0 < options.top_k < vocab_size:
        filters.append(lambda x: apply_top_k(x, options.top_k))
    return SeededSampler(options.seed or 0, options.temperature, filters, first_index)


def make_processors(options: GenerationOptions, vocab_size: int) -> list[LogitsProcessor]:
    """Return the processors that a request's penalties and biases need.

    Raises:
        RequestError: a biased token id is not in the vocabulary.
    """
    bias = {int(token): value for token, value in (options.logit_bias or {}).items()}
    if bias and max(bias) >= vocab_size:
        raise RequestError(
            ErrorCode.INVALID_PARAM,
            f"logit_bias: token id {max(bias)} is not in the vocabulary of {vocab_size} tokens",
            param="logit_bias",
        )
    processors: list[LogitsProcessor] = make_logits_processors(
        logit_bias=bias or None,
        repetition_penalty=options.repetition_penalty if options.repetition_penalty != 1.0 else None,
        repetition_context_size=PENALTY_CONTEXT_TOKENS,
        presence_penalty=options.presence_penalty or None,
        presence_context_size=PENALTY_CONTEXT_TOKENS,
        frequency_penalty=options.frequency_penalty or None,
        frequency_context_size=PENALTY_CONTEXT_TOKENS,
    )
    return processors
