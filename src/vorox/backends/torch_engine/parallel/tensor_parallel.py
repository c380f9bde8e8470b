"""Tensor parallelism: the ranks of a group share every matrix product of the decoder.

In: the decoder's dimensions and the mesh. Out: the dimensions of this rank's share, and the collectives that put the
shares together. As in Megatron-LM, a rank computes some heads and some hidden units of the MLP: query, key, value, gate
and up projections are divided along their outputs, the projections behind them along their inputs, so a block has two
sums over the group in the forward pass and two in the backward pass. Embedding and head are divided along the
vocabulary. All else is replicated: norms, position embeddings, biases of the output projections.

With sequence parallelism (Korthikanti et al., arXiv 2205.05198), the residual stream of training is divided along its
positions: a reduce-scatter replaces each sum, and an all-gather comes before each divided product. Norms, dropout and
additions then work on this rank's positions, and gradients of replicated parameters are parts.

Shape legend: M positions of a micro-batch, P those of a rank, D width, V vocabulary, L that of a rank, R ranks of the
group.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vorox.backends.torch_engine.distributed import Ranks
from vorox.backends.torch_engine.inputs import PositionPart
from vorox.backends.torch_engine.parallel.differentiable import differentiable, unchanged
from vorox.models.decoder_spec import DecoderSpec

DIVIDED_AXES = frozenset({"heads", "kv_heads", "mlp", "vocab"})
"""Logical axes of parameters (``models/spec.py``) that are divided; no parameter has two of them."""


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share every matrix product, and the collectives between them.

    Attributes:
        index: Index of this rank in the group.
        size: Number of ranks of the group.
        group: The ranks.
        divides_positions: Whether the residual stream of training is divided along its positions.
    """

    index: int
    size: int
    group: ProcessGroup
    divides_positions: bool = False

    @classmethod
    def among(cls, ranks: Ranks) -> TensorGroup | None:
        """Return the group of a rank; ``None`` without tensor parallelism."""
        if ranks.tensor_parallel_size == 1:
            return None
        assert ranks.mesh is not None
        return TensorGroup(ranks.tensor_index, ranks.tensor_parallel_size, ranks.mesh.get_group("tp"))

    @property
    def part(self) -> PositionPart | None:
        """The positions of a micro-batch that are here in training; ``None`` for all."""
        return PositionPart(self.index, self.size) if self.divides_positions else None

    def range_of(self, num: int) -> tuple[int, int]:
        """Return the first index and the number of this rank's part of an axis; the last parts may be shorter."""
        share = -(-num // self.size)
        first = min(share * self.index, num)
        return first, min(share, num - first)

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

    def sum_(self, x: Tensor) -> None:
        """Add the tensors of all ranks in place, without gradients."""
        dist.all_reduce(x, group=self.group)

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked, without gradients."""
        found = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(found, x.contiguous(), group=self.group)
        return torch.stack(found)

    def join(self, x: Tensor, num: int, dim: int) -> Tensor:
        """Return a whole tensor from the parts of all ranks along a dimension of size ``num``, without gradients."""
        missing = -(-num // self.size) - x.shape[dim]
        padded = x if missing == 0 else torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)
        return torch.cat(self.gather(padded).unbind(), dim).narrow(dim, 0, num)

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


@dataclass(frozen=True)
class TensorParallel(TensorGroup):
    """This rank's share of a decoder.

    Attributes:
        spec: The whole decoder.
    """

    spec: DecoderSpec = field(kw_only=True)

    @classmethod
    def of(cls, spec: DecoderSpec, ranks: Ranks, *, divides_positions: bool) -> TensorParallel | None:
        """Return the share of a rank; ``None`` without tensor parallelism."""
        found = cls.among(ranks)
        return None if found is None else cls(found.index, found.size, found.group, divides_positions, spec=spec)

    @cached_property
    def local(self) -> DecoderSpec:
        """The decoder with the dimensions of this rank."""
        spec = self.spec
        return replace(
            spec,
            num_heads=spec.num_heads // self.size,
            num_kv_heads=spec.num_kv_heads // self.size,
            intermediate_size=spec.intermediate_size // self.size,
            vocab_size=self.range_of(spec.vocab_size)[1],
        )

    def join_logits(self, logits_ML: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary, ``[M, V]``; every rank computes the same from them."""
        return self.join_columns(logits_ML, self.spec.vocab_size)

    def local_tokens(self, index_M: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of tokens in this rank's part of the vocabulary, and whether they are there (else row 0)."""
        return self.local_rows(index_M, self.spec.vocab_size)
