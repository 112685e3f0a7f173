"""An engine without a model, for tests and for measuring everything that is not a model.

Same interface as the real one. A prompt token is a word. The tokens of an answer depend on the prompt and
the seed only, so that a test knows what must come: `scripted_token`; a token's id is its index. `max_tokens`
is honoured, and nothing else ends an answer; options that need a model (sampling, stop strings, logprobs)
change nothing.

A prompt that contains one of these misbehaves when its third token is due:

    [[crash]]   the process kills itself with SIGKILL
    [[hang]]    the step sleeps for an hour
    [[raise]]   the step raises
    [[print]]   the process writes a megabyte to stdout and to stderr, then goes on

and one that contains one of these otherwise:

    [[late]]    the process kills itself with SIGKILL before the ninth token that this engine makes of it
    [[leak]]    every token costs 4 MiB that are never given back

A prompt that contains `[[clock]]` is answered with the times at which its tokens were made, by
`time.monotonic()`, in seconds, each after a space.

A configuration whose `model` is one of these misbehaves while loading:

    fault:permanent        the load fails and will never succeed
    fault:transient        the load fails and may succeed later
    fault:crash            the process kills itself with SIGKILL
    fault:crash-once:PATH  the same if PATH does not exist, which it then does
"""

import os
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from ..protocol.frames import RequestId, Status, Timings, Usage
from ..protocol.messages import (
    CancelReason,
    Delta,
    End,
    EngineInfo,
    EngineStats,
    Event,
    Loading,
    Progress,
    Submit,
)
from ..protocol.options import ChatInput, CompletionInput
from ..protocol.stream import cancelled_error, specprefill_not_run
from .config import EngineConfig
from .interface import EngineLoadError, OnLoading

CONTEXT_TOKENS = 1 << 20
FAULTS = ("[[crash]]", "[[hang]]", "[[raise]]", "[[print]]", "[[late]]", "[[leak]]")
CLOCK = "[[clock]]"
FAULT_TOKEN = 2
"""Index of the token that most faults strike at."""
LATE_TOKENS = 8
"""Tokens that `[[late]]` lets an engine make."""
LEAK_BYTES = 4 << 20
"""What `[[leak]]` costs a token."""
ROUNDS_PER_STEP = 8
"""Decode rounds in one `step` when there is no delay, so that one report carries many tokens."""
_LOAD_STEP_S = 0.05
_MIN_SLEEP_S = 1e-4
_FLOOD_BYTES = 1 << 20


def prompt_text(source: CompletionInput | ChatInput) -> str:
    """Return a request's prompt as one string, whose words are its tokens."""
    if isinstance(source, ChatInput):
        return "\n".join(message.text for message in source.messages)
    if isinstance(source.prompt, str):
        return source.prompt
    return " ".join(str(token) for token in source.prompt)


def token_prefix(prompt: str, seed: int) -> str:
    """Return what all tokens of an answer begin with."""
    return f" {blake2b(f'{seed} {prompt}'.encode(), digest_size=2).hexdigest()}-"


def scripted_token(prompt: str, seed: int, index: int) -> str:
    """Return token `index` of the answer to a prompt."""
    return f"{token_prefix(prompt, seed)}{index}"


@dataclass(slots=True, eq=False)
class _Request:
    message: Submit
    prefix: str
    fault: str | None
    is_clock: bool
    num_prompt_tokens: int
    max_tokens: int
    submitted_s: float
    report_at_s: float
    num_tokens: int
    """Tokens of the answer so far, those of earlier engines included."""
    credit: int | None
    num_prefilled: int = 0
    cancel_reason: CancelReason | None = None
    first_token_s: float | None = None
    prefilled_s: float | None = None


@dataclass(slots=True)
class _Clock:
    """Sleeps, and carries what is too short to sleep over to the next time."""

    debt_s: float = 0.0

    def spend(self, duration_s: float) -> None:
        self.debt_s += duration_s
        if self.debt_s >= _MIN_SLEEP_S:
            started_s = time.perf_counter()
            time.sleep(self.debt_s)
            self.debt_s -= time.perf_counter() - started_s


@dataclass(slots=True)
class _Totals:
    prefill_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    clock: _Clock = field(default_factory=_Clock)


