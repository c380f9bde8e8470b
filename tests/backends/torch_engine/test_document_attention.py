"""Causal slices against a dense mask in float64, and the memory that they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vorox.backends.torch_engine.attention import attention
from vorox.backends.torch_engine.device.document_attention import find_lengths

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
HEADS, WIDTH = 4, 8
ROWS = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 0, 0], [1, 2, *[3] * 14]], np.int32)


def random(*shape: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).normal(size=shape))


def visible(segments_BT: np.ndarray, window: int | None) -> np.ndarray:
    """Who may see whom, one pair at a time."""
    rows, length = segments_BT.shape
    found = np.zeros((rows, length, length), bool)
    for row, query, key in np.ndindex(*found.shape):
        is_near = key <= query and (window is None or query - key < window)
        found[row, query, key] = is_near and segments_BT[row, query] == segments_BT[row, key]
    return found


def gradients(attend: Callable[..., Tensor], inputs: list[Tensor], direction: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    mixed = attend(*leaves)
    mixed.backward(direction.to(mixed.dtype))
    return [mixed.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def check_equals_a_dense_mask(mask: attention.AttentionMask | None, window: int | None, kv_heads: int) -> None:
    """Compare values and all gradients over ``ROWS``, in layers with and without the window, with float64."""
    shape = (*ROWS.shape, WIDTH)
    inputs = [random(2, heads, *shape[1:], seed=seed) for seed, heads in enumerate((HEADS, kv_heads, kv_heads))]
    direction = random(2, HEADS, *shape[1:], seed=9)
    assert mask is not None
    assert mask.dense is None
    for given, width in ((mask, None), (mask.sliding or mask, window)):
        dense = attention.AttentionMask(torch.from_numpy(visible(ROWS, width))[:, None], False)
        expected = gradients(lambda *x, m=dense: attention.reference(*x, m, 0.0), inputs, direction)
        found = gradients(lambda *x, m=given: attention.sdpa(*x, m, 0.0), [x.float() for x in inputs], direction)
        for mine, oracle in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.double(), oracle, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("window", [None, 3, 4, 7, 20])
def test_equals_a_dense_mask(window: int | None, kv_heads: int) -> None:
    check_equals_a_dense_mask(attention.separated_mask(ROWS, ROWS.shape, window), window, kv_heads)


def test_rows_of_one_document_are_plainly_causal() -> None:
    segments = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], np.int32)
    for given in (segments, None):
        assert attention.separated_mask(given, (2, 4), None) is attention.CAUSAL
        mask = attention.separated_mask(given, (2, 4), 3)
        assert mask is not None
        assert mask.is_causal
        assert mask.sliding is not None
        assert attention.add_window(mask, 3, 0, 4, CPU) is mask


def test_a_document_in_two_parts_needs_a_dense_mask() -> None:
    assert find_lengths(np.array([[1, 2, 1]], np.int32)) is None
    assert attention.separated_mask(np.array([[1, 2, 1]], np.int32), (1, 3), None) is None


class AllocatedBytes(TorchDispatchMode):
    """Adds up the storages of everything that operators return, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self.storages[leaf.untyped_storage()._cdata] = leaf  # kept alive, so that no address is used twice
        return found

    def total(self) -> int:
        storages = {
            leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in self.storages.values()
        }
        return sum(storages.values())


def allocated_bytes(length: int, window: int | None) -> int:
    """Of attention over one row with documents of 512 tokens, forward and backward, with its mask."""
    segments = np.repeat(np.arange(1, length // 512 + 1, dtype=np.int32), 512)[None]
    leaves = [random(1, 1, length, 4, seed=seed).float().requires_grad_() for seed in range(3)]
    with AllocatedBytes() as allocated:
        mask = attention.separated_mask(segments, segments.shape, window)
        assert mask is not None
        attention.sdpa(leaves[0], leaves[1], leaves[2], mask.sliding or mask, 0.0).sum().backward()
    return allocated.total()


@pytest.mark.parametrize("window", [None, 64])
def test_memory_grows_linearly(window: int | None) -> None:
    short, long = (allocated_bytes(length, window) for length in (1024, 8192))
    assert long < 8.5 * short
    assert long < 8192**2  # the bytes of a dense mask
