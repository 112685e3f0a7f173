"""The engine: continuous batching over one MLX model. One step is a page: `MlxEngine.step`.

A request waits, is prefilled, decodes, and leaves with one `End`, from wherever it is. Prompts are read here,
a chunk between two decode steps (`prefill`); tokens come from mlx-lm's `BatchGenerator`, which gets a request
with its cache complete and one token left to read.
"""

import logging
import time
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from ..protocol.errors import ErrorCode, HeadraceError, ServerError
from ..protocol.frames import FinishReason, RequestId, TokenLogprob, TopLogprob
from ..protocol.messages import CancelReason, End, EngineInfo, EngineStats, Event, Loading, Progress, Submit
from ..protocol.stream import cancelled_error, end_without_engine
from .admission import Admission
from .config import EngineConfig
from .interface import EngineLoadError, OnLoading
from .loading.loader import LoadedModel, LoadProgress, ModelLoadError, load_model
from .prefill import DensePrefill
from .prefill_schedule import PrefillSchedule, warm_up
from .prompt_cache import PromptCache
from .request import Request
from .specprefill.policy import SpecPrefill
from .text import Piece
from .tokenizing import Tokenizing, Waiting

logger = logging.getLogger(__name__)

TOKENIZING_WAIT_S = 0.02
"""How long a step waits for a prompt to be tokenized if it has nothing else to do."""


