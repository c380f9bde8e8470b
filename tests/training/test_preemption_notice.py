"""Notices that fit and that do not, by times that are known; and a run that is stopped."""

from __future__ import annotations

import math
import os
import signal
import threading
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vorox.run
from tiny_runs import at_step, configuration, use_numpy_engine
from vorox.core.errors import Preempted
from vorox.core.files.json_lines import read_lines
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.schema import CheckpointConfig, RunConfig
from vorox.records.log import RunLog
from vorox.training.checkpoints import preemption_notice, writer
from vorox.training.checkpoints.preemption_notice import MeasuredTimes, PreemptionNotice
from vorox.training.mirror import run_mirror
from vorox.training.steps import stop as stop_module
from vorox.training.steps.stop import StopRequest


def opened(seconds: float, earlier: MeasuredTimes | None = None) -> tuple[PreemptionNotice, list[str]]:
    logged: list[str] = []
    log = RunLog(None, echo=lambda text, level: logged.append(f"{level}: {text}"))
    return PreemptionNotice(seconds, log, earlier or MeasuredTimes()), logged


def test_a_step_and_two_saves_must_fit() -> None:
    notice, logged = opened(30.0)
    notice.step(10.0)
    notice.saved(9.0)  # 10 + 2 x 9 = 28
    notice.step(None)
    assert not logged
    notice.saved(10.5)  # 31
    assert len(logged) == 1
    assert "A stop takes up to 31.0 s: a step of 10.0 s and two saves of 10.5 s; the notice is 30 s" in logged[0]
    notice.saved(11.0)
    assert len(logged) == 1, "once, until it has grown by a quarter"
    notice.saved(16.0)
    assert len(logged) == 2


def test_what_an_earlier_attempt_measured_is_compared_at_the_start() -> None:
    assert len(opened(30.0, MeasuredTimes(1.0, 20.0))[1]) == 1
    assert not opened(50.0, MeasuredTimes(1.0, 20.0))[1]
    assert not opened(30.0, MeasuredTimes(100.0, None))[1], "no save is known yet"


def test_a_save_after_the_end_of_the_notice_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption_notice.time, "monotonic", lambda: 100.0)
    notice, logged = opened(30.0)
    stop = StopRequest()
    notice.stopped(stop)
    assert not logged, "without a signal"
    stop.requested, stop.requested_at = "SIGTERM", 96.0
    notice.stopped(stop)
    stop.requested_at -= 40.0
    notice.stopped(stop)
    assert logged == [
        "info: Saved 4.0 s after SIGTERM, within the notice of 30 s",
        "warning: Saved 44.0 s after SIGTERM, later than the notice of 30 s",
    ]


def test_a_run_measures_its_saves_and_warns_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    config = configuration(tmp_path, ["checkpoint.notice_seconds=0.000001"])
    at_step(monkeypatch, 7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted) as stopped:
        vorox.run.train(config)
    assert stopped.value.exit_code == 75
    outcome = vorox.run.train(config)
    assert outcome.progress.step == 12
    kinds = [event["kind"] for event in read_lines(RunLayout(outcome.run_directory).events)]
    assert kinds.count("save_skipped") == 1
    assert "short_notice" in kinds[: kinds.index("save_skipped")], "measured by the save of step 4"
    again = kinds[kinds.index("save_skipped") :]
    assert again.index("short_notice") < again.index("checkpoint_saved"), "known at the start of the second attempt"
    longer = configuration(tmp_path, ["checkpoint.notice_seconds=600", "run.seed=5"])
    quiet = vorox.run.train(longer)
    assert "short_notice" not in [event["kind"] for event in read_lines(RunLayout(quiet.run_directory).events)]


