"""The scan of Mamba-2 in JAX against its recurrence in float64, written as a plain loop, and against the torch engine.

Shape legend: B rows, T positions, N heads, G groups, H head width, S state size, E channels, K taps.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vorox.backends.jax_engine.layers.state_space import causal_convolution, gated_norm, scan

pytestmark = pytest.mark.jax
Inputs = tuple[np.ndarray, ...]
LENGTH, ROWS = 19, 2
PACKED = np.stack([np.repeat(np.arange(len(row)), row) for row in ((4, 1, 8, 4, 2), (1, 1, 13, 3, 1))])


def inputs(length: int = LENGTH) -> Inputs:
    """x, dt, A, B, C and D of 6 heads in 2 groups, float64."""
    normal = np.random.default_rng(0).standard_normal
    dt = np.log1p(np.exp(normal((ROWS, length, 6)) - 1))
    return (
        normal((ROWS, length, 6, 5)), dt, -np.exp(normal(6)), normal((ROWS, length, 2, 7)),
        normal((ROWS, length, 2, 7)), normal(6),
    )  # fmt: skip


def recurrence(values: Any, documents_BT: np.ndarray | None = None, initial: Any = None) -> tuple[Any, Any]:
    """The definition, position by position."""
    x, dt, a, b, c, d = values
    b, c = (jnp.repeat(part, 3, axis=2) for part in (b, c))
    state = jnp.zeros((ROWS, 6, 5, 7), x.dtype) if initial is None else initial
    outputs = []
    for t in range(x.shape[1]):
        if documents_BT is not None and t:
            state = state * (documents_BT[:, t] == documents_BT[:, t - 1])[:, None, None, None]
        state = state * jnp.exp(dt[:, t] * a)[..., None, None]
        state = state + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        outputs.append((state * c[:, t, :, None]).sum(-1) + d[:, None] * x[:, t])
    return jnp.stack(outputs, axis=1), state


@pytest.mark.parametrize("chunk", [1, 4, 19, 64])
@pytest.mark.parametrize("packed", [None, PACKED], ids=["one document", "packed"])
def test_scan_is_the_recurrence(chunk: int, packed: np.ndarray | None) -> None:
    with jax.enable_x64(True):
        values = tuple(map(jnp.asarray, inputs()))
        documents = None if packed is None else jnp.asarray(packed)
        y, state = scan(*values, chunk_tokens=chunk, documents_BT=documents)
        expected_y, expected_state = recurrence(values, packed)
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, expected_y, rtol=0, atol=1e-12)
        np.testing.assert_allclose(state, expected_state, rtol=0, atol=1e-12)


def test_gradients_are_those_of_the_recurrence() -> None:
    with jax.enable_x64(True):
        values = tuple(map(jnp.asarray, inputs()))
        weights = np.random.default_rng(1).standard_normal((ROWS, LENGTH, 6, 5))

        def mine(*values: Any) -> Any:
            return (scan(*values, chunk_tokens=4, documents_BT=jnp.asarray(PACKED))[0] * weights).sum()

        def theirs(*values: Any) -> Any:
            return (recurrence(values, PACKED)[0] * weights).sum()

        found, expected = (jax.jit(jax.grad(f, argnums=tuple(range(6))))(*values) for f in (mine, theirs))
        for here, there in zip(found, expected, strict=True):
            np.testing.assert_allclose(here, there, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("length", [1, 8, 9])
def test_initial_state_continues_a_row(length: int) -> None:
    with jax.enable_x64(True):
        values, initial = tuple(map(jnp.asarray, inputs(length))), jnp.asarray(inputs(10)[3][:, :6, :1, :])
        initial = jnp.broadcast_to(initial, (ROWS, 6, 5, 7))
        y, state = scan(*values, chunk_tokens=4, initial_BNHS=initial)
        expected_y, expected_state = recurrence(values, initial=initial)
        np.testing.assert_allclose(y, expected_y, rtol=0, atol=1e-12)
        np.testing.assert_allclose(state, expected_state, rtol=0, atol=1e-12)


def test_a_long_decay_leaves_no_infinity() -> None:
    """Decays of -2,000 within a chunk, whose inverse has no value in fp32."""
    values = [np.asarray(value, np.float32) for value in inputs()]
    values[1] = np.full_like(values[1], 100.0)

    def loss(*values: Any) -> Any:
        return scan(*values, chunk_tokens=64, documents_BT=jnp.asarray(PACKED))[0].sum()

    gradients = jax.grad(loss, argnums=tuple(range(6)))(*map(jnp.asarray, values))
    assert all(bool(jnp.isfinite(gradient).all()) for gradient in gradients)


def test_bf16_sums_in_fp32() -> None:
    values = [jnp.asarray(value, jnp.bfloat16) for value in inputs()]
    y, state = scan(*values, chunk_tokens=4)
    assert y.dtype == state.dtype == jnp.float32
    expected, _ = scan(*(value.astype(jnp.float32) for value in values), chunk_tokens=4)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("packed", [None, PACKED], ids=["one document", "packed"])
def test_both_engines_compute_the_same(packed: np.ndarray | None) -> None:
    """Scan, convolution and norm in float64."""
    import torch

    from vorox.backends.torch_engine.layers import state_space

    values = inputs()
    generator = np.random.default_rng(2)
    x, taps, bias = (generator.standard_normal(shape) for shape in ((ROWS, LENGTH, 6), (6, 4), (6,)))
    with jax.enable_x64(True):
        documents = None if packed is None else jnp.asarray(packed)
        theirs_documents = None if packed is None else torch.from_numpy(packed)
        y, state = scan(*map(jnp.asarray, values), chunk_tokens=5, documents_BT=documents)
        expected = state_space.scan(
            *map(torch.from_numpy, values), chunk_tokens=5, documents_BT=theirs_documents
        )  # fmt: skip
        np.testing.assert_allclose(y, expected[0].numpy(), rtol=0, atol=1e-12)
        np.testing.assert_allclose(state, expected[1].numpy(), rtol=0, atol=1e-12)
        mixed = causal_convolution(jnp.asarray(x), jnp.asarray(taps), jnp.asarray(bias), documents_BT=documents)
        theirs = state_space.causal_convolution(
            *map(torch.from_numpy, (x, taps, bias)), documents_BT=theirs_documents
        )  # fmt: skip
        np.testing.assert_allclose(mixed, theirs.numpy(), rtol=0, atol=1e-12)
        normed = gated_norm(mixed, jnp.asarray(x), jnp.asarray(bias), 2, 1e-5)
        theirs = state_space.gated_norm(theirs, torch.from_numpy(x), torch.from_numpy(bias), 2, 1e-5)
        np.testing.assert_allclose(normed, theirs.numpy(), rtol=0, atol=1e-12)


def test_a_short_row_is_convolved() -> None:
    """Fewer positions than taps."""
    x, taps = np.ones((1, 2, 3), np.float32), np.ones((3, 4), np.float32)
    documents = jnp.asarray([[0, 1]])
    found = causal_convolution(jnp.asarray(x), jnp.asarray(taps), None, documents_BT=documents)
    np.testing.assert_allclose(found, np.full((1, 2, 3), 1 / (1 + np.exp(-1.0))), rtol=1e-6)
