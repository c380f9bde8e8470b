"""Every way to compute attention against numpy's float64, with and without documents, grouped heads and not.

The kernel for TPUs runs in Pallas' interpreter here, in its own arithmetic (tolerance 2e-3); the others to 2e-6.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vorox.backends.jax_engine import attention
from vorox.backends.jax_engine.attention import AttentionMask

pytestmark = [pytest.mark.jax]


def expected(query: np.ndarray, key: np.ndarray, value: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Softmax attention in float64, one head at a time; mask is ``[B, T, S]``."""
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    found = np.zeros_like(query)
    repeats = query.shape[2] // key.shape[2]
    for head in range(query.shape[2]):
        scores = query[:, :, head] @ key[:, :, head // repeats].swapaxes(1, 2) / np.sqrt(query.shape[3])
        scores = np.where(mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        found[:, :, head] = weights / weights.sum(-1, keepdims=True) @ value[:, :, head // repeats]
    return found


def given(
    num_positions: int, num_kv_heads: int, head_dim: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng()
    query = generator.standard_normal((2, num_positions, 4, head_dim)).astype(np.float32)
    key, value = generator.standard_normal((2, 2, num_positions, num_kv_heads, head_dim)).astype(np.float32)
    segments = np.sort(generator.integers(1, 4, (2, num_positions)), axis=1).astype(np.int32)
    return query, key, value, segments


@pytest.mark.parametrize("window", [None, 4, 11])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", ["reference", "xla"])
def test_against_float64(name: str, num_kv_heads: int, documents: bool, window: int | None) -> None:
    query, key, value, segments = given(11, num_kv_heads, 8)
    mask = np.broadcast_to(np.tril(np.ones((11, 11), bool)), (2, 11, 11))
    if documents:
        mask = mask & (segments[:, :, None] == segments[:, None, :])
    if window is not None:
        mask = mask & ~np.tril(np.ones((11, 11), bool), -window)
    attention_mask = AttentionMask(jnp.asarray(segments) if documents else None, window_tokens=window)
    found = jax.jit(lambda q, k, v: attention.ATTENTION[name](q, k, v, attention_mask, None))(query, key, value)
    np.testing.assert_allclose(np.asarray(found), expected(query, key, value, mask), atol=2e-6)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("documents", [False, True])
def test_the_kernel_for_tpus_computes_the_same(documents: bool, window: int | None) -> None:
    query, key, value, segments = given(128, 2, 128)
    attention_mask = AttentionMask(jnp.asarray(segments) if documents else None, window_tokens=window)
    found = partial(attention.splash, interpret=True)(
        *(jnp.asarray(x) for x in (query, key, value)), attention_mask, None
    )  # fmt: skip
    wanted = attention.reference(*(jnp.asarray(x) for x in (query, key, value)), attention_mask, None)
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=2e-3)


@pytest.mark.parametrize("name", ["reference", "xla"])
def test_dropout_is_drawn_by_its_key_and_keeps_the_mean(name: str) -> None:
    query, key, value, _ = given(16, 4, 8)
    arrays: Any = tuple(jnp.asarray(x) for x in (query, key, np.ones_like(value)))
    attend = attention.ATTENTION[name]
    draws = [attend(*arrays, AttentionMask(), (0.5, jax.random.key(seed))) for seed in (1, 1, *range(2, 40))]
    assert np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])
    assert float(np.mean(draws)) == pytest.approx(1.0, abs=0.02)


@pytest.mark.torch
def test_rotary_tables_are_those_of_the_torch_engine() -> None:
    from vorox.backends.torch_engine.attention import attention as torch_attention

    for ours, theirs in zip(
        attention.rotary_table(16, 4096, 10_000.0), torch_attention.rotary_table(16, 4096, 10_000.0), strict=True
    ):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)
