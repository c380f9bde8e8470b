"""Attention against loops over every query and key in float64, and who may see whom."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from vorox.backends.torch_engine.attention import attention
from vorox.backends.torch_engine.attention.attention import CAUSAL, FULL, AttentionMask

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
HEAD = 8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32))


def by_hand(query: Tensor, key: Tensor, value: Tensor, visible: np.ndarray) -> np.ndarray:
    """One query at a time; ``visible`` is ``[B, T, S]``."""
    q, k, v = (x.double().numpy() for x in (query, key, value))
    rows, heads, queries, width = q.shape
    mixed = np.zeros(q.shape)
    for b in range(rows):
        for n in range(heads):
            shared = n // (heads // k.shape[1])
            for t in range(queries):
                seen = [s for s in range(k.shape[2]) if visible[b, t, s]]
                weights = np.exp([q[b, n, t] @ k[b, shared, s] / math.sqrt(width) for s in seen])
                mixed[b, n, t] = (weights / weights.sum()) @ v[b, shared, seen]
    return mixed


@pytest.mark.parametrize("kernel", ["sdpa", "reference", "auto"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("visibility", ["causal", "everything", "documents"])
def test_against_loops(kernel: str, kv_heads: int, visibility: str) -> None:
    rows, length = 2, 9
    query = random(rows, 4, length, HEAD)
    key, value = random(rows, kv_heads, length, HEAD, seed=1), random(rows, kv_heads, length, HEAD, seed=2)
    visible = np.ones((rows, length, length), bool)
    given: AttentionMask = {"causal": CAUSAL, "everything": FULL}.get(visibility, CAUSAL)
    if visibility != "everything":
        visible = np.tril(visible)
    if visibility == "documents":
        segments = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 0], [1, 2, 2, 2, 2, 2, 2, 2, 2]], np.int32)
        visible &= segments[:, :, None] == segments[:, None, :]
        given = attention.document_mask(segments, CPU)
        assert given.dense is not None
    found = attention.ATTENTION[kernel](query, key, value, given, 0.0)
    np.testing.assert_allclose(found.numpy(), by_hand(query, key, value, visible), atol=2e-6)


@pytest.mark.parametrize("visibility", [CAUSAL, FULL])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_gradients_of_both_kernels_agree(visibility: AttentionMask, kv_heads: int) -> None:
    inputs = [random(2, 4, 17, HEAD), random(2, kv_heads, 17, HEAD, seed=1), random(2, kv_heads, 17, HEAD, seed=2)]
    direction, gradients = random(2, 4, 17, HEAD, seed=3), []
    for kernel in (attention.sdpa, attention.reference):
        leaves = [x.clone().requires_grad_() for x in inputs]
        kernel(leaves[0], leaves[1], leaves[2], visibility, 0.0).backward(direction)
        gradients.append([leaf.grad for leaf in leaves])
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("segments", "is_causal"),
    [
        (None, True),
        ([[1, 1, 1, 1], [1, 1, 1, 1]], True),
        ([[1, 1, 1, 0], [1, 0, 0, 0]], True),
        ([[1, 1, 1, 1], [0, 0, 0, 0]], True),
        ([[1, 1, 1, 1], [1, 1, 1, 2]], False),
        ([[1, 2, 0, 0], [1, 1, 1, 1]], False),
        ([[0, 1, 1, 1], [1, 1, 1, 1]], False),
    ],
)
def test_a_mask_is_made_only_when_a_row_has_several_documents(
    segments: list[list[int]] | None, is_causal: bool
) -> None:
    given = None if segments is None else np.array(segments, np.int32)
    found = attention.document_mask(given, CPU)
    assert found.is_causal == is_causal
    assert (found.dense is None) == is_causal


def test_a_compiled_model_always_gets_a_mask() -> None:
    """Changing between mask and no mask would compile in the middle of a run."""
    one = np.ones((2, 5), np.int32)
    found = attention.document_mask(one, CPU, always_mask=True)
    assert found.dense is not None
    assert found.dense.expand(2, 1, 5, 5).equal(torch.ones(2, 1, 5, 5).tril().bool())
    assert attention.document_mask(None, CPU, always_mask=True) is CAUSAL


def test_no_position_sees_nothing() -> None:
    """A query without a key would be 0 / 0, even in padding."""
    segments = np.array([[1, 1, 2, 0, 0, 0]], np.int32)
    mask = attention.document_mask(segments, CPU).dense
    assert mask is not None
    assert mask.any(dim=-1).all()


def test_continued_tokens_see_the_past_and_each_other() -> None:
    assert attention.decoding_mask(0, 5, CPU) is CAUSAL
    assert attention.decoding_mask(7, 1, CPU) is FULL
    mask = attention.decoding_mask(2, 3, CPU).dense
    assert mask is not None
    assert mask[0, 0].tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False], [True] * 5]


def test_a_window_hides_what_is_further_back() -> None:
    for mask in (CAUSAL, FULL):
        assert attention.add_window(mask, None, 3, 4, CPU) is mask
        assert attention.add_window(mask, 7, 3, 4, CPU) is mask, "no position is further back"
    row = attention.add_window(CAUSAL, 2, 0, 4, CPU)
    assert (row.dense, row.is_causal) == (None, True), "layers without the window keep the fast kernel"
    assert row.sliding is not None
    assert row.sliding.dense is not None
    assert row.sliding.dense[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    next_token = attention.add_window(attention.decoding_mask(4, 1, CPU), 2, 4, 1, CPU)
    assert next_token.sliding is not None
    assert next_token.sliding.dense is not None
    assert next_token.sliding.dense[0, 0].int().tolist() == [[0, 0, 0, 1, 1]]
    segments = np.array([[1, 1, 1, 2, 2, 0]], np.int32)
    packed = attention.add_window(attention.document_mask(segments, CPU), 2, 0, 6, CPU).sliding
    assert packed is not None
    assert packed.dense is not None
    seen = [[index for index in range(6) if row[index]] for row in packed.dense[0, 0]]
    assert seen == [[0], [0, 1], [1, 2], [3], [3, 4], [5]]


def test_rotary_table() -> None:
    cosines, sines = attention.rotary_table(6, 50, 1000.0)
    for position in (0, 1, 49):
        for pair in range(3):
            angle = position * 1000.0 ** (-2 * pair / 6)
            assert float(cosines[position, pair]) == pytest.approx(math.cos(angle), abs=1e-5)
            assert float(sines[position, pair]) == pytest.approx(math.sin(angle), abs=1e-5)
