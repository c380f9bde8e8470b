"""MLflow sink, which never blocks a step.

A background thread starts the client (which takes seconds) and sends values: to the server or database that
``MLFLOW_TRACKING_URI`` names, else to ``<run>/mlflow.db``, without any network. The MLflow run has our run id as its
name and tag, so a resumed run continues it. Credentials are read by the client only.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from vorox.core.errors import ConfigError
from vorox.core.platform.installation import install_command
from vorox.core.platform.telemetry import disable_telemetry
from vorox.core.run_layout import RunLayout
from vorox.experiments.background_sink import BackgroundSink, Entries

RUN_TAG = "vorox.run"
_MAX_METRICS, _MAX_SETTINGS = 1000, 100
"""Largest numbers in one request of the client."""
_MAX_SETTING_CHARACTERS = 6000


class MlflowSink(BackgroundSink):
    """Sends metrics to an MLflow run.

    Args:
        run_directory: The run; its name is the name of the MLflow run.
        experiment: MLflow experiment, created if it does not exist.
        settings: The run's configuration, recorded as parameters of a new MLflow run.

    Raises:
        ConfigError: A package is not installed.
    """

    def __init__(self, run_directory: Path, *, experiment: str, settings: Mapping[str, Any]) -> None:
        require_mlflow()
        super().__init__("mlflow", functools.partial(_send, run_directory.absolute(), experiment, dict(settings)))


def require_mlflow() -> None:
    """Check that the packages of ``log.mlflow`` are installed.

    Raises:
        ConfigError: One is not.
    """
    missing = [name for name in ("mlflow", "sqlalchemy", "alembic") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"log.mlflow=true needs the package {missing[0]}", where="log.mlflow", hint=install_command("mlflow")
        )


def _send(run_directory: Path, experiment: str, settings: dict[str, Any], entries: Entries) -> None:
    disable_telemetry()
    os.environ.setdefault("MLFLOW_CONFIGURE_LOGGING", "false")
    logging.getLogger("alembic").setLevel(logging.WARNING)  # it reports each migration of a new database
    entities, client = import_module("mlflow.entities"), _client(run_directory)
    run_id = _run(client, run_directory, experiment, settings)
    for step, values in entries:
        now = time.time_ns() // 1_000_000
        metrics = [entities.Metric(name, value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), _MAX_METRICS):
            client.log_batch(run_id, metrics=metrics[start : start + _MAX_METRICS])
    client.set_terminated(run_id)


def _client(run_directory: Path) -> Any:
    create: Any = import_module("mlflow.tracking").MlflowClient
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return create(registry_uri=_registry(run_directory, os.environ["MLFLOW_TRACKING_URI"]))
    uri = f"sqlite:///{RunLayout(run_directory).mlflow}"
    return create(tracking_uri=uri, registry_uri=_registry(run_directory, uri))


def _registry(run_directory: Path, tracking_uri: str) -> str | None:
    """Return a registry of models for the client, which the small MLflow package does not have for databases."""
    return None if tracking_uri.startswith("http") else run_directory.as_uri()


def _run(client: Any, run_directory: Path, experiment: str, settings: dict[str, Any]) -> str:
    """Return the id of the MLflow run, which is created on the first attempt."""
    found = client.get_experiment_by_name(experiment)
    experiment_id = client.create_experiment(experiment) if found is None else found.experiment_id
    for run in client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{run_directory.name}'", max_results=1):
        client.update_run(run.info.run_id, status="RUNNING")
        return str(run.info.run_id)
    name = run_directory.name
    run_id = str(client.create_run(experiment_id, run_name=name, tags={RUN_TAG: name}).info.run_id)
    parameter: Any = import_module("mlflow.entities").Param
    recorded = [parameter(key, str(value)[:_MAX_SETTING_CHARACTERS]) for key, value in settings.items()]
    for start in range(0, len(recorded), _MAX_SETTINGS):
        client.log_batch(run_id, params=recorded[start : start + _MAX_SETTINGS])
    return run_id
