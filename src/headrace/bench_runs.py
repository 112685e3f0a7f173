"""The measuring of `headrace bench`: streams at a time, prompt lengths, SpecPrefill on and off."""

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from .client import Client, ClientConfig, Done, FlowConfig, ReasoningDelta, Result, TextDelta, connect

# Each is one token, or nearly, in the vocabularies of common models.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue"
)
_CALIBRATION_WORDS = 200


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to measure."""

    streams: int
    prompt_tokens: int
    specprefill: bool


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured: medians over streams and repeats, unless they say otherwise."""

    streams: int
    prompt_tokens: int
    """As the server counts them."""
    specprefill: bool
    applied: bool
    reason: str | None
    """Why SpecPrefill was not applied."""
    kept_share: float
    """Of the prompt's tokens."""
    ttft_s: float
    """From sending the request to its first token."""
    ttft_worst_s: float
    prefill_tokens_per_s: float
    """All prompts' tokens over the time until the last stream has its first token."""
    stream_tokens_per_s: float | None
    """Of one stream, from its first token on; None: it had one only."""
    total_tokens_per_s: float | None
    """Of all streams together, from the first token of any to the last of all."""
    gap_ms: float | None
    """Between the tokens of a stream."""
    gap_worst_ms: float | None
    completion_tokens: int
    """Of all streams together."""


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run."""

    server: str
    model: str
    max_tokens: int
    rows: list[Row]


@dataclass(slots=True)
class _Sample:
    started_s: float
    token_s: list[float] = field(default_factory=list)
    """When a delta came, once for each of its tokens."""
    gaps_s: list[float] = field(default_factory=list)
    """Between deltas."""
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class _Settings:
    model: str
    keep_pct: float | None
    max_tokens: int
    tokens_per_word: float
    random: random.Random


async def measure(
    url: str,
    token: str | None,
    cells: Sequence[Cell],
    *,
    model: str | None,
    keep_pct: float | None,
    max_tokens: int,
    repeat: int,
    on_cell: Callable[[str], None] | None,
) -> Report:
    """Measure one cell after the other over one connection.

    Raises:
        ClientError: there is no server, or it refused or failed a request.
    """
    # Neither credit nor resuming: what is measured is the server.
    config = ClientConfig(flow=FlowConfig(window_tokens=None, resume=False), reconnect=False)
    async with connect(url, token=token, config=config) as client:
        infos = {info["name"]: info for info in await client.models()}
        name = model or next(iter(infos))
        settings = _Settings(name, keep_pct, max_tokens, 1.0, random.Random())
        per_word = await _tokens_per_word(client, settings)
        settings = _Settings(name, keep_pct, max_tokens, per_word, settings.random)
        # The first request may have had the model loaded: only now it is known what it can do.
        infos = {info["name"]: info for info in await client.models()}
        can_speculate = name not in infos or infos[name]["specprefill"]["supported"]
        rows = []
        for cell in cells:
            if cell.specprefill and not can_speculate:
                continue
            runs = [await _run(client, cell, settings) for _ in range(repeat)]
            row = _row(cell, runs)
            rows.append(row)
            if on_cell is not None:
                mode = "on" if cell.specprefill else "off"
                what = f"{row.prompt_tokens:,} tokens × {cell.streams}, SpecPrefill {mode}"
                on_cell(f"{what}: TTFT {row.ttft_s:.3f} s")
        return Report(client.hello["server"], name, max_tokens, rows)


async def _tokens_per_word(client: Client, settings: _Settings) -> float:
    """Ask the server how many tokens its model makes of our words."""
    text = _prompt(_CALIBRATION_WORDS, settings)
    result = await client.complete(text, model=settings.model, max_tokens=1, specprefill=False).result()
    return max(result.usage["prompt_tokens"], 1) / _CALIBRATION_WORDS


def _prompt(num_tokens: int, settings: _Settings) -> str:
    count = max(1, round(num_tokens / settings.tokens_per_word))
    return " ".join(settings.random.choices(_WORDS.split(), k=count))


async def _run(client: Client, cell: Cell, settings: _Settings) -> list[_Sample]:
    prompts = [_prompt(cell.prompt_tokens, settings) for _ in range(cell.streams)]
    return list(await asyncio.gather(*(_one(client, prompt, cell, settings) for prompt in prompts)))


async def _one(client: Client, prompt: str, cell: Cell, settings: _Settings) -> _Sample:
    sample = _Sample(time.perf_counter())
    stream = client.complete(
        prompt,
        model=settings.model,
        max_tokens=settings.max_tokens,
        temperature=0.0,
        specprefill=cell.specprefill,
        specprefill_keep_pct=settings.keep_pct if cell.specprefill else None,
        cache_prompt=False,
    )
    async for event in stream:
        now_s = time.perf_counter()
        if isinstance(event, TextDelta | ReasoningDelta) and event.num_tokens:
            if sample.token_s:
                sample.gaps_s.append(now_s - sample.token_s[-1])
            sample.token_s += [now_s] * event.num_tokens
        elif isinstance(event, Done):
            sample.result = event.result
    return sample


def _row(cell: Cell, runs: list[list[_Sample]]) -> Row:
    samples = [sample for run in runs for sample in run if sample.token_s]
    results = [sample.result for sample in samples if sample.result is not None]
    reports = [result.specprefill for result in results]
    ttfts_s = [sample.token_s[0] - sample.started_s for sample in samples]
    gaps_s = [gap for sample in samples for gap in sample.gaps_s]
    prompt_tokens = round(median(result.usage["prompt_tokens"] for result in results))
    return Row(
        streams=cell.streams,
        prompt_tokens=prompt_tokens,
        specprefill=cell.specprefill,
        applied=all(report["applied"] for report in reports),
        reason=next((report["reason"] for report in reports if not report["applied"]), None),
        kept_share=sum(report["kept_tokens"] for report in reports)
        / max(1, sum(report["uncached_tokens"] for report in reports)),
        ttft_s=median(ttfts_s),
        ttft_worst_s=max(ttfts_s),
        prefill_tokens_per_s=median(_prefill_speed(run, prompt_tokens) for run in runs),
        stream_tokens_per_s=_median(_speed([sample]) for sample in samples),
        total_tokens_per_s=_median(_speed(run) for run in runs),
        gap_ms=1000 * median(gaps_s) if gaps_s else None,
        gap_worst_ms=1000 * max(gaps_s) if gaps_s else None,
        completion_tokens=sum(len(sample.token_s) for sample in samples) // len(runs),
    )


def _prefill_speed(run: list[_Sample], prompt_tokens: int) -> float:
    last_s = max(sample.token_s[0] for sample in run if sample.token_s)
    return prompt_tokens * len(run) / max(last_s - min(sample.started_s for sample in run), 1e-9)


def _speed(run: list[_Sample]) -> float | None:
    """Return the tokens a second after the first ones; None where there are no more."""
    times = sorted(time_s for sample in run for time_s in sample.token_s)
    if not times or times[-1] <= times[0]:
        return None
    return sum(time_s > times[0] for time_s in times) / (times[-1] - times[0])


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
