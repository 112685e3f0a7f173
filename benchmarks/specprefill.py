"""Time to the first token with SpecPrefill, against the same server without: measured beside the cost model.

    python benchmarks/specprefill.py                          # about 8 minutes on 2 cores
    python benchmarks/specprefill.py --draft-tokens 1000 2000 4000 --self-tokens 1000 2000 4000 8000
    python benchmarks/specprefill.py --rounds 5 --json specprefill.json
    OPENBLAS_NUM_THREADS=1 python benchmarks/specprefill.py --clock cpu     # on a busy machine (Linux)

Both modes go through a real `headrace serve`, over its socket, and read what its clients read
(`done.timings.ttft_ms`); dense and sparse requests are asked in turn of the same server, so that a machine
that gets slower gets slower for both. Medians over the rounds, of ratios pair by pair.

`--clock cpu` takes the CPU seconds that the server's processes spend up to the first token instead: other
programs don't count in, but threads that wait for each other do, so it wants BLAS on one thread.

- `self`: the default model scores itself and carries on.
- `draft`: the target is the default model deepened `--times` times by layers whose output projections are
  zero: the same function at so many times the cost. The draft model is the plain one.

Prompts are passkey prompts, another one each round, none of it cached; `right` counts answers with the key.
The cost model, with k of the draft's L layers run and r = draft cost / target cost: self
1 / (k/L + (1 - k/L)·keep), draft 1 / (r·k/L + keep).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model, load_tokenizer
from rich.console import Console
from rich.table import Table
from servers import headrace, machine, save
from websockets.sync.client import connect

from headrace.engine.loading.default_model import DEFAULT_MODEL, fetch_default_model
from headrace.engine.loading.model_files import cache_folder
from headrace.engine.specprefill.calibration import load_calibration, model_fingerprint, scorer_for
from headrace.engine.specprefill.passkey import PasskeyPrompt, passkey_prompt

ANSWER_TOKENS = 12
WARM_UP_TOKENS = 300


@dataclass(frozen=True)
class Answer:
    """One request: seconds to the first token, whether it found the key, and `done.specprefill`."""

    first_token_s: float
    right: bool
    report: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One mode, prompt length and keep rate. `speedup` and its bounds: dense by sparse, pair by pair."""

    mode: str
    prompt_tokens: int
    keep_pct: float
    rounds: int
    dense_s: float
    sparse_s: float
    speedup: float
    speedup_min: float
    speedup_max: float
    cost_model: float
    of_cost_model: float
    score_s: float
    prefill_s: float
    dense_right: int
    sparse_right: int


def deepened(times: int) -> Path:
    """Make a folder with the default model at `times` its depth, or find the one made before.

    The added layers are copies of the model's own, in its own quantization (an engine makes them float32
    where the plain model becomes so), but for o_proj and down_proj: zero.
    """
    source = fetch_default_model(lambda progress: None)
    target = cache_folder() / "bench" / f"{source.name}-{times}x-deep"
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    depth = config["num_hidden_layers"]
    weights: dict[str, mx.array] = {}
    for file in source.glob("model*.safetensors"):
        weights |= mx.load(str(file))
    for name, value in list(weights.items()):
        parts = name.split(".")
        if parts[:2] != ["model", "layers"]:
            continue
        for copy in range(1, times):
            parts[2] = str(int(name.split(".")[2]) + copy * depth)
            silent = parts[-2] in ("o_proj", "down_proj")
            weights[".".join(parts)] = mx.zeros_like(value) if silent else value
    mx.save_safetensors(str(target / "model.safetensors"), weights, metadata={"format": "mlx"})
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy(file, target / file.name)
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": depth * times}))
    return target


def depth_share() -> float:
    """Return k/L of the default model: the share of its layers below the one in which scoring stops."""
    model, config = load_model(fetch_default_model(lambda progress: None), lazy=True)
    calibration = load_calibration(model_fingerprint(model, config), cache_folder() / "calibrations")
    return scorer_for(model, calibration).last_layer / len(model.layers)


