"""Checkpoints whose removal or copy was interrupted: swept or renamed, and never reported as corrupt."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import vorox.cli
from tiny_runs import Killed, configuration, events, run, use_numpy_engine
from vorox.core.errors import CheckpointError, UnreadableCheckpointError
from vorox.core.files import atomic, file_holder
from vorox.core.files.atomic import MANIFEST_NAME, FileOperation
from vorox.core.run_layout import RunLayout, step_directories
from vorox.experiments.artifacts import list_checkpoints
from vorox.records.log import RunLog
from vorox.records.run_lookup import find_run
from vorox.training.checkpoints.store import latest_valid, verify
from vorox.training.resume.resume import choose_checkpoint_before
from vorox.training.steps.loss_spikes import Rollback

SETTINGS = ["checkpoint.asynchronous=false", "checkpoint.keep_last=2", "train.num_steps=24"]


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def verdict(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = vorox.cli.main(words)
    found = capsys.readouterr()
    return code, found.out + found.err


def interrupted(tmp_path: Path, action: Callable[[], None]) -> Path:
    """A run whose removal of step 4 is interrupted in the middle."""

    def observer(operation: FileOperation) -> None:
        if operation.kind == "remove" and operation.path.name == "state.json" and "00000004" in str(operation.path):
            action()

    with atomic.observe(observer), contextlib.suppress(Killed):
        run(configuration(tmp_path, SETTINGS))
    return find_run(tmp_path / "runs", "tiny")


def kill() -> None:
    raise Killed


def test_a_kill_during_a_removal_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = replace(file_holder.this_process(), process_id=2**22 + 1)  # no Linux process has this id
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "this_process", lambda: dead)
        directory = interrupted(tmp_path, kill)
    (left,) = (path for path in RunLayout(directory).checkpoints.iterdir() if path.name.startswith(".tmp-"))
    assert list(step_directories(directory)) == [8, 12]
    assert [(entry.step, entry.state) for entry in list_checkpoints(directory)] == [
        (8, "unverified"),
        (12, "unverified"),
    ]
    assert latest_valid(directory, at_or_before=5) is None
    assert verdict(capsys, "checkpoints", "verify", str(directory))[0] == 0
    code, text = verdict(capsys, "replay", str(directory), "--from", "5", "--to", "7")
    assert (code, "bit-exact, 7 steps" in text) == (0, True)
    run(configuration(tmp_path, SETTINGS))
    assert not left.exists()
    assert len(events(directory, "checkpoint_swept")) == 1


def test_a_removal_that_fails_is_tried_again_at_the_next_save(tmp_path: Path) -> None:
    def fail() -> None:
        if not failed:
            failed.append(True)
            raise OSError(5, "Input/output error")

    failed = list[bool]()
    directory = interrupted(tmp_path, fail)
    assert failed
    assert len(events(directory, "checkpoint_kept")) == 1
    assert [path.name for path in sorted(RunLayout(directory).checkpoints.iterdir())] == [
        "step-00000020",
        "step-00000024",
    ]


def without_manifest(tmp_path: Path, *steps: int) -> Path:
    directory = run(configuration(tmp_path, [*SETTINGS, "checkpoint.keep_last=9"])).run_directory
    for step in steps:
        (RunLayout(directory).checkpoint(step) / MANIFEST_NAME).unlink()
    return directory


def test_a_directory_without_a_manifest_is_no_corrupt_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = without_manifest(tmp_path, 4)
    assert list(step_directories(directory)) == [8, 12, 16, 20, 24]
    code, text = verdict(capsys, "checkpoints", "verify", str(directory))
    assert (code, "has no manifest" in text) == (0, True)
    code, text = verdict(capsys, "replay", str(directory), "--from", "5", "--to", "7")
    assert (code, "from step 0" in text) == (0, True)
    run(configuration(tmp_path, [*SETTINGS, "checkpoint.keep_last=9", "train.num_steps=28"]), resume_from=directory)
    aside = RunLayout(directory).checkpoint(4).with_name("step-00000004.incomplete-1")
    assert (aside / "state.json").is_file(), "it may be a copy of somebody's; nothing is deleted"
    (text,) = events(directory, "checkpoint_incomplete")
    assert "Quarantined step-00000004 as step-00000004.incomplete-1: it has no manifest" in text
    assert verdict(capsys, "checkpoints", "remove", str(directory), aside.name, "--yes")[0] == 0
    assert not aside.exists()


def test_a_run_with_nothing_but_a_directory_without_a_manifest_starts_again(tmp_path: Path) -> None:
    directory = without_manifest(tmp_path, 4, 8, 12, 16, 20, 24)
    assert latest_valid(directory) is None
    outcome = run(configuration(tmp_path, [*SETTINGS, "checkpoint.keep_last=9"]))
    assert (outcome.run_directory, outcome.start_step) == (directory, 0)
    assert len(events(directory, "started_again")) == 1


def test_a_corrupt_checkpoint_is_still_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = without_manifest(tmp_path)
    (RunLayout(directory).checkpoint(4) / "state.json").write_bytes(b"{}")
    code, text = verdict(capsys, "checkpoints", "verify", str(directory))
    assert (code, "step-00000004" in text) == (5, True)
    assert latest_valid(directory, at_or_before=5) is None
    code, text = verdict(capsys, "replay", str(directory), "--from", "5", "--to", "7")
    assert (code, "--from 0 --to 7" in text) == (5, True)
    for step in step_directories(directory):
        (RunLayout(directory).checkpoint(step) / "state.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="No checkpoint of this run is valid"):
        latest_valid(directory)


def test_a_disk_that_does_not_tell_is_no_missing_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = without_manifest(tmp_path)
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        if path.name == MANIFEST_NAME:
            raise OSError(5, "Input/output error", str(path))
        return real(path)

    monkeypatch.setattr(Path, "lstat", lstat)
    with pytest.raises(UnreadableCheckpointError):
        latest_valid(directory)


def test_a_rollback_takes_the_oldest_valid_state_behind_its_target(tmp_path: Path) -> None:
    """Steps 4 and 8 are gone or corrupt, the target is 6: 12 loses the fewest good steps that are left to lose."""
    directory = without_manifest(tmp_path, 4)
    (RunLayout(directory).checkpoint(8) / "state.json").write_bytes(b"{}")
    found = choose_checkpoint_before(directory, RunLog(None), Rollback(14, 8, 9.0, 3.0, 1))
    assert found is not None
    assert found.step == 12
    assert [path.name for path in directory.glob("checkpoints/*.corrupt-*")] == ["step-00000008.corrupt-1"]
    found = choose_checkpoint_before(directory, RunLog(None), Rollback(20, 2, 9.0, 3.0, 1))
    assert found is not None
    assert found.step == 16, "the newest without the undone steps"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_file_of_a_checkpoint_that_never_ends_is_refused_unread(tmp_path: Path) -> None:
    """A pipe would be waited for, and a device or a sparse file read for hours; the older checkpoint is taken."""
    directory = run(configuration(tmp_path, SETTINGS)).run_directory
    path = RunLayout(directory).checkpoint(24) / "state.json"
    assert latest_valid(directory) == verify(path.parent)
    for spoil, text in (
        (lambda: os.mkfifo(path), "is not a regular file"),
        (lambda: path.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda: (path.touch(), os.truncate(path, 1 << 40)), "The file has 1,099,511,627,776 bytes"),
    ):
        path.unlink()
        spoil()
        with pytest.raises(CheckpointError, match=text):
            verify(path.parent)
        (summary,) = (found for found in list_checkpoints(directory, verify=True) if found.step == 24)
        assert summary.state == "corrupt"
    found = latest_valid(directory)
    assert found is not None
    assert found.step == 20


def test_verify_tells_what_the_replay_chain_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoints are valid without it, but nobody can replay to them."""
    directory = run(configuration(tmp_path, SETTINGS)).run_directory
    code, text = verdict(capsys, "checkpoints", "verify", str(directory))
    assert (code, "chain.jsonl" in text) == (0, False)
    chain = RunLayout(directory).chain
    lines = chain.read_bytes().splitlines(keepends=True)
    for kept, lost in ((lines[:4] + lines[6:], "steps 5 to 6 are not recorded"), (None, "steps 1 to 24 are not")):
        chain.unlink() if kept is None else chain.write_bytes(b"".join(kept))
        code, text = verdict(capsys, "checkpoints", "verify", str(directory))
        assert code == 0
        assert f"chain.jsonl is missing or damaged: {lost}" in text
        assert "cannot be replayed" in text
