"""A fork continues from a state of another run: unchanged it computes the same bits, changed it differs from there on."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

import tiny_runs
import vorox.run
from vorox.core.config import load_config
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.schema import RunConfig
from vorox.data.order.plan_events import MaskedDocument
from vorox.data.provenance.queries import when, where
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.experiments.tracking import read_metrics
from vorox.records.log import RunLog
from vorox.records.replay_chain import read_chain
from vorox.training.checkpoints.store import Checkpoint, verify
from vorox.training.fork import ForkChange, fork
from vorox.training.materialize import materialize, open_range
from vorox.training.replay import replay
from vorox.training.steps.workload import Workload

CASES: dict[str, list[str]] = {
    "plain": [],
    "stages": ['data.stages=[{"start_tokens":0,"weights":{"text":1}},{"start_tokens":256,"sequence_length_tokens":8}]'],
    "batch sizes": ['train.batch_stages=[{"start_step":5,"global_batch_sequences":8}]'],
    "streaming": ["data.mode=streaming", "data.growth.mode=strict", "data.streaming.retention_bytes=24000"],
    "elastic": ["data.growth.mode=elastic", "data.growth.horizon_steps=2"],
    "unshuffled": ["data.packing=concat", "data.shuffle=false"],
}


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)


def make_workload(config: RunConfig) -> Workload:
    return vorox.run.make_workload(config, DistributedContext(), RunLog(None), None, build=False)


def chain(run_directory: Path) -> dict[int, str]:
    return {step: entry.chain for step, entry in read_chain(run_directory).items()}


def state(run_directory: Path, step: int, scratch: Path) -> Checkpoint | None:
    """The state after a step, kept or not."""
    if step == 0:
        return None
    if (kept := step_directories(run_directory).get(step)) is not None:
        return verify(kept)
    (one,) = materialize(open_range(run_directory, [step]), make_workload, [step], scratch, on_step=lambda *_: None)
    return verify(one.path)


def train_on(forked: Path, overrides: Sequence[str] = ()) -> Path:
    """Resume a run with its own configuration, as ``vorox train --resume`` does."""
    config = load_config(RunLayout(forked).config, overrides)
    outcome = tiny_runs.run(config, resume_from=forked)
    assert outcome.run_directory == forked
    return forked


def documents(run_directory: Path, *ordinals: int) -> tuple[MaskedDocument, ...]:
    with RunDataIndex.open(run_directory) as run_data:
        (file,) = run_data.readers[0].files
        return tuple(MaskedDocument("text", file.version, ordinal) for ordinal in ordinals)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("step", [0, 3, 4, 12])
def test_an_empty_fork_is_its_parent(tmp_path: Path, case: str, step: int) -> None:
    parent = tiny_runs.run(tiny_runs.configuration(tmp_path, CASES[case])).run_directory
    before = {path: path.stat().st_mtime_ns for path in parent.rglob("*") if path.is_file() and path.suffix != ".pin"}
    forked = fork(parent, step, state(parent, step, tmp_path / "made"), ForkChange())
    assert {path: path.stat().st_mtime_ns for path in before} == before, "the parent is not changed"
    assert step == 0 or max(chain(forked)) == step
    assert step == 0 or verify(step_directories(forked)[step]).step == step
    train_on(forked)
    assert chain(forked) == chain(parent)
    assert [verify(step_directories(one)[12]).metadata["fingerprint"] for one in (forked, parent)] == [
        verify(step_directories(parent)[12]).metadata["fingerprint"]
    ] * 2
    assert replay(forked, make_workload).is_exact
    numbers = [
        {at: found["loss"] for at, found in read_metrics(one).items() if "loss" in found}
        for one in (forked, parent)
    ]
    assert numbers[0] == numbers[1]
