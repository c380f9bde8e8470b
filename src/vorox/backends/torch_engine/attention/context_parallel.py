"""Context parallelism: the ranks of a group divide the positions of their rows.

All ranks of a group read the same rows. Embedding, norms, projections, MLP and loss treat each position by itself, so
each rank computes them for its positions. Attention needs all positions. As in DeepSpeed-Ulysses (arXiv 2309.14509), an
all-to-all before it exchanges positions for heads, so that a rank has some of the heads for whole rows; after it,
a second one exchanges them back. Masks cover whole rows. Or keys and values pass through the ranks
(``ring_attention.py``). Gradients are sums over a rank's positions and are added as for replicas.

Shape legend: R ranks of the group, B rows, T positions of a row, P = T / R positions of a rank, N query heads, K
key/value heads, X any heads, S = X / R heads of a rank, H head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vorox.backends.torch_engine.attention.attention import Attend, AttentionMask, attend_with_share, ring_mask
from vorox.backends.torch_engine.attention.ring_attention import passing, ring_attention
from vorox.backends.torch_engine.device.inputs import PositionPart
from vorox.backends.torch_engine.ranks.differentiable import differentiable
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.batch import Int32Array


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """Attention between the ranks that divide the positions of the same rows.

    Attributes:
        part: The positions of this rank.
        group: The ranks.
        heads: Index and number of the shares of the heads, of which this rank attends with one.
        is_ring: Whether keys and values pass through the ranks.
    """

    part: PositionPart
    group: ProcessGroup
    heads: tuple[int, int]
    is_ring: bool

    @classmethod
    def of(cls, ranks: Ranks) -> ContextParallel | None:
        """Return that of a rank; ``None`` without context parallelism."""
        part, group = ranks.position_part, ranks.context_group
        if group is None:
            return None
        # Tensor parallelism divides the heads first.
        heads = ranks.tensor_index * part.size + part.index, ranks.tensor_parallel_size * part.size
        return cls(part, group, heads, ranks.context_parallel_kind == "ring")

    def attend(self, attend: Attend) -> Attend:
        """Return attention of this rank's positions to all positions of their rows."""
        if self.is_ring:
            return self._attend_in_ring
        return partial(self._attend, attend_with_share(attend, *self.heads))

    def mask(
        self, segments_BT: Int32Array | None, window_tokens: int | None, device: torch.device
    ) -> AttentionMask | None:
        """Return the mask of ring attention; ``None`` if attention has whole rows."""
        return ring_mask(segments_BT, window_tokens, device) if self.is_ring else None

    def _attend_in_ring(
        self,
        query_BNPH: Tensor,
        key_BKPH: Tensor,
        value_BKPH: Tensor,
        attention_mask: AttentionMask,
        dropout: float,
    ) -> Tensor:
        assert attention_mask.ring is not None
        assert dropout == 0
        return ring_attention(query_BNPH, key_BKPH, value_BKPH, attention_mask.ring, self.part, passing(self.group))

    def _attend(
        self,
        attend: Attend,
        query_BNPH: Tensor,
        key_BKPH: Tensor,
        value_BKPH: Tensor,
        attention_mask: AttentionMask,
        dropout: float,
    ) -> Tensor:
        """Compute attention of the native decoder; ``attend`` gets the dropout of one process."""
        return self.exchange_heads(
            lambda query, key, value: attend(query, key, value, attention_mask, dropout),
            query_BNPH, key_BKPH, value_BKPH,
        )  # fmt: skip

    def exchange_heads(
        self,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        query_BNPH: Tensor,
        key_BKPH: Tensor,
        value_BKPH: Tensor,
    ) -> Tensor:
        """Return attention ``[B, N, P, H]`` of this rank's positions to whole rows.

        Args:
            attend: Computes some of the heads for whole rows, ``[B, S, T, H]``, from their queries, keys and values.
            query_BNPH: Queries of this rank's positions.
            key_BKPH: Their keys.
            value_BKPH: Their values.
        """
        size, num_kv_heads = self.part.size, key_BKPH.shape[1]
        copies = math.lcm(num_kv_heads, size) // num_kv_heads  # fewer key/value heads than ranks are replicated
        heads = [query_BNPH, *(x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key_BKPH, value_BKPH))]
        kind = query_BNPH.device.type
        if torch.is_autocast_enabled(kind):  # attention computes in this precision
            heads = [x.to(torch.get_autocast_dtype(kind)) for x in heads]
        shares = [x.shape[1] // size for x in heads]
        received_RBSPH = self._exchange(torch.cat([_by_rank(x, size) for x in heads], dim=2))
        query, key, value = (x.movedim(0, 2).flatten(2, 3) for x in received_RBSPH.split(shares, dim=2))
        mixed_BSTH = attend(query, key, value)
        num_rows, share, _, width = mixed_BSTH.shape
        by_position_RBSPH = mixed_BSTH.view(num_rows, share, size, -1, width).movedim(2, 0)
        return self._exchange(by_position_RBSPH).movedim(0, 1).flatten(1, 2)

    def _exchange(self, x_R: Tensor) -> Tensor:
        """Send ``x_R[r]`` to rank r of the group; return what each rank sent here."""
        return differentiable(x_R, self._all_to_all, self._all_to_all)

    def _all_to_all(self, x_R: Tensor) -> Tensor:
        sent = x_R.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received


def _by_rank(x_BXPH: Tensor, size: int) -> Tensor:
    """Return consecutive heads for each rank, ``[R, B, S, P, H]``."""
    return x_BXPH.unflatten(1, (size, -1)).movedim(1, 0)
