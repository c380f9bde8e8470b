"""The loss is divided by the recorded number of targets, which counts those of masked documents."""

from __future__ import annotations

from dataclasses import replace
from random import randrange

import pytest

from small_configurations import batch_of, random_rows

pytestmark = pytest.mark.jax


def test_twice_as_many_targets_halve_loss_and_gradient_exactly() -> None:
    from backends.jax_engine.jax_models import make

    rows = batch_of(random_rows(4, seed=randrange(1 << 30)), 2)
    full, halved = (
        make().train_step(replace(rows, num_target_tokens=factor * rows.num_target_tokens), lr=0.1, weight_decay=0.0)
        for factor in (1, 2)
    )
    assert halved.fetch().loss == full.fetch().loss / 2
    assert halved.fetch().grad_norm == full.fetch().grad_norm / 2
