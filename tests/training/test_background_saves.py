"""Checkpoints that a thread writes while training goes on: what is visible when, what waits, what is lost by a kill.

Here the writer is held at one of its file operations, so every case knows what is under way; no case depends on how
fast anything is. That what is written is right is shown by ``test_checkpointing.py``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from numpy_engine import NumpyEngine
from tiny_runs import at_step, configuration, run, use_numpy_engine
from training.test_checkpointing import Run, loaded, progress_at
from vorox.core.errors import CheckpointError, Preempted
from vorox.core.files import atomic
from vorox.core.files.atomic import FileOperation
from vorox.core.files.staged_directory import read_manifest
from vorox.core.run_layout import RunLayout, step_directories
from vorox.experiments.tracking import read_metrics
from vorox.records.replay_chain import read_chain
from vorox.run import make_workload
from vorox.training.checkpoints.store import latest_valid, request_save, verify
from vorox.training.replay import replay

WAIT_SECONDS = 60.0


class Held:
    """The writer, held before the first operation on a path that contains some text."""

    def __init__(self, text: str) -> None:
        self.reached, self.released, self.failure = threading.Event(), threading.Event(), 0
        self._text, self._main = text, threading.get_ident()

    def __call__(self, operation: FileOperation) -> None:
        if self._text not in str(operation.path) or self.released.is_set():
            return
        assert threading.get_ident() != self._main, "the loop writes itself"
        self.reached.set()
        assert self.released.wait(WAIT_SECONDS), "never released"
        if self.failure:
            raise OSError(self.failure, os.strerror(self.failure), str(operation.path))

    def await_reached(self) -> None:
        assert self.reached.wait(WAIT_SECONDS), "the writer never came there"

    def release(self, failure: int = 0) -> None:
        self.failure = failure
        self.released.set()


@contextlib.contextmanager
def held(text: str) -> Generator[Held]:
    writer = Held(text)
    with atomic.observe(writer):
        try:
            yield writer
        finally:
            writer.release()


@pytest.fixture(autouse=True)
def background() -> None:
    Run.asynchronous = True


def save(run: Run, step: int) -> None:
    run.step()
    run.checkpointer.save(run.engine, progress_at(step), run.pending, run.report)


def test_training_goes_on_and_nothing_shows_before_the_commit(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(10)
    run.now = 5.0
    with held("step-00000020/MANIFEST.json") as writer:
        save(run, 20)
        moment = run.engine.fingerprint()
        run.now = 8.0
        writer.await_reached()
        for _ in range(3):
            run.step()
        assert run.steps == [10]
        assert run.checkpointer.is_writing
        assert run.checkpointer.safe() == "training state up to step 10 is safe in step-00000010"
        assert run.reported == [RunLayout(tmp_path).checkpoint(10)]
        writer.release()
        run.checkpointer.wait()
    assert run.steps == [10, 20]
    assert run.reported == [RunLayout(tmp_path).checkpoint(10), RunLayout(tmp_path).checkpoint(20)]
    assert run.seconds == [0.0, 3.0], "the age of what it holds, not of the commit"
    path = RunLayout(tmp_path).checkpoint(20)
    assert loaded(path) == moment == verify(path).metadata["fingerprint"] != run.engine.fingerprint()


def test_at_most_one_write_is_under_way(tmp_path: Path) -> None:
    """The next save begins only when the one before stands: at its snapshot, that one is committed."""
    run = Run(tmp_path, keep_last=5)
    seen: list[list[int]] = []
    original = run.engine.snapshot

    def snapshot(*, detached: bool) -> Any:
        assert detached
        seen.append(run.steps)
        return original(detached=detached)

    run.engine.snapshot = snapshot  # type: ignore[method-assign]
    with held("step-00000010/state.bin") as writer:
        save(run, 10)
        writer.await_reached()
        waiting = threading.Thread(target=save, args=(run, 20))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        assert seen == [[]]
        writer.release()
        waiting.join(WAIT_SECONDS)
    run.checkpointer.wait()
    assert seen == [[], [10]]
    assert run.steps == [10, 20]


def test_the_chain_is_durable_before_the_writer_begins(tmp_path: Path) -> None:
    run, order = Run(tmp_path), list[str]()
    flush = run.pending.chain.flush

    def noted() -> None:
        flush()
        order.append("chain")

    run.pending.chain.flush = noted  # type: ignore[method-assign]
    with atomic.observe(lambda operation: order.append(operation.kind)):
        run.save(10)
    assert order.index("chain") < order.index("rename")


def test_a_request_is_answered_by_the_commit_and_a_later_one_by_a_later_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=5)
    control = tmp_path / "control" / "save"
    request_save(tmp_path)
    assert run.checkpointer.due(progress_at(3))
    with held("step-00000003/MANIFEST.json") as writer:
        save(run, 3)
        writer.await_reached()
        assert control.exists(), "nothing is committed yet"
        assert not run.checkpointer.due(progress_at(4)), "the request is being answered"
        writer.release()
        run.checkpointer.wait()
    assert not control.exists()
    request_save(tmp_path)
    with held("step-00000006/MANIFEST.json") as writer:
        save(run, 6)
        writer.await_reached()
        request_save(tmp_path)  # asks for what has been done since
        assert run.checkpointer.due(progress_at(8))
        writer.release()
        run.checkpointer.wait()
    assert control.exists(), "the commit of step 6 does not answer it"
    save(run, 8)
    run.checkpointer.wait()
    assert not control.exists()


def test_time_counts_from_the_last_commit_and_a_slow_disk_does_not_stop_training(tmp_path: Path) -> None:
    run = Run(tmp_path, every_seconds=10.0, at_end=False)
    run.now = 10.0
    assert run.checkpointer.due(progress_at(1))
    with held("step-00000001/MANIFEST.json") as writer:
        save(run, 1)
        writer.await_reached()
        run.now = 50.0
        assert not run.checkpointer.due(progress_at(2)), "one is under way"
        writer.release()
        run.checkpointer.wait()
    run.now = 59.0
    assert not run.checkpointer.due(progress_at(3))
    run.now = 60.0
    assert run.checkpointer.due(progress_at(3))


def fail_in_background(run: Run, number: int, *, then: str) -> None:
    """Let the write of step 20 fail, and go on to one of the places at which that must be said."""
    with held("step-00000020/state.bin") as writer:
        save(run, 20)
        writer.await_reached()
        writer.release(number)
        under_way = run.checkpointer._in_flight
        assert under_way is not None
        assert under_way.exception(WAIT_SECONDS) is not None
    match then:
        case "due":
            run.checkpointer.due(progress_at(21))
        case "save":
            save(run, 21)
        case "wait":
            run.checkpointer.wait()
        case _:
            pass


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("where", ["due", "save", "wait", "end"])
def test_a_failed_write_is_raised_once_with_the_words_of_a_waiting_save(
    where: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = type("Usage", (), {"free": 7})
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    run = Run(tmp_path / "background" / "run")
    run.save(10)
    with pytest.raises(CheckpointError) as refused, run.checkpointer:
        fail_in_background(run, number, then=where)
    assert run.steps == [10]
    assert [path.name for path in (run.directory / "checkpoints").iterdir()] == ["step-00000010"]
    run.checkpointer.wait()  # it is raised once

    Run.asynchronous = False
    other = Run(tmp_path / "waiting" / "run")
    other.save(10)

    def failing(operation: FileOperation) -> None:
        if "step-00000020/state.bin" in str(operation.path):
            raise OSError(number, os.strerror(number), str(operation.path))

    with atomic.observe(failing), pytest.raises(CheckpointError) as expected:
        other.save(20)
    unlike = (str(run.directory), str(other.directory))
    for attribute in ("what", "saved", "exit_code"):
        assert getattr(refused.value, attribute) == getattr(expected.value, attribute)
    assert refused.value.hint.replace(*unlike) == expected.value.hint
    assert "step-00000020" in refused.value.where.replace(*unlike)


def test_a_failed_write_does_not_hide_what_ended_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def end() -> None:
        with held("state.bin") as writer, run.checkpointer:
            save(run, 20)
            writer.await_reached()
            writer.release(errno.ENOSPC)
            raise RuntimeError("what ended it")

    with pytest.raises(RuntimeError, match="what ended it"):
        end()
    assert run.events[-1][0] == "checkpoint_failed"
    assert "No room for the checkpoint of step 20" in run.events[-1][1]


def test_an_error_waits_for_the_write(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with held("step-00000010/MANIFEST.json") as writer:

        def end() -> None:
            with run.checkpointer:
                save(run, 10)
                writer.await_reached()
                threading.Timer(0.1, writer.release).start()
                raise RuntimeError("what ended it")

        with pytest.raises(RuntimeError, match="what ended it"):
            end()
    assert run.steps == [10]


# -- whole runs -------------------------------------------------------------------------------------------------------


def came_to(directory: Path) -> dict[str, Any]:
    manifests = {step: read_manifest(path)["metadata"] for step, path in step_directories(directory).items()}
    return {
        "chain": [entry.chain for entry in read_chain(directory).values()],
        "states": {step: metadata["fingerprint"] for step, metadata in manifests.items()},
        "manifests": {step: {**metadata, "environment": 0, "settings": 0} for step, metadata in manifests.items()},
        "files": {
            (step, file.name): file.read_bytes()
            for step, path in step_directories(directory).items()
            for file in sorted(path.iterdir())
            if file.name != "MANIFEST.json"
        },
    }


@pytest.fixture
def numpy_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)


@pytest.mark.usefixtures("numpy_runs")
def test_on_and_off_leave_the_same_bytes_and_both_replay(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for setting in ("true", "false"):
        chosen = [f"checkpoint.asynchronous={setting}", "checkpoint.keep_last=9", f"run.directory={tmp_path / setting}"]
        outcome = run(configuration(tmp_path, chosen))
        found.append(came_to(outcome.run_directory))
        metrics = read_metrics(outcome.run_directory)
        stood_still = sum(values.get("checkpoint_seconds", 0.0) for values in metrics.values())
        wrote = sum(values.get("checkpoint_write_seconds", 0.0) for values in metrics.values())
        assert stood_still > 0
        assert wrote > 0
        assert any(values.get("time/save_fraction", 0.0) > 0 for values in metrics.values())

        def setting_of(config: Any) -> Any:
            from vorox.core.ranks.distributed_context import DistributedContext
            from vorox.records.log import RunLog

            return make_workload(config, DistributedContext(), RunLog(None), None, build=False)

        report = replay(outcome.run_directory, setting_of, first_step=4)
        assert report.is_exact
        assert report.num_states == 2
    assert found[0] == found[1]
    assert list(found[0]["states"]) == [4, 8, 12]


@pytest.mark.usefixtures("numpy_runs")
def test_resumed_with_the_other_setting_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = came_to(run(configuration(tmp_path, [f"run.directory={tmp_path / 'straight'}"])).run_directory)
    for first, second in (("true", "false"), ("false", "true")):
        place = f"run.directory={tmp_path / first}"

        def stop() -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        with monkeypatch.context() as patch:
            at_step(patch, 7, stop)
            with pytest.raises(Preempted):
                run(configuration(tmp_path, [f"checkpoint.asynchronous={first}", place]))
        outcome = run(configuration(tmp_path, [f"checkpoint.asynchronous={second}", place]))
        found = came_to(outcome.run_directory)
        assert found["chain"] == straight["chain"]
        assert found["states"] == straight["states"]


def while_writing(monkeypatch: pytest.MonkeyPatch, writer: Held, step: int, action: Callable[[], None]) -> None:
    """Do something in the middle of a step at which a write is sure to be under way."""

    def when_held() -> None:
        writer.await_reached()
        action()

    at_step(monkeypatch, step, when_held)


@pytest.mark.usefixtures("numpy_runs")
def test_asked_to_stop_during_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path)
    with held("step-00000004/state.bin") as writer:

        def stop() -> None:
            assert list(step_directories(next((tmp_path / "runs").iterdir()))) == []
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(0.05, writer.release).start()

        while_writing(monkeypatch, writer, 6, stop)
        with pytest.raises(Preempted) as stopped:
            run(config)
    assert stopped.value.exit_code == 75
    assert stopped.value.saved == "training state up to step 6 is safe in step-00000006"
    assert list(step_directories(next((tmp_path / "runs").iterdir()))) == [4, 6]


@pytest.mark.usefixtures("numpy_runs")
def test_a_failure_in_validation_waits_for_the_checkpoint_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path, ["checkpoint.every_steps=6"])
    with held("step-00000006/state.bin") as writer:

        def eval_step(self: NumpyEngine, batch: Any) -> Any:
            writer.await_reached()
            threading.Timer(0.05, writer.release).start()
            raise RuntimeError("validation failed")

        monkeypatch.setattr(NumpyEngine, "eval_step", eval_step)
        with pytest.raises(RuntimeError, match="validation failed"):
            run(config)
    found = latest_valid(next((tmp_path / "runs").iterdir()))
    assert found is not None
    assert found.step == 6


KILLED = """
import os, signal, sys
from pathlib import Path
import pytest
from tiny_runs import at_step, configuration, run, use_numpy_engine
from training.test_background_saves import held, while_writing
directory, place = Path(sys.argv[1]), sys.argv[2]
patch = pytest.MonkeyPatch()
use_numpy_engine(patch)
with held(place) as writer:
    while_writing(patch, writer, 11, lambda: os.kill(os.getpid(), signal.SIGKILL))
    run(configuration(directory))
"""


@pytest.mark.usefixtures("numpy_runs")
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
@pytest.mark.parametrize("place", ["step-00000008/engine.json", "step-00000008/MANIFEST.json"])
def test_killed_while_the_writer_is_at_work_goes_back_to_the_last_commit(place: str, tmp_path: Path) -> None:
    """SIGKILL in step 11, two steps behind the snapshot of step 8, which is not committed: step 4 is what counts."""
    straight = came_to(run(configuration(tmp_path, [f"run.directory={tmp_path / 'straight'}"])).run_directory)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])}
    command = [sys.executable, "-c", KILLED, str(tmp_path), place]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    directory = next((tmp_path / "runs").iterdir())
    assert list(step_directories(directory)) == [4], "nothing torn is visible"
    assert [path for path in (directory / "checkpoints").iterdir() if path.name.startswith(".tmp-")]
    outcome = run(configuration(tmp_path))
    found = came_to(outcome.run_directory)
    assert found["chain"] == straight["chain"]
    assert found["states"] == straight["states"]
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert [event["fields"]["step"] for event in events if event["kind"] == "resumed"] == [4]
    assert not [path for path in (directory / "checkpoints").iterdir() if path.name.startswith(".tmp-")]
