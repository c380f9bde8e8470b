"""A disk that fails for a moment, or goes read-only: exit code 5, the file is named, nothing is judged or lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eventually import wait_until
from numpy_engine import NumpyEngine
from tiny_runs import at_step, configuration, run, use_numpy_engine
from vorox.cli import app
from vorox.core.errors import CheckpointError, DataError, UnreadableCheckpointError
from vorox.core.files import atomic
from vorox.core.files.atomic import FileOperation
from vorox.core.files.file_holder import FileLock
from vorox.core.run_layout import RunLayout, step_directories
from vorox.experiments.artifacts import list_checkpoints
from vorox.records.run_context import recorded_config
from vorox.training.checkpoints.store import latest_valid, quarantine_corrupt, restore_quarantined


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    return run(configuration(tmp_path)).run_directory


def fail_reading(patch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Every reading of a file of this name, or listing of a directory of it, fails."""

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **named: Any) -> Any:
            if Path(path).name == name and (not arguments or str(arguments[0]).startswith("r")):
                raise OSError(number, os.strerror(number), str(path))
            return original(path, *arguments, **named)

        return call

    for owner, function in ((Path, "open"), (Path, "read_bytes"), (os, "scandir")):
        patch.setattr(owner, function, failing(getattr(owner, function)))


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ENOMEM])
@pytest.mark.parametrize("name", ["state.bin", "MANIFEST.json", "state.json", "step-00000012", "checkpoints"])
def test_an_error_while_reading_ends_the_run_and_is_no_verdict(
    name: str, number: int, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = recorded_config(finished, ["train.num_steps=16"])
    before = sorted(path.name for path in (finished / "checkpoints").iterdir())
    with monkeypatch.context() as patch:
        fail_reading(patch, name, number)
        with pytest.raises(UnreadableCheckpointError) as failed:
            run(longer, resume_from=finished)
    assert failed.value.exit_code == 5
    assert Path(failed.value.where).name == name
    assert failed.value.hint
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == before
    assert run(longer, resume_from=finished).progress.step == 16


RECORDS = ("chain.jsonl", "run.json", "config.yaml", "plan.jsonl", "attempts.bin", "evaluations.jsonl", "configs")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_cannot_be_read_is_not_called_damaged(
    name: str, number: int, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(recorded_config(finished, ["train.num_steps=14", "optimizer.lr=0.02"]), resume_from=finished)
    longer = recorded_config(finished, ["train.num_steps=16"])
    before = (finished / name).read_bytes() if (finished / name).is_file() else b""
    with monkeypatch.context() as patch:
        fail_reading(patch, name, number)
        with pytest.raises(CheckpointError) as failed:
            run(longer, resume_from=finished)
    assert failed.value.exit_code == 5
    assert Path(failed.value.where).name == name
    assert "same command again" in failed.value.hint
    assert not before or (finished / name).read_bytes() == before
    assert run(longer, resume_from=finished).progress.step == 16


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("name", ["plan.jsonl", "attempts.bin", "evaluations.jsonl"])
def test_a_file_of_the_run_that_may_not_be_read(
    name: str, number: int, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = recorded_config(finished, ["train.num_steps=16"])
    with monkeypatch.context() as patch:
        fail_reading(patch, name, number)
        with pytest.raises(CheckpointError) as failed:
            run(longer, resume_from=finished)
    assert Path(failed.value.where).name == name
    assert "permission" in failed.value.hint
    assert name in failed.value.hint
    assert run(longer, resume_from=finished).progress.step == 16


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("name", ["plan.jsonl", "attempts.bin", "evaluations.jsonl", "tokenizer.json"])
def test_a_file_of_the_run_that_may_not_be_written(name: str, number: int, tmp_path: Path) -> None:
    config = configuration(tmp_path)

    def refuse(operation: FileOperation) -> None:
        if tmp_path / "runs" in operation.path.parents and name in operation.path.name:
            raise PermissionError(number, os.strerror(number), str(operation.path))

    with atomic.observe(refuse), pytest.raises(CheckpointError) as failed:
        run(config)
    assert name in Path(failed.value.where).name
    assert "permission" in failed.value.hint
    assert run(config).progress.step == 12


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_run_directory_that_the_disk_refuses(number: int, tmp_path: Path) -> None:
    config = configuration(tmp_path)

    def refuse(operation: FileOperation) -> None:
        if tmp_path / "runs" in operation.path.parents:
            raise OSError(number, os.strerror(number), str(operation.path))

    with atomic.observe(refuse), pytest.raises(CheckpointError) as failed:
        run(config)
    assert failed.value.exit_code == 5
    assert str(tmp_path / "runs") in failed.value.where
    assert "same command again" in failed.value.hint


def test_verifying_tells_unreadable_from_corrupt(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fail_reading(patch, "state.bin", errno.EIO)
        assert {entry.state for entry in list_checkpoints(finished, verify=True)} == {"unreadable"}
        result = CliRunner().invoke(app, ["checkpoints", "verify", str(finished)])
        assert isinstance(result.exception, UnreadableCheckpointError)
        assert "vorox checkpoints verify" in result.exception.hint
    assert {entry.state for entry in list_checkpoints(finished, verify=True)} == {"valid"}


class _Log:
    def event(self, kind: str, message: str, **fields: object) -> None:
        """Nothing."""


def damage_all(directory: Path) -> dict[Path, bytes]:
    """Every checkpoint is damaged and quarantined as corrupt; what its file held before."""
    whole: dict[Path, bytes] = {}
    for path in step_directories(directory).values():
        whole[path] = (path / "state.bin").read_bytes()
        (path / "state.bin").write_bytes(b"")
    with pytest.raises(CheckpointError) as refused:
        latest_valid(directory, on_corrupt=quarantine_corrupt(_Log()))  # type: ignore[arg-type]
    assert "vorox checkpoints verify" in refused.value.hint
    assert "--restore" in refused.value.hint
    assert step_directories(directory) == {}
    return whole


def test_a_quarantined_checkpoint_is_restored(finished: Path) -> None:
    kept = sorted(step_directories(finished))
    for path, content in damage_all(finished).items():
        (path.with_name(f"{path.name}.corrupt-1") / "state.bin").write_bytes(content)
    still_bad = RunLayout(finished).checkpoint(kept[0]).with_name(f"step-{kept[0]:08d}.corrupt-1")
    (still_bad / "state.bin").write_bytes(b"x")
    result = CliRunner().invoke(app, ["checkpoints", "verify", str(finished), "--restore"])
    assert result.exit_code == 0, result.output
    assert f"Restored step {kept[-1]}" in result.output
    assert "stays quarantined" in result.output
    assert sorted(step_directories(finished)) == kept[1:]
    assert still_bad.is_dir()
    longer = recorded_config(finished, ["train.num_steps=16"])
    assert run(longer, resume_from=finished).progress.step == 16


def test_a_state_that_the_run_left_is_not_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run(configuration(tmp_path)).run_directory
    path = RunLayout(directory).checkpoint(12)
    whole = (path / "state.bin").read_bytes()
    (path / "state.bin").write_bytes(b"")
    with monkeypatch.context() as patch:
        at_step(patch, 11, _kill)
        with pytest.raises(_Killed):
            run(recorded_config(directory, ["optimizer.lr=0.001", "checkpoint.every_steps=3"]), resume_from=directory)
    aside = path.with_name(f"{path.name}.corrupt-1")
    (aside / "state.bin").write_bytes(whole)
    assert [(entry.step, entry.problem != "") for entry in restore_quarantined(directory)] == [(12, True)]
    assert aside.is_dir()
    with FileLock(directory / "LOCK"), pytest.raises(Exception, match="in use"):
        restore_quarantined(directory)


class _Killed(BaseException):
    """Ends a run in the middle."""


def _kill() -> None:
    raise _Killed


@pytest.mark.parametrize("kind", ["create", "write", "fsync", "rename", "mkdir"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_a_disk_that_takes_no_writes_any_more(number: int, kind: str, tmp_path: Path) -> None:
    straight = run(configuration(tmp_path / "straight", ["train.num_steps=20"]))
    config = configuration(tmp_path / "run", ["train.num_steps=20"])
    failing = False
    steps: list[int] = []
    original = NumpyEngine.train_step

    def refuse(operation: FileOperation) -> None:
        if failing and operation.kind == kind:
            raise OSError(number, os.strerror(number), str(operation.path))

    def train_step(engine: NumpyEngine, batch: Any, **named: float) -> Any:
        nonlocal failing
        if batch.step == 6:
            wait_until(lambda: any(tmp_path.glob("run/runs/*/checkpoints/step-00000004")))  # saved in the background
        failing = batch.step >= 6
        steps.append(batch.step)
        return original(engine, batch, **named)

    with pytest.MonkeyPatch.context() as patch, atomic.observe(refuse):
        patch.setattr(NumpyEngine, "train_step", train_step)
        with pytest.raises(CheckpointError) as failed:
            run(config)
    assert failed.value.exit_code == 5
    assert str(tmp_path / "run") in failed.value.where
    assert failed.value.hint
    assert failed.value.saved == "training state up to step 4 is safe in step-00000004"
    assert steps[-1] < 12, "found at the next save, not at the end"
    assert run(config).fingerprint == straight.fingerprint


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_a_cache_that_the_disk_refuses_is_given_the_remedy_of_the_disk(number: int, tmp_path: Path) -> None:
    def refuse(operation: FileOperation) -> None:
        if operation.kind == "write" and operation.path.suffix == ".psc":
            raise OSError(number, os.strerror(number), str(operation.path))

    with atomic.observe(refuse), pytest.raises(DataError) as failed:
        run(configuration(tmp_path))
    assert failed.value.exit_code == 4
    assert str(tmp_path / "cache") in failed.value.where
    assert "same command again" in failed.value.hint
