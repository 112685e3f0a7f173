"""From a submitted message to a request that is ready to be prefilled: everything that may be refused."""

import time
from typing import Any

from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from ..protocol.errors import ErrorCode, RequestError
from ..protocol.messages import Submit
from ..protocol.options import ChatInput
from .loading.loader import LoadedModel
from .prefill import DensePrefill
from .prompt import Prompt, system_prompt_tokens
from .prompt_cache import PromptCache, detach
from .request import Request
from .sampling import make_processors, make_sampler
from .specprefill.policy import SpecPrefill
from .text import PRIMING_TOKENS, Answer, AnswerFormat, Detokenizer


class Admission:
    """Builds requests for one model."""

    def __init__(
        self, loaded: LoadedModel, prompt_cache: PromptCache, specprefill: SpecPrefill, *, keep_system: bool
    ) -> None:
        self._loaded = loaded
        self._prompt_cache = prompt_cache
        self._specprefill = specprefill
        self._keep_system = keep_system
        self._format = AnswerFormat(loaded.tokenizer)

    def prepare(self, message: Submit, prompt: Prompt, arrived_s: float) -> Request:
        """Return the request of a message; tokens that an earlier engine made count as its own.

        Raises:
            RequestError: the model cannot serve it; the error names the field.
        """
        options, tokenizer = message.options, self._loaded.tokenizer
        max_tokens = self._token_limit(message, len(prompt.tokens))
        processors = make_processors(options, self._loaded.vocab_size)
        tokens = prompt.tokens + message.generated
        cache, num_cached = self._cached(message, tokens)
        protected = []
        if self._keep_system and isinstance(message.input, ChatInput):
            protected.append((0, system_prompt_tokens(tokenizer, message.input, prompt)))
        prefill, report = self._specprefill.start(
            options,
            tokens,
            cache,
            num_cached,
            [*protected, (len(prompt.tokens), len(tokens))],
            stays_dense=message.stays_dense,
        )
        answer = Answer(
            Detokenizer(tokenizer, prompt.tokens[-PRIMING_TOKENS:]),
            self._format,
            stops=options.stop,
            starts_in=prompt.starts_in,
            tools=prompt.tools,
            call_id_prefix=f"call_{message.rid}_",
        )
        for token in message.generated:
            if token not in tokenizer.eos_token_ids:
                answer.push(token)
        now = time.monotonic()
        return Request(
            message=message,
            prompt=prompt,
            max_tokens=max_tokens,
            sampler=make_sampler(options, self._loaded.vocab_size, len(message.generated)),
            processors=processors,
            answer=answer,
            prefill=prefill,
            dense_again=lambda: DensePrefill(self._loaded.model, tokens[num_cached:-1], cache),
            new_decoder=lambda: Detokenizer(tokenizer),
            num_cached=num_cached,
            specprefill=report,
            generated=list(message.generated),
            num_sent=len(message.generated),
            credit=message.credit,
            protected=protected,
            arrived_s=arrived_s,
            asked_s=arrived_s,
            admitted_s=now,
            phase_began_s=now,
        )

    def prepare_again(self, request: Request) -> None:
        """Make a paused request ready to be prefilled: nearly nothing if its cache could be held."""
        tokens, held = request.tokens, request.held_cache
        request.held_cache = None
        if held is not None:
            cache, num_cached = held, len(tokens) - 1
        else:
            cache, num_cached = self._cached(request.message, tokens)
        request.prefill, _ = self._specprefill.start(
            request.message.options,
            tokens,
            cache,
            num_cached,
            [*request.protected, (len(request.prompt.tokens), len(tokens))],
            stays_dense=not request.specprefill["applied"],
        )
        request.asked_s = time.monotonic()
        request.dense_again = lambda: DensePrefill(self._loaded.model, tokens[num_cached:-1], cache)
        request.sampler = make_sampler(
            request.message.options, self._loaded.vocab_size, len(request.generated)
        )

    def hold(self, request: Request, tokens: list[int], cache: list[Any]) -> None:
        """Keep the cache of a request that is about to pause, if it can be cut before its last token.

        A sparse cache lacks tokens, and a recurrent one cannot be cut: such a prompt is read again.
        """
        if request.specprefill["applied"] or not can_trim_prompt_cache(cache):
            return
        surplus = len(tokens) - (len(request.tokens) - 1)
        if surplus >= 0:
            trim_prompt_cache(cache, surplus)
            detach(cache)
            request.held_cache = cache

    def _cached(self, message: Submit, tokens: list[int]) -> tuple[list[Any], int]:
        cache, num_cached = None, 0
        if message.options.cache_prompt:
            cache, num_cached = self._prompt_cache.fetch(message.tenant, tokens)
        return (make_prompt_cache(self._loaded.model), 0) if cache is None else (cache, num_cached)

    def _token_limit(self, message: Submit, num_prompt: int) -> int:
        """Return how many tokens a request may generate.

        Raises:
            RequestError: the prompt, or the prompt and the limit asked for, do not fit the context.
        """
        context = self._loaded.context_length
        limit = message.options.max_tokens or context
        room = context - num_prompt
        if room < 1 or (limit > room and not message.max_tokens_is_default):
            field_name = "messages" if isinstance(message.input, ChatInput) else "prompt"
            raise RequestError(
                ErrorCode.CONTEXT_TOO_LONG,
                f"{num_prompt} prompt tokens and max_tokens {limit} do not fit a context of {context} tokens",
                param=field_name if room < 1 else "max_tokens",
            )
        return min(limit, room)
