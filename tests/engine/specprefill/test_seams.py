"""seams.py: what a forward call sees, and that nothing stays behind."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from tiny_models import CONFIGS, tiny_model, tokens

from headrace.engine.specprefill.seams import (
    AttentionCall,
    SeamError,
    explicit_positions,
    layer_list,
    observed_attention,
    replaced_layers,
)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Any:
    rope, attention = mx.fast.rope, mx.fast.scaled_dot_product_attention
    yield
    assert mx.fast.rope is rope
    assert mx.fast.scaled_dot_product_attention is attention


@pytest.mark.parametrize("traditional", [False, True])
def test_positions_turn_each_token_by_its_own(traditional: bool) -> None:
    """Each token is rotated as one rotated alone at its position."""
    x = mx.random.normal((1, 3, 4, 16))
    where = [0, 7, 8, 90]

    def turn(states: mx.array, offset: int) -> mx.array:
        return mx.fast.rope(
            states, 16, traditional=traditional, base=1e4, scale=0.5, offset=offset, freqs=None
        )

    alone = mx.concatenate([turn(x[:, :, i : i + 1], p) for i, p in enumerate(where)], axis=2)
    with explicit_positions(mx.array(where)):
        together = turn(x, 5)
    assert float(mx.abs(together - alone).max()) < 1e-6


def test_positions_of_another_length_are_refused() -> None:
    """A rope call that doesn't match the positions ends the forward."""
    with explicit_positions(mx.arange(3)), pytest.raises(SeamError):
        mx.fast.rope(mx.zeros((1, 2, 4, 8)), 8, traditional=False, base=1e4, scale=1.0, offset=0)


def test_seams_do_not_nest_and_survive_errors() -> None:
    """Entering twice raises; what raises inside leaves the originals in place."""
    model = tiny_model("llama")
    with pytest.raises(SeamError), explicit_positions(0), explicit_positions(0):
        pass
    with pytest.raises(SeamError), replaced_layers(model, {0: print}), replaced_layers(model, {1: print}):
        pass

    def fail(_: AttentionCall) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), observed_attention(fail):
        model(mx.array([tokens(5)]))
    assert type(layer_list(model)[0]).__name__ == "TransformerBlock"
    with explicit_positions(0), observed_attention(lambda _: None):
        mx.eval(model(mx.array([tokens(5)])))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_layer_list_is_the_one_the_forward_uses(name: str) -> None:
    """Also where ``model.layers`` gives a copy (qwen2): a layer that is replaced is not called."""
    model = tiny_model(name)

    class Reached(Exception):
        pass

    def stop(*_: Any, **__: Any) -> None:
        raise Reached

    with pytest.raises(Reached), replaced_layers(model, {2: stop}):
        model(mx.array([tokens(5)]))


def test_observer_sees_and_replaces() -> None:
    """The observer gets rotated queries and all keys, and its mask is the one used."""
    model = tiny_model("llama")
    seen: list[AttentionCall] = []

    def only_self(call: AttentionCall) -> mx.array:
        seen.append(call)
        return mx.eye(call.keys.shape[2]).astype(mx.bool_)

    prompt = tokens(6)
    with observed_attention(only_self):
        alone = model(mx.array([prompt]))[0, -1]
    assert len(seen) == 4
    assert seen[0].queries.shape == (1, 4, 6, 8)
    # Attending to itself alone, the last token needs no other.
    assert float(mx.abs(alone - model(mx.array([prompt[-1:]]))[0, -1]).max()) < 1e-4
