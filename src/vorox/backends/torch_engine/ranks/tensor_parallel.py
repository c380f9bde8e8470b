"""Tensor parallelism: the collectives between ranks that share every matrix product of a model.

A model hands over a plan (``plan.py``) that says which parameter is divided which way; ``divided_layers.py`` has the
layers that compute with the parts. All else is replicated: norms, position embeddings, biases of the output
projections.

With sequence parallelism (Korthikanti et al., arXiv 2205.05198), the residual stream of training is divided along its
positions: a reduce-scatter replaces each sum, and an all-gather comes before each divided product. Norms, dropout and
additions then work on this rank's positions, and gradients of replicated parameters are parts.

Shape legend: M positions of a micro-batch, P those of a rank, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from vorox.backends.torch_engine.device.inputs import PositionPart
from vorox.backends.torch_engine.ranks.differentiable import differentiable, unchanged
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.backends.torch_engine.ranks.rank_group import RankGroup


@dataclass(frozen=True)
class TensorGroup(RankGroup):
    """The ranks that share every matrix product, and the collectives between them.

    Attributes:
        divides_positions: Whether the residual stream of training is divided along its positions.
    """

    divides_positions: bool = False

    @classmethod
    def among(cls, ranks: Ranks, *, divides_positions: bool = False) -> TensorGroup | None:
        """Return the group of a rank; ``None`` without tensor parallelism."""
        if ranks.tensor_parallel_size == 1:
            return None
        assert ranks.mesh is not None
        return cls(ranks.tensor_index, ranks.tensor_parallel_size, ranks.mesh.get_group("tp"), divides_positions)

    @property
    def part(self) -> PositionPart | None:
        """The positions of a micro-batch that are here in training; ``None`` for all."""
        return PositionPart(self.index, self.size) if self.divides_positions else None

    def local_rows(self, index: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """Return indices into this rank's part of ``num`` rows, and whether they are in it (else row 0)."""
        first, count = self.range_of(num)
        local = index - first
        is_here = (local >= 0) & (local < count)
        return local.where(is_here, 0), is_here

    def share(self, x: Tensor, *, is_training: bool = False) -> Tensor:
        """Return the residual stream of all positions, for products that each rank does a part of; sums its gradients.

        Args:
            x: The stream, the same on all ranks, or this rank's positions of it.
            is_training: Whether the stream belongs to training, where it may be divided.
        """
        if is_training and self.divides_positions:
            return differentiable(x, self._gather_positions, self._reduce_scatter)
        return differentiable(x, unchanged, self._all_reduce)

    def sum(self, x: Tensor, *, is_training: bool = False) -> Tensor:
        """Return the sum over the ranks, or this rank's positions of it; its gradient goes to every addend."""
        if is_training and self.divides_positions:
            return differentiable(x, self._reduce_scatter, self._gather_positions)
        return differentiable(x, self._all_reduce, unchanged)

    def gather_positions(self, x: Tensor) -> Tensor:
        """Return the residual stream of all positions, without gradients."""
        return self._gather_positions(x) if self.divides_positions else x

    def sum_positions(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, or this rank's positions of it, without gradients."""
        return self._reduce_scatter(x) if self.divides_positions else self._all_reduce(x)

    def join_columns(self, x: Tensor, num: int) -> Tensor:
        """Return the columns of all ranks, ``num`` in total; every rank computes the same from them."""
        return differentiable(
            x, lambda x: self.join(x, num, x.ndim - 1), lambda d_y: d_y.narrow(-1, *self.range_of(num))
        )

    def _gather_positions(self, x_PD: Tensor) -> Tensor:
        """Return the positions of all ranks, concatenated."""
        x_PD = x_PD.contiguous()
        found_MD = x_PD.new_empty(self.size * x_PD.shape[0], *x_PD.shape[1:])
        dist.all_gather(list(found_MD.chunk(self.size)), x_PD, group=self.group)
        return found_MD

    def _reduce_scatter(self, x_MD: Tensor) -> Tensor:
        """Return this rank's positions of the sum over the ranks."""
        parts = list(x_MD.contiguous().chunk(self.size))
        total_PD = torch.empty_like(parts[0])
        dist.reduce_scatter(total_PD, parts, group=self.group)
        return total_PD

    def _all_reduce(self, x: Tensor) -> Tensor:
        total = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total
