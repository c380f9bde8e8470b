"""Notices that fit and that do not, by times that are known; and a run that is stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import vorox.run
from tiny_runs import at_step, configuration, use_numpy_engine
from vorox.core.errors import Preempted
from vorox.core.json_lines import read_lines
from vorox.core.log import RunLog
from vorox.core.run_layout import RunLayout
from vorox.training import preemption_notice
from vorox.training.preemption_notice import MeasuredTimes, PreemptionNotice
from vorox.training.stop import StopRequest


def opened(seconds: float | None, earlier: MeasuredTimes | None = None) -> tuple[PreemptionNotice, list[str]]:
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
    assert not opened(None, MeasuredTimes(1.0, 20.0))[1]
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
    assert kinds.count("stop_saved") == 1
    assert "short_notice" in kinds[: kinds.index("stop_saved")], "measured by the save of step 4"
    again = kinds[kinds.index("stop_saved") :]
    assert again.index("short_notice") < again.index("checkpoint_saved"), "known at the start of the second attempt"
    longer = configuration(tmp_path, ["checkpoint.notice_seconds=600", "run.seed=5"])
    quiet = vorox.run.train(longer)
    assert "short_notice" not in [event["kind"] for event in read_lines(RunLayout(quiet.run_directory).events)]
