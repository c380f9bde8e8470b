"""Taps: functions that observe or replace the residual stream inside the model.

``engine.taps.attach(point, layer, function)`` makes the model call ``function(x_BTD)`` at that point, in training,
evaluation and generation. A tensor that it returns replaces the residual stream; a function that returns ``None`` only
observes. Functions are called in the order in which they were attached::

    detach = engine.taps.attach("after_attention", 3, lambda x_BTD: x_BTD + 0.1 * direction_D)
    ...
    detach()

With ``train.activation_checkpointing=block`` a block runs again in the backward pass, and so do its taps, so they must
be pure. A model without taps pays nothing.

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
    """The taps of one model.

    Attributes:
        statistics: Collects activation statistics at every point, if set.
        active: Whether any function or the statistics are attached.
    """

    def __init__(self, num_layers: int, *, compiled: bool) -> None:
        self._num_layers = num_layers
        self._compiled = compiled
        self._functions: dict[tuple[TapPoint, int], list[Tap]] = {}
        self.statistics: ActivationStatistics | None = None
        self.active = False

    def attach(self, point: TapPoint, layer: int, function: Tap) -> Callable[[], None]:
        """Pass the residual stream through ``function`` at a point of a layer (from 0).

        Returns:
            A function that detaches it.

        Raises:
            ConfigError: The point or layer does not exist, or the model is compiled.
        """
        if point not in POINTS:
            raise ConfigError(f"Unknown tap point {point!r}; available: {', '.join(POINTS)}", where="taps")
        if not 0 <= layer < self._num_layers:
            raise ConfigError(f"Tap layer {layer} does not exist; there are {self._num_layers}", where="taps")
        if self._compiled:
            raise ConfigError("Taps need an uncompiled model", where="taps", hint="set runtime.compile=false")
        functions = self._functions.setdefault((point, layer), [])
        functions.append(function)
        self._update()

        def detach() -> None:
            functions.remove(function)
            self._update()

        return detach

    def measure(self, statistics: ActivationStatistics | None) -> None:
        """Collect statistics at every point; ``None`` stops it."""
        self.statistics = statistics
        self._update()

    def _update(self) -> None:
        self.active = self.statistics is not None or any(self._functions.values())

    def apply(self, point: TapPoint, layer: int, x_MD: Tensor, shape_BT: tuple[int, int]) -> Tensor:
        """Return the residual stream after the taps of a point."""
        for function in self._functions.get((point, layer), ()):
            replacement = function(x_MD.view(*shape_BT, -1))
            if replacement is not None:
                x_MD = replacement.reshape(x_MD.shape)
        if self.statistics is not None:
            self.statistics.observe(point, layer, x_MD)
        return x_MD


class ActivationStatistics:
    """Mean, standard deviation and largest magnitude at every tap point, over all micro-batches of a step.

    Values are keyed by micro-batch, so a block that runs twice (activation checkpointing) counts once. They stay on the
    device until the step is fetched.
    """

    def __init__(self) -> None:
        self.micro_batch = 0
        self._moments: dict[tuple[int, TapPoint, int], Tensor] = {}

    def observe(self, point: TapPoint, layer: int, x_MD: Tensor) -> None:
        with torch.no_grad():
            x = x_MD.detach().float()
            moments = torch.stack([x.mean(), x.square().mean(), x.abs().amax()])
        self._moments[layer, point, self.micro_batch] = moments

    def take(self) -> tuple[list[str], Tensor | None]:
        """Return metric names and values since the last call, and reset."""
        points = sorted({(layer, POINTS.index(point)) for layer, point, _ in self._moments})
        names: list[str] = []
        values: list[Tensor] = []
        for layer, index in points:
            point = POINTS[index]
            parts = torch.stack([part for key, part in sorted(self._moments.items()) if key[:2] == (layer, point)])
            mean = parts[:, 0].mean()
            deviation = (parts[:, 1].mean() - mean.square()).clamp(min=0).sqrt()
            values += [mean, deviation, parts[:, 2].amax()]
            names += [f"activation/{layer}/{point}/{kind}" for kind in ("mean", "std", "absmax")]
        self._moments.clear()
        return names, torch.stack(values) if values else None
