"""Headrace beside `mlx_lm.server`: the same model, the same prompts, in one run, as ratios.

    python benchmarks/serve.py                      # all three comparisons, about 5 minutes on 2 cores
    python benchmarks/serve.py --rounds 5 --json serve.json

1. `alone` and `at 8`: decode speed of 1 and of 8 streams. Both servers run the same float32 weights with the
   same BLAS preloaded, are up at the same time, and are asked in turn, so that a machine that gets slower
   gets slower for both.
2. `as shipped`: time to the first token of a prompt of about 500 tokens, against `mlx_lm.server` as its users
   get it on a Linux CPU: the 4-bit weights, and the BLAS that mlx is linked to.

A ratio above 1 says that Headrace is faster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import websockets
from rich.console import Console
from rich.table import Table
from servers import headrace, machine, mlx_lm_server, save

from headrace.pool.blas import engine_environment

STORY = "Write a long story about a lighthouse keeper, a storm, and ship number {}."
FILLER = "The keeper wrote the wind, the tide and the names of the ships into the log of the day. "


@dataclass(frozen=True)
class Sample:
    """One stream. `decode_tps`: tokens after the first by the time from the first to the last."""

    ttft_s: float
    decode_tps: float
    tokens: int


@dataclass(frozen=True)
class Round:
    """Some streams at once. `tps`: all their tokens by the time from the first start to the last end."""

    streams: list[Sample]
    tps: float


def sample(began: float, stamps: list[tuple[float, int]]) -> Sample:
    """Return a stream's figures from (time, tokens so far) of its deltas."""
    (first, first_tokens), (last, tokens) = stamps[0], stamps[-1]
    return Sample(first - began, (tokens - first_tokens) / max(last - first, 1e-9), tokens)


async def ask_headrace(url: str, prompt: str, max_tokens: int) -> Sample:
    """Run one chat request over a connection of its own."""
    async with websockets.connect(url, compression=None) as ws:
        await ws.recv()
        frame = {
            "type": "chat",
            "id": "1",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "cache_prompt": False,
        }
        began, tokens, stamps = time.perf_counter(), 0, []
        await ws.send(json.dumps(frame))
        async for message in ws:
            event = json.loads(message)
            if event["type"] == "delta":
                tokens += event["n"]
                stamps.append((time.perf_counter(), tokens))
            elif event["type"] in ("done", "error"):
                if event.get("status") != "completed":
                    raise SystemExit(f"headrace answered {event}")
                break
        return sample(began, stamps)


async def ask_mlx_lm(url: str, prompt: str, max_tokens: int) -> Sample:
    """Run one chat request over a connection of its own; every event with content is one token."""
    target = urllib.parse.urlsplit(url)
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection(target.hostname, target.port)
    began = time.perf_counter()
    writer.write(
        b"POST %b HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (target.path.encode(), target.netloc.encode(), len(body), body)
    )
    stamps: list[tuple[float, int]] = []
    usage: dict[str, Any] = {}
    async for line in reader:
        if not line.startswith(b"data: "):
            continue
        data = line[len(b"data: ") :].strip()
        if data == b"[DONE]":
            break
        event = json.loads(data)
        usage = event.get("usage") or usage
        if any(choice.get("delta", {}).get("content") for choice in event.get("choices", [])):
            stamps.append((time.perf_counter(), len(stamps) + 1))
    writer.close()
    result = sample(began, stamps)
    return Sample(result.ttft_s, result.decode_tps, usage.get("completion_tokens", result.tokens))


async def run_round(ask: Any, url: str, streams: int, max_tokens: int) -> Round:
    """Ask for some stories at once."""
    began = time.perf_counter()
    samples = await asyncio.gather(*(ask(url, STORY.format(n), max_tokens) for n in range(streams)))
    return Round(samples, sum(s.tokens for s in samples) / (time.perf_counter() - began))


