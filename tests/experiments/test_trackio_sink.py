"""The trackio sink with the real package and a local database, read back by SQL."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from vorox.core.errors import ConfigError
from vorox.experiments.trackio_sink import TrackioSink

TWO_ATTEMPTS = """
import sys
from pathlib import Path
import vorox.experiments.background_sink as background_sink
from vorox.core.schema import LogConfig
from vorox.experiments.tracking import Tracker
background_sink.CLOSE_SECONDS = 300.0
run = Path(sys.argv[1])
for steps in (range(1, 31), range(21, 41)):
    tracker = Tracker.open(run, LogConfig(trackio=True, trackio_project="tests"), settings={"model.num_layers": 2})
    for step in steps:
        tracker.log(step, {"loss": 1 / step, "activation/0/after_mlp/std": float(step)})
    tracker.log(steps[-1], {"eval/loss": 2.5})
    tracker.close()
"""


@pytest.mark.slow
def test_every_value_of_two_attempts_is_in_the_database_once(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    run = tmp_path / "a-run"
    run.mkdir()
    hostile = {"TRACKIO_SERVER_URL": "http://127.0.0.1:9/", "TRACKIO_SPACE_ID": "nobody/nothing", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **hostile, "TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", TWO_ATTEMPTS, run], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (done.stdout, "trackio" in done.stderr) == ("", False), "it neither prints nor fails"
    with sqlite3.connect(tmp_path / "trackio" / "tests.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
        (settings,) = database.execute("select config from configs").fetchone()
    assert {name for name, _, _ in rows} == {"a-run"}
    found = [(step, json.loads(values)) for _, step, values in rows]
    losses = {step: values["loss"] for step, values in found if "loss" in values}
    assert losses == {step: pytest.approx(1 / step) for step in range(1, 41)}
    assert len(found) == 42, "steps 21 to 30 are there once; both validations are"
    assert sorted(step for step, values in found if "eval/loss" in values) == [30, 40]
    assert json.loads(settings)["model.num_layers"] == 2
    assert {path.name for path in tmp_path.iterdir()} == {"a-run", "trackio"}


def test_without_the_package_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package trackio") as refused:
        TrackioSink(tmp_path, project="tests", settings={})
    assert "trackio" in refused.value.hint
