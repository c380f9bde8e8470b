"""Runs and checkpoints as files: what is seen of them, and what may be removed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from processor_cost import cost
from vorox.core.config import load_config
from vorox.core.errors import CheckpointError, ConfigError, DataError, Preempted
from vorox.core.files import atomic
from vorox.core.files.file_holder import FileLock
from vorox.core.files.staged_directory import StagedDirectory
from vorox.core.schema import LogConfig, RunConfig
from vorox.experiments.artifacts import inspect_run, list_checkpoints, list_runs, remove_checkpoints, remove_run
from vorox.experiments.tracking import Tracker
from vorox.records.log import RunLog
from vorox.records.run_context import RunContext
from vorox.records.run_lookup import has_checkpoint, saved_state


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config("quickstart", [f"run.directory={tmp_path}/runs", "train.num_steps=40"])


def open_run(config: RunConfig) -> RunContext:
    return RunContext.open_or_create(config, argv=["vorox", "train", "quickstart"])


def add_checkpoint(directory: Path, step: int, eval_loss: float | None = None, name: str | None = None) -> Path:
    if eval_loss is not None:
        line = json.dumps({"step": step, "loss": eval_loss}).encode()
        atomic.append(directory / "evaluations.jsonl", line + b"\n", sync=False)
    with StagedDirectory(directory / "checkpoints" / (name or f"step-{step:08d}")) as staged:
        staged.write("model.safetensors", bytes(1000))
        staged.write("state.json", b"{}")
        return staged.commit({"step": step, "fingerprint": "f" * 16, "chain": "c" * 32})


def add_metrics(run: RunContext, steps: range, resume_step: int = 0) -> None:
    tracker = Tracker.open(
        run.directory, LogConfig(), attempt=run.attempt, resume_step=resume_step, log=RunLog(run.directory)
    )
    for step in steps:
        tracker.log(step, {"loss": 10 - step / 10})
    tracker.log(steps[-1], {"eval/loss": 5.5})
    tracker.close()


def test_a_finished_run(config: RunConfig) -> None:
    with open_run(config) as run:
        add_metrics(run, range(10, 41, 10))
        add_checkpoint(run.directory, 20)
        add_checkpoint(run.directory, 40, 5.5)
    summary = inspect_run(run.directory)
    assert (summary.state, summary.step, summary.total_steps) == ("finished", 40, 40)
    assert (summary.loss, summary.eval_loss, summary.checkpoint_step) == (6.0, 5.5, 40)
    assert summary.holder is None
    assert summary.failure is None
    assert summary.attempts == 1
    real = sum(path.stat().st_size for path in run.directory.rglob("*") if path.is_file())
    assert summary.size_bytes == real
    assert list_runs(Path(config.run.directory)) == [summary]


def test_a_checkpoint_that_is_removed_meanwhile(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run removes old checkpoints while the dashboard measures it."""
    with open_run(config) as run:
        removed = add_checkpoint(run.directory, 20)
        kept = add_checkpoint(run.directory, 40)
    scan = os.scandir

    def scan_without(folder: str) -> object:
        if Path(folder) == removed:
            raise FileNotFoundError(folder)
        return scan(folder)

    whole = inspect_run(run.directory).size_bytes
    monkeypatch.setattr(os, "scandir", scan_without)
    assert whole - inspect_run(run.directory).size_bytes == sum(path.stat().st_size for path in kept.iterdir())


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (Preempted("SIGTERM"), "stopped"),
        (DataError("the cache is gone", where="x"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (ZeroDivisionError("bug"), "failed"),
    ],
)
def test_how_a_run_ended(config: RunConfig, error: BaseException, state: str) -> None:
    with pytest.raises(type(error)), open_run(config) as run:
        raise error
    summary = inspect_run(run.directory)
    assert summary.state == state
    assert (summary.failure is not None) == (state == "failed")


def test_a_running_one_and_a_killed_one(config: RunConfig) -> None:
    run = open_run(config)
    summary = inspect_run(run.directory)
    assert summary.state == "running"
    assert summary.holder is not None
    assert str(os.getpid()) in summary.holder
    with pytest.raises(ConfigError, match="in use"):
        remove_run(run.directory)
    assert run._lock is not None
    run._lock.release()  # as if the process had died
    assert inspect_run(run.directory).state == "killed"


