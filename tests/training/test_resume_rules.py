"""What a run that goes on may change, and what is refused before anything is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from numpy_engine import NumpyEngine
from tiny_runs import Killed, at_step, configuration, events, kill, result, run, use_numpy_engine
from vorox.core.distributed_context import DistributedContext
from vorox.core.errors import CheckpointError, ConfigError, DataError
from vorox.core.file_holder import FileLock
from vorox.core.log import RunLog
from vorox.core.run_context import recorded_config
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.plan import DataPlan
from vorox.experiments.tracking import read_metrics
from vorox.run import make_workload
from vorox.training import resume
from vorox.training.checkpoints.store import Checkpoint, step_directories
from vorox.training.replay import replay
from vorox.training.workload import Workload

CHANGED = {"engine": "numpy", "numpy": "9.9", "blas": "new", "determinism": "bitwise"}


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nobody cuts the power here


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the uninterrupted run comes to."""
    with pytest.MonkeyPatch.context() as patch:
        use_numpy_engine(patch)
        return result(run(configuration(tmp_path_factory.mktemp("straight"))))


def test_another_process_is_refused(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    directory = run(config).run_directory
    with FileLock(directory / "LOCK"), pytest.raises(ConfigError, match="is in use by"):
        run(config)


def test_resume_refuses_another_model_or_other_data(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    directory = run(config).run_directory
    files = {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file() and path.name != "LOCK"}
    other = recorded_config(
        directory, ["model.num_layers=2", "data.sequence_length_tokens=8", "run.seed=7", "train.num_steps=20"]
    )
    with pytest.raises(ConfigError, match="3 differences") as refused:
        run(other, resume_from=directory)
    for text in ("model.num_layers: 1 -> 2", "data.sequence_length_tokens: 16 -> 8", "run.seed: 1234 -> 7"):
        assert text in str(refused.value)
    for path, content in files.items():
        assert path.read_bytes() == content, f"{path} was changed by a refused resume"


def test_resume_with_another_length_and_pace(tmp_path: Path) -> None:
    directory = run(configuration(tmp_path)).run_directory
    longer = recorded_config(directory, ["train.num_steps=16", "optimizer.lr=0.001", "log.every_steps=1"])
    outcome = run(longer, resume_from=directory)
    assert outcome.run_directory == directory
    assert outcome.progress.step == 16
    assert events(directory, "config_changed") == [
        "Configuration changed: optimizer.lr: 0.01 -> 0.001; train.num_steps: 12 -> 16; log.every_steps: 2 -> 1"
    ]
    assert recorded_config(directory) == longer
    rates = {step: values["learning_rate"] for step, values in read_metrics(directory).items()}
    assert rates[16] == pytest.approx(0.0001)


def test_another_length_survives_a_kill_before_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run(configuration(tmp_path)).run_directory
    longer = recorded_config(directory, ["train.num_steps=16", "train.max_nonfinite_steps=5"])
    with monkeypatch.context() as patch:
        at_step(patch, 14, kill)
        with pytest.raises(Killed):
            run(longer, resume_from=directory)
    again = run(recorded_config(directory), resume_from=directory)
    assert again.progress.step == 16
    assert run(recorded_config(directory), resume_from=directory).progress.step == 16


def test_resume_from_an_older_checkpoint_abandons_what_came_after(straight: dict[str, Any], tmp_path: Path) -> None:
    config = configuration(tmp_path)
    directory = run(config).run_directory
    found = result(run(config, resume_from=RunLayout(directory).checkpoint(8)))
    assert found == straight
    assert (directory / "checkpoints" / "step-00000012.replaced-1").is_dir()
    assert list(step_directories(directory)) == [8, 12]


def test_a_changed_environment_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path)
    with monkeypatch.context() as patch:
        at_step(patch, 9, kill)
        with pytest.raises(Killed):
            run(config)
    monkeypatch.setattr(NumpyEngine, "environment", lambda self: CHANGED)
    directory = run(config).run_directory
    said = events(directory, "environment_changed")
    assert len(said) == 1
    assert "Not bit-exact from step 8 on" in said[0]
    assert "numpy was" in said[0]
    assert "blas was absent, is new" in said[0]


def test_the_checkpoint_of_another_plan_is_refused(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    directory = run(config).run_directory
    (directory / "plan.jsonl").unlink()
    with pytest.raises(DataError, match="Run has no data plan") as refused:
        run(recorded_config(directory, ["train.num_steps=999"]), resume_from=directory)

    def open_workload(config: RunConfig) -> Workload:
        return make_workload(config, DistributedContext(), RunLog(None), None, build=False)

    for read in (lambda: DataPlan.open(directory / "plan.jsonl"), lambda: replay(directory, open_workload)):
        with pytest.raises(DataError) as again:
            read()
        assert str(again.value) == str(refused.value), "one message, whoever reads the plan"


def test_a_changed_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path)
    at_step(monkeypatch, 6, kill)
    with pytest.raises(Killed):
        run(config)
    (tmp_path / "text" / "text.jsonl").write_text('{"text": "something else"}\n' * 200)
    with pytest.raises(DataError, match="no longer"):
        run(config)


def test_a_checkpoint_of_another_model_is_refused_with_the_fields_that_differ(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, {"spec": {"num_layers": 2, "width": 4, "bias": True}})
    with pytest.raises(CheckpointError, match="belongs to a different model") as refused:
        resume.load(NumpyEngine(8), checkpoint, {"num_layers": 3, "width": 4})
    _, _, fields = refused.value.what.partition(": ")
    assert fields == "bias = True, configured is None, num_layers = 2, configured is 3"