def float32_copy(folder: Path) -> Path:
    """Write the default model's weights as float32 beside it, for a server that does not do so itself."""
    from headrace.engine.loading.default_model import fetch_default_model

    source = fetch_default_model(lambda progress: None)
    target = folder / f"{source.name}-float32"
    if not target.exists():
        import mlx.core as mx
        from mlx.utils import tree_flatten, tree_map
        from mlx_lm.utils import dequantize_model, load, save

        model, tokenizer, config = load(str(source), return_config=True)
        model = dequantize_model(model)
        model.update(
            tree_map(
                lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a,
                model.parameters(),
            )
        )
        mx.eval([array for _, array in tree_flatten(model.parameters())])
        config.pop("quantization", None)
        config.pop("quantization_config", None)
        save(target, source, model, tokenizer, config)
    return target


def compare(name: str, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Return the medians of two series and the median of their ratios, pair by pair."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "what": name,
        "headrace": round(statistics.median(ours), 3),
        "mlx_lm.server": round(statistics.median(theirs), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


async def decode_speed(ours: str, theirs: str, rounds: int, max_tokens: int) -> list[dict[str, Any]]:
    """Compare decode speed of 1 and of 8 streams, in turn."""
    results = []
    for streams, name in ((1, "alone"), (8, "at 8")):
        pairs: list[tuple[Round, Round]] = []
        for number in range(rounds + 1):
            order = [(ask_headrace, ours), (ask_mlx_lm, theirs)]
            got = {}
            for ask, url in order if number % 2 else reversed(order):
                got[url] = await run_round(ask, url, streams, max_tokens)
            if number:  # the first round warms both up
                pairs.append((got[ours], got[theirs]))
        decode = [
            [statistics.mean(s.decode_tps for s in r.streams) for r in side]
            for side in zip(*pairs, strict=True)
        ]
        total = [[r.tps for r in side] for side in zip(*pairs, strict=True)]
        results.append(compare(f"{name}: decode, tokens/s a stream", *decode))
        results.append(compare(f"{name}: all tokens/s, prompts included", *total))
    return results


async def first_token(ours: str, theirs: str) -> dict[str, Any]:
    """Compare the time to the first token of a prompt of about 500 tokens; the ratio is theirs by ours."""
    prompt = FILLER * 22 + "What did the keeper write?"
    mine = min([(await ask_headrace(ours, prompt, 2)).ttft_s for _ in range(3)])
    other = (await ask_mlx_lm(theirs, prompt, 2)).ttft_s
    return {
        "what": "as shipped: time to the first token, s (prompt of about 500 tokens)",
        "headrace": round(mine, 2),
        "mlx_lm.server": round(other, 2),
        "ratio": round(other / mine, 1),
        "ratio_min": None,
        "ratio_max": None,
    }


def main() -> None:
    """Run the comparisons and print them as a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs for each comparison")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/headrace/bench")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--skip-shipped", action="store_true", help="leave out the slow third comparison")
    args = parser.parse_args()

    args.folder.mkdir(parents=True, exist_ok=True)
    model = float32_copy(args.folder)
    same_blas = engine_environment("auto", os.environ)
    results = []
    with headrace("--model", str(model)) as ours, mlx_lm_server(model, same_blas) as theirs:
        results += asyncio.run(decode_speed(ours, theirs, args.rounds, args.max_tokens))
    if not args.skip_shipped:
        from headrace.engine.loading.default_model import fetch_default_model

        shipped = fetch_default_model(lambda progress: None)
        with headrace() as ours, mlx_lm_server(shipped, {}) as theirs:
            results.append(asyncio.run(first_token(ours, theirs)))

    table = Table(title="Headrace beside mlx_lm.server")
    for column in ("what", "headrace", "mlx_lm.server", "ratio", "min", "max"):
        table.add_column(column)
    for row in results:
        table.add_row(*(str(row[key]) for key in row))
    Console().print(table)
    save({"machine": machine(), "results": results}, args.json)


if __name__ == "__main__":
    main()
