"""Ring attention: keys and values pass through the ranks of a group while each rank keeps its queries.

Ring Attention (arXiv 2310.01889) with the head-tail ("zigzag") division of Megatron-LM and of PyTorch's
``context_parallel``: a row has 2 R chunks, and rank r computes chunks r and 2 R - 1 - r, so that ranks have
equal work under a causal mask. In step i, a rank attends to the positions of rank r - i and sends their keys and values
on. Results of blocks are merged by the online softmax in fp32; only they and their log-sum-exps are saved, and the
backward pass computes weights again. There, the gradients of keys and values travel with their block and are added in
the order of the ring, so they have the same bits in every run.

Blocks are computed in tiles of the plain formula, on every device. Tiles that a causal mask, a window or documents hide
are skipped. Products are in fp32, also of bf16 inputs.

Shape legend: R ranks of the group, B rows, T positions of a row, P = T / R positions of a rank, Q query and S key
positions of a tile, N query heads, K key/value heads, G = N / K, H head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vorox.backends.torch_engine.attention.ring_mask import RingMask, Tile
from vorox.backends.torch_engine.device.inputs import PositionPart

TILE_POSITIONS = 1024
"""Most queries and most keys of a tile, which bounds the memory of scores."""

PassOn = Callable[[Tensor], Callable[[], Tensor]]
"""Starts to send a tensor to the next rank of the ring; the result waits for the one of the rank before this one."""


def ring_attention(
    query_BNPH: Tensor, key_BKPH: Tensor, value_BKPH: Tensor, mask: RingMask, part: PositionPart, pass_on: PassOn
) -> Tensor:
    """Return attention of this rank's queries to all positions of their rows, ``[B, N, P, H]``."""
    heads = (query_BNPH, key_BKPH, value_BKPH)
    kind = query_BNPH.device.type
    if torch.is_autocast_enabled(kind):  # attention computes in this precision
        heads = tuple(x.to(torch.get_autocast_dtype(kind)) for x in heads)
    return _Ring.apply(*heads, mask, part, pass_on)


