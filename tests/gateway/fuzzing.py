"""Frames that nobody should send: mutated valid ones, and noise. Seeded: a failure can be repeated."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

VALID: tuple[dict[str, Any], ...] = (
    {"type": "completion", "id": "a", "prompt": "x", "max_tokens": 3, "stop": ["x"], "logit_bias": {"5": 1}},
    {"type": "completion", "id": "b", "prompt": [1, 2, 3], "max_tokens": 2, "stream": False, "seed": 7},
    {"type": "completion", "id": "c", "prompt": "x", "max_tokens": 5, "window": 2, "detach": True},
    {"type": "chat", "id": "d", "messages": [{"role": "user", "content": "y"}], "max_tokens": 2, "top_k": 1},
    {"type": "chat", "id": "e", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
     "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "max_tokens": 1},
    {"type": "cancel", "id": "a"},
    {"type": "credit", "id": "c", "tokens": 3},
    {"type": "resume", "id": "c", "token": "t", "after_seq": 0},
    {"type": "models", "id": "m"},
    {"type": "ping", "nonce": 5},
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 2**70, 1.5, 1e308, -0.0, "", "x",
    "x" * 600, "\x00", "\ud800", "😀", [], {}, [[]], [None], {"": None}, {"type": "text"},
    float("nan"), float("inf"), "completion",
)  # fmt: skip
NAMES = (
    "id",
    "type",
    "prompt",
    "messages",
    "model",
    "token",
    "after_seq",
    "tokens",
    "stop",
    "seed",
    "",
    "\x00",
    "zz",
)


def frames(seed: int, count: int) -> Iterator[str | bytes]:
    """Return generated messages."""
    rng = random.Random(seed)
    for _ in range(count):
        yield _frame(rng)


def _frame(rng: random.Random) -> str | bytes:
    value = json.loads(json.dumps(rng.choice(VALID)))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        _mutate(rng, value)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.3:
        text = _scramble(rng, text)
    if rng.random() < 0.02:
        return text.encode("utf-8", "replace")
    if rng.random() < 0.02:
        text = "".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(0xD7FF)))) for _ in range(50))
    if rng.random() < 0.005:
        text = "[" * 3000 + text
    return text.encode("utf-8", "replace").decode()


def _mutate(rng: random.Random, value: Any) -> None:
    """Change something somewhere in an object or a list."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        deeper = [key for key in keys if isinstance(value[key], dict | list) and value[key]]
        if not deeper or rng.random() < 0.6:
            break
        value = value[rng.choice(deeper)]
    if isinstance(value, list):
        value.insert(rng.randrange(len(value) + 1), deepcopy(rng.choice(VALUES)))
    elif rng.random() < 0.2 and value:
        del value[rng.choice(list(value))]
    else:
        value[rng.choice([*value, *NAMES])] = deepcopy(rng.choice(VALUES))


def _scramble(rng: random.Random, text: str) -> str:
    """Cut, double or replace a piece of a text."""
    start, stop = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    match rng.randrange(3):
        case 0:
            return text[:start] + text[stop:]
        case 1:
            return text[:stop] + text[start:]
        case _:
            return text[:start] + chr(rng.randrange(1, 0xD7FF)) + text[start + 1 :]
