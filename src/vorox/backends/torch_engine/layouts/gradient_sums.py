"""Sums of gradients over micro-batches and ranks, optionally in an order that no layout changes.

In: gradients of one micro-batch at a time, in the gradient buffers. Out: their sum over all ranks, in the same buffers.
Usually every micro-batch adds to the buffers, and the ranks add theirs, so the order of additions depends on the
layout: replicas by all-reduce, in buckets during the last backward pass (``gradient_buckets.py``), FSDP2 in its
backward pass (``sharded_parameters.py``), ZeRO in DeepSpeed (``zero_parameters.py``). Ranks that divide tensors or
blocks add what they share in ``finish_gradients``. With
``determinism=bitwise-any-world`` the order is a binary tree over the indices of the micro-batches in the global batch:
the root adds the sums of even and odd indices, and so on down, which pairs indices that differ in their highest bit
first. Rank ``r`` of ``W`` has the indices ``r + W a``, which is a subtree if ``W`` is a power of two.

Shape legend: W ranks, N elements of a rank's share of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vorox.backends.torch_engine.layouts.divided_parameters import ExpertParallelParameters
from vorox.backends.torch_engine.layouts.gradient_buckets import GradientBuckets
from vorox.backends.torch_engine.layouts.parameters import Parameters
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.batch_sizes import batch_sizes_of
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig

_aten = torch.ops.aten
PIECE_ELEMENTS = 1 << 22
"""Elements per exchange between ranks, which bounds its memory."""


def accumulate(
    parameters: Parameters,
    ranks: Ranks,
    num_micro_batches: int,
    buckets: GradientBuckets | None = None,
    overlaps: bool = False,
) -> Iterator[int]:
    """Yield this rank's micro-batches in the order in which to run them; at the end, gradients are sums over all ranks.

    The caller adds the gradients of a micro-batch to the buffers before it asks for the next one.

    Args:
        parameters: Parameters and gradients.
        ranks: The ranks of the run.
        num_micro_batches: Micro-batches of this rank.
        buckets: Parts in which replicas add their gradients; ``None`` for whole buffers.
        overlaps: Whether the sums of buckets start within the last micro-batch, which must have one backward pass.
    """
    if ranks.is_exact:
        gradients = [tensor for tensors in parameters.gradients.values() for tensor in tensors]
        for index in tree_order(gradients, num_micro_batches):
            parameters.zero_gradients()
            yield index
        with ranks.collective_time.measured():
            for gradient in gradients:
                sum_over_ranks(gradient, ranks)
        return
    parameters.zero_gradients()
    yield from range(num_micro_batches - 1)
    if buckets is not None:
        buckets.open(overlaps=overlaps)
    yield num_micro_batches - 1
    if buckets is not None:
        with ranks.collective_time.measured():
            buckets.finish()
    elif isinstance(parameters, ExpertParallelParameters):
        parameters.sum_gradients(ranks)
    elif ranks.num_fsdp_shards == 1:  # FSDP has summed them in the backward pass
        ranks.sum(*(tensor for tensors in parameters.gradients.values() for tensor in tensors))
    parameters.finish_gradients()


def tree_order(tensors: Sequence[Tensor], num_leaves: int) -> Iterator[int]:
    """Yield leaves from 0; the caller puts the values of each into ``tensors``, which hold the sum at the end.

    The leaves come in bit-reversed order, so at most log2 of their number of partial sums are kept. Their number is
    padded to a power of two by leaves without a value, which add nothing.
    """
    num_bits = (num_leaves - 1).bit_length()
    partial_sums: list[list[Tensor] | None] = []
    for place in range(1 << num_bits):
        leaf = sum(1 << (num_bits - 1 - bit) for bit in range(num_bits) if place >> bit & 1)
        is_empty = leaf >= num_leaves
        if not is_empty:
            yield leaf
        for _ in range((~place & (place + 1)).bit_length() - 1):  # as a binary counter carries
            left = partial_sums.pop()
            if left is not None and is_empty:
                _copy(tensors, left)
                is_empty = False
            elif left is not None:
                _aten._foreach_add_(list(tensors), left)
        if place + 1 < 1 << num_bits:
            partial_sums.append(None if is_empty else [tensor.clone() for tensor in tensors])


def _copy(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


@torch.no_grad()
def sum_over_ranks(values: Tensor, ranks: Ranks) -> None:
    """Add contiguous tensors of all ranks in place, in the tree: each rank adds a share, and all gather the sums."""
    if ranks.mesh is None:
        return
    size = ranks.world_size
    for piece in values.view(-1).split(PIECE_ELEMENTS):
        share = -(-len(piece) // size)
        mine = piece.new_zeros(size * share)
        mine[: len(piece)] = piece
        received = torch.empty_like(mine)
        dist.all_to_all_single(received, mine)
        parts_WN = received.view(size, share)
        while len(parts_WN) > 1:
            half = len(parts_WN) // 2
            parts_WN = parts_WN[:half] + parts_WN[half:]
        dist.all_gather(list(mine.view(size, share).unbind()), parts_WN[0])
        piece.copy_(mine[: len(piece)])


def check(config: RunConfig, ranks: Ranks) -> None:
    """Check before step 1 that the tree is the same on any number of ranks.

    Raises:
        ConfigError: The number of ranks is no power of 2, or the micro-batches of a rank are not a subtree.
    """
    if not ranks.is_exact:
        return
    level, size = "determinism = bitwise-any-world", ranks.world_size
    if size & (size - 1):
        raise ConfigError(
            f"{level} needs 1, 2, 4, 8, ... ranks; the run has {size}", where="parallel",
            hint=f"start {1 << (size.bit_length() - 1)} processes, or set determinism=bitwise",
        )  # fmt: skip
    micro_batch = config.train.micro_batch_rows
    uneven = [stage.rows for stage in batch_sizes_of(config).stages if stage.rows % (micro_batch * size)]
    if uneven:
        raise ConfigError(
            f"{level} needs whole micro-batches: {uneven[0]} rows per step do not divide into micro-batches of "
            f"{micro_batch} on each of {size} ranks",
            where="train.micro_batch_sequences",
            hint="choose train.micro_batch_sequences so that it times the largest number of ranks divides "
            "train.global_batch_sequences, and keep it for all",
        )  # fmt: skip
