"""Damaged checkpoints and full disks: a run loses steps at most, and says so."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tiny_runs import Killed, at_step, configuration, events, kill, result, run, use_numpy_engine
from vorox.cli.failure import report_failure
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files import atomic
from vorox.core.files.atomic import FileOperation
from vorox.core.files.file_holder import FileLock
from vorox.core.run_layout import RunLayout, lock_run, step_directories
from vorox.training.loop.display import NoDisplay


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


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_a_corrupt_newest_checkpoint_costs_some_steps_and_is_said(
    damage: str, straight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path)
    at_step(monkeypatch, 11, kill)
    with pytest.raises(Killed):
        run(config)
    directory = next((tmp_path / "runs").iterdir())
    file = RunLayout(directory).checkpoint(8) / ("MANIFEST.json" if damage == "manifest" else "state.bin")
    whole = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(whole[:-1] if damage == "truncate" else whole[:99] + bytes([whole[99] ^ 16]) + whole[100:])
    messages: list[str] = []

    class Display(NoDisplay):
        def message(self, text: str, level: str = "info") -> None:
            messages.append(f"{level}: {text}")

    assert result(run(config, display=Display())) == straight
    said = events(directory, "checkpoint_corrupt")
    assert len(said) == 1
    assert "step-00000008" in said[0]
    assert "quarantined as step-00000008.corrupt-1" in said[0]
    assert said[0].endswith("trying step 4")
    assert f"warning: {said[0]}" in messages
    assert events(directory, "resumed")[-1] == "Resuming from step 4"
    assert (directory / "checkpoints" / "step-00000008.corrupt-1" / "REASON.txt").exists()


def test_no_valid_checkpoint_is_an_error(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    directory = run(config).run_directory
    for path in step_directories(directory).values():
        (path / "state.bin").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="No checkpoint of this run is valid") as refused:
            run(config)
        assert refused.value.exit_code == 5
    said = events(directory, "checkpoint_corrupt")
    assert [text.rpartition("; ")[2] for text in said] == ["trying step 8", "the run has no older one"]


def test_disk_full_during_a_save(straight: dict[str, Any], tmp_path: Path) -> None:
    config = configuration(tmp_path)

    def no_room(operation: FileOperation) -> None:
        if operation.kind == "write" and "step-00000008" in str(operation.path):
            raise OSError(errno.ENOSPC, "No space left on device", str(operation.path))

    with atomic.observe(no_room), pytest.raises(CheckpointError, match="No room for the checkpoint of step 8") as full:
        run(config)
    assert full.value.exit_code == 5
    assert full.value.saved == "training state up to step 4 is safe in step-00000004"
    assert result(run(config)) == straight


def test_disk_full_for_the_chain_stops_before_a_checkpoint_without_proof(
    straight: dict[str, Any], tmp_path: Path
) -> None:
    config = configuration(tmp_path)

    def no_room(operation: FileOperation) -> None:
        if operation.kind == "write" and operation.path.name == "chain.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device", str(operation.path))

    with atomic.observe(no_room), pytest.raises(CheckpointError, match="No room for the checkpoint of step 4"):
        run(config)
    assert result(run(config)) == straight


def test_disk_full_for_observations_stops_nothing(straight: dict[str, Any], tmp_path: Path) -> None:
    config = configuration(tmp_path)

    def no_room(operation: FileOperation) -> None:
        if operation.kind == "write" and operation.path.name in {"metrics.jsonl", "events.jsonl", "log.txt"}:
            raise OSError(errno.ENOSPC, "No space left on device", str(operation.path))

    with atomic.observe(no_room):
        found = result(run(config))
    assert {**found, "losses": 0} == {**straight, "losses": 0}


def test_a_crash_says_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the screen and in ``failure.json``, also if the error is none of ours."""

    def fail() -> None:
        raise ZeroDivisionError("a user's function")

    at_step(monkeypatch, 11, fail)
    with pytest.raises(ZeroDivisionError) as caught:
        run(configuration(tmp_path))
    (directory,) = (tmp_path / "runs").iterdir()
    saved = "training state up to step 8 is safe in step-00000008"
    assert json.loads(RunLayout(directory).failure.read_bytes())["saved"] == saved
    capsys.readouterr()
    report_failure(caught.value, ["train", "tiny.yaml"])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("x crash: ZeroDivisionError: a user's function")
    assert lines[2] == f"  saved   {saved}"


def the_run(folder: Path) -> Path:
    return next((folder / "runs").iterdir())


def test_a_plan_that_is_removed_under_a_run_is_reported_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(monkeypatch, 6, lambda: RunLayout(the_run(tmp_path)).plan.unlink())
    finished = run(configuration(tmp_path, ["checkpoint.asynchronous=false"]))
    reports = events(finished.run_directory, "plan_lost")
    assert len(reports) == 2, "after steps 8 and 12, not after step 4"
    assert all("plan.jsonl was removed or changed" in report for report in reports)


def test_a_removed_lock_is_locked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []

    def second_process() -> None:
        with pytest.raises(ConfigError, match="is in use by"):
            lock_run(the_run(tmp_path)).acquire()
        refused.append("step 10")

    at_step(monkeypatch, 6, lambda: RunLayout(the_run(tmp_path)).lock.unlink())
    at_step(monkeypatch, 10, second_process)
    finished = run(configuration(tmp_path, ["checkpoint.asynchronous=false"]))
    assert refused == ["step 10"]
    assert len(events(finished.run_directory, "lock_removed")) == 1


def test_a_run_whose_lock_another_process_took_ends_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[FileLock] = []

    def second_process() -> None:
        RunLayout(the_run(tmp_path)).lock.unlink()
        taken.append(lock_run(the_run(tmp_path)).acquire())

    at_step(monkeypatch, 6, second_process)
    with pytest.raises(ConfigError, match="is in use by"):
        run(configuration(tmp_path, ["checkpoint.asynchronous=false"]))
    assert max(step_directories(the_run(tmp_path))) == 8, "it trained no further"
    taken[0].release()
