"""Replicas that sum gradients in small buckets within the backward pass are the run of one process.

The oracle is the same command with one process, over 20 steps of four micro-batches. Sums over ranks are made in
another order, so losses agree to 1e-5 (relative), parameters and moments to 2e-5. With two ranks, a sum has one order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ranks.processes import Runs, entries, losses, stored_arrays
from ranks.test_torch_ranks import MODEL
from vorox.core.files.staged_directory import read_manifest
from vorox.records.replay_chain import number

pytestmark = [pytest.mark.torch, pytest.mark.slow]

STEPS = 20
SETTINGS = [
    *MODEL, f"train.num_steps={STEPS}", "train.global_batch_sequences=12", "train.micro_batch_sequences=1",
    "model.tie_embeddings=false", "parallel.gradient_bucket_bytes=4096",
]  # fmt: skip
CHECKPOINT = f"checkpoints/step-{STEPS:08}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("overlap"), SETTINGS)


@pytest.fixture(scope="module")
def alone(runs: Runs) -> Path:
    return runs.train("alone", [])[0]


def fingerprint(run: Path) -> str:
    return read_manifest(run / CHECKPOINT)["metadata"]["fingerprint"]


def bucket_events(run: Path) -> list[str]:
    return [line for line in (run / "log.txt").read_text().splitlines() if "Gradients are summed over ranks" in line]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_twenty_steps_are_those_of_one_process(runs: Runs, alone: Path, count: int) -> None:
    run, _ = runs.train(f"ranks-{count}", ["--nproc", str(count)])
    assert len(entries(run)) == STEPS
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(alone)]
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    norms = [[number(entry.grad_norm) for entry in entries(path)] for path in (run, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    mine, theirs = (stored_arrays(path / CHECKPOINT) for path in (run, alone))
    assert mine.keys() == theirs.keys()
    for key, array in theirs.items():
        np.testing.assert_allclose(mine[key], array, rtol=1e-3, atol=2e-5, err_msg=key)
    (event,) = bucket_events(run)
    assert int(event.rpartition(" in ")[2].split()[0]) > 5
    assert f"bit-exact, {STEPS} steps" in runs.vorox(["replay", str(run), "--nproc", str(count)])


def test_two_ranks_have_the_bits_of_sums_after_the_backward_pass(runs: Runs) -> None:
    buckets, _ = runs.train("buckets", ["--nproc", "2"])
    whole, _ = runs.train("whole", ["parallel.gradient_bucket_bytes=0", "--nproc", "2"])
    assert bucket_events(whole) == []
    assert fingerprint(whole) == fingerprint(buckets)
    assert [entry.loss for entry in entries(whole)] == [entry.loss for entry in entries(buckets)]