def passing(group: ProcessGroup) -> PassOn:
    """Return a function that passes tensors through the ranks of a group."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def pass_on(sent: Tensor) -> Callable[[], Tensor]:
        received = torch.empty_like(sent)
        operations = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
        ]
        works = dist.batch_isend_irecv(operations)

        def wait() -> Tensor:
            for work in works:
                work.wait()
            del operations[:]  # until here, what is sent must not be freed
            return received

        return wait

    return pass_on


def tiles_of(part: PositionPart, num_positions: int) -> list[Tile]:
    """Return the positions of a rank in tiles, in the order in which it holds them."""
    tiles: list[Tile] = []
    first = 0
    for chunk in part.slices(num_positions):
        for start in range(chunk.start, chunk.stop, TILE_POSITIONS):
            count = min(TILE_POSITIONS, chunk.stop - start)
            tiles.append(Tile(start, slice(first, first + count)))
            first += count
    return tiles


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: RingMask, part: PositionPart, pass_on: PassOn
    ) -> Tensor:
        ctx.mask, ctx.part, ctx.pass_on = mask, part, pass_on
        query_BKGPH = query.unflatten(1, (key.shape[1], -1))
        held_2BKPH = torch.stack([key, value])
        mixed_BKGPH = torch.zeros_like(query_BKGPH, dtype=_wide(query), memory_format=torch.contiguous_format)
        total_BKGP = mixed_BKGPH.new_zeros(mixed_BKGPH.shape[:-1])
        peak_BKGP = torch.full_like(total_BKGP, -math.inf)
        with torch.autocast(query.device.type, enabled=False):
            for step in range(part.size):
                is_last = step == part.size - 1
                arrival = None if is_last else pass_on(held_2BKPH)
                keys, values = held_2BKPH.to(mixed_BKGPH.dtype)
                for rows, columns, visible in _pairs(mask, part, step, query):
                    scores = _scores(query_BKGPH[..., rows, :], keys[:, :, columns], visible)
                    before = peak_BKGP[..., rows]
                    peak = torch.maximum(before, scores.amax(-1))
                    base = peak.masked_fill(peak == -math.inf, 0)  # no key so far
                    weights = scores.sub_(base[..., None]).exp_()
                    factor = (before - base).exp()
                    total_BKGP[..., rows] = total_BKGP[..., rows] * factor + weights.sum(-1)
                    mixed = mixed_BKGPH[..., rows, :] * factor[..., None]
                    mixed_BKGPH[..., rows, :] = mixed + _multiply(weights, values[:, :, columns])
                    peak_BKGP[..., rows] = peak
                held_2BKPH = held_2BKPH if arrival is None else arrival()
        mixed_BNPH = (mixed_BKGPH / total_BKGP[..., None]).flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, mixed_BNPH, peak_BKGP + total_BKGP.log())
        return mixed_BNPH

    @staticmethod
    def backward(ctx: Any, d_mixed: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, mixed, lse_BKGP = ctx.saved_tensors
        mask, part, pass_on = ctx.mask, ctx.part, ctx.pass_on
        query_BKGPH, d_mixed_BKGPH, mixed_BKGPH = (
            x.unflatten(1, (key.shape[1], -1)).to(lse_BKGP.dtype) for x in (query, d_mixed, mixed)
        )
        d_total_BKGP = (d_mixed_BKGPH * mixed_BKGPH).sum(-1)
        d_query_BKGPH = torch.zeros_like(query_BKGPH, memory_format=torch.contiguous_format)
        held_2BKPH = torch.stack([key, value])
        d_arrival: Callable[[], Tensor] | None = None
        with torch.autocast(query.device.type, enabled=False):
            for step in range(part.size):
                arrival = None if step == part.size - 1 else pass_on(held_2BKPH)
                keys, values = held_2BKPH.to(lse_BKGP.dtype)
                d_held_2BKPH = torch.zeros(held_2BKPH.shape, dtype=lse_BKGP.dtype, device=query.device)
                d_keys, d_values = d_held_2BKPH
                for rows, columns, visible in _pairs(mask, part, step, query):
                    queries, d_results = query_BKGPH[..., rows, :], d_mixed_BKGPH[..., rows, :]
                    scores = _scores(queries, keys[:, :, columns], visible)
                    weights = scores.sub_(lse_BKGP[..., rows, None]).exp_()
                    d_values[:, :, columns] += _multiply_transposed(weights, d_results)
                    d_weights = _multiply(d_results, values[:, :, columns].transpose(-1, -2))
                    d_scores = d_weights.sub_(d_total_BKGP[..., rows, None]).mul_(weights)
                    d_scores.mul_(1 / math.sqrt(query.shape[-1]))
                    d_query_BKGPH[..., rows, :] += _multiply(d_scores, keys[:, :, columns])
                    d_keys[:, :, columns] += _multiply_transposed(d_scores, queries)
                if d_arrival is not None:  # what the ranks before this one computed for the same block
                    d_held_2BKPH = d_arrival() + d_held_2BKPH
                d_arrival = pass_on(d_held_2BKPH)
                held_2BKPH = held_2BKPH if arrival is None else arrival()
        assert d_arrival is not None
        d_key, d_value = d_arrival().to(key.dtype)
        return d_query_BKGPH.flatten(1, 2).to(query.dtype), d_key, d_value, None, None, None


def _wide(x: Tensor) -> torch.dtype:
    """Return the precision of products and sums."""
    return torch.promote_types(x.dtype, torch.float32)


def _pairs(
    mask: RingMask, part: PositionPart, step: int, query: Tensor
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield the visible tiles of a step: their queries, their keys in the block, and their mask."""
    source = part.at((part.index - step) % part.size)
    num_positions = query.shape[2] * part.size
    for key in tiles_of(source, num_positions):
        for rows in tiles_of(part, num_positions):
            if not mask.hides(rows, key):
                yield rows.here, key.here, mask.visible(rows, key, query.device)


def _scores(query_BKGQH: Tensor, key_BKSH: Tensor, visible: Tensor | None) -> Tensor:
    """Return the scaled scores of a tile, ``[B, K, G, Q, S]``."""
    scores = _multiply(query_BKGQH.to(key_BKSH.dtype), key_BKSH.transpose(-1, -2))
    scores.mul_(1 / math.sqrt(query_BKGQH.shape[-1]))
    return scores if visible is None else scores.masked_fill_(~visible, -math.inf)


def _multiply(left_BKGQX: Tensor, right_BKXY: Tensor) -> Tensor:
    """Return ``[B, K, G, Q, Y]``; the query heads of a key head are one product."""
    return (left_BKGQX.flatten(2, 3) @ right_BKXY).unflatten(2, left_BKGQX.shape[2:4])


def _multiply_transposed(left_BKGQX: Tensor, right_BKGQY: Tensor) -> Tensor:
    """Return the sum over query heads and positions, ``[B, K, X, Y]``."""
    return left_BKGQX.flatten(2, 3).transpose(-1, -2) @ right_BKGQY.flatten(2, 3)
