"""Tensor and sequence parallelism with PyTorch: on every rank the numbers of one process, for rows of a fresh seed.

Sums over ranks are made in another order, so losses and norms of 20 steps agree to 1e-5 (relative), gradients of the
first step to 1e-5 of their largest element, and weights to a hundredth of the distance that training moves them, plus
1e-4 (a thirtieth of one update).
States of checkpoints are equal element by element. The vocabulary (61, 265) divides unequally.
"""

from __future__ import annotations

import os
import secrets
import signal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranks.divided_decoders import cases_of, config_of, engine_of, train
from ranks.processes import PATIENCE_SECONDS, Runs, entries, lines, losses, second_process, stored_arrays
from ranks.test_sharded_checkpoints import on_ranks, recorded, save
from ranks.test_torch_ranks import MODEL
from small_configurations import LR, batch_of, random_rows
from vorox.core.distributed_context import DistributedContext
from vorox.core.staged_directory import verify_directory

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SEED = secrets.randbelow(1 << 30)


@cache
def on_one_device(case: str) -> dict[str, Any]:
    return train(engine_of(config_of(case), DistributedContext()), SEED)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one device in which no array is at its initial value."""
    engine = engine_of(config_of("gemma3"), DistributedContext())
    for step in range(2):
        engine.train_step(batch_of(random_rows(8, SEED - step), 4, step=step), lr=LR, weight_decay=0.1).fetch()
    return save(engine, tmp_path_factory.mktemp("one") / "device")


def check_case(
    found: dict[str, np.ndarray], expected: dict[str, Any], start: dict[str, np.ndarray], where: str
) -> None:
    np.testing.assert_allclose(found["values"], expected["values"], rtol=1e-5, err_msg=where)
    # The mean of an activation is a sum of terms that cancel.
    np.testing.assert_allclose(found["statistics"], expected["statistics"], rtol=1e-5, atol=1e-6, err_msg=where)
    np.testing.assert_allclose(found["evaluation"], expected["evaluation"], rtol=1e-5, err_msg=where)
    for key in ("logits", "decoded"):
        np.testing.assert_allclose(found[key], expected[key], atol=2e-4, err_msg=f"{where}, {key}")
    names = {key for key in expected if key.startswith(("gradient.", "weight."))}
    assert names == {key for key in found if key.startswith(("gradient.", "weight."))}
    for key in names:
        scale = np.abs(expected[key]).max()
        if key.startswith("weight."):
            scale = 1000 * np.abs(expected[key] - start[key.removeprefix("weight.")]).max()
        # The gradient of a key's bias is zero up to rounding, and AdamW magnifies it.
        tolerance = 1e-5 * scale + (1e-4 if key.startswith("weight.") else 1e-9)
        np.testing.assert_allclose(found[key], expected[key], rtol=0, atol=tolerance, err_msg=f"{where}, {key}")


@pytest.mark.parametrize(
    "layouts",
    [["1,1,2"], ["1,1,2,1,1,1"], ["2,1,2", "1,2,2", "1,2,2,1,1,1"]],
    ids=["alone", "sequence parallel", "with replicas, and with FSDP2"],
)
def test_every_rank_computes_what_one_process_computes(alone: Path, layouts: list[str], tmp_path: Path) -> None:
    count = int(np.prod([int(size) for size in layouts[0].split(",")[:3]]))
    on_ranks("ranks.divided_decoders", count, SEED, alone, tmp_path, *layouts)
    expected_state = stored_arrays(alone)
    assert all(np.abs(array).max() > 0 for array in expected_state.values())
    for layout in layouts:
        for case in cases_of(layout):
            start = dict(engine_of(config_of(case), DistributedContext()).export_weights())
            ranks = [dict(np.load(tmp_path / f"{layout}-{case}-{rank}.npz")) for rank in range(count)]
            assert len({str(found["bits"]) for found in ranks}) == 1, "replicated parameters have the same bits"
            for rank, found in enumerate(ranks):
                check_case(found, on_one_device(case), start, f"seed {SEED}, {layout}, {case}, rank {rank}")
        saved = tmp_path / f"saved-{layout}"
        verify_directory(saved)
        found_state = stored_arrays(saved)
        assert found_state.keys() == expected_state.keys()
        for key, array in expected_state.items():
            np.testing.assert_array_equal(found_state[key], array, err_msg=f"{layout}, {key}")
        engine = engine_of(config_of("gemma3"), DistributedContext())
        engine.load(saved)
        assert engine.fingerprint() == recorded(alone)


def test_a_killed_run_continues_on_other_layouts(tmp_path: Path) -> None:
    """Two ranks that are killed, then one, then two again: the rows and losses of one uninterrupted process."""
    runs = Runs(tmp_path, [*MODEL, "schedule.name=constant"])  # another train.num_steps changes no learning rate
    alone, _ = runs.train("alone", [])
    tensor = "parallel.tensor_parallel_size=2"
    process = runs.start("killed", [tensor, "--nproc", "2"], tmp_path / "hold")
    os.kill(second_process(process, runs, "killed"), signal.SIGKILL)
    (tmp_path / "hold").unlink()
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode not in (0, 2, 75), errors
    run = runs.find("killed")
    assert any("num_devices = 2, tensor_parallel_size = 2)" in record["message"] for record in lines(run, "events"))
    for size, steps in ((1, 10), (2, 12)):
        sizes = [f"parallel.tensor_parallel_size={size}", f"train.num_steps={steps}", "--nproc", str(size)]
        runs.vorox(["train", "--resume", str(run), *sizes])
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(alone)]
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
