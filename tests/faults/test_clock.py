"""A wall clock that is set back and forth by hours while runs train: order, resume, timings, saves and leases hold."""

from __future__ import annotations

import io
import itertools
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tiny_runs import configuration, run, use_numpy_engine
from vorox.cli.progress import LiveDisplay
from vorox.core.run_lookup import find_run
from vorox.data.cache.leases import Leases
from vorox.experiments.tracking import read_metrics
from vorox.training.chain import read_chain
from vorox.training.checkpoint_store import step_directories
from vorox.training.display import StepView

HOUR = 3600.0


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the wall clock finds it hours away from the look before."""
    real, jumps = time.time, itertools.cycle([0.0, 5 * HOUR, -3 * HOUR, HOUR, -HOUR])
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))


@pytest.mark.usefixtures("jumping")
def test_a_run_and_its_resume_do_not_depend_on_the_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    timed = ["checkpoint.every_steps=null", f"checkpoint.every_seconds={HOUR / 2}"]
    began = time.monotonic()
    straight = run(configuration(tmp_path / "straight", timed))
    assert list(step_directories(straight.run_directory)) == [12], "no hour has passed, whatever the clock says"
    first = run(configuration(tmp_path / "resumed", [*timed, "train.num_steps=6"]))
    second = run(configuration(tmp_path / "resumed", [*timed, "train.num_steps=12"]), resume_from=first.run_directory)
    assert second.run_directory == first.run_directory == find_run(tmp_path / "resumed" / "runs", "latest")
    assert (second.begun_at_step, second.progress.step) == (6, 12)
    chains = [read_chain(outcome.run_directory) for outcome in (straight, second)]
    assert [chains[0][step].batch for step in chains[0]] == [chains[1][step].batch for step in chains[1]]
    elapsed_seconds = time.monotonic() - began
    for outcome in (straight, second):
        assert 0 < outcome.speed.seconds["compute"] <= elapsed_seconds
        for values in read_metrics(outcome.run_directory).values():
            assert 0 <= values.get("step_seconds", 0.0) <= elapsed_seconds
            assert 0 <= values.get("seconds_since_save", 0.0) <= elapsed_seconds
    assert elapsed_seconds < 120


@pytest.mark.usefixtures("jumping")
def test_no_builder_loses_its_lease_to_the_wall_clock(tmp_path: Path) -> None:
    with Leases(tmp_path) as first, Leases(tmp_path) as second:
        assert first.acquire(3)
        assert not any(second.acquire(3) for _ in range(10))
        first.release(3)
        assert second.acquire(3)


def test_the_display_goes_on_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    terminal, now = Terminal(), [10 * HOUR]
    display = LiveDisplay(terminal, clock=lambda: now[0])
    view = StepView(1, 300, 5.5, 4096, 1_228_800, 1e-4, 3.5)
    display.step(view)
    now[0] -= 3 * HOUR
    display.step(replace(view, step=77))
    display.close()
    assert "Step    77/300" in terminal.getvalue()