def test_a_run_that_only_began(config: RunConfig, tmp_path: Path) -> None:
    with open_run(config) as run:
        pass
    summary = inspect_run(run.directory)
    assert (summary.step, summary.loss, summary.eval_loss, summary.checkpoint_step) == (0, None, None, None)
    (run.directory / "config.yaml").unlink()
    assert inspect_run(run.directory).total_steps is None
    with open_run(config) as run:
        run.note(total_steps=77)
    assert inspect_run(run.directory).total_steps == 77, "a length in tokens is known once the run began"
    (run.directory / "run.json").write_text("{")
    summary = inspect_run(run.directory)
    assert summary.state == "unreadable"
    assert summary.problem.startswith("run.json: The file cannot be read: Expecting property name")


def test_the_chain_knows_steps_that_were_not_logged(config: RunConfig) -> None:
    with open_run(config) as run:
        lines = [json.dumps({"step": step, "batch": "b" * 500}) for step in range(1, 38)]
        (run.directory / "chain.jsonl").write_text("\n".join(lines) + '\n{"step": 38')
    assert inspect_run(run.directory).step == 37


def test_checkpoints_are_listed_and_verified(config: RunConfig) -> None:
    with open_run(config) as run:
        for step in (10, 20, 30):
            add_checkpoint(run.directory, step, 6.0 if step == 20 else None)
        add_checkpoint(run.directory, 5, name="step-00000005.corrupt-1")
        add_checkpoint(run.directory, 10, name="step-00000040")
        (run.directory / "checkpoints" / "step-00000050").mkdir()
        atomic.append(run.directory / "evaluations.jsonl", b'{"step":30,"loss":5.0}\n{"resume_step":20}\n', sync=False)
        (run.directory / "checkpoints" / "notes.txt").write_text("mine")
    broken = run.directory / "checkpoints" / "step-00000030" / "model.safetensors"
    broken.write_bytes(bytes(999) + b"\x01")
    quick = {summary.name: summary for summary in list_checkpoints(run.directory)}
    assert [summary.state for summary in quick.values()] == [
        "quarantined", "unverified", "unverified", "unverified", "unverified", "quarantined",
    ]  # fmt: skip
    assert inspect_run(run.directory).num_checkpoints == 4, "without those that the list calls quarantined"
    assert quick["step-00000020"].eval_loss == 6.0
    assert quick["step-00000010"].eval_loss is None
    assert quick["step-00000030"].eval_loss is None, "that validation is of an abandoned attempt"
    assert quick["step-00000010"].size_bytes == 1002
    states = {
        summary.step: (summary.state, summary.problem) for summary in list_checkpoints(run.directory, verify=True)
    }
    assert states[10][0] == states[20][0] == "valid"
    assert states[30][0] == "corrupt"
    assert "model.safetensors" in states[30][1]
    assert states[40][0] == "corrupt"
    assert states[40][1].startswith("Directory holds the checkpoint of step 10 [")
    assert states[50] == ("quarantined", "has no manifest: its copy or its removal was interrupted")


def test_a_folder_that_cannot_be_listed_is_not_called_empty(config: RunConfig) -> None:
    with open_run(config) as run:
        (run.directory / "checkpoints").write_text("somebody's")
    assert has_checkpoint(run.directory)
    assert saved_state(run.layout) == "unknown: Cannot read a checkpoint: Not a directory; its content may be intact"
    (summary,) = list_runs(Path(config.run.directory))
    assert (summary.state, summary.problem) == (
        "unreadable", "Cannot read a checkpoint: Not a directory; its content may be intact",
    )  # fmt: skip


