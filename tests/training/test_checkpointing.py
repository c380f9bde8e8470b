"""Checkpoints with the numpy engine: what is written, what is kept, what is read after damage, crashes, full disks.

Every case is done twice: with a writer in the background, which is waited for before anything is looked at, and with a
loop that waits itself. What only the background can do is in ``test_background_saves.py``.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crash_enumeration import crash_states, record
from numpy_engine import NumpyEngine
from vorox.core.batch import Batch, DataCursor, Progress
from vorox.core.errors import CheckpointError
from vorox.core.files import atomic
from vorox.core.files.atomic import MANIFEST_NAME, FileOperation
from vorox.core.files.file_holder import this_process
from vorox.core.files.staged_directory import read_manifest
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.schema import CheckpointConfig
from vorox.records.replay_chain import ReplayChain
from vorox.training.checkpoints.store import (
    latest_valid,
    quarantine,
    quarantine_corrupt,
    read_state,
    request_save,
    steps_to_keep,
    verify,
)
from vorox.training.checkpoints.writer import CheckpointWriter, SavedCheckpoint
from vorox.training.steps.pending_steps import PendingSteps
from vorox.training.steps.schedule import Horizon

CURSOR = DataCursor("plan", 3, 0, 0, 7)
HORIZON = Horizon(100, 5, 64)


@pytest.fixture(autouse=True, params=["background", "waiting"])
def asynchronous(request: pytest.FixtureRequest) -> None:
    Run.asynchronous = request.param == "background"


class Run:
    """A run directory, its engine and everything that was reported."""

    asynchronous = True

    def __init__(self, directory: Path, **config: object) -> None:
        self.directory, self.events = directory, []
        self.engine = NumpyEngine(11, width=2)
        self.losses: dict[int, float] = {}
        self.now = 0.0
        self.config = CheckpointConfig.model_validate({"asynchronous": self.asynchronous, **config})
        self.reported: list[Path] = []
        self.seconds: list[float] = []
        chain = ReplayChain(directory, progress_at(0))
        self.pending = PendingSteps(chain, max_nonfinite_steps=3, nonfinite_in_a_row=0)
        self.checkpointer = self.open()

    def open(self, saved_step: int | None = None) -> CheckpointWriter:
        return CheckpointWriter(
            self.directory, self.config, HORIZON,
            describe={"kind": "test"}, companions={"config.json": b"{}"}, eval_losses=self.losses,
            saved_step=saved_step, log=self, clock=lambda: self.now,  # type: ignore[arg-type]
        )  # fmt: skip

    def event(self, kind: str, message: str, **fields: object) -> None:
        self.events.append((kind, message))

    def step(self) -> None:
        rows = np.arange(12, dtype=np.int32).reshape(1, 2, 6) % 11
        batch = Batch(0, rows, np.roll(rows, -1, 2), None, None, np.zeros((1, 2), np.uint64), 12, CURSOR)
        self.engine.train_step(batch, lr=0.01, weight_decay=0.1)

    def save(self, step: int) -> Path:
        self.step()
        return self.commit(step)

    def commit(self, step: int) -> Path:
        """Save without a step before, and wait for it."""
        self.checkpointer.save(self.engine, progress_at(step), self.pending, self.report)
        self.checkpointer.wait()
        return RunLayout(self.directory).checkpoint(step)

    def report(self, saved: SavedCheckpoint) -> None:
        self.reported.append(saved.path)
        self.seconds.append(saved.seconds)

    @property
    def steps(self) -> list[int]:
        return list(step_directories(self.directory))


def progress_at(step: int) -> Progress:
    return Progress(step, step * 64, replace(CURSOR, step=step, position=2 * step), f"chain-{step}", 2.5)


def loaded(path: Path) -> str:
    engine = NumpyEngine(11, width=2, seed=99)
    engine.load(path)
    return engine.fingerprint()


def test_holds_the_state_and_says_what_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.losses |= {5: 3.0, 9: 2.5, 50: 1.0}
    path = run.save(10)
    assert path == RunLayout(tmp_path).checkpoint(10) == tmp_path / "checkpoints" / "step-00000010"
    checkpoint = latest_valid(tmp_path)
    assert checkpoint is not None
    assert checkpoint == (path, read_manifest(path)["metadata"])
    assert checkpoint.metadata == {
        "kind": "test", "step": 10, "num_tokens": 640, "fingerprint": run.engine.fingerprint(), "chain": "chain-10",
        "plan_digest": "plan", "plan_events": 3, "horizon": HORIZON.to_json(), "eval": {"step": 9, "loss": 2.5},
    }  # fmt: skip
    assert loaded(path) == run.engine.fingerprint()
    state = read_state(path)
    assert state.progress == progress_at(10)
    assert (state.horizon, state.nonfinite_in_a_row) == (HORIZON, 0)
    assert sorted(file.name for file in path.iterdir()) == sorted(
        [MANIFEST_NAME, "config.json", "engine.json", "state.bin", "state.json"]
    )


def test_none_is_not_an_error_but_none_valid_is(tmp_path: Path) -> None:
    assert latest_valid(tmp_path) is None
    run = Run(tmp_path)
    assert latest_valid(tmp_path) is None
    path = run.save(10)
    assert latest_valid(tmp_path, at_or_before=9) is None
    (path / "state.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="No checkpoint of this run is valid"):
        latest_valid(tmp_path, on_corrupt=quarantine_corrupt(run))
    with pytest.raises(CheckpointError, match="all are quarantined"):
        latest_valid(tmp_path)  # the next start must not begin from nothing in silence


def test_due(tmp_path: Path) -> None:
    run = Run(tmp_path, every_steps=4, every_seconds=10.0, keep_last=5)
    due = [step for step in range(1, 13) if run.checkpointer.due(progress_at(step))]
    assert due == [4, 8, 12]
    assert run.checkpointer.due(progress_at(100)), "the last step"
    run.now = 10.0
    assert run.checkpointer.due(progress_at(5))
    run.save(5)
    assert not run.checkpointer.due(progress_at(6))


def test_save_on_demand(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert not run.checkpointer.due(progress_at(3))
    request_save(tmp_path)
    assert run.checkpointer.due(progress_at(3))
    run.save(3)
    assert not (tmp_path / "control" / "save").exists()
    assert not run.checkpointer.due(progress_at(4))
    request_save(tmp_path)
    assert run.checkpointer.due(progress_at(4))


def test_a_last_state_that_only_skipped_steps_led_to_is_not_saved_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(4)
    run.pending.nonfinite_in_a_row = 2
    run.checkpointer.save(run.engine, progress_at(6), run.pending, run.report, is_last=True)
    run.checkpointer.wait()
    assert run.steps == [4]
    run.checkpointer.save(run.engine, progress_at(7), run.pending, run.report, is_last=True)
    run.checkpointer.wait()
    assert run.steps == [4, 7], "step 5 was applied"


def test_at_end_off(tmp_path: Path) -> None:
    assert not Run(tmp_path, at_end=False).checkpointer.due(progress_at(100))


def test_retention_by_hand(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=2, keep_best=1, keep_every_steps=30)
    for step in range(10, 80, 10):
        run.save(step)
        run.losses[step] = {20: 1.0, 50: 2.0}.get(step, 3.0)
    assert run.steps == [20, 30, 60, 70]


@settings(deadline=None, max_examples=200)
@given(
    steps=st.sets(st.integers(1, 500), max_size=12),
    losses=st.dictionaries(st.integers(1, 500), st.floats(0, 10)),
    last=st.integers(1, 4),
    best=st.integers(0, 3),
    every=st.none() | st.integers(1, 50),
)
def test_retention_laws(steps: set[int], losses: dict[int, float], last: int, best: int, every: int | None) -> None:
    config = CheckpointConfig(keep_last=last, keep_best=best, keep_every_steps=every)
    keep = steps_to_keep(sorted(steps), config, losses)
    assert keep <= steps
    assert set(sorted(steps)[-last:]) <= keep
    assert all(step in keep for step in steps if every and step % every == 0)
    kept_losses = sorted(losses[step] for step in keep if step in losses)
    assert kept_losses[:best] == sorted(losses[step] for step in steps if step in losses)[:best]
    assert len(keep) <= last + best + sum(1 for step in steps if every and step % every == 0)


def test_nothing_goes_before_its_successor_reads_back(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=1)
    run.save(10)
    run.step()

    def bad_disk(operation: FileOperation) -> None:
        if operation.kind == "rename":
            (operation.path / "state.bin").write_bytes(b"other bits")

    with atomic.observe(bad_disk), pytest.raises(CheckpointError, match=r"state\.bin"):
        run.commit(20)
    assert verify(RunLayout(tmp_path).checkpoint(10)).step == 10


def test_a_removal_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=1)
    run.save(10)
    operations = [op for op in record(lambda: run.save(20)) if op.kind in {"rename", "remove"}]
    hidden = next(op.target for op in operations if op.path == RunLayout(tmp_path).checkpoint(10))
    assert hidden is not None
    assert hidden.name.startswith(".tmp-")
    removed = [op for op in operations if op.kind == "remove"]
    assert removed[0].path == hidden / MANIFEST_NAME
    assert removed[-1].path == hidden
    assert run.steps == [20]


@pytest.mark.parametrize("name", ["MANIFEST.json", "state.json", "state.bin", "engine.json", "config.json"])
def test_every_flipped_byte_and_every_truncation_falls_back(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path / "run")
    run.save(10)
    older = run.engine.fingerprint()
    file = run.save(20) / name
    whole = file.read_bytes()

    def falls_back(*, is_reported: bool = True) -> None:
        seen: list[Path] = []
        checkpoint = latest_valid(run.directory, on_corrupt=lambda path, error: seen.append(path))
        assert checkpoint is not None
        assert checkpoint.step == 10
        assert seen == ([file.parent] if is_reported else [])

    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        falls_back()
    file.write_bytes(whole + b"\0")
    falls_back()
    for index in range(len(whole)):
        file.write_bytes(whole[:index] + bytes([whole[index] ^ (1 << index % 8)]) + whole[index + 1 :])
        falls_back()
    file.unlink()
    falls_back(is_reported=name != "MANIFEST.json")  # without a manifest it is incomplete, not corrupt
    assert loaded(RunLayout(run.directory).checkpoint(10)) == older
    file.write_bytes(whole)
    restored = latest_valid(run.directory)
    assert restored is not None
    assert restored.step == 20


def test_a_stranger_in_the_directory_or_a_wrong_name(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(10)
    newest = run.save(20)
    (newest / "extra.bin").write_bytes(b"?")
    with pytest.raises(CheckpointError, match="is not in the manifest"):
        verify(newest)
    (newest / "extra.bin").unlink()
    (newest / "extra").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(CheckpointError, match="is not in the manifest") as caught:
        verify(newest)
    assert caught.value.where == str(newest / "extra")
    (newest / "extra").unlink()
    shutil.copytree(RunLayout(tmp_path).checkpoint(10), RunLayout(tmp_path).checkpoint(30))
    with pytest.raises(CheckpointError, match="the checkpoint of step 10"):
        verify(RunLayout(tmp_path).checkpoint(30))
    found = latest_valid(tmp_path)
    assert found is not None
    assert found.step == 20


def test_corrupt_ones_are_renamed_with_a_reason(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(10)
    for attempt in (1, 2):
        (run.save(20) / "state.bin").write_bytes(b"")
        found = latest_valid(tmp_path, on_corrupt=quarantine_corrupt(run))
        assert found is not None
        assert found.step == 10
        aside = tmp_path / "checkpoints" / f"step-00000020.corrupt-{attempt}"
        assert "0 bytes" in (aside / "REASON.txt").read_text()
        assert run.events[-1][0] == "checkpoint_corrupt"
        assert "state.bin" in run.events[-1][1]
        assert run.steps == [10]
        run.checkpointer = run.open(saved_step=10)


def test_a_checkpoint_of_an_abandoned_future_is_replaced(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(10)
    run.save(20)
    run.checkpointer = run.open(saved_step=10)
    run.save(20)
    assert verify(RunLayout(tmp_path).checkpoint(20)).metadata["fingerprint"] == run.engine.fingerprint()
    assert (tmp_path / "checkpoints" / "step-00000020.replaced-1").is_dir()
    found = latest_valid(tmp_path)
    assert found is not None
    assert found.step == 20


def test_crash_enumeration_of_a_save_with_retention(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", keep_last=2)
    old = {}
    for step in (10, 20):
        run.save(step)
        old[step] = run.engine.fingerprint()
    shutil.copytree(run.directory, tmp_path / "before")
    operations = record(lambda: run.save(30))
    new = run.engine.fingerprint()
    kinds = [operation.kind for operation in operations]
    assert {"mkdir", "create", "write", "fsync", "rename", "fsync_directory", "remove"} == set(kinds)
    states, news = 0, 0
    for name, directory in crash_states(tmp_path / "before", run.directory, operations, tmp_path):
        complaints: list[str] = []
        found = latest_valid(directory, on_corrupt=lambda path, error, c=complaints: c.append(str(path)))
        assert found is not None, name
        assert not complaints, name
        assert found.step in {20, 30}, name
        assert loaded(found.path) == (new if found.step == 30 else old[20]), name
        assert read_state(found.path).progress == progress_at(found.step), name
        states, news = states + 1, news + (found.step == 30)
        resumed = Run(directory, keep_last=2)  # goes on from there and cleans up
        resumed.checkpointer = resumed.open(saved_step=found.step)
        resumed.save(40)
        assert resumed.steps[-1] == 40, name
        assert len(resumed.steps) == 2, name
    assert states > 80
    assert 0 < news < states


def test_crash_enumeration_of_the_first_save_and_of_putting_aside(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    shutil.copytree(run.directory, tmp_path / "before")
    operations = record(lambda: run.save(10))
    for name, directory in crash_states(tmp_path / "before", run.directory, operations, tmp_path):
        found = latest_valid(directory)
        assert found is None or found.step == 10, name
    shutil.rmtree(tmp_path / "before")
    shutil.copytree(run.directory, tmp_path / "before")
    operations = record(lambda: quarantine(RunLayout(run.directory).checkpoint(10), "corrupt", "why"))
    for name, directory in crash_states(tmp_path / "before", run.directory, operations, tmp_path):
        if RunLayout(directory).checkpoint(10).exists():
            assert latest_valid(directory) is not None, name
        else:
            with pytest.raises(CheckpointError):
                latest_valid(directory)


@pytest.mark.parametrize("failing", ["write", "create", "fsync", "rename", "mkdir"])
def test_disk_full_leaves_the_old_one_and_says_what_is_needed(tmp_path: Path, failing: str) -> None:
    run = Run(tmp_path, keep_last=1)
    run.save(10)
    run.step()
    count = 0

    def no_room(operation: FileOperation) -> None:
        nonlocal count
        count += operation.kind == failing
        if operation.kind == failing and count > (2 if failing in {"write", "create", "fsync"} else 0):
            raise OSError(errno.ENOSPC, "No space left on device", str(operation.path))

    with atomic.observe(no_room), pytest.raises(CheckpointError) as refused:
        run.commit(20)
    error = refused.value
    assert error.exit_code == 5
    needed_bytes = (RunLayout(tmp_path).checkpoint(10) / "state.bin").stat().st_size
    numbers = [int(word.replace(",", "")) for word in re.findall(r"\d[\d,]*", error.what)]
    assert needed_bytes + len(b"{}") in numbers
    assert numbers[-1] > needed_bytes, "more is free, so the message says that a write was refused"
    assert "refused" in error.what
    assert "vorox checkpoints remove" in error.hint
    assert error.saved == "training state up to step 10 is safe in step-00000010"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]
    assert verify(RunLayout(tmp_path).checkpoint(10)).step == 10
    assert run.commit(20).name == "step-00000020"


def test_another_disk_error_names_the_file(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def broken(operation: FileOperation) -> None:
        if operation.kind == "write":
            raise OSError(errno.EIO, "Input/output error", str(operation.path))

    with atomic.observe(broken), pytest.raises(CheckpointError, match="Input/output error") as refused:
        run.commit(20)
    assert "engine.json" in refused.value.where
    assert refused.value.saved == "nothing yet"


def test_a_short_write_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unbuffered writes may take less than given, near a full disk and beyond 2 GiB."""
    create = atomic.create

    class Stingy:
        def __init__(self, path: Path, *, private: bool = False) -> None:
            self.file = create(path, private=private)

        def __enter__(self) -> object:
            return self

        def __exit__(self, *exception: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> int:
            return self.file.write(bytes(data)[:7])

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    monkeypatch.setattr(atomic, "create", Stingy)
    run = Run(tmp_path)
    path = run.save(10)
    monkeypatch.undo()
    assert verify(path).step == 10
    assert loaded(path) == run.engine.fingerprint()


def test_sweeps_what_a_dead_writer_left(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(10)
    dead = replace(this_process(), process_id=999_999_999)
    left = atomic.temporary_name(tmp_path / "checkpoints" / "step-00000020", dead)
    left.mkdir()
    (left / "state.bin").write_bytes(b"x")
    run.open()
    assert not left.exists()
    assert run.events[-1][0] == "checkpoint_swept"


def test_refuses_the_state_of_another_version(tmp_path: Path) -> None:
    path = Run(tmp_path).save(10)
    value = json.loads((path / "state.json").read_bytes())
    (path / "state.json").write_text(json.dumps({**value, "format": "vorox-state/9"}))
    with pytest.raises(CheckpointError, match="vorox-state/9"):
        read_state(path)


def test_a_failed_write_is_written_again(tmp_path: Path) -> None:
    """The state of a failed write is in no checkpoint, so a save of the same step is not skipped."""
    run = Run(tmp_path)
    run.save(10)

    def fail(operation: FileOperation) -> None:
        if operation.path.name == MANIFEST_NAME:
            raise OSError(errno.EIO, "Input/output error")

    with atomic.observe(fail), pytest.raises(CheckpointError, match="cannot be written"):
        run.save(20)
    assert run.steps == [10]
    assert run.checkpointer.is_unsaved(progress_at(20))
    assert not run.checkpointer.is_unsaved(progress_at(10))
    run.commit(20)
    assert run.steps == [10, 20]