class SlowStore:
    """Commits take a time of their own; the notice sees a clock that only they move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now, commit = 1000.0, writer.commit_checkpoint

        def slow_commit(*arguments: Any) -> None:
            commit(*arguments)
            self.now += seconds

        monkeypatch.setattr(writer, "commit_checkpoint", slow_commit)
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(preemption_notice, "time", clock)
        monkeypatch.setattr(stop_module, "time", clock)
        original = writer.CheckpointWriter.__init__
        monkeypatch.setattr(
            writer.CheckpointWriter,
            "__init__",
            partialmethod(original, clock=lambda: self.now),  # type: ignore[arg-type]
        )


@pytest.fixture
def slow_store(monkeypatch: pytest.MonkeyPatch) -> SlowStore:
    """Every save takes 40 s."""
    use_numpy_engine(monkeypatch)
    return SlowStore(monkeypatch, 40.0)


def stopped_at(monkeypatch: pytest.MonkeyPatch, step: int, config: RunConfig) -> Preempted:
    with monkeypatch.context() as patches:
        at_step(patches, step, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Preempted) as stopped:
            vorox.run.train(config)
    assert stopped.value.exit_code == 75
    return stopped.value


def saved_steps(directory: Path) -> list[int]:
    return sorted(step_directories(next((directory / "runs").glob("tiny-*"))))


@pytest.mark.parametrize(("notice", "is_saved"), [(30, False), (39.9, False), (40, True), (600, True)])
def test_a_save_that_cannot_end_in_time_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_store: SlowStore, notice: float, is_saved: bool
) -> None:
    settings = [f"checkpoint.notice_seconds={notice}", "checkpoint.asynchronous=false"]
    config = configuration(tmp_path, settings)
    stopped = stopped_at(monkeypatch, 7, config)
    assert saved_steps(tmp_path) == ([4, 7] if is_saved else [4])
    expected = "" if is_saved else f": state not saved, because {notice:.1f} s of the notice are left, and the shortest"
    assert f"SIGTERM: stopped after step 7 of 12{expected}" in stopped.what
    assert "safe in step-0000000" + ("7" if is_saved else "4") in stopped.saved
    chain = vorox.run.train(config).progress.chain
    assert (
        chain == vorox.run.train(configuration(tmp_path / "straight", ["checkpoint.every_steps=null"])).progress.chain
    )


def test_a_write_in_flight_ends_first_and_counts_against_the_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_store: SlowStore
) -> None:
    """A notice of 70 s has room for one save of 40 s: the one that is in flight at the signal."""
    is_stopping, commit = threading.Event(), writer.commit_checkpoint

    def held_commit(*arguments: Any) -> None:
        assert is_stopping.wait(20)
        commit(*arguments)

    monkeypatch.setattr(writer, "commit_checkpoint", held_commit)

    def signal_in_flight() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        is_stopping.set()

    config = configuration(tmp_path, ["checkpoint.notice_seconds=70", "eval.every_steps=null"])
    with monkeypatch.context() as patches:
        at_step(patches, 6, signal_in_flight)
        with pytest.raises(Preempted, match=r"30\.0 s of the notice are left, and the shortest save took 40\.0 s"):
            vorox.run.train(config)
    assert saved_steps(tmp_path) == [4]
    kinds = [event["kind"] for event in read_lines(next((tmp_path / "runs").glob("tiny-*")) / "events.jsonl")]
    assert kinds.index("checkpoint_saved") < kinds.index("save_skipped")
    assert "stop_saved" not in kinds


def test_the_first_checkpoint_of_a_run_is_always_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_store: SlowStore
) -> None:
    stopped_at(monkeypatch, 2, configuration(tmp_path, ["checkpoint.notice_seconds=1"]))
    assert saved_steps(tmp_path) == [2]


def test_without_a_notice_every_stop_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_store: SlowStore
) -> None:
    stopped_at(monkeypatch, 7, configuration(tmp_path))
    assert saved_steps(tmp_path) == [4, 7]


def test_the_mirror_is_awaited_within_the_notice_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption_notice.time, "monotonic", lambda: 100.0)
    stop = StopRequest()
    assert preemption_notice.seconds_left(30.0, stop) == math.inf, "no signal"
    stop.requested, stop.requested_at = "SIGTERM", 90.0
    assert preemption_notice.seconds_left(None, stop) == math.inf, "no notice"
    assert preemption_notice.seconds_left(30.0, stop) == 20.0
    assert preemption_notice.seconds_left(5.0, stop) == 0.0
    waits: list[float] = []
    uploader = SimpleNamespace(wait=lambda seconds: waits.append(seconds) or "", enqueue=lambda path: None)
    monkeypatch.setattr(run_mirror, "Uploader", lambda *arguments, **options: uploader)
    owned: Any = SimpleNamespace(lineage=list)
    for notice in (30.0, None):
        config = CheckpointConfig(mirror="gs://bucket/folder", mirror_wait_seconds=300, notice_seconds=notice)
        run_config: Any = SimpleNamespace(checkpoint=config)
        mirror = run_mirror.Mirror("never", run_config, "", owned, owned)
        with pytest.raises(Preempted), mirror.uploading(Path("nowhere"), 0, {}, RunLog(None), stop):
            raise Preempted("SIGTERM: stopped")
    assert waits == [20.0, 300.0]
