"""Prompts with a known place that matters: a pass key hidden in filler text, and a question for it.

They find the layers whose attention points at what a question is about (``calibration``), and measure
whether answers survive thinning. After "passkey retrieval" (arXiv 2305.16300, section 5), with varied
filler instead of the same sentences over and over, so that repetition gives nothing away.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

_MARK = "\u241e"
_WHO = ("Anna", "The baker", "A tall sailor", "My uncle", "The teacher", "Old Marek", "The nurse", "A farmer")
_DID = ("walked to", "looked at", "painted", "wrote about", "drove past", "remembered", "waited near", "sold")
_WHAT = ("the harbour", "a red bicycle", "the old mill", "the school yard", "a green coat", "the north gate")
_WHEN = (
    "in the early morning",
    "after the rain",
    "on market day",
    "before supper",
    "late in autumn",
    "at noon",
)
_WHY = (
    "because the road was closed",
    "and thought of the sea",
    "while the children were asleep",
    "to save a little money",
    "and nobody asked for a reason",
    "as the bells began to ring",
)
_WORDS = (
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


@dataclass(frozen=True, slots=True)
class Needle:
    """``fact`` and ``question`` about it; ``{key}`` in the fact is what a right answer contains."""

    task: str
    fact: str
    question: str
    digits: bool = False


PASS_KEY = Needle(
    "There is a pass key hidden in the text below. Find it and remember it.",
    "The pass key is {key}. Remember it: {key} is the pass key.",
    "What is the pass key? Answer with the number only.",
    digits=True,
)
NEEDLES = (
    PASS_KEY,
    Needle(
        "Read the text below. You will be asked one question about it.",
        "The secret ingredient of the soup is {key}, the cook said.",
        "Which secret ingredient did the cook put into the soup?",
    ),
    Needle(
        "Read this report.",
        "Before he left, the captain hid his map under the {key} on the lower deck.",
        "Where is the map that the captain left behind?",
    ),
)


@dataclass(frozen=True, slots=True)
class PasskeyPrompt:
    """``tokens``: the prompt, chat template applied where there is one. ``needle``: the half-open range of
    the tokens that name the key. ``key``: what a right answer contains.
    """

    tokens: list[int]
    needle: tuple[int, int]
    key: str


def passkey_prompt(
    tokenizer: Any, *, num_tokens: int, depth: float, seed: int, needle: Needle = PASS_KEY
) -> PasskeyPrompt:
    """Make a prompt of about ``num_tokens`` with its needle at ``depth`` (0: start of the text, 1: end).

    The same arguments give the same prompt. ``tokenizer`` is mlx-lm's wrapper or a transformers tokenizer.
    """
    random_source = random.Random(seed)
    number = str(random_source.randrange(10_000, 100_000))
    key = number if needle.digits else random_source.choice(_WORDS)
    fact = encode(tokenizer, " " + needle.fact.format(key=key))
    head, tail = chat_frame(tokenizer, f"{needle.task}\n", f"\n{needle.question}")
    room = max(0, num_tokens - len(head) - len(tail) - len(fact))
    before = _filler(tokenizer, random_source, round(depth * room))
    after = _filler(tokenizer, random_source, room - len(before))
    start = len(head) + len(before)
    return PasskeyPrompt(head + before + fact + after + tail, (start, start + len(fact)), key)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of ``text`` without beginning or end marks."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def filler_sentence(random_source: random.Random) -> str:
    """Return one sentence that says nothing about any key."""
    parts = [random_source.choice(words) for words in (_WHO, _DID, _WHAT, _WHEN, _WHY)]
    return " " + " ".join(parts) + "."


def chat_frame(tokenizer: Any, before: str, after: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a user turn up to and with ``before``, and from ``after`` to its end.

    Without a chat template: the text alone, with the tokenizer's own beginning.
    """
    text = f"{before}{_MARK}{after}"
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer.encode(before)), encode(tokenizer, f"{after}\nAnswer:")
    turn = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    head, tail = rendered.split(_MARK)
    return encode(tokenizer, head), encode(tokenizer, tail)


def _filler(tokenizer: Any, random_source: random.Random, num_tokens: int) -> list[int]:
    """Whole sentences, at most ``num_tokens``."""
    filler: list[int] = []
    while True:
        sentence = encode(tokenizer, filler_sentence(random_source))
        if len(filler) + len(sentence) > num_tokens:
            return filler
        filler += sentence
