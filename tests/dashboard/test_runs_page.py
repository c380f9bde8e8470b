"""What the lists and the pages of runs show: a loss curve for every run, settings that were typed or changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tiny_runs import configuration, run, use_numpy_engine
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.dashboard.metrics.downsampling import default_smoothing, moving_average
from vorox.dashboard.metrics.series import MetricSeries
from vorox.dashboard.pages.run_pages import _changed_settings, curves
from vorox.dashboard.runs.run_index import RunIndex, _sparkline, _typed_settings, signature_of
from vorox.records.run_lookup import read_run_record


def write_metrics(directory: Path, num_steps: int, *, validate_every: int = 1) -> None:
    """A long line of every step, followed by a short one where the run validates."""
    directory.mkdir(exist_ok=True)
    lines: list[str] = []
    for step in range(1, num_steps + 1):
        names = {f"time/phase_{number}_seconds": 0.001 * number for number in range(30)}
        lines.append(
            json.dumps({"step": step, "attempt": 1, "time": step, "values": {"loss": 5 - step / 100, **names}})
        )
        if step % validate_every == 0:
            lines.append(json.dumps({"step": step, "attempt": 1, "time": step, "values": {"eval/loss": 4.0}}))
    RunLayout(directory).metrics.write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("validate_every", [1, 2, 3, 7])
def test_a_run_has_a_loss_curve_however_often_it_validates(tmp_path: Path, validate_every: int) -> None:
    write_metrics(tmp_path / "run", 200, validate_every=validate_every)
    found = _sparkline(tmp_path / "run")
    assert len(found) > 40
    assert found == sorted(found, reverse=True)
    sample = MetricSeries.sampled(tmp_path / "run", num_places=20)
    assert len(sample.points("loss")[0]) >= 20


@pytest.mark.parametrize(("num_points", "expected"), [(1, 0.0), (40, 0.0), (80, 0.5), (400, 0.9), (100_000, 0.9)])
def test_smoothing_follows_the_number_of_points(num_points: int, expected: float) -> None:
    assert default_smoothing(num_points) == pytest.approx(expected)


def test_a_falling_loss_is_not_drawn_far_above_itself() -> None:
    """A moving average lags: of a short run it must not hide how far the loss has come."""
    for num_points in (10, 60, 120, 200, 1000):
        loss = 8.0 * np.exp(-4 * np.arange(num_points) / num_points) + 2.0
        drawn = moving_average(loss, default_smoothing(num_points))
        assert np.abs(drawn - loss).max() < 0.12 * (loss.max() - loss.min())


def test_curves_are_smoothed_by_their_length_unless_told(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", 120)
    series = MetricSeries(tmp_path / "run")
    series.refresh()
    found = curves(series, ["loss", "eval/loss"])["metrics"]
    assert found["loss"]["smoothing"] == pytest.approx(1 - 40 / 120)
    assert found["eval/loss"]["smooth"] is None
    assert curves(series, ["loss"], smoothing=0.0)["metrics"]["loss"]["smooth"] is None
    assert curves(series, ["loss"], smoothing=0.9)["metrics"]["loss"]["smoothing"] == 0.9


def test_typed_settings_are_those_of_the_command_that_started_the_run() -> None:
    first = {
        "argv": ["vorox", "train", "small.yaml", "optimizer.lr=0.01", "--name", "a.b", "data.sources.0.paths=[x=y]"]
    }
    later = {"argv": ["vorox", "train", "train.num_steps=5"]}
    assert _typed_settings([first, later]) == {"optimizer.lr": "0.01", "data.sources.0.paths": "[x=y]"}
    for argv in (None, 5, [5, None], "optimizer.lr=1"):
        assert _typed_settings([{"argv": argv}]) == {}
    assert _typed_settings([]) == {}


def test_changed_settings_are_those_that_differ_from_the_defaults(tmp_path: Path) -> None:
    config = configuration(tmp_path, ["optimizer.lr=0.123", "train.num_steps=7"])
    changed = _changed_settings(config.model_dump(mode="json"))
    assert {"optimizer.lr", "train.num_steps", "data.sources"} <= set(changed)
    defaults = {"optimizer.beta2", "parallel.fsdp_size", "loss.z_loss_weight"}
    assert not defaults & set(changed)
    assert isinstance(config, RunConfig)


HOLDER = "import sys; from pathlib import Path; from vorox.core.run_layout import lock_run\n" + (
    "lock = lock_run(Path(sys.argv[1])); lock.acquire(); print('held', flush=True); sys.stdin.read()"
)


def test_a_killed_run_is_not_shown_as_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The death of a process changes no file."""
    use_numpy_engine(monkeypatch)
    directory = run(configuration(tmp_path)).run_directory
    record = read_run_record(directory)
    record["attempts"][-1]["outcome"] = "running"
    (directory / "run.json").write_text(json.dumps(record))
    index = RunIndex(directory.parent)
    command = [sys.executable, "-c", HOLDER, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        before = signature_of(directory)
        assert [row["state"] for row in index.rows()] == ["running"]
        holder.kill()
        holder.wait()
    assert signature_of(directory) != before
    assert [row["state"] for row in index.rows()] == ["killed"]
    (directory / "failure.json").write_text(json.dumps({"what": "The disk is full"}))
    assert [row["failure"] for row in index.rows()] == ["The disk is full"]


def test_a_run_of_ones_own_is_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The types that readers demand of ``run.json`` are those that a run writes."""
    use_numpy_engine(monkeypatch)
    result = run(configuration(tmp_path))
    record = read_run_record(result.run_directory)
    assert record["attempts"][0]["notes"].keys() >= {"caches", "validation_caches", "environment", "total_steps"}
    (row,) = RunIndex(result.run_directory.parent).rows()
    assert row["state"] == "finished", row
