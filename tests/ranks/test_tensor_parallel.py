"""Tensor and sequence parallelism with PyTorch: on every rank the numbers of one process, for rows of a fresh seed.

Tolerances are those of ``layouts.py``. The vocabulary (61, 265) divides unequally.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ranks.layouts import check_layouts, save_one_device
from ranks.processes import PATIENCE_SECONDS, Runs, entries, lines, losses, second_process
from ranks.test_torch_ranks import MODEL

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_one_device(tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(
    ("layouts", "count"),
    [(["1,1,2"], 2), (["1,1,2,1,1,1"], 2), (["2,1,2", "1,2,2", "1,2,2,1,1,1"], 4)],
    ids=["alone", "sequence parallel", "with replicas, and with FSDP2"],
)
def test_every_rank_computes_what_one_process_computes(
    alone: Path, layouts: list[str], count: int, tmp_path: Path
) -> None:
    check_layouts(alone, layouts, count, tmp_path)


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