def cpu_seconds() -> float:
    """Return the CPU time that all processes below this one have spent so far (Linux)."""
    ticks: dict[int, tuple[int, int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            ticks[int(stat.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    below: set[int] = {os.getpid()}
    while found := {pid for pid, (parent, _) in ticks.items() if parent in below} - below:
        below |= found
    return sum(ticks[pid][1] for pid in below - {os.getpid()}) / os.sysconf("SC_CLK_TCK")


def ask(client: Any, prompt: PasskeyPrompt, keep_pct: float | None, clock: str) -> Answer:
    """Run one request on an open connection; `keep_pct` None: densely."""
    frame = {
        "type": "completion",
        "id": "1",
        "prompt": prompt.tokens,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "cache_prompt": False,
        "specprefill": keep_pct is not None,
    }
    before_s = cpu_seconds() if clock == "cpu" else 0.0
    client.send(json.dumps(frame if keep_pct is None else frame | {"specprefill_keep_pct": keep_pct}))
    text, spent_s = "", None
    while (got := json.loads(client.recv()))["type"] not in ("done", "error"):
        if got["type"] == "delta":
            text += got.get("text", "")
            spent_s = cpu_seconds() - before_s if spent_s is None and clock == "cpu" else spent_s
    report = got.get("specprefill")
    if got.get("status") != "completed" or report["applied"] is (keep_pct is None):
        raise SystemExit(f"headrace answered {got}")
    ttft_s = got["timings"]["ttft_ms"] / 1e3
    return Answer(ttft_s if spent_s is None else spent_s, prompt.key in text, report)


def measure(
    url: str,
    tokenizer: Any,
    mode: str,
    num_tokens: int,
    allowed: dict[float, float],
    rounds: int,
    clock: str,
) -> list[Row]:
    """Ask one prompt densely and at each keep rate, in turn, `rounds` times.

    Args:
        allowed: per keep rate the speed-up that the cost model allows.
    """
    dense: list[Answer] = []
    sparse: dict[float, list[Answer]] = {keep_pct: [] for keep_pct in allowed}
    with connect(url, proxy=None, ping_interval=None) as client:
        client.recv()
        warm = passkey_prompt(tokenizer, num_tokens=min(WARM_UP_TOKENS, num_tokens), depth=0.5, seed=0)
        ask(client, warm, min(allowed), clock)
        for number in range(rounds):
            depth = (number + 0.5) / rounds
            prompt = passkey_prompt(tokenizer, num_tokens=num_tokens, depth=depth, seed=50 + number)
            order: list[float | None] = [None, *allowed]
            for keep_pct in order if number % 2 else reversed(order):
                answer = ask(client, prompt, keep_pct, clock)
                (dense if keep_pct is None else sparse[keep_pct]).append(answer)
                print(mode, num_tokens, keep_pct or "dense", answer, file=sys.stderr, flush=True)
    return [row(mode, keep_pct, allowed[keep_pct], dense, sparse[keep_pct]) for keep_pct in allowed]


def row(mode: str, keep_pct: float, allowed: float, dense: list[Answer], sparse: list[Answer]) -> Row:
    """Return the medians of one series of pairs."""
    ratios = [one.first_token_s / other.first_token_s for one, other in zip(dense, sparse, strict=True)]
    speedup = statistics.median(ratios)
    return Row(
        mode=mode,
        prompt_tokens=sparse[0].report["prompt_tokens"],
        keep_pct=keep_pct,
        rounds=len(ratios),
        dense_s=round(statistics.median(a.first_token_s for a in dense), 3),
        sparse_s=round(statistics.median(a.first_token_s for a in sparse), 3),
        speedup=round(speedup, 3),
        speedup_min=round(min(ratios), 3),
        speedup_max=round(max(ratios), 3),
        cost_model=round(allowed, 3),
        of_cost_model=round(speedup / allowed, 3),
        score_s=round(statistics.median(a.report["score_ms"] for a in sparse) / 1e3, 3),
        prefill_s=round(statistics.median(a.report["prefill_ms"] for a in sparse) / 1e3, 3),
        dense_right=sum(a.right for a in dense),
        sparse_right=sum(a.right for a in sparse),
    )


def show(rows: list[Row]) -> None:
    """Print the table."""
    table = Table(title="Time to the first token: dense by sparse, and the cost model")
    columns = ("mode", "prompt_tokens", "keep_pct", "dense_s", "sparse_s", "speedup", "cost_model")
    for column in (*columns, "of_cost_model", "right"):
        table.add_column(column)
    for one in rows:
        values = [str(getattr(one, column)) for column in (*columns, "of_cost_model")]
        table.add_row(*values, f"{one.sparse_right}/{one.rounds} (dense {one.dense_right})")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--self-tokens", nargs="*", type=int, default=[1000, 2000, 4000])
    parser.add_argument("--self-keep", nargs="+", type=float, default=[0.15, 0.3])
    parser.add_argument("--draft-tokens", nargs="*", type=int, default=[1000])
    parser.add_argument("--draft-keep", nargs="+", type=float, default=[0.2])
    parser.add_argument("--times", type=int, default=8, help="depth of the target in draft mode")
    parser.add_argument("--rounds", type=int, default=3, help="of each prompt length")
    parser.add_argument("--draft-rounds", type=int, default=2, help="the same in draft mode")
    parser.add_argument("--clock", choices=["ttft", "cpu"], default="ttft")
    parser.add_argument("--json", type=Path, help="write everything here too")
    args = parser.parse_args()

    share = depth_share()
    tokenizer = load_tokenizer(fetch_default_model(lambda progress: None))
    rows: list[Row] = []
    if args.self_tokens:
        allowed = {keep: 1 / (share + (1 - share) * keep) for keep in args.self_keep}
        with headrace() as url:
            for length in args.self_tokens:
                rows += measure(url, tokenizer, "self", length, allowed, args.rounds, args.clock)
    if args.draft_tokens:
        allowed = {keep: 1 / (share / args.times + keep) for keep in args.draft_keep}
        flags = ("--model", str(deepened(args.times)), "--specprefill-draft-model", DEFAULT_MODEL)
        with headrace(*flags) as url:
            for length in args.draft_tokens:
                rows += measure(url, tokenizer, "draft", length, allowed, args.draft_rounds, args.clock)
    show(rows)
    head = {"machine": machine(), "clock": args.clock, "depth_share": share, "times": args.times}
    save({**head, "rows": [asdict(one) for one in rows]}, args.json)


if __name__ == "__main__":
    main()
