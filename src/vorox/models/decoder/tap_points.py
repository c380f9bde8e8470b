"""Tap points: the points of each layer of a decoder, and the functions that are attached there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from vorox.core.engine import TapPoint
from vorox.core.errors import ConfigError
from vorox.models.decoder.spec import DecoderSpec

POINTS: tuple[TapPoint, ...] = get_args(TapPoint)
LayerPoints = Mapping[TapPoint, TapPoint]
"""The points of a layer, each with the point at which its block calls the functions."""


def decoder_points(spec: DecoderSpec) -> list[LayerPoints]:
    """Return the points of every layer. ``after_mlp`` is the end of any block.

    A layer of ``model.layer_pattern`` has one mixer, so after its attention is the end of the block.
    """
    if spec.layer_pattern is None and spec.block is None:
        return [{point: point for point in POINTS}] * spec.num_layers
    ends: LayerPoints = {"block_input": "block_input", "after_mlp": "after_mlp"}
    with_attention: LayerPoints = {**ends, "after_attention": "after_mlp"}
    pattern = spec.layer_pattern or ""
    return [with_attention if pattern[layer : layer + 1] == "*" else ends for layer in range(spec.num_layers)]


class TapFunctions:
    """The functions of one model, by the point and layer at which its blocks call them.

    Args:
        layers: The points of every layer; empty if the model has none.
        on_change: Called after a function was attached or detached.
    """

    def __init__(self, layers: Sequence[LayerPoints], on_change: Callable[[], None]) -> None:
        self._layers, self._on_change = layers, on_change
        self._functions: dict[tuple[TapPoint, int], list[Callable[[Any], Any]]] = {}

    def attach(self, point: TapPoint, layer: int, function: Callable[[Any], Any]) -> Callable[[], None]:
        """Pass the residual stream through ``function`` at a point of a layer (from 0).

        Returns:
            A function that detaches it.

        Raises:
            ConfigError: The point or layer does not exist.
        """
        functions = self._functions.setdefault((self._place(point, layer), layer), [])
        functions.append(function)
        self._on_change()

        def detach() -> None:
            functions.remove(function)
            self._on_change()

        return detach

    def _place(self, point: TapPoint, layer: int) -> TapPoint:
        if not self._layers:
            raise ConfigError(
                "The modules of this model have no tap points", where="taps",
                hint="use a model of model.kind=decoder, or hooks of PyTorch (register_forward_hook)",
            )  # fmt: skip
        if point not in POINTS:
            raise ConfigError(f"Unknown tap point {point!r}; available: {', '.join(POINTS)}", where="taps")
        if not 0 <= layer < len(self._layers):
            raise ConfigError(f"Tap layer {layer} does not exist; there are {len(self._layers)}", where="taps")
        if point not in self._layers[layer]:
            others = [number for number, points in enumerate(self._layers) if point in points]
            raise ConfigError(
                f"Layer {layer} has no tap point {point!r}; it has {', '.join(self._layers[layer])}", where="taps",
                hint=f"layers with {point}: {', '.join(map(str, others)) or 'none'}",
            )  # fmt: skip
        return self._layers[layer][point]
