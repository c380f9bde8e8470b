"""Context parallelism with PyTorch: the numbers of one process, on every rank, for random rows of a fresh seed.

Tolerances are those of ``test_tensor_parallel.py``. Documents of a packed row cross the borders between ranks. Sliding
windows, learned and rotary positions, QK-norms, dropout, noise, activation statistics, checkpointing and Muon are among
the cases; four ranks share one key/value head.
"""

from __future__ import annotations

import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranks.divided_decoders import cases_of, config_of, engine_of, train
from ranks.processes import PATIENCE_SECONDS, Runs, entries, fingerprint, lines, losses, second_process, stored_arrays
from ranks.test_sharded_checkpoints import on_ranks, recorded
from ranks.test_tensor_parallel import SEED, alone, check_case
from ranks.test_torch_ranks import MODEL
from vorox.core.distributed_context import DistributedContext
from vorox.core.staged_directory import verify_directory

__all__ = ["alone"]  # a fixture

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@cache
def on_one_device(case: str) -> dict[str, Any]:
    return train(engine_of(config_of(case), DistributedContext()), SEED)


@pytest.mark.parametrize(
    ("layouts", "count"),
    [(["1,1,1,1,2", "1,2,1"], 2), (["1,1,1,1,4", "2,1,1,1,2", "1,2,1,1,2"], 4)],
    ids=["alone, then FSDP2", "four, with replicas, and with FSDP2"],
)
def test_every_rank_computes_what_one_process_computes(
    alone: Path, layouts: list[str], count: int, tmp_path: Path
) -> None:
    """The state of one process also goes through every layout and back to one process unchanged."""
    on_ranks("ranks.divided_decoders", count, SEED, alone, tmp_path, *layouts)
    expected_state = stored_arrays(alone)
    for layout in layouts:
        for case in cases_of(layout):
            start = dict(engine_of(config_of(case), DistributedContext()).export_weights())
            ranks = [dict(np.load(tmp_path / f"{layout}-{case}-{rank}.npz")) for rank in range(count)]
            assert len({str(found["bits"]) for found in ranks}) == 1, "parameters have the same bits on every rank"
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
    """Two ranks that are killed and start again repeat every bit; other layouts read the same rows."""
    settings = [*MODEL, "data.document_mask=true", "schedule.name=constant"]  # train.num_steps changes no learning rate
    runs = Runs(tmp_path, settings)
    alone, _ = runs.train("alone", ["train.num_steps=18"])
    positions = ["parallel.context_parallel_size=2", "--nproc", "2"]
    pair, _ = runs.train("pair", positions)
    assert losses(pair) == pytest.approx(losses(alone)[:12], rel=1e-5)
    found, expected = ({line["step"]: line["loss"] for line in lines(run, "evaluations")} for run in (pair, alone))
    shared = found.keys() & expected.keys()
    assert shared
    assert [found[step] for step in shared] == pytest.approx([expected[step] for step in shared], rel=1e-5)
    process = runs.start("killed", positions, tmp_path / "hold")
    os.kill(second_process(process, runs, "killed"), signal.SIGKILL)
    (tmp_path / "hold").unlink()
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode not in (0, 2, 75), errors
    run, _ = runs.train("killed", positions)
    assert any("num_devices = 2, context_parallel_size = 2)" in record["message"] for record in lines(run, "events"))
    assert entries(run) == entries(pair)
    assert fingerprint(run) == fingerprint(pair)
    for fsdp, size, steps in ((1, 1, 14), (2, 2, 16), (2, 1, 18)):
        sizes = [f"parallel.fsdp_size={fsdp}", f"parallel.context_parallel_size={size}"]
        runs.vorox(["train", "--resume", str(run), *sizes, f"train.num_steps={steps}", "--nproc", str(fsdp * size)])
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(alone)]
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
