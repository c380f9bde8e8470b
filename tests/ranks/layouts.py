"""The oracle of every layout of ranks: on each rank the numbers of one process, and its state element by element.

Sums over ranks are made in another order, so losses and norms of 20 steps agree to 1e-5 (relative), statistics of
activations to 1e-4, gradients of the first step to 1e-5 of their largest element, and weights to a hundredth of the
distance that training moves them, plus 1e-4 (a thirtieth of one update). AdamW would magnify rounding where gradients
nearly cancel, so all cases have a larger epsilon. Muon does where a gradient is nearly singular: how much is measured
with the rows of the test. Logits after 20 steps agree to 1e-3. Parameters and optimizer state of checkpoints are equal
element by element.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranks.divided_decoders import (
    CASES,
    cases_of,
    config_of,
    engine_of,
    in_order,
    sizes_of,
    state_case,
    train,
)
from ranks.processes import on_ranks, stored_arrays
from ranks.test_sharded_checkpoints import recorded, save
from small_configurations import LR, batch_of, random_rows
from vorox.core.files.staged_directory import verify_directory
from vorox.core.ranks.distributed_context import DistributedContext

SEED = secrets.randbelow(1 << 30)
EXPERTS_SEED = 7
"""Rounding may move a token to another expert where two have nearly equal scores; with these rows, none does."""


@cache
def on_one_device(case: str, seed: int) -> dict[str, Any]:
    return train(engine_of(config_of(case), DistributedContext()), seed)


@cache
def tolerance(case: str, seed: int) -> float:
    """The relative tolerance of losses and norms: 1e-5, or the rounding that Muon magnifies.

    This is 20 times the largest difference of one process that adds the micro-batches of each step in reverse order.
    """
    if CASES[case].get("optimizer__name") != "muon":
        return 1e-5
    expected, config = np.array(on_one_device(case, seed)["values"]), config_of(case)
    order = range(8 // config.train.micro_batch_rows)[::-1]
    found = np.array(train(engine_of(config, DistributedContext()), seed, in_order(order))["values"])
    return max(1e-5, 20 * float(np.abs(found / expected - 1).max()))


def save_one_device(folder: Path, case: str = "gemma3") -> Path:
    """A checkpoint of one device in which no array is at its initial value."""
    engine = engine_of(config_of(case), DistributedContext())
    for step in range(2):
        engine.train_step(batch_of(random_rows(8, SEED - step), 4, step=step), lr=LR, weight_decay=0.1).fetch()
    return save(engine, folder / "device")


def layout_cases(native: Mapping[str, list[str]], transformers: Mapping[str, list[str]]) -> list[Any]:
    """The parameters of a test of an axis: the layouts of both kinds of model, by name."""
    return [
        *(pytest.param(layouts, id=name) for name, layouts in native.items()),
        *(pytest.param(layouts, id=name, marks=pytest.mark.hf) for name, layouts in transformers.items()),
    ]


def check_layouts(layouts: list[str], folder: Path, seed: int = SEED) -> None:
    """Check the cases of each layout on its ranks, and that the state of one process goes through all of them.

    The first layout loads the state of one process, and each other one what the one before it saved.

    Args:
        layouts: See ``divided_decoders.py``; with the same number of ranks.
        folder: Where the ranks write.
        seed: The seed of the rows.
    """
    alone, count = save_one_device(folder, state_case(layouts[0])), math.prod(sizes_of(layouts[0])[:5])
    on_ranks("ranks.divided_decoders", count, seed, alone, folder, *layouts)
    expected_state = stored_arrays(alone)
    assert all(np.abs(array).max() > 0 for array in expected_state.values())
    for layout in layouts:
        sizes = layout.partition(":")[0]
        for case in cases_of(layout):
            start = dict(engine_of(config_of(case), DistributedContext()).export_weights())
            ranks = [dict(np.load(folder / f"{sizes}-{case}-{rank}.npz")) for rank in range(count)]
            bits = {str(found["bits"]) for found in ranks} - {""}
            assert len(bits) == 1, "replicated parameters have the same bits"
            for rank, found in enumerate(ranks):
                check_case(found, case, seed, start, f"seed {seed}, {layout}, {case}, rank {rank}")
        saved = folder / f"saved-{sizes}"
        verify_directory(saved)
        found_state = stored_arrays(saved)
        assert found_state.keys() == expected_state.keys()
        for key, array in expected_state.items():
            np.testing.assert_array_equal(found_state[key], array, err_msg=f"{layout}, {key}")
        engine = engine_of(config_of(state_case(layout)), DistributedContext())
        engine.load(saved)
        assert engine.fingerprint() == recorded(alone)


def check_case(found: dict[str, np.ndarray], case: str, seed: int, start: dict[str, np.ndarray], where: str) -> None:
    expected, rtol = on_one_device(case, seed), tolerance(case, seed)
    losses_and_norms = np.array(expected["values"])
    values, (loss, gradient_norm, parameter_norm) = found["values"], range(3)
    exact = [loss, parameter_norm]
    np.testing.assert_allclose(values[:, exact], losses_and_norms[:, exact], rtol=rtol, err_msg=where)
    # The gradient becomes small beside what it is summed from: its norm was 1.07e-5 off where others were 1e-6.
    np.testing.assert_allclose(
        values[:, gradient_norm], losses_and_norms[:, gradient_norm], rtol=5 * rtol, err_msg=where
    )
    # The mean of an activation is a sum of terms that cancel, its maximum one element, where rounding does not average.
    np.testing.assert_allclose(found["statistics"], expected["statistics"], rtol=1e-4, atol=1e-6, err_msg=where)
    np.testing.assert_allclose(found["evaluation"], expected["evaluation"], rtol=1e-5, err_msg=where)
    for key in ("logits", "decoded"):  # of the last weights, which differ by up to 1e-4 each
        np.testing.assert_allclose(found[key], expected[key], atol=1e-3, err_msg=f"{where}, {key}")
    names = {key for key in expected if key.startswith(("gradient.", "weight."))}
    assert names == {key for key in found if key.startswith(("gradient.", "weight."))}
    for key in names:
        scale = np.abs(expected[key]).max()
        if key.startswith("weight."):
            scale = 1000 * np.abs(expected[key] - start[key.removeprefix("weight.")]).max()
        # The gradient of a key's bias is zero up to rounding, and AdamW magnifies it.
        bound = 1e-5 * scale + (1e-4 if key.startswith("weight.") else 1e-9)
        np.testing.assert_allclose(found[key], expected[key], rtol=0, atol=bound, err_msg=f"{where}, {key}")