class ScriptedEngine:
    """Implements `interface.Engine`."""

    def __init__(self, config: EngineConfig, load_s: float = 0.0) -> None:
        self._config = config
        self._waiting: deque[_Request] = deque()
        self._prefilling: deque[_Request] = deque()
        self._decoding: list[_Request] = []
        self._requests: dict[RequestId, _Request] = {}
        self._paused: dict[RequestId, _Request] = {}
        self._cancelled: list[_Request] = []
        self._leaked: list[bytearray] = []
        self._totals = _Totals()
        self._info = EngineInfo(
            model=config.name,
            context_length=CONTEXT_TOKENS,
            vocab_size=1 << 16,
            chat=True,
            specprefill={"supported": False, "reason": "unsupported_model", "draft": None},
            device="none",
            dtype="none",
            num_parameters=0,
            weight_bytes=0,
            load_s=load_s,
        )

    @classmethod
    def load(cls, config: EngineConfig, on_loading: OnLoading) -> "ScriptedEngine":
        """Take `scripted_load_s` to load nothing.

        Raises:
            EngineLoadError: the configuration asks for it.
        """
        num_steps = round(config.scripted_load_s / _LOAD_STEP_S)
        for done in range(num_steps):
            on_loading(Loading("load", done, num_steps, "steps"))
            time.sleep(_LOAD_STEP_S)
        on_loading(Loading("load", num_steps, num_steps, "steps"))
        match (config.model or "").split(":", 2):
            case ["fault", "permanent"]:
                raise EngineLoadError("this model never loads: name another", permanent=True)
            case ["fault", "transient"]:
                raise EngineLoadError("this model did not load: try again", permanent=False)
            case ["fault", "crash"]:
                _kill_self()
            case ["fault", "crash-once", path]:
                if not Path(path).exists():
                    Path(path).touch()
                    _kill_self()
        return cls(config, config.scripted_load_s)

    @property
    def info(self) -> EngineInfo:
        """Facts about the model that isn't there."""
        return self._info

    @property
    def busy(self) -> bool:
        """Whether there are requests that do not wait for credit."""
        return bool(self._cancelled) or len(self._requests) > len(self._paused)

    @property
    def stats(self) -> EngineStats:
        """Gauges and counters as they stand now."""
        return EngineStats(
            waiting=len(self._waiting),
            prefilling=len(self._prefilling),
            decoding=len(self._decoding),
            paused=len(self._paused),
            memory_bytes=LEAK_BYTES * len(self._leaked),
            prefill_tokens_total=self._totals.prefill_tokens,
            completion_tokens_total=self._totals.completion_tokens,
            steps_total=self._totals.steps,
        )

    def submit(self, message: Submit) -> None:
        """Take a request; its options must be resolved."""
        max_tokens, seed = message.options.max_tokens, message.options.seed
        if max_tokens is None or seed is None:
            raise ValueError("options are not resolved")
        prompt = prompt_text(message.input)
        now_s = time.monotonic()
        request = _Request(
            message=message,
            prefix=token_prefix(prompt, seed),
            fault=next((fault for fault in FAULTS if fault in prompt), None),
            is_clock=CLOCK in prompt,
            num_prompt_tokens=max(1, len(prompt.split())),
            max_tokens=max_tokens,
            submitted_s=now_s,
            report_at_s=now_s,
            num_tokens=len(message.generated),
            credit=message.credit,
        )
        self._requests[message.rid] = request
        self._waiting.append(request)

    def cancel(self, rid: RequestId, reason: CancelReason) -> None:
        """Let a request go at the next step; the first reason counts."""
        request = self._requests.get(rid)
        if request is not None and request.cancel_reason is None:
            request.cancel_reason = reason
            self._cancelled.append(request)

    def credit(self, rid: RequestId, tokens: int) -> None:
        """Allow a request with a `window` so many more tokens."""
        request = self._requests.get(rid)
        if request is None or request.credit is None:
            return
        request.credit += tokens
        if self._paused.pop(rid, None) is not None:
            self._decoding.append(request)

    def step(self) -> list[Event]:
        """Let cancelled requests go, read a chunk of prompts, decode a token of every request."""
        events: list[Event] = []
        self._drop_cancelled(events)
        while self._waiting and len(self._prefilling) + len(self._decoding) < self._config.max_batch_size:
            self._prefilling.append(self._waiting.popleft())
        self._prefill(events)
        self._decode(events)
        self._report_waiting(events)
        return events

    def close(self) -> None:
        """Forget everything."""
        self._requests.clear()
        self._waiting.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._paused.clear()

    # --- the parts of a step ---

    def _drop_cancelled(self, events: list[Event]) -> None:
        for request in self._cancelled:
            if request.message.rid in self._requests:
                for holder in (self._waiting, self._prefilling, self._decoding):
                    if request in holder:
                        holder.remove(request)
                self._paused.pop(request.message.rid, None)
                events.append(self._end(request, "cancelled"))
        self._cancelled.clear()

    def _prefill(self, events: list[Event]) -> None:
        """Read prompts, first come first served, up to one chunk of tokens."""
        if not self._prefilling:
            return
        config, speed = self._config, self._config.scripted_prefill_tokens_per_s
        chunk = int(speed * config.chunk_target_ms / 1000)
        budget = min(max(chunk, config.min_chunk_tokens), config.max_chunk_tokens)
        spent = 0
        while self._prefilling and spent < budget:
            request = self._prefilling[0]
            num_tokens = min(budget - spent, request.num_prompt_tokens - request.num_prefilled)
            started = request.num_prefilled == 0
            request.num_prefilled += num_tokens
            spent += num_tokens
            if started or time.monotonic() >= request.report_at_s:
                events.append(self._progress(request))
            if request.num_prefilled == request.num_prompt_tokens:
                self._prefilling.popleft()
                request.prefilled_s = time.monotonic() + spent / speed
                if request.num_tokens >= request.max_tokens:
                    events.append(self._end(request, "completed"))
                else:
                    self._decoding.append(request)
        self._totals.prefill_tokens += spent
        self._totals.clock.spend(spent / speed)

    def _decode(self, events: list[Event]) -> None:
        if not self._decoding:
            return
        delay_s = self._config.scripted_token_delay_ms / 1000
        one_round = delay_s > 0 or any(request.fault for request in self._decoding)
        for _ in range(1 if one_round else ROUNDS_PER_STEP):
            if not self._decoding:
                break
            if delay_s:
                self._totals.clock.spend(delay_s)
            self._decode_round(events)

    def _decode_round(self, events: list[Event]) -> None:
        left = False
        self._totals.completion_tokens += len(self._decoding)
        self._totals.steps += 1
        for request in self._decoding:
            index = request.num_tokens
            if request.first_token_s is None:
                request.first_token_s = time.monotonic()
            if request.fault:
                self._strike(request.fault, index, index - len(request.message.generated))
            text = f" {time.monotonic():.6f}" if request.is_clock else f"{request.prefix}{index}"
            events.append(Delta(request.message.rid, text, 1, tokens=[index]))
            request.num_tokens = index + 1
            if index + 1 == request.max_tokens:
                events.append(self._end(request, "completed"))
                left = True
            elif request.credit is not None:
                request.credit -= 1
                if request.credit <= 0:
                    self._paused[request.message.rid] = request
                    left = True
        if left:
            self._decoding = [
                r for r in self._decoding if r.num_tokens < r.max_tokens and r.message.rid not in self._paused
            ]

    def _strike(self, fault: str, index: int, num_made: int) -> None:
        """Misbehave before a token, the `num_made`-th that this engine makes of its request."""
        if fault == "[[leak]]":
            self._leaked.append(bytearray(b"x" * LEAK_BYTES))
        elif fault == "[[late]]" and num_made == LATE_TOKENS:
            _kill_self()
        elif index == FAULT_TOKEN:
            _strike(fault)

    def _report_waiting(self, events: list[Event]) -> None:
        if not self._waiting:
            return
        now_s = time.monotonic()
        for request in self._waiting:
            if now_s >= request.report_at_s:
                events.append(self._progress(request, "queue"))

    # --- what requests hear ---

    def _progress(self, request: _Request, phase: str = "prefill") -> Progress:
        request.report_at_s = time.monotonic() + self._config.progress_interval_s
        if phase == "queue":
            return Progress(request.message.rid, "queue", 0, None)
        total = request.num_prompt_tokens
        return Progress(request.message.rid, "prefill", request.num_prefilled, total, prompt_tokens=total)

    def _end(self, request: _Request, status: Status) -> End:
        message, reason = request.message, request.cancel_reason
        del self._requests[message.rid]
        num_prompt_tokens = request.num_prompt_tokens if request.num_prefilled else 0
        usage: Usage = {
            "prompt_tokens": num_prompt_tokens,
            "cached_tokens": 0,
            "completion_tokens": request.num_tokens,
            "total_tokens": num_prompt_tokens + request.num_tokens,
        }
        is_cancelled = status == "cancelled"
        return End(
            rid=message.rid,
            status=status,
            finish_reason=None if is_cancelled else "length",
            reason=reason if is_cancelled else None,
            error=cancelled_error(reason) if is_cancelled and reason is not None else None,
            usage=usage,
            timings=_timings(request, time.monotonic()),
            specprefill=specprefill_not_run(message.options, "disabled", num_prompt_tokens),
        )


def _timings(request: _Request, now_s: float) -> Timings:
    timings: Timings = {
        "queue_ms": request.message.queue_ms,
        "score_ms": None,
        "prefill_ms": None,
        "ttft_ms": None,
        "decode_ms": None,
        "tokens_per_s": None,
    }
    if request.prefilled_s is not None:
        timings["prefill_ms"] = (request.prefilled_s - request.submitted_s) * 1000
    if request.first_token_s is not None:
        decode_s = now_s - request.first_token_s
        timings["ttft_ms"] = request.message.queue_ms + (request.first_token_s - request.submitted_s) * 1000
        timings["decode_ms"] = decode_s * 1000
        timings["tokens_per_s"] = (request.num_tokens - 1) / decode_s if decode_s > 0 else None
    return timings


def _strike(fault: str) -> None:
    match fault:
        case "[[crash]]":
            _kill_self()
        case "[[hang]]":
            time.sleep(3600)
        case "[[raise]]":
            raise RuntimeError("the prompt asked for it")
        case "[[print]]":
            print("x" * _FLOOD_BYTES)
            print("y" * _FLOOD_BYTES, file=sys.stderr)
            sys.stdout.flush()


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # Until the signal is here.
