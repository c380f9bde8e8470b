"""Gradients of micro-batches are added in one binary tree, whatever the number of ranks and micro-batches per rank.

The oracle adds the same numbers by recursion over the indices of the global batch. Magnitudes differ so much that any
other order gives other bits, which a sum in sequence shows.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from small_configurations import configuration
from vorox.backends.torch_engine.layouts import gradient_sums
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.batch import DataShard
from vorox.core.errors import ConfigError

pytestmark = pytest.mark.torch


def leaves(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(97, generator=generator) * 10.0 ** (number % 7) for number in range(count)]


def oracle(values: list[Tensor], first: int = 0, stride: int = 1) -> Tensor:
    """The sum of ``first, first + stride, ...``: that of the even ones of them, plus that of the odd ones."""
    if first + stride >= len(values):
        return values[first]
    return oracle(values, first, 2 * stride) + oracle(values, first + stride, 2 * stride)


def summed(values: list[Tensor]) -> tuple[Tensor, list[int]]:
    """The sum by ``tree_order`` in one process, and the order of the leaves."""
    total, order = torch.full_like(values[0], torch.nan), []
    for index in gradient_sums.tree_order([total], len(values)):
        order.append(index)
        total.copy_(values[index])
    return total, order


@pytest.mark.parametrize("count", [*range(1, 18), 31, 33])
def test_one_process_adds_in_the_tree(count: int) -> None:
    values = leaves(count)
    total, order = summed(values)
    assert sorted(order) == list(range(count))
    assert torch.equal(total, oracle(values))
    if count > 4:
        assert not torch.equal(total, functools.reduce(torch.add, values)), "the order matters"


@pytest.mark.parametrize(("world", "accumulation"), [(2, 1), (2, 3), (2, 4), (4, 1), (4, 2), (4, 5), (8, 3), (16, 1)])
def test_ranks_hold_subtrees_of_the_same_tree(world: int, accumulation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = leaves(world * accumulation)
    parts = [summed(values[rank::world])[0] for rank in range(world)]

    def all_to_all(received: Tensor, mine: Tensor) -> None:
        share = len(mine) // world
        padded = [torch.cat([part, part.new_zeros(share * world - len(part))]) for part in parts]
        received.copy_(torch.cat([part.view(world, share)[rank[0]] for part in padded]))

    def all_gather(gathered: list[Tensor], mine: Tensor) -> None:
        for number, part in enumerate(gathered):
            part.copy_(mine if number == rank[0] else torch.zeros_like(mine))

    rank = [0]
    monkeypatch.setattr(gradient_sums.dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(gradient_sums.dist, "all_gather", all_gather)
    ranks = Ranks(DataShard(0, world), world, 1, mesh=object(), is_exact=True)  # pyright: ignore[reportArgumentType]
    shares = []
    for rank[0] in range(world):
        mine = parts[rank[0]].clone()
        gradient_sums.sum_over_ranks(mine, ranks)
        shares.append(mine)
    assert torch.equal(torch.stack(shares).sum(0), oracle(values)), "every element was added by one rank"


def test_few_partial_sums_are_kept() -> None:
    kept, most = torch.zeros(1), 0
    order = gradient_sums.tree_order([kept], 64)
    for _ in order:
        most = max(most, sum(part is not None for part in order.gi_frame.f_locals["partial_sums"]))
    assert most == 6


def test_layouts_with_another_tree_are_refused() -> None:
    def layout(data: int, fsdp: int = 1, *, is_exact: bool = True) -> Ranks:
        return Ranks(DataShard(0, data * fsdp), data, fsdp, is_exact=is_exact)

    sizes = {"train__global_batch_sequences": 8, "runtime__determinism": "bitwise-any-world"}
    for ranks in (layout(1), layout(2), layout(4), layout(3, is_exact=False), layout(1, 2, is_exact=False)):
        gradient_sums.check(configuration(**sizes, train__micro_batch_sequences=2), ranks)
    for ranks, micro_batch, what in (
        (layout(3), 1, r"needs 1, 2, 4, 8, \.\.\. ranks; the run has 3"),
        (layout(8), 2, "do not divide into micro-batches of 2 on each of 8 ranks"),
    ):
        with pytest.raises(ConfigError, match=what) as found:
            gradient_sums.check(configuration(**sizes, train__micro_batch_sequences=micro_batch), ranks)
        assert found.value.hint
