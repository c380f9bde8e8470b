"""Distillation from stored logits on two ranks: the losses of one process, exact resume, and the same directory.

The oracle is the same command with one process, and that one the teacher in memory (``test_stored_teacher.py``).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from ranks.processes import (
    PATIENCE_SECONDS,
    Runs,
    entries,
    fingerprint,
    losses,
    second_process,
    stored_arrays,
)
from ranks.test_torch_ranks import MODEL
from vorox.experiments.tracking import read_metrics

pytestmark = [pytest.mark.torch, pytest.mark.slow]
PLACEMENTS = {
    "replicas": (2, ["parallel.data_parallel_size=2"]),
    "FSDP2": (2, ["parallel.fsdp_size=2"]),
    "three replicas of unequal parts": (3, ["parallel.data_parallel_size=3"]),
}
STUDENT = ["log.every_steps=1", "loss.chunk_tokens=7", "data.document_mask=true", "train.distillation.weight=0.8"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("stored"), MODEL)


@pytest.fixture(scope="module")
def student(runs: Runs) -> list[str]:
    """Settings of a student of logits in fp32, which a command wrote for the rows of 12 steps."""
    teacher, _ = runs.train("teacher", ["model.num_layers=3", "model.hidden_size=24", "train.num_steps=6"])
    logits = runs.directory / "logits"
    wanted = [
        f"train.distillation.teacher={teacher}", "train.distillation.top_k=5", "data.document_mask=true",
    ]  # fmt: skip
    configuration = str(runs.directory / "tiny.yaml")
    runs.vorox(
        ["data", "teacher-logits", configuration, *runs.model, *wanted, "--to", str(logits), "--precision", "fp32"]
    )
    return [*STUDENT, f"train.distillation.logits={logits}"]


@pytest.fixture(scope="module")
def alone(runs: Runs, student: list[str]) -> Path:
    run, _ = runs.train("alone", student)
    plain, _ = runs.train("plain", [setting for setting in student if "distillation" not in setting])
    assert abs(losses(run)[-1] - losses(plain)[-1]) > 1e-3, "the comparison would be trivial"
    return run


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ranks_learn_what_one_process_learns(runs: Runs, student: list[str], alone: Path, placement: str) -> None:
    count, sizes = PLACEMENTS[placement]
    run, _ = runs.train(placement.replace(" ", "-"), [*student, *sizes, "--nproc", str(count)])
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(alone)]
    found, expected = read_metrics(run), read_metrics(alone)
    for name in ("loss", "objective", "grad_norm"):
        values = [[metrics[step][name] for step in range(1, 13)] for metrics in (found, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-5), name
    mine, theirs = (stored_arrays(path / "checkpoints" / "step-00000012") for path in (run, alone))
    assert mine.keys() == theirs.keys()
    for key, array in theirs.items():
        np.testing.assert_allclose(mine[key], array, rtol=1e-3, atol=2e-5, err_msg=key)


def test_killed_ranks_resume_and_replay_bit_for_bit(runs: Runs, student: list[str], tmp_path: Path) -> None:
    settings = [*student, "parallel.fsdp_size=2", "--nproc", "2"]
    pair, _ = runs.train("pair", settings)
    process = runs.start("killed", settings, tmp_path / "hold")
    os.kill(second_process(process, runs, "killed"), signal.SIGKILL)
    (tmp_path / "hold").unlink()
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode not in (0, 2, 75), errors
    run, _ = runs.train("killed", settings)
    assert entries(run) == entries(pair)
    assert fingerprint(run) == fingerprint(pair)
    assert "bit-exact, 12 steps" in runs.vorox(["replay", str(run), "--nproc", "2"])


def test_a_row_without_logits_ends_all_ranks(runs: Runs, student: list[str]) -> None:
    """The step after the stored ones, on whichever rank it is missing first; the state before it is saved."""
    settings = [*student, "train.num_steps=14", "parallel.fsdp_size=2", "--nproc", "2"]
    run, said = runs.train("longer", settings, code=4)
    assert "Stored logits lack" in said
    assert "of step 13" in said
    assert len(entries(run)) == 12
    assert (run / "checkpoints" / "step-00000012" / "MANIFEST.json").exists()
