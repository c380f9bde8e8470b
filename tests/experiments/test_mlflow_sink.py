"""The MLflow sink with the real client and a local database."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

from eventually import PATIENCE_SECONDS
from vorox.core.errors import ConfigError
from vorox.core.schema import LogConfig
from vorox.experiments.mlflow_sink import RUN_TAG, MlflowSink
from vorox.experiments.tracking import Tracker


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_client_reads_back_every_value_of_two_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking: Any = pytest.importorskip("mlflow.tracking")
    monkeypatch.setattr("vorox.experiments.background_sink.CLOSE_SECONDS", 10 * PATIENCE_SECONDS)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "a-run"
    run.mkdir()
    settings = {f"model.key_{number}": number for number in range(150)} | {"data.text": "x" * 7000}
    for steps in (range(1, 31), range(31, 41)):
        tracker = Tracker.open(run, LogConfig(mlflow=True, mlflow_experiment="tests"), settings=settings)
        for step in steps:
            tracker.log(step, {"loss": 1 / step, "activation/0/after_mlp/std": float(step)})
        tracker.close()
    client = tracking.MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow.db'}", registry_uri=tmp_path.as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert (found.info.run_name, found.info.status, found.data.tags[RUN_TAG]) == ("a-run", "FINISHED", "a-run")
    losses = {point.step: point.value for point in client.get_metric_history(found.info.run_id, "loss")}
    assert losses == {step: pytest.approx(1 / step) for step in range(1, 41)}
    assert len(client.get_metric_history(found.info.run_id, "activation/0/after_mlp/std")) == 40
    assert found.data.params == {key: str(value)[:6000] for key, value in settings.items()}
    assert {path.name for path in tmp_path.iterdir()} == {"a-run"}
    assert math.isclose(found.data.metrics["loss"], 1 / 40)


def test_without_the_package_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sqlalchemy" else object())
    with pytest.raises(ConfigError, match="needs the package sqlalchemy"):
        MlflowSink(tmp_path, experiment="tests", settings={})
