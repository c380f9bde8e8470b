"""The page on checkpoints: losses of the steps that were saved, and commands that do what they say."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import tiny_runs
from vorox.cli import main
from vorox.dashboard.metrics.series import MetricSeries
from vorox.dashboard.pages import run_pages
from vorox.experiments.tracking import read_metrics


def test_each_checkpoint_has_its_loss_and_the_command_that_resumes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_runs.use_numpy_engine(monkeypatch)
    monkeypatch.chdir(tmp_path)
    config = tiny_runs.configuration(tmp_path, ["checkpoint.keep_last=9", "log.every_steps=3"])
    directory = tiny_runs.run(config).run_directory
    series = MetricSeries(directory)
    series.refresh()
    rows = run_pages.checkpoints(directory, series)["checkpoints"]
    logged = {step: values["loss"] for step, values in read_metrics(directory).items() if "loss" in values}
    assert [(row["step"], row["loss"]) for row in rows] == [(4, logged[3]), (8, logged[6]), (12, logged[12])]
    assert [row["loss"] for row in run_pages.checkpoints(directory)["checkpoints"]] == [None] * 3
    assert rows[-1]["resume"] == f"{directory.name} train.num_steps=24", "a finished run needs a new length"
    words = shlex.split(f"train --resume {rows[1]['resume']} train.num_steps=13")
    assert main(words) == 0
    (resumed,) = [event for event in run_pages.events(directory) if event["kind"] == "resumed"]
    assert resumed["step"] == 8
