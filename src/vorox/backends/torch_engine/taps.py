"""Points inside the model where a function can watch or replace the residual stream.

``engine.taps.attach(point, layer, function)`` calls ``function(x_BTD)`` whenever the model passes the point: in
training, evaluation and generation. A function that returns a tensor replaces the stream by it (perturbation); one
that returns ``None`` only watches. Functions are called in the order in which they were attached::

    detach = engine.taps.attach("after_attention", 3, lambda x_BTD: x_BTD + 0.1 * direction_D)
    ...
    detach()

Under ``train.activation_checkpointing=block`` a block runs a second time in the backward pass and its functions with
it, so they must be pure. Nothing attached costs nothing.

Shape legend: B rows, T positions, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor

from vorox.core.engine import TapPoint
from vorox.core.errors import ConfigError

POINTS: tuple[TapPoint, ...] = get_args(TapPoint)
Tap = Callable[[Tensor], Tensor | None]


class Taps:
    """What is attached to one model.

    Attributes:
        active: Whether the model has to look here at all.
    """

    def __init__(self, num_layers: int, *, compiled: bool) -> None:
        self._num_layers = num_layers
        self._compiled = compiled
        self._functions: dict[tuple[TapPoint, int], list[Tap]] = {}
        self.statistics: ActivationStatistics | None = None
        self.active = False

    def attach(self, point: TapPoint, layer: int, function: Tap) -> Callable[[], None]:
        """Call ``function`` at a point of a layer, from 0.

        Returns:
            Detaches it again.

        Raises:
            ConfigError: There is no such point or layer, or the model is compiled.
        """
        if point not in POINTS:
            raise ConfigError(f"tap point {point!r} is unknown; known are {', '.join(POINTS)}", where="taps")
        if not 0 <= layer < self._num_layers:
            raise ConfigError(f"layer {layer} does not exist; there are {self._num_layers}", where="taps")
        if self._compiled:
            raise ConfigError("a compiled model has no taps", where="taps", hint="set runtime.compile=false")
        functions = self._functions.setdefault((point, layer), [])
        functions.append(function)
        self._update()

        def detach() -> None:
            functions.remove(function)
            self._update()

        return detach

    def measure(self, statistics: ActivationStatistics | None) -> None:
        """Collect statistics at every point until called with ``None``."""
        self.statistics = statistics
        self._update()

    def _update(self) -> None:
        self.active = self.statistics is not None or any(self._functions.values())

    def apply(self, point: TapPoint, layer: int, x_MD: Tensor, shape_BT: tuple[int, int]) -> Tensor:
        """What the model carries on with."""
        for function in self._functions.get((point, layer), ()):
            replacement = function(x_MD.view(*shape_BT, -1))
            if replacement is not None:
                x_MD = replacement.reshape(x_MD.shape)
        if self.statistics is not None:
            self.statistics.observe(point, layer, x_MD)
        return x_MD


class ActivationStatistics:
    """Mean, standard deviation and largest magnitude at every point, over all micro-batches of a step.

    Kept per micro-batch and keyed, so seeing a block twice (activation checkpointing) changes nothing. Stays on the
    device until the step is fetched.
    """

    def __init__(self) -> None:
        self.micro_batch = 0
        self._seen: dict[tuple[int, TapPoint, int], Tensor] = {}

    def observe(self, point: TapPoint, layer: int, x_MD: Tensor) -> None:
        with torch.no_grad():
            x = x_MD.detach().float()
            moments = torch.stack([x.mean(), x.square().mean(), x.abs().amax()])
        self._seen[layer, point, self.micro_batch] = moments

    def take(self) -> tuple[list[str], Tensor | None]:
        """Names and values of what was seen since the last call."""
        points = sorted({(layer, POINTS.index(point)) for layer, point, _ in self._seen})
        names: list[str] = []
        values: list[Tensor] = []
        for layer, index in points:
            point = POINTS[index]
            parts = torch.stack([seen for key, seen in sorted(self._seen.items()) if key[:2] == (layer, point)])
            mean = parts[:, 0].mean()
            deviation = (parts[:, 1].mean() - mean.square()).clamp(min=0).sqrt()
            values += [mean, deviation, parts[:, 2].amax()]
            names += [f"activation/{layer}/{point}/{kind}" for kind in ("mean", "std", "absmax")]
        self._seen.clear()
        return names, torch.stack(values) if values else None
