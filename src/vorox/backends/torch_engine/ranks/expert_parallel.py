"""Expert parallelism: ranks divide the experts of every block and exchange tokens for them.

The ranks of a group train on different rows, as replicas do, and each has some of the experts. A rank routes its own
positions and sends each slot to the rank that has its expert (all-to-all); that rank computes its experts on the slots
of all ranks, and sends the results back. All other parameters are on every rank.

Shape legend: E experts, X experts of a rank, R ranks of the group, S slots of this rank, P slots that it computes, D
width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vorox.backends.torch_engine.ranks.differentiable import differentiable
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.backends.torch_engine.ranks.rank_group import RankGroup

Compute = Callable[[Tensor, Tensor], Tensor]
"""(slots sorted by expert, end of each expert) -> their output."""


@dataclass(frozen=True)
class ExpertGroup(RankGroup):
    """The ranks that divide the experts, and the exchange of slots between them."""

    @classmethod
    def among(cls, ranks: Ranks) -> ExpertGroup | None:
        """Return the group of a rank; ``None`` without expert parallelism."""
        if ranks.expert_parallel_size == 1:
            return None
        assert ranks.replica_group is not None
        return cls(ranks.expert_index, ranks.expert_parallel_size, ranks.replica_group)

    def run(self, compute: Compute, x_SD: Tensor, ends_E: Tensor) -> Tensor:
        """Compute the experts of all ranks on this rank's slots, which are sorted by expert."""
        load_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        sent_RX = load_E.view(self.size, -1).contiguous()
        received_RX = torch.empty_like(sent_RX)
        dist.all_to_all_single(received_RX, sent_RX, group=self.group)
        sent, received = sent_RX.sum(1).tolist(), received_RX.sum(1).tolist()
        dispatch, combine = partial(self._all_to_all, sent, received), partial(self._all_to_all, received, sent)
        x_PD = differentiable(x_SD, dispatch, combine)
        # Slots arrive by rank, then by expert.
        expert_P = torch.arange(sent_RX.shape[1], device=x_SD.device).repeat(self.size)
        order_P = expert_P.repeat_interleave(received_RX.flatten().long()).argsort(stable=True)
        inverse_P = order_P.argsort()
        y_PD = compute(Permute.apply(x_PD, order_P, inverse_P), received_RX.sum(0).cumsum(0).int())
        return differentiable(Permute.apply(y_PD, inverse_P, order_P), combine, dispatch)

    def _all_to_all(self, sent: list[int], received: list[int], x_SD: Tensor) -> Tensor:
        """Send consecutive slots to the ranks of the group, ``sent[r]`` to rank r."""
        found_PD = x_SD.new_empty(sum(received), x_SD.shape[1])
        dist.all_to_all_single(found_PD, x_SD.contiguous(), received, sent, group=self.group)
        return found_PD


class Permute(torch.autograd.Function):
    """Reorder slots; the gradient is the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, order_P: Tensor, inverse_P: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_P)
        return x_PD[order_P]

    @staticmethod
    def backward(ctx: Any, d_PD: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (inverse_P,) = ctx.saved_tensors
        return d_PD[inverse_P], None, None
