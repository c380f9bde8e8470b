"""The loss of the JAX engine at positions that are not trained on; its values are held to PyTorch's in tests/parity."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vorox.core.batch import IGNORED_LABEL
from vorox.core.schema import LossConfig

pytestmark = pytest.mark.jax


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("terms", [{}, {"z_loss_weight": 0.01, "label_smoothing_fraction": 0.2}], ids=str)
def test_positions_that_are_not_trained_on_contribute_nothing(
    value: float, dtype: str, terms: dict[str, float]
) -> None:
    import jax.numpy as jnp

    from vorox.backends.jax_engine import loss

    generator = np.random.default_rng(3)
    hidden_BTD = generator.normal(0, 1, (2, 15, 8))
    head_VD = jnp.asarray(generator.normal(0, 1, (11, 8)), jnp.float32)
    labels_BT = generator.integers(0, 11, (2, 15), np.int32)
    labels_BT[1, 4] = IGNORED_LABEL
    found = []
    for held in (0.5, value):
        hidden_BTD[1, 4] = held
        inputs = jnp.asarray(hidden_BTD, dtype), head_VD, jnp.asarray(labels_BT)
        sums, d_hidden, d_head = loss.train(*inputs, LossConfig(chunk_tokens=8, **terms), jnp.float32(0.01))
        found.append([*sums, *loss.evaluate(*inputs, 8), d_hidden.astype(jnp.float32), d_head])
    for clean, dirty in zip(*found, strict=True):
        assert np.isfinite(clean).all()
        np.testing.assert_array_equal(clean, dirty)
    assert not found[1][-2][1, 4].any()
