"""Tensor parallelism: the ranks of a group share every matrix product of the decoder.

In: the decoder's dimensions and the mesh. Out: the dimensions of this rank's share, and the collectives that put the
shares together. As in Megatron-LM, a rank computes some heads and some hidden units of the MLP: query, key, value, gate
and up projections are divided along their outputs, the projections behind them along their inputs, so a block has two
sums over the group in the forward pass and two in the backward pass. Embedding and head are divided along the
vocabulary. All else is replicated: norms, position embeddings, biases of the output projections.

Shape legend: M positions of a micro-batch, D width, V vocabulary, L vocabulary of a rank, R ranks of the group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vorox.backends.torch_engine.distributed import Ranks
from vorox.models.decoder_spec import DecoderSpec

DIVIDED_AXES = frozenset({"heads", "kv_heads", "mlp", "vocab"})
"""Logical axes of parameters (``models/spec.py``) that are divided; no parameter has two of them."""


@dataclass(frozen=True)
class TensorParallel:
    """This rank's share of a decoder.

    Attributes:
        spec: The whole decoder.
        index: Index of this rank in the group.
        size: Number of ranks of the group.
        group: The ranks that share every matrix product.
    """

    spec: DecoderSpec
    index: int
    size: int
    group: ProcessGroup

    @classmethod
    def of(cls, spec: DecoderSpec, ranks: Ranks) -> TensorParallel | None:
        """Return the share of a rank; ``None`` without tensor parallelism."""
        if ranks.tensor_parallel_size == 1:
            return None
        assert ranks.mesh is not None
        return cls(spec, ranks.tensor_index, ranks.tensor_parallel_size, ranks.mesh.get_group("tp"))

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

    def range_of(self, num: int) -> tuple[int, int]:
        """Return the first index and the number of this rank's part of an axis; the last parts may be shorter."""
        share = -(-num // self.size)
        first = min(share * self.index, num)
        return first, min(share, num - first)

    def local_tokens(self, index_M: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of tokens in this rank's part of the vocabulary, and whether they are there (else row 0)."""
        first, count = self.range_of(self.spec.vocab_size)
        local_M = index_M - first
        is_here_M = (local_M >= 0) & (local_M < count)
        return local_M.where(is_here_M, 0), is_here_M

    def share(self, x: Tensor) -> Tensor:
        """Return ``x``, the same on all ranks, for products that each rank does a part of; sums its gradients."""
        return _Share.apply(x, self.group)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, whose gradient is that of every addend."""
        return _Sum.apply(x, self.group)

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

    def join_logits(self, logits_ML: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary, ``[M, V]``; every rank computes the same from them."""
        return _JoinLogits.apply(logits_ML, self)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _total(d_x, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ARG004 - PyTorch's shape
        return _total(x, group)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004  # pyright: ignore[reportIncompatibleMethodOverride]
        return d_y, None


class _JoinLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_ML: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.parallel = parallel
        return parallel.join(logits_ML, parallel.spec.vocab_size, 1)

    @staticmethod
    def backward(ctx: Any, d_logits_MV: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return d_logits_MV.narrow(1, *ctx.parallel.range_of(ctx.parallel.spec.vocab_size)), None


def _total(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
