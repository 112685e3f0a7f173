"""Three seams through which SpecPrefill reaches into any mlx-lm model for the length of one forward call.

All RoPE modules of mlx and mlx-lm end in ``mx.fast.rope``, and attention ends in
``mx.fast.scaled_dot_product_attention``; both are looked up on ``mx.fast`` at call time. Swapping one of them
around one forward call, on the only thread that uses MLX, serves every architecture without code per
architecture. The third seam swaps single decoder layers in the model's own list. Every seam puts back what it
found, also when the forward raises, and refuses to be entered twice. Nothing is swapped while decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

_MARK = "_headrace_seam"


class SeamError(RuntimeError):
    """A seam was entered twice, or the model calls it in a way that can't be served. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of ``mx.fast.scaled_dot_product_attention``, as the model made it.

    ``queries`` (B, H, L, D) and ``keys`` (B, H_kv, T, D) are rotated and normed already; T counts what the
    layer's cache holds, the L new tokens last. ``mask`` is None, ``"causal"``, or an array that broadcasts to
    (B, H, L, T): bool (True = visible) or additive. ``sinks`` (H,) are extra logits in the softmax, or None.
    """

    queries: mx.array
    keys: mx.array
    scale: float
    mask: mx.array | str | None
    sinks: mx.array | None


Observer = Callable[[AttentionCall], "mx.array | None"]


@contextmanager
def explicit_positions(positions: int | mx.array) -> Iterator[None]:
    """Rotate the tokens of the forward calls inside at ``positions`` instead of the caches' offsets.

    ``positions`` is an int32 array (L,), one position per token of the call, or an int: the position of the
    first of consecutive tokens. Serves batches of one row. The vector form of ``offset`` of ``mx.fast.rope``
    wants one offset per batch row, so the token axis goes through it as the batch axis.

    Raises SeamError when already entered, or (inside) when a rope call has another length than ``positions``.
    """
    original = mx.fast.rope

    def rope(x: mx.array, *args: Any, offset: Any = None, **kwargs: Any) -> mx.array:
        # nn.RoPE and mlx-lm pass ``offset`` by name; the positions given here replace it.
        if isinstance(positions, int):
            return original(x, *args, offset=positions, **kwargs)
        if x.ndim not in (3, 4) or x.shape[0] != 1 or x.shape[-2] != positions.shape[0]:
            raise SeamError(f"rope on shape {x.shape} can't take {positions.shape[0]} positions")
        heads = x if x.ndim == 4 else x[:, None]
        turned = original(heads.transpose(2, 1, 0, 3), *args, offset=positions, **kwargs)
        turned = turned.transpose(2, 1, 0, 3)
        return turned if x.ndim == 4 else turned[:, 0]

    with _swapped("rope", rope):
        yield


@contextmanager
def observed_attention(observer: Observer) -> Iterator[None]:
    """Show ``observer`` each attention call inside, before it runs.

    The observer returns None to leave the call as it is, or a mask to use instead; what it raises ends the
    forward. Attention written without ``mx.fast`` (softcapping, quantized caches) is not seen.

    Raises SeamError when already entered.
    """
    original = mx.fast.scaled_dot_product_attention

    def attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
        **kwargs: Any,
    ) -> mx.array:
        replacement = observer(AttentionCall(queries, keys, scale, mask, sinks))
        if replacement is not None:
            mask = replacement
        return original(queries, keys, values, scale=scale, mask=mask, sinks=sinks, **kwargs)

    with _swapped("scaled_dot_product_attention", attention):
        yield


@contextmanager
def replaced_layers(model: Module, replacements: Mapping[int, Callable[..., Any]]) -> Iterator[None]:
    """Put callables in the place of single decoder layers (by index) for the forward calls inside.

    Each becomes a LayerStandIn, so that attributes the model reads from a layer (``is_linear``,
    ``use_sliding``) are still there. Raises SeamError when the model holds no list of layers, or when a
    layer is replaced already.
    """
    layers = layer_list(model)
    originals = {index: layers[index] for index in replacements}
    if any(isinstance(layer, LayerStandIn) for layer in layers):
        raise SeamError("layers are replaced already")
    try:
        for index, call in replacements.items():
            layers[index] = LayerStandIn(originals[index], call)
        yield
    finally:
        for index, layer in originals.items():
            layers[index] = layer


class LayerStandIn:
    """Stands in for a decoder layer: calls ``call``, answers every attribute as the layer would."""

    def __init__(self, layer: Any, call: Callable[..., Any]) -> None:
        self._layer = layer
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def layer_list(model: Module) -> list[Any]:
    """Return the very list that the model's forward iterates over (``model.layers`` may be a copy of it).

    Raises SeamError when no module of the model holds such a list.
    """
    shown = list(getattr(model, "layers", []))
    if not shown:
        raise SeamError("the model shows no layers")
    modules: list[Any] = model.modules()  # type: ignore[no-untyped-call]
    for module in modules:
        for value in module.values():
            if isinstance(value, list) and len(value) == len(shown) and value[0] is shown[0]:
                return value
    raise SeamError("no module of the model holds its list of layers")


@contextmanager
def _swapped(name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    original = getattr(mx.fast, name)
    if getattr(original, _MARK, False):
        raise SeamError(f"mx.fast.{name} is swapped already: seams don't nest")
    setattr(replacement, _MARK, True)
    setattr(mx.fast, name, replacement)
    try:
        yield
    finally:
        setattr(mx.fast, name, original)
