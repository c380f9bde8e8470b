"""Ranks that divide parameters, and collectives between them without gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class RankGroup:
    """Ranks that divide parameters.

    Attributes:
        index: Index of this rank in the group.
        size: Number of ranks of the group.
        group: The ranks.
    """

    index: int
    size: int
    group: ProcessGroup

    def global_rank(self, index: int) -> int:
        """Return the rank in the run of a rank of the group."""
        return dist.get_global_rank(self.group, index)

    def range_of(self, num: int) -> tuple[int, int]:
        """Return the first index and the number of this rank's part of an axis; the last parts may be shorter."""
        share = -(-num // self.size)
        first = min(share * self.index, num)
        return first, min(share, num - first)

    def sum_(self, x: Tensor) -> None:
        """Add the tensors of all ranks in place."""
        dist.all_reduce(x, group=self.group)

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked."""
        found = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(found, x.contiguous(), group=self.group)
        return torch.stack(found)

    def join(self, x: Tensor, num: int, dim: int) -> Tensor:
        """Return a whole tensor from the parts of all ranks along a dimension of size ``num``."""
        missing = -(-num // self.size) - x.shape[dim]
        padded = x if missing == 0 else torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)
        return torch.cat(self.gather(padded).unbind(), dim).narrow(dim, 0, num)

    def broadcast_(self, x: Tensor, source: int) -> None:
        """Overwrite a tensor by that of the rank with an index."""
        dist.broadcast(x, self.global_rank(source), self.group)

    def exchange_columns(self, x: Tensor) -> tuple[int, Tensor]:
        """Return the first of this rank's rows of a matrix and these rows, from the columns of each rank."""
        num_rows, num_columns = x.shape
        first, count = self.range_of(num_rows)
        share = -(-num_rows // self.size)
        sent = x.new_zeros(share * self.size, num_columns)
        sent[:num_rows] = x
        received = torch.empty_like(sent)
        if share:
            dist.all_to_all_single(received, sent, group=self.group)
        parts_ROC = received.view(self.size, share, num_columns)
        return first, parts_ROC.transpose(0, 1).reshape(share, -1)[:count]


def num_here(group: RankGroup | None, num: int) -> int:
    """Return how many of ``num`` heads or tokens this rank has; all without a group."""
    return num if group is None else group.range_of(num)[1]
