"""Ring attention against dense attention in float64, with the ranks of the ring as threads of this process."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from vorox.backends.torch_engine.attention import attention, ring_attention
from vorox.backends.torch_engine.attention.ring_attention import PassOn
from vorox.backends.torch_engine.device.inputs import PositionPart

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
PATIENCE_SECONDS = 60
NUM_POSITIONS = 24
ROWS = np.array([[1] * 7 + [2] * 13 + [3] * 2 + [0] * 2, [1, 2, *[3] * 10, *[4] * 12]], np.int32)


def random(*shape: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).normal(size=shape))


def threads_of_a_ring(size: int) -> list[PassOn]:
    """Functions that pass copies from each thread to the next one, in order."""
    inboxes: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(size)]

    def connect(index: int) -> PassOn:
        def pass_on(sent: Tensor) -> Callable[[], Tensor]:
            inboxes[(index + 1) % size].put(sent.clone())
            return lambda: inboxes[index].get(timeout=PATIENCE_SECONDS)

        return pass_on

    return [connect(index) for index in range(size)]


def dense(inputs: list[Tensor], direction: Tensor, segments_BT: np.ndarray | None, window: int | None) -> list[Tensor]:
    """The plain formula with whole rows: results and gradients."""
    distance_TT = np.subtract.outer(np.arange(NUM_POSITIONS), np.arange(NUM_POSITIONS))
    visible = ((distance_TT >= 0) & (distance_TT < (window or NUM_POSITIONS)))[None]
    if segments_BT is not None:
        visible = visible & (segments_BT[:, :, None] == segments_BT[:, None, :])
    mask = attention.AttentionMask(torch.from_numpy(visible)[:, None], False)
    leaves = [x.clone().requires_grad_() for x in inputs]
    query, key, value = leaves
    mixed = attention.reference(query, key, value, mask, 0.0)
    mixed.backward(direction)
    return [mixed.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def in_ring(
    inputs: list[Tensor], direction: Tensor, segments_BT: np.ndarray | None, window: int | None, size: int
) -> list[Tensor]:
    """Results and gradients of all ranks, in the order of the row."""
    passers = threads_of_a_ring(size)
    mask = attention.ring_mask(segments_BT, window, CPU)
    ring = (mask.sliding or mask).ring
    assert ring is not None

    def run(index: int) -> list[Tensor]:
        part = PositionPart(index, size, num_chunks=2)
        chosen = torch.cat([torch.arange(NUM_POSITIONS)[chunk] for chunk in part.slices(NUM_POSITIONS)])
        leaves = [x[:, :, chosen].clone().requires_grad_() for x in inputs]
        query, key, value = leaves
        mixed = ring_attention.ring_attention(query, key, value, ring, part, passers[index])
        mixed.backward(direction[:, :, chosen].to(mixed.dtype))
        return [mixed.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None), chosen]

    with ThreadPoolExecutor(size) as pool:
        *results, positions = zip(*pool.map(run, range(size), timeout=PATIENCE_SECONDS), strict=True)
    order = torch.cat(positions).argsort()
    return [torch.cat(parts, 2)[:, :, order] for parts in results]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 30])
@pytest.mark.parametrize("segments", [None, ROWS], ids=["one document", "documents"])
@pytest.mark.parametrize("tile", [2, 1024])
def test_equals_dense_attention(
    size: int, window: int | None, segments: np.ndarray | None, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six query heads share two key/value heads; four ranks divide neither."""
    monkeypatch.setattr(ring_attention, "TILE_POSITIONS", tile)
    inputs = [random(2, heads, NUM_POSITIONS, 8, seed=seed) for seed, heads in enumerate((6, 2, 2))]
    direction = random(2, 6, NUM_POSITIONS, 8, seed=9)
    expected = dense(inputs, direction, segments, window)
    for mine, oracle in zip(in_ring(inputs, direction, segments, window, size), expected, strict=True):
        torch.testing.assert_close(mine, oracle, rtol=1e-10, atol=1e-12)
    floats = in_ring([x.float() for x in inputs], direction, segments, window, size)
    for mine, oracle in zip(floats, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), oracle, rtol=1e-4, atol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    """The merge subtracts the running maximum; weights of fp32 would overflow at a score of 89."""
    inputs = [100 * random(1, 2, NUM_POSITIONS, 8, seed=seed) for seed in range(3)]
    direction = random(1, 2, NUM_POSITIONS, 8, seed=9)
    found = in_ring([x.float() for x in inputs], direction, None, None, 2)
    torch.testing.assert_close(found[0].double(), dense(inputs, direction, None, None)[0], rtol=1e-3, atol=1e-2)
    assert all(bool(x.isfinite().all()) for x in found)


def test_bf16_is_rounded_once() -> None:
    """Products are in fp32: results are those of rounded inputs, rounded."""
    inputs = [random(2, 2, NUM_POSITIONS, 8, seed=seed).bfloat16() for seed in range(3)]
    direction = random(2, 2, NUM_POSITIONS, 8, seed=9).bfloat16()
    expected = dense([x.double() for x in inputs], direction.double(), ROWS, 5)
    found = in_ring(inputs, direction, ROWS, 5, 2)
    assert found[0].dtype == torch.bfloat16
    torch.testing.assert_close(found[0].double(), expected[0], rtol=2**-8, atol=1e-6)
    for mine, oracle in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(mine.double(), oracle, rtol=2**-6, atol=2e-2)


@pytest.mark.parametrize("size", [2, 4, 7])
def test_zigzag_divides_the_work_of_a_causal_mask_equally(size: int) -> None:
    num_positions = 4 * 2 * size
    positions_1T = np.arange(num_positions, dtype=np.int32)[None]
    parts = [PositionPart(index, size, num_chunks=2).select(positions_1T) for index in range(size)]
    assert sorted(np.concatenate(parts, 1)[0]) == list(range(num_positions))
    assert len({int((part + 1).sum()) for part in parts}) == 1


def test_hidden_tiles_are_not_computed() -> None:
    """Of a row of many short documents, or with a short window, few tiles are left."""

    def count(segments_BT: np.ndarray | None, window: int | None) -> int:
        ring = attention.ring_mask(segments_BT, window, CPU)
        mask = (ring.sliding or ring).ring
        assert mask is not None
        parts = [PositionPart(index, 4, num_chunks=2) for index in range(4)]
        tiles = [tile for part in parts for tile in ring_attention.tiles_of(part, 64)]
        return sum(not mask.hides(query, key) for query in tiles for key in tiles)

    assert count(None, None) == 8 * 9 // 2
    assert count(None, 1) == 8
    assert count(None, 9) == 8 + 7
    assert count(np.repeat(np.arange(1, 9), 8)[None].astype(np.int32), None) == 8