def test_removing_checkpoints(config: RunConfig) -> None:
    with open_run(config) as run:
        for step in (10, 20, 1_000):
            add_checkpoint(run.directory, step)
        add_checkpoint(run.directory, 5, name="step-00000005.replaced-1")
        with pytest.raises(ConfigError, match="in use"):
            remove_checkpoints(run.directory, ["10"])
    removed = remove_checkpoints(run.directory, ["10", "step-00000010", "step-00000005.replaced-1"])
    assert [summary.step for summary in removed] == [5, 10]
    with pytest.raises(ConfigError, match="Checkpoint 30 does not exist; available: step-00000020, step-00001000"):
        remove_checkpoints(run.directory, ["30"])
    with pytest.raises(ConfigError, match="does not exist"):
        remove_checkpoints(run.directory, ["../../other"])
    remove_checkpoints(run.directory, ["1,000"])
    with pytest.raises(CheckpointError, match="No valid checkpoint would remain"):
        remove_checkpoints(run.directory, ["20"])
    assert [summary.step for summary in list_checkpoints(run.directory)] == [20]
    remove_checkpoints(run.directory, ["20"], force=True)
    assert list_checkpoints(run.directory) == []


def test_the_last_valid_checkpoint_is_kept_when_the_others_are_corrupt(config: RunConfig) -> None:
    with open_run(config) as run:
        for step in (10, 20):
            add_checkpoint(run.directory, step)
    (run.directory / "checkpoints" / "step-00000020" / "state.json").unlink()
    with pytest.raises(CheckpointError, match="No valid checkpoint would remain"):
        remove_checkpoints(run.directory, ["10"])
    (run.directory / "checkpoints" / "step-00000020" / atomic.MANIFEST_NAME).unlink()
    assert [summary.step for summary in remove_checkpoints(run.directory, ["20"])] == [20], "an incomplete one may go"


def test_removing_a_run(config: RunConfig, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    with open_run(config) as run:
        add_metrics(run, range(1, 5))
        add_checkpoint(run.directory, 4)
        (run.directory / "checkpoints" / "link").symlink_to(outside)
    size_bytes = inspect_run(run.directory).size_bytes
    assert remove_run(run.directory) == size_bytes
    assert not run.directory.exists()
    assert list(run.directory.parent.iterdir()) == []
    assert (outside / "precious").read_text() == "x", "links are not followed"


def refused(change: Callable[[Path], Path], match: str) -> Callable[[RunConfig], None]:
    def test(config: RunConfig) -> None:
        with open_run(config) as run:
            add_checkpoint(run.directory, 4)
        target = change(run.directory)
        before = sorted(str(path) for path in run.directory.parent.rglob("*"))
        with pytest.raises(ConfigError, match=match):
            remove_run(target)
        assert sorted(str(path) for path in run.directory.parent.rglob("*")) == before

    return test


def add_foreign(directory: Path) -> Path:
    (directory / "thesis.tex").write_text("x")
    return directory


def add_link(directory: Path) -> Path:
    link = directory.with_name("link")
    link.symlink_to(directory)
    return link


def drop_record(directory: Path) -> Path:
    (directory / "run.json").unlink()
    return directory


test_foreign_files_are_not_removed = refused(add_foreign, "thesis.tex")
test_a_link_is_not_removed = refused(add_link, "link")
test_a_folder_with_a_config_is_no_run = refused(drop_record, "no run.json")
test_the_folder_of_all_runs_is_no_run = refused(lambda directory: directory.parent, "no run.json")


def test_an_interrupted_removal_leaves_no_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_run(config) as run:
        add_checkpoint(run.directory, 4)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_run(run.directory)
    assert list_runs(run.directory.parent) == []
    with FileLock(run.directory.parent / "probe", blocking=False):
        pass


@pytest.mark.slow
def test_the_size_of_a_run_of_many_files_costs_linear_time(tmp_path: Path) -> None:
    """A folder of 20,000 files; the square of that would be a minute."""
    folder = tmp_path / "run" / "nonfinite"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text('{"attempts": []}')
    (folder / "a").write_bytes(b"x" * 1000)
    before = cost(lambda: inspect_run(tmp_path / "run"), repeats=1)
    for number in range(20_000):
        (folder / str(number)).touch()
    assert cost(lambda: inspect_run(tmp_path / "run"), repeats=1) < before + 400
    assert inspect_run(tmp_path / "run").size_bytes == 1000 + len('{"attempts": []}')
