"""calibration.py and passkey.py: the layers that find what a question asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny_models import CONFIGS, VOCABULARY, tiny_model

from headrace.engine.specprefill.calibration import (
    calibrate,
    calibration_prompts,
    candidate_layers,
    choose_layers,
    load_calibration,
    model_fingerprint,
    save_calibration,
    scorer_for,
)
from headrace.engine.specprefill.passkey import NEEDLES, encode, passkey_prompt
from headrace.engine.specprefill.scoring import default_layers


class Letters:
    """A tokenizer of single letters, with a begin mark and, on demand, a chat template."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [1 + ord(letter) % (VOCABULARY - 1) for letter in text]

    def apply_chat_template(self, turns: Sequence[dict[str, str]], **_: Any) -> str:
        return f"<user>{turns[0]['content']}</user><assistant>"


@pytest.mark.parametrize("template", [None, "there is one"])
@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
def test_the_needle_is_where_the_prompt_says(template: str | None, depth: float) -> None:
    """The range holds exactly the fact, at its depth; length as asked; the same every time."""
    tokenizer = Letters(template)
    for needle in NEEDLES:
        prompt = passkey_prompt(tokenizer, num_tokens=1500, depth=depth, seed=4, needle=needle)
        start, end = prompt.needle
        assert prompt.tokens[start:end] == encode(tokenizer, " " + needle.fact.format(key=prompt.key))
        assert 1350 <= len(prompt.tokens) <= 1500
        assert start < 200 or depth > 0
        assert start > 900 or depth < 1
        assert prompt.tokens[-len("<assistant>") :] == encode(tokenizer, "<assistant>") or template is None
        assert prompt == passkey_prompt(tokenizer, num_tokens=1500, depth=depth, seed=4, needle=needle)
        other = passkey_prompt(tokenizer, num_tokens=1500, depth=depth, seed=5, needle=needle)
        assert prompt.tokens != other.tokens


def test_every_fourth_prompt_is_long() -> None:
    """A layer that finds things in short prompts only must not look good."""
    lengths = [len(prompt.tokens) for prompt in calibration_prompts(Letters(), 8, 400, 1600)]
    assert [length > 1200 for length in lengths] == [False, False, False, True] * 2


def test_the_shallowest_good_set_is_chosen() -> None:
    """A deeper set must find more than its depth costs; layers that complete each other count together."""
    table = {2: [0.3], 8: [0.9], 9: [0.1], 14: [0.92], 20: [0.93]}
    assert choose_layers(table, lambda chosen: [max(table[i][0] for i in chosen)], 30) == (8,)
    weak = table | {8: [0.5]}
    assert choose_layers(weak, lambda chosen: [max(weak[i][0] for i in chosen)], 30) == (14,)
    halves = {4: [0.5], 5: [0.5], 20: [1.0]}

    def together(chosen: Sequence[int]) -> list[float]:
        return [1.0 if {4, 5} <= set(chosen) or 20 in chosen else 0.5]

    assert choose_layers(halves, together, 30) == (4, 5)


def test_calibrate_a_tiny_model() -> None:
    """Every candidate layer gets a row per keep rate, progress is told, the same model gives the same."""
    model = tiny_model("gemma3")
    told: list[tuple[int, int]] = []

    def run() -> Any:
        return calibrate(
            model,
            Letters(),
            CONFIGS["gemma3"],
            num_prompts=2,
            prompt_tokens=400,
            keep_pcts=(0.2, 0.4),
            on_progress=lambda done, total: told.append((done, total)),
        )

    found = run()
    assert told == [(1, 2), (2, 2)]
    assert list(found.recall) == candidate_layers(model) == [1, 3][: len(found.recall)]
    assert all(len(row) == 2 for row in found.recall.values())
    assert set(found.layers) <= set(found.recall)
    assert found == run()


def test_stored_and_found_again(tmp_path: Path) -> None:
    """What was saved is found by the model's fingerprint; no file, a broken or a foreign one is none."""
    model = tiny_model("llama")
    found = calibrate(model, Letters(), CONFIGS["llama"], num_prompts=1, prompt_tokens=400)
    path = save_calibration(found, tmp_path / "deeper")
    assert load_calibration(found.fingerprint, tmp_path / "deeper") == found
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert load_calibration("0" * 16, tmp_path / "deeper") is None
    assert load_calibration(found.fingerprint, None) is None
    for broken in ("{", "[]", '{"format": 99}', '{"format": 1}'):
        path.write_text(broken)
        assert load_calibration(found.fingerprint, path.parent) is None


def test_scorer_of_an_uncalibrated_model() -> None:
    """The documented default: the band of layers in the middle."""
    model = tiny_model("llama", num_hidden_layers=20)
    assert scorer_for(model, None).layers == default_layers(model) == (8, 9, 10, 11)


def test_fingerprint_is_of_the_model_not_of_its_dtype() -> None:
    """Quantized or not, float32 or bfloat16: the same. Other norm weights or another shape: not."""
    shape = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
    model, config = tiny_model("llama", **shape), CONFIGS["llama"]

    def vary(target: Any) -> None:
        target.model.norm.weight = mx.linspace(0.5, 1.7, 64)

    vary(model)
    print_of_model = model_fingerprint(model, config)
    assert print_of_model == model_fingerprint(model, dict(config))
    half = tiny_model("llama", **shape)
    vary(half)
    half.set_dtype(mx.bfloat16)
    assert model_fingerprint(half, config) == print_of_model
    nn.quantize(half, group_size=32, bits=4)
    assert model_fingerprint(half, config) == print_of_model
    assert model_fingerprint(model, config | {"vocab_size": 98}) != print_of_model
    model.model.norm.weight = mx.ones(64)
    assert model_fingerprint(model, config) != print_of_model


@pytest.mark.model
def test_shipped_calibration_finds_the_needle_in_the_default_model() -> None:
    """The file beside the package is that of the default model, and its layers keep the needles of prompts
    it was not made with.
    """
    import numpy as np

    from headrace.engine.loading.loader import load_model
    from headrace.engine.specprefill.selection import SelectionRule, select

    loaded = load_model(None)
    shipped = load_calibration(model_fingerprint(loaded.model, loaded.config))
    assert shipped is not None
    scorer = scorer_for(loaded.model, shipped)
    found = []
    for number in range(3):
        prompt = passkey_prompt(
            loaded.tokenizer,
            num_tokens=(600, 2000, 600)[number],
            depth=(0.2, 0.1, 0.8)[number],
            seed=700 + number,
            needle=NEEDLES[number],
        )
        reader = scorer.start(prompt.tokens)
        while not reader.done:
            reader.step(512)
        kept = select(scorer.scores(reader), SelectionRule(keep_pct=0.3)).indices
        found.append(float(np.isin(np.arange(*prompt.needle), kept).mean()))
    assert np.mean(found) >= 0.9
