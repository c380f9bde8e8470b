"""Which checkpoints a resume sets aside, and what a plan must be for a checkpoint and a replay."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tiny_runs import configuration, run, use_numpy_engine
from vorox.core.errors import CheckpointError, ConfigError, DataError
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.schema import RunConfig
from vorox.data.order.plan import DataPlan
from vorox.records.log import RunLog
from vorox.run import make_workload
from vorox.training.replay import replay
from vorox.training.resume.resume import quarantine_later_checkpoints
from vorox.training.steps.workload import Workload


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def workload(config: RunConfig) -> Workload:
    return make_workload(config, DistributedContext(), RunLog(None), None, build=False)


def test_every_later_checkpoint_is_set_aside_the_next_step_too(tmp_path: Path) -> None:
    settings = ["checkpoint.every_steps=1", "checkpoint.keep_last=12"]
    directory = run(configuration(tmp_path, settings)).run_directory
    quarantine_later_checkpoints(directory, 4, RunLog(None))
    assert list(step_directories(directory)) == [1, 2, 3, 4]
    aside = sorted(path.name for path in RunLayout(directory).checkpoints.glob("*.replaced-1"))
    assert aside == [f"step-{step:08d}.replaced-1" for step in range(5, 13)]


def test_a_replay_refuses_a_plan_of_other_settings(tmp_path: Path) -> None:
    """A seed of the configuration that the plan does not have."""
    directory = run(configuration(tmp_path)).run_directory
    path = RunLayout(directory).config
    path.write_text(path.read_text().replace("seed: 1234", "seed: 7"))
    for checkpoint in step_directories(directory).values():
        checkpoint.rename(checkpoint.with_name("away-" + checkpoint.name))
    with pytest.raises(ConfigError, match="Plan has seed = 1234, the configuration 7"):
        replay(directory, workload)


def test_a_replay_refuses_caches_that_the_plan_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run(configuration(tmp_path)).run_directory
    checked = list[Path]()

    def check(plan: DataPlan, readers: object) -> None:
        checked.append(plan.path)
        raise DataError("another cache")

    monkeypatch.setattr(DataPlan, "check", check)
    with pytest.raises(DataError, match="another cache"):
        replay(directory, workload)
    assert checked


def test_a_replay_refuses_a_checkpoint_of_another_plan(tmp_path: Path) -> None:
    """The plan of a twin with another order of the data, put in the place of the run's own."""
    directory = run(configuration(tmp_path)).run_directory
    plan = RunLayout(directory).plan
    manifest = json.loads((RunLayout(directory).checkpoint(8) / "MANIFEST.json").read_text())
    other = run(configuration(tmp_path, ["train.num_steps=11"])).run_directory
    plan.write_bytes(RunLayout(other).plan.read_bytes())
    assert manifest["metadata"]["plan_digest"] != DataPlan.open(plan).digest
    with pytest.raises(CheckpointError, match="was written under another data plan"):
        replay(directory, workload, first_step=8, last_step=10)
