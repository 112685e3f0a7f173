"""What SpecPrefill keeps of a model's answers, over keep rates and beside controls; self mode's TTFT share.

    python benchmarks/specprefill_quality.py --prompts 20 --tasks passkey --json passkey.json
    python benchmarks/specprefill_quality.py --prompts 20 --tasks quote count --methods carry_on draft
    python benchmarks/specprefill_quality.py --ttft 1000 2000   # times only

About a minute a prompt on 2 cores with all methods; the JSON file holds what is done so far after each one.

Tasks: `passkey` (one fact, depths spread evenly), `quote` (a verbatim line of words), `count` (which of
four words occurs most: an aggregation, which thinning is bound to hurt). For each prompt the dense model
answers greedily; then, per method and keep rate, on the same tokens: right (the greedy answer contains the
key), KL (dense against sparse, mean over the tokens of the dense answer, nats), and the rise in NLL of the
dense answer. Methods: `carry_on` (the model scores itself), `draft` (a second copy of the model as its draft
model: what a plain model does for its deepened copy, which is the same function), `two_passes` (`draft` with
the scorer in the same model), and the controls `random` chunks, `recency` (sink and tail only) and
`renumbered` (the two-pass selection at contiguous positions).
Times are of one process, the best of three.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from headrace.engine.loading.loader import LoadedModel, load_model
from headrace.engine.loading.model_files import cache_folder
from headrace.engine.specprefill.calibration import load_calibration, model_fingerprint, scorer_for
from headrace.engine.specprefill.passkey import chat_frame, encode, filler_sentence, passkey_prompt
from headrace.engine.specprefill.scoring import PromptReader, Scorer
from headrace.engine.specprefill.selection import SelectionRule, select
from headrace.engine.specprefill.sparse_cache import as_sparse
from headrace.engine.specprefill.sparse_prefill import KeptFill, SparsePlan, SparsePrefill
from headrace.pool.blas import engine_environment

METHODS = ("carry_on", "draft", "two_passes", "random", "recency", "renumbered")
DEFAULT_METHODS = ("carry_on", "draft", "random", "recency", "renumbered")
STEP = 512
ANSWER_TOKENS = 32
WORDS = (
    "saffron",
    "walnut",
    "copper",
    "lantern",
    "basket",
    "velvet",
    "barrel",
    "cinnamon",
    "anchor",
    "violin",
)


@dataclass
class Task:
    name: str
    tokens: list[int]
    key: str


def tasks(tokenizer: Any, count: int, num_tokens: int) -> list[Task]:
    """Return `count` prompts of each kind, the same every time."""
    made: list[Task] = []
    for number in range(count):
        prompt = passkey_prompt(
            tokenizer, num_tokens=num_tokens, depth=(number + 0.5) / count, seed=1000 + number
        )
        made.append(Task("passkey", prompt.tokens, prompt.key))
        source = random.Random(2000 + number)
        quote = " ".join(source.sample(WORDS, 5))
        fact = encode(tokenizer, f" The sign on the door says: {quote}.")
        question = "\nRepeat word by word what the sign on the door says."
        made.append(Task("quote", _hidden(tokenizer, source, [fact], num_tokens, question), quote))
        most, *others = source.sample(WORDS, 4)
        mentions = [most] * 9 + [word for word in others for _ in range(3)]
        source.shuffle(mentions)
        facts = [encode(tokenizer, f" A customer bought one {word}.") for word in mentions]
        question = (
            f"\nWhich was bought most often: {', '.join(sorted([most, *others]))}? Answer with one word."
        )
        made.append(Task("count", _hidden(tokenizer, source, facts, num_tokens, question), most))
    return made


def _hidden(
    tokenizer: Any, source: random.Random, facts: list[list[int]], num_tokens: int, question: str
) -> list[int]:
    head, tail = chat_frame(tokenizer, "Read the text below.\n", question)
    room = num_tokens - len(head) - len(tail) - sum(map(len, facts))
    sentences: list[list[int]] = []
    while sum(map(len, sentences)) < room:
        sentences.append(encode(tokenizer, filler_sentence(source)))
    for fact in facts:
        sentences.insert(source.randrange(len(sentences) + 1), fact)
    return head + [token for sentence in sentences for token in sentence] + tail


class Bench:
    """Runs prompts through one model by each method."""

    def __init__(
        self, loaded: LoadedModel, scorer: Scorer, rule: SelectionRule, draft: Scorer | None = None
    ) -> None:
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.scorer, self.rule, self.draft = scorer, rule, draft

    def dense(self, prompt: list[int]) -> list[Any]:
        cache = make_prompt_cache(self.model)
        for start in range(0, len(prompt) - 1, STEP):
            chunk = prompt[start : min(start + STEP, len(prompt) - 1)]
            self.model(mx.array([chunk]), cache=cache)
            mx.eval([entry.state for entry in cache])
        return cache

    def score(self, prompt: list[int]) -> Any:
        reader = PromptReader(self.model, prompt, self.scorer.layers, num_queries=self.scorer.num_queries)
        while not reader.done:
            reader.step(STEP * 2)
        return self.scorer.scores(reader)

    def prefilled(self, prompt: list[int], keep_pct: float, draft: Scorer | None = None) -> list[Any]:
        """Prefill as a request would: by a draft model, or without one carrying on."""
        plan = SparsePlan(draft or self.scorer, self._rule(keep_pct), carry_on=draft is None)
        run = SparsePrefill(self.model, prompt, make_prompt_cache(self.model), 0, plan)
        while not run.done:
            run.step(STEP)
        return run.cache

    def fill(self, prompt: list[int], kept: Any, positions: Any) -> list[Any]:
        fill = KeptFill(self.model, np.array(prompt)[kept], positions, make_prompt_cache(self.model))
        while fill.processed < fill.total:
            fill.step(STEP)
        return [as_sparse(entry, int(positions[-1]) + 1 - len(kept)) for entry in fill.cache]

    def sparse(self, method: str, prompt: list[int], scores: Any, keep_pct: float) -> list[Any]:
        if method in ("carry_on", "draft"):
            return self.prefilled(prompt, keep_pct, self.draft if method == "draft" else None)
        rule = self._rule(keep_pct)
        if method == "random":
            scores = np.random.default_rng(len(prompt)).random(len(prompt), dtype=np.float32)
        elif method == "recency":
            scores = np.arange(len(prompt), dtype=np.float32)
        kept = select(scores, rule).indices[:-1]
        return self.fill(prompt, kept, np.arange(len(kept)) if method == "renumbered" else kept)

    def _rule(self, keep_pct: float) -> SelectionRule:
        return SelectionRule(keep_pct, self.rule.chunk_tokens, self.rule.sink_tokens, self.rule.tail_tokens)

    def forced(self, cache: list[Any], fed: list[int]) -> mx.array:
        """Return log-probabilities (len(fed), V), teacher-forced from a copy of the cache."""
        batch = [entry.merge([entry]) for entry in cache]
        logits = self.model(mx.array([fed]), cache=batch)[0].astype(mx.float32)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    def answer(self, cache: list[Any], last: int) -> list[int]:
        """Return the greedy answer, its end mark included."""
        batch, answer, token = [entry.merge([entry]) for entry in cache], [], last
        for _ in range(ANSWER_TOKENS):
            token = int(self.model(mx.array([[token]]), cache=batch)[0, -1].argmax())
            answer.append(token)
            if token in self.tokenizer.eos_token_ids:
                break
        return answer

    def first_token_s(self, prompt: list[int], keep_pct: float | None) -> float:
        """Return the seconds from an empty cache to the first token, dense or self mode; best of three."""
        times = []
        for _ in range(3):
            started = time.perf_counter()
            cache = self.dense(prompt) if keep_pct is None else self.prefilled(prompt, keep_pct)
            mx.eval(self.forced(cache, prompt[-1:]))
            times.append(time.perf_counter() - started)
        return min(times)

    def right(self, answer: list[int], key: str) -> bool:
        return key.lower() in self.tokenizer.decode(answer).lower()


def quality(
    bench: Bench, work: list[Task], methods: list[str], keeps: list[float]
) -> Iterator[dict[str, Any]]:
    """Yield after each prompt, per task, method and keep rate, the mean of each figure so far."""
    sums: dict[tuple[str, str, float], list[list[float]]] = defaultdict(list)
    dense_right: dict[str, list[float]] = defaultdict(list)
    for number, task in enumerate(work, start=1):
        last, cache = task.tokens[-1], bench.dense(task.tokens)
        answer = bench.answer(cache, last)
        fed = [last, *answer[:-1]]
        expected = bench.forced(cache, fed)
        right = bench.right(answer, task.key)
        dense_right[task.name].append(right)
        scores = bench.score(task.tokens)
        for method in methods:
            for keep_pct in keeps:
                sparse = bench.sparse(method, task.tokens, scores, keep_pct)
                given = bench.forced(sparse, fed)
                kl = (mx.exp(expected) * (expected - given)).sum(axis=-1).mean()
                picked = mx.array(answer)[:, None]
                nll = (
                    mx.take_along_axis(expected, picked, axis=-1) - mx.take_along_axis(given, picked, axis=-1)
                ).mean()
                # Greedy at every forced step is the dense answer: no need to decode it again.
                same = given.argmax(axis=-1).tolist() == answer
                got = right if same else bench.right(bench.answer(sparse, last), task.key)
                sums[task.name, method, keep_pct].append([float(got), float(kl), float(nll)])
        print(
            f"{number}/{len(work)} {task.name}: dense {'right' if right else 'wrong'}",
            file=sys.stderr,
            flush=True,
        )
        yield {
            "dense_right": {task: float(np.mean(values)) for task, values in dense_right.items()},
            "rows": [
                {"task": task, "method": method, "keep_pct": keep_pct, "prompts": len(values)}
                | dict(zip(("right", "kl", "nll_rise"), np.mean(values, axis=0).tolist(), strict=True))
                for (task, method, keep_pct), values in sums.items()
            ],
        }


def ttft(bench: Bench, lengths: list[int], keeps: list[float]) -> list[dict[str, Any]]:
    """Time self mode against dense, prefill and first decode step, beside k/L + (1 - k/L)·keep."""
    rows = []
    split, layers = bench.scorer.last_layer, len(make_prompt_cache(bench.model))
    for length in lengths:
        prompt = passkey_prompt(bench.tokenizer, num_tokens=length, depth=0.5, seed=1).tokens

        dense_s = bench.first_token_s(prompt, None)
        for keep_pct in keeps:
            sparse_s = bench.first_token_s(prompt, keep_pct)
            model = split / layers + (1 - split / layers) * keep_pct
            rows.append(
                {
                    "prompt_tokens": len(prompt),
                    "keep_pct": keep_pct,
                    "dense_s": dense_s,
                    "sparse_s": sparse_s,
                    "share": sparse_s / dense_s,
                    "cost_model_share": model,
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a markdown table."""
    if not rows:
        return ""
    cells = [list(rows[0]), ["---"] * len(rows[0])]
    cells += [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub name; the default model if absent")
    parser.add_argument("--prompts", type=int, default=6, help="of each task")
    parser.add_argument("--tokens", type=int, default=750, help="of each prompt")
    parser.add_argument("--tasks", nargs="+", default=["passkey", "quote", "count"])
    parser.add_argument("--methods", nargs="+", default=list(DEFAULT_METHODS), choices=METHODS)
    parser.add_argument("--keep", nargs="+", type=float, default=[0.5, 0.3, 0.2, 0.15])
    parser.add_argument("--layers", nargs="+", type=int, help="instead of the calibrated ones")
    parser.add_argument("--chunk-tokens", type=int, default=SelectionRule().chunk_tokens)
    parser.add_argument("--ttft", nargs="*", type=int, help="prompt lengths; times only")
    parser.add_argument("--json", type=Path, help="write everything here too")
    options = parser.parse_args()
    loaded = load_model(options.model)
    calibration = load_calibration(
        model_fingerprint(loaded.model, loaded.config), cache_folder() / "calibrations"
    )
    scorer = scorer_for(loaded.model, calibration)
    if options.layers:
        scorer = Scorer(loaded.model, tuple(sorted(options.layers)))
    draft = None
    if options.ttft is None and "draft" in options.methods:
        draft = Scorer(load_model(options.model).model, scorer.layers, "draft")
    bench = Bench(loaded, scorer, SelectionRule(chunk_tokens=options.chunk_tokens), draft)
    result: dict[str, Any] = {
        "model": loaded.name,
        "layers": scorer.layers,
        "calibrated": calibration is not None,
    }
    if options.ttft is not None:
        result["ttft"] = ttft(bench, options.ttft or [1000, 2000], [0.3, 0.15])
        print(table(result["ttft"]))
    else:
        work = [
            task
            for task in tasks(loaded.tokenizer, options.prompts, options.tokens)
            if task.name in options.tasks
        ]
        for so_far in quality(bench, work, options.methods, options.keep):
            result |= so_far
            write(result, options.json)
        print(f"layers {scorer.layers}; dense right: {result['dense_right']}")
        print(table(result["rows"]))
    write(result, options.json)


def write(result: dict[str, Any], path: Path | None) -> None:
    """Write what there is, if somebody asked for it."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    # A tuned BLAS must be there before the process starts (architecture page, "Linux CPU").
    if added := engine_environment("auto", os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | added)
    main()