class MlxEngine:
    """Continuous batching over one MLX model; see `interface.Engine` for the contract.

    Build it with `load`, and use it on the thread that loaded it: MLX arrays belong to a thread's stream.
    """

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, specprefill: SpecPrefill, load_s: float
    ) -> None:
        self._config = config
        self._loaded = loaded
        self._model = loaded.model
        self._tokenizer = loaded.tokenizer
        self._batch = BatchGenerator(
            self._model,
            stop_tokens=[(token,) for token in sorted(self._tokenizer.eos_token_ids)],
            completion_batch_size=config.max_batch_size,
            prefill_batch_size=config.max_batch_size,
        )
        self._prompt_cache = PromptCache(config.prompt_cache_entries, config.prompt_cache_bytes)
        self._admission = Admission(
            loaded, self._prompt_cache, specprefill, keep_system=config.specprefill.keep_system_prompt
        )
        self._tokenizing = Tokenizing(loaded)
        self._waiting: list[Waiting] = []
        self._decoding: dict[int, Request] = {}
        self._paused: dict[RequestId, Request] = {}
        self._cancels: dict[RequestId, CancelReason] = {}
        self._last_queue_progress_s = 0.0
        self._cached_tokens_total = 0
        self._completion_tokens_total = 0
        self._steps_total = 0
        self._prefills = PrefillSchedule(
            config, self._batch.stream, *warm_up(self._model, self._batch.stream)
        )
        self._info = EngineInfo(
            model=config.name,
            context_length=loaded.context_length,
            vocab_size=loaded.vocab_size,
            chat=bool(self._tokenizer.has_chat_template),
            specprefill=specprefill.ability,
            device=str(mx.default_device().type).rsplit(".", 1)[-1],
            dtype=str(loaded.dtype).rsplit(".", 1)[-1],
            num_parameters=loaded.num_parameters,
            weight_bytes=loaded.weight_bytes,
            load_s=load_s,
        )

    @classmethod
    def load(cls, config: EngineConfig, on_loading: OnLoading) -> "MlxEngine":
        """Load the model and return the engine.

        Raises:
            EngineLoadError: the model cannot be loaded; the message says what to do.
        """
        began_s = time.monotonic()

        def report(progress: LoadProgress) -> None:
            on_loading(Loading(progress.stage, progress.done, progress.total, progress.unit))

        try:
            loaded = load_model(config.model, dequantize=config.dequantize, on_progress=report)
            on_loading(Loading("warm up", 0, None, "tokens"))
            specprefill = SpecPrefill.load(config.specprefill, loaded, report)
        except ModelLoadError as error:
            raise EngineLoadError(str(error)) from error
        return cls(config, loaded, specprefill, time.monotonic() - began_s)

    # --- the interface ---

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded model."""
        return self._info

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._waiting or self._prefills.requests or self._decoding or self._cancels)

    @property
    def stats(self) -> EngineStats:
        """Gauges and counters as they stand now."""
        scoring = sum(request.prefill.phase == "score" for request in self._prefills.requests)
        return EngineStats(
            waiting=len(self._waiting),
            scoring=scoring,
            prefilling=len(self._prefills.requests) - scoring,
            decoding=len(self._decoding),
            paused=len(self._paused),
            prompt_cache_entries=self._prompt_cache.num_entries,
            prompt_cache_bytes=self._prompt_cache.nbytes,
            memory_bytes=mx.get_active_memory() + mx.get_cache_memory(),
            prefill_tokens_total=self._prefills.tokens_total,
            cached_tokens_total=self._cached_tokens_total,
            completion_tokens_total=self._completion_tokens_total,
            steps_total=self._steps_total,
        )

    def submit(self, message: Submit) -> None:
        """Take a request."""
        self._waiting.append(self._tokenizing.begin(message, time.monotonic()))

    def cancel(self, rid: RequestId, reason: CancelReason) -> None:
        """Let a request go at the next step."""
        self._cancels[rid] = reason

    def credit(self, rid: RequestId, tokens: int) -> None:
        """Allow a request with a `window` so many more tokens."""
        request = self._paused.pop(rid, None)
        if request is None:
            for request in (*self._prefills.requests, *self._decoding.values()):
                if request.rid == rid and request.credit is not None:
                    request.credit += tokens
            return
        request.credit = tokens
        self._admission.prepare_again(request)
        self._prefills.requests.append(request)

    def step(self) -> list[Event]:
        """Let cancelled requests go, admit new ones, decode a token for each, read prompts for a while."""
        events: list[Event] = []
        self._apply_cancels(events)
        self._admit(events)
        if self._decoding:
            self._decode(events)
        if self._prefills.requests:
            self._read_prompts()
        self._report_progress(events)
        self._steps_total += 1
        return events

    def close(self) -> None:
        """Give everything back."""
        self._tokenizing.close()
        self._batch.close()

    # --- cancelling ---

    def _apply_cancels(self, events: list[Event]) -> None:
        cancels, self._cancels = self._cancels, {}
        if not cancels:
            return
        for waiting in [waiting for waiting in self._waiting if waiting.message.rid in cancels]:
            self._waiting.remove(waiting)
            self._tokenizing.drop(waiting)
            events.append(self._end_unadmitted(waiting, cancels[waiting.message.rid]))
        for request in [r for r in self._prefills.requests if r.rid in cancels]:
            self._prefills.requests.remove(request)
            self._keep_half_read(request)
            events.append(request.end("cancelled", reason=cancels[request.rid]))
        for request in [r for r in self._decoding.values() if r.rid in cancels]:
            self._take_out(request)
            events.append(request.end("cancelled", reason=cancels[request.rid]))
        for request in [r for r in self._paused.values() if r.rid in cancels]:
            del self._paused[request.rid]
            events.append(request.end("cancelled", reason=cancels[request.rid]))

    def _keep_half_read(self, request: Request) -> None:
        """Keep what was read of a cancelled prompt: clients that cancel often ask again."""
        if isinstance(request.prefill, DensePrefill):
            # Not from `num_cached`: a paused request that reads again found another prefix than at first.
            num_read = len(request.tokens) - 1 - (request.prefill.total - request.prefill.processed)
            self._store(request, request.tokens[:num_read], request.prefill.cache)

    def _end_unadmitted(self, waiting: Waiting, why: CancelReason | HeadraceError) -> End:
        """Return the end of a request that was cancelled in line, or cannot be served at all."""
        message = waiting.message
        return end_without_engine(
            message.rid,
            message.options,
            status="failed" if isinstance(why, HeadraceError) else "cancelled",
            reason=why.code.value if isinstance(why, HeadraceError) else why,
            error=why.body() if isinstance(why, HeadraceError) else cancelled_error(why),
            queue_ms=message.queue_ms + (time.monotonic() - waiting.arrived_s) * 1e3,
            completion_tokens=len(message.generated),
        )

    # --- admission ---

    def _has_room(self) -> bool:
        num_reading = len(self._prefills.requests)
        return (
            num_reading < self._config.max_prefills
            and num_reading + len(self._decoding) < self._config.max_batch_size
        )

    def _admit(self, events: list[Event]) -> None:
        """Admit those that wait, while there is room; a prompt that is being tokenized is passed over."""
        if not (self._prefills.requests or self._decoding or events):
            self._tokenizing.wait_any(self._waiting, TOKENIZING_WAIT_S)
        for waiting in [waiting for waiting in self._waiting if self._tokenizing.is_ready(waiting)]:
            if not self._has_room():
                break
            self._waiting.remove(waiting)
            message = waiting.message
            try:
                prompt = self._tokenizing.finish(waiting)
                request = self._admission.prepare(message, prompt, waiting.arrived_s)
            except HeadraceError as error:
                events.append(self._end_unadmitted(waiting, error))
                continue
            except Exception:
                logger.exception("%s could not be admitted", message.rid, extra={"rid": message.rid})
                events.append(self._end_unadmitted(waiting, _fault()))
                continue
            if (finish := self._already_finished(request)) is not None:
                self._finish(request, Piece(), [], 0, finish, events)
                continue
            self._cached_tokens_total += request.num_cached
            self._prefills.requests.append(request)
            request.last_progress_s = time.monotonic()
            events.append(request.progress())
            if message.options.echo and not message.generated:
                events += request.emit(Piece(request.prompt.text), [], 0)

    def _already_finished(self, request: Request) -> FinishReason | None:
        """Return how a request ended whose last token came from an engine that died before it said so."""
        generated = request.generated
        if generated and (request.answer.stopped or generated[-1] in self._tokenizer.eos_token_ids):
            return "stop"
        return "length" if len(generated) >= request.max_tokens else None

    # --- reading prompts ---

    def _read_prompts(self) -> None:
        """Spend a slice of time on prompts; those that are read, or short, join the batch."""
        room = self._config.max_batch_size - len(self._decoding)
        joining = self._prefills.run(others_decode=bool(self._decoding), room=room)
        if not joining:
            return
        # Rows join together in one step; the first one's caches decide how, and sparse ones know more.
        joining.sort(key=lambda request: not request.specprefill["applied"])
        unread = [request.prefill.total - request.prefill.processed + 1 for request in joining]
        uids = self._batch.insert(
            prompts=[request.tokens[-left:] for request, left in zip(joining, unread, strict=True)],
            max_tokens=[request.max_tokens - len(request.generated) for request in joining],
            caches=[request.prefill.cache for request in joining],
            all_tokens=[request.tokens[:-left] for request, left in zip(joining, unread, strict=True)],
            samplers=[request.sampler for request in joining],
            logits_processors=[request.processors for request in joining],
        )
        for uid, request in zip(uids, joining, strict=True):
            request.uid = uid
            self._decoding[uid] = request
        mx.clear_cache()

    def _report_progress(self, events: list[Event]) -> None:
        now = time.monotonic()
        for request in self._decoding.values():
            events += request.emit_held(self._config.progress_interval_s)
        for request in self._prefills.requests:
            if now - request.last_progress_s >= self._config.progress_interval_s:
                request.last_progress_s = now
                events.append(request.progress())
        if self._waiting and now - self._last_queue_progress_s >= self._config.progress_interval_s:
            self._last_queue_progress_s = now
            messages = [waiting.message for waiting in self._waiting]
            events += [Progress(message.rid, "queue", 0, None) for message in messages]

    # --- decoding ---

    def _decode(self, events: list[Event]) -> None:
        """Run one step of the batch and hand out its tokens."""
        prompts, responses = self._batch.next()
        now = time.monotonic()
        for prompt in prompts:
            if prompt.end_of_prompt and (request := self._decoding.get(prompt.uid)) is not None:
                request.phase_ms.setdefault("prefill", (now - request.phase_began_s) * 1e3)
        for response in responses:
            if (request := self._decoding.get(response.uid)) is None:
                continue
            if request.first_token_s is None:
                request.first_token_s = now
            self._completion_tokens_total += 1
            try:
                self._take_token(request, response, events)
            except Exception:
                logger.exception(
                    "a token of %s could not be handled", request.rid, extra={"rid": request.rid}
                )
                if request.uid in self._decoding:
                    self._take_out(request)
                events.append(request.end("failed", error=_fault().body()))

    def _take_token(self, request: Request, response: Any, events: list[Event]) -> None:
        """Make a request's next token text, and let the request go if it was the last."""
        request.generated.append(response.token)
        is_end_token = response.finish_reason == "stop"
        piece = Piece() if is_end_token else request.answer.push(response.token)
        logprobs = self._logprobs(request, response)
        finish: FinishReason | None = response.finish_reason
        if finish is not None:
            del self._decoding[request.uid]
            self._store(request, response.all_tokens, response.prompt_cache)
        elif request.answer.stopped:
            finish = "stop"
            self._take_out(request)
        if finish is not None:
            self._finish(request, piece, logprobs, 1, finish, events)
            return
        if request.credit is not None:
            request.credit -= 1
        pauses = request.credit is not None and request.credit <= 0
        events += request.emit(piece, logprobs, 1, last=pauses)
        if pauses:
            self._pause(request)

    def _finish(
        self,
        request: Request,
        piece: Piece,
        logprobs: list[TokenLogprob],
        num_tokens: int,
        finish: FinishReason,
        events: list[Event],
    ) -> None:
        """End a request that is complete and no longer held anywhere."""
        piece += request.answer.finish()
        if request.answer.stopped:
            finish = "stop"  # Also where the token that completes it is the last one allowed.
        events += request.emit(piece, logprobs, num_tokens, last=True)
        if finish == "stop" and request.answer.num_tool_calls:
            finish = "tool_calls"
        events.append(request.end("completed", finish=finish))

    def _pause(self, request: Request) -> None:
        """Take a request out of the batch until its client allows more tokens."""
        del self._decoding[request.uid]
        cache, tokens = self._batch.remove([request.uid], return_prompt_caches=True)[request.uid]
        self._admission.hold(request, tokens, cache)
        self._paused[request.rid] = request
        holding = [paused for paused in self._paused.values() if paused.held_cache is not None]
        if len(holding) > self._config.max_held_caches:
            holding[0].held_cache = None

    def _take_out(self, request: Request) -> None:
        """Take a request out of the batch before the batch would let it go."""
        del self._decoding[request.uid]
        caches = self._batch.remove([request.uid], return_prompt_caches=request.may_store)
        if request.uid in caches:
            cache, tokens = caches[request.uid]
            self._store(request, tokens, cache)

    def _store(self, request: Request, tokens: list[int], cache: list[Any]) -> None:
        if request.may_store:
            self._prompt_cache.store(request.message.tenant, tokens, cache)

    def _logprobs(self, request: Request, response: Any) -> list[TokenLogprob]:
        """Return a token's log probability and the likeliest alternatives, after penalties and biases."""
        options = request.message.options
        if not options.logprobs:
            return []
        logprobs, ids = response.logprobs, [response.token]
        if options.top_logprobs:
            top = mx.argpartition(-logprobs, kth=options.top_logprobs - 1)[: options.top_logprobs]
            ids += cast(list[int], top[mx.argsort(-logprobs[top])].tolist())
        values = cast(list[float], logprobs[mx.array(ids)].tolist())
        chosen, *top_logprobs = [
            TopLogprob(token=self._tokenizer.decode([token]), token_id=token, logprob=value)
            for token, value in zip(ids, values, strict=True)
        ]
        return [{**chosen, "top_logprobs": top_logprobs}]


def _fault() -> ServerError:
    """Return the error of a request that failed for a reason of ours; the others go on."""
    return ServerError(ErrorCode.ENGINE_ERROR, "the engine could not serve this request")
