"""Taps: functions that observe or replace the residual stream inside the model.

``engine.taps.attach(point, layer, function)`` makes the model call ``function(x_BTD)`` at that point, in training,
evaluation and generation. A tensor that it returns replaces the residual stream; a function that returns ``None`` only
observes. Functions are called in the order in which they were attached::

    detach = engine.taps.attach("after_attention", 3, lambda x_BTD: x_BTD + 0.1 * direction_D)
    ...
    detach()

With ``train.activation_checkpointing`` a block runs again in the backward pass, and so do its taps, so they must
be pure. Taps of a compiled model run between compiled graphs. A model without taps pays nothing.

Shape legend: B rows, T positions, D width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.engine import TapPoint
from vorox.models.decoder.tap_points import POINTS, LayerPoints, TapFunctions


class Taps(TapFunctions):
    """The taps of one model.

    Attributes:
        statistics: Collects activation statistics at every point where blocks call functions, if set.
        active: Whether any function or the statistics are attached.
    """

    def __init__(self, layers: Sequence[LayerPoints]) -> None:
        super().__init__(layers, self._update)
        self.statistics: ActivationStatistics | None = None
        self.active = False

    def measure(self, statistics: ActivationStatistics | None) -> None:
        """Collect statistics; ``None`` stops it."""
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
            self.statistics.observe(point, layer, x_MD, shape_BT[1])
        return x_MD


class ActivationStatistics:
    """Mean, standard deviation and largest magnitude at every tap point, over all micro-batches of a step.

    Values are keyed by micro-batch, so a block that runs twice (activation checkpointing) counts once. They stay on the
    device until the step is fetched.
    """

    def __init__(self) -> None:
        self.micro_batch = 0
        self._num_rows: dict[int, int] = {}
        self._moments: dict[tuple[int, TapPoint, int], Tensor] = {}

    def begin(self, micro_batch: int, num_rows: int) -> None:
        """Begin a micro-batch; the rows after the first ``num_rows`` are padding and do not count."""
        self.micro_batch = micro_batch
        self._num_rows[micro_batch] = num_rows

    def observe(self, point: TapPoint, layer: int, x_MD: Tensor, num_positions: int) -> None:
        num_rows = self._num_rows[self.micro_batch]
        with torch.no_grad():
            x = x_MD.detach()[: num_rows * num_positions].float()
            if num_rows:
                moments = torch.stack([x.mean() * num_rows, x.square().mean() * num_rows, x.abs().amax()])
            else:
                moments = x.new_zeros(3)
        self._moments[layer, point, self.micro_batch] = moments

    def add_zeros(self, layers: Iterable[int], num_micro_batches: int, device: torch.device) -> None:
        """Add zeros for layers that another rank measures."""
        zeros = torch.zeros(3, device=device)
        for layer, point, micro_batch in itertools.product(layers, POINTS, range(num_micro_batches)):
            self._moments[layer, point, micro_batch] = zeros

    def take(self, ranks: Ranks) -> tuple[list[str], Tensor | None]:
        """Return metric names and values since the last call, over all ranks, and reset."""
        points = sorted({(layer, POINTS.index(point)) for layer, point, _ in self._moments})
        names: list[str] = []
        moments: list[Tensor] = []
        largest: list[Tensor] = []
        for layer, index in points:
            point = POINTS[index]
            parts = torch.stack([part for key, part in sorted(self._moments.items()) if key[:2] == (layer, point)])
            moments.append(parts[:, :2].T)
            largest.append(parts[:, 2].amax())
            names += [f"activation/{layer}/{point}/{kind}" for kind in ("mean", "std", "absmax")]
        self._moments.clear()
        if not names:
            return names, None
        sums_P2, largest_P = ranks.sum_micro_batches(torch.stack(moments)), torch.stack(largest)
        ranks.maximum(largest_P)
        (num_rows,) = ranks.sum_counts(sum(self._num_rows.values()))
        self._num_rows.clear()
        mean_P, square_P = (sums_P2 / max(1.0, num_rows)).unbind(1)
        deviation_P = (square_P - mean_P.square()).clamp(min=0).sqrt()
        return names, torch.stack([mean_P, deviation_P, largest_P], dim=1).flatten()
