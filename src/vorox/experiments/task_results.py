"""Results of tasks in a run directory: one JSON file per checkpoint, and metrics of its step.

A repeated task replaces its earlier result; other tasks of the file are kept. Metrics are appended to
``metrics.jsonl`` unless a live process writes the run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vorox.core.errors import ConfigError
from vorox.core.files import atomic
from vorox.core.files.atomic import MANIFEST_NAME
from vorox.core.files.json_lines import LineFile, finite_json, read_lines
from vorox.core.files.json_reader import read_json
from vorox.core.run_layout import RunLayout, lock_run
from vorox.experiments.metrics import metric
from vorox.experiments.metrics_lines import encode_metrics

FORMAT = "vorox-tasks/1"


def write_task_results(
    run_directory: Path, step: int, checkpoint_sha256: str, tasks: Mapping[str, Mapping[str, Any]]
) -> tuple[Path, bool]:
    """Record results of tasks, with their metrics if no live process writes the run.

    Args:
        run_directory: The run.
        step: Step of the checkpoint.
        checkpoint_sha256: Digest of its manifest.
        tasks: By task, at least ``metrics``: values by name.

    Returns:
        The file, and whether the metrics were appended as well.
    """
    path = record_task_results(run_directory, step, checkpoint_sha256, tasks)
    try:
        with lock_run(run_directory):
            _append_metrics(run_directory, step, task_metrics(tasks))
    except ConfigError:  # a live process writes the run
        return path, False
    return path, True


def checkpoint_sha256(checkpoint: Path) -> str:
    """Return the digest that identifies a checkpoint: the SHA-256 of its manifest."""
    return hashlib.sha256((checkpoint / MANIFEST_NAME).read_bytes()).hexdigest()


def recorded_steps(run_directory: Path) -> list[int]:
    """Return the steps with recorded results."""
    names = [path.stem.removeprefix("step-") for path in RunLayout(run_directory).tasks.glob("step-*.json")]
    return sorted(int(name) for name in names if name.isdecimal())


def record_task_results(
    run_directory: Path, step: int, checkpoint_sha256: str, tasks: Mapping[str, Mapping[str, Any]]
) -> Path:
    """Record results of tasks in their file, and return it; arguments as in ``write_task_results``."""
    path = RunLayout(run_directory).task_results(step)
    atomic.make_directory(path.parent)
    record: dict[str, Any] = {"format": FORMAT, "step": step, "checkpoint_sha256": checkpoint_sha256, "tasks": {}}
    if path.exists():
        stored = read_json(path)
        if stored.get("checkpoint_sha256") == checkpoint_sha256:
            record["tasks"] = stored["tasks"]
    record["tasks"] |= {name: finite_json(dict(result)) for name, result in tasks.items()}
    atomic.write_file(path, atomic.pretty_json(record))
    return path


def task_metrics(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of tasks under registered names."""
    found = {
        f"eval/tasks/{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}/{key}": float(value)
        for name, result in tasks.items()
        for key, value in result["metrics"].items()
    }
    for name in found:
        metric(name)
    return found


def _append_metrics(run_directory: Path, step: int, values: Mapping[str, float]) -> None:
    path = RunLayout(run_directory).metrics
    attempts = [line["attempt"] for line in read_lines(path) if type(line.get("attempt")) is int]
    file = LineFile(path)
    error = file.append(encode_metrics(step, max(attempts, default=1), values)) or file.flush(sync=True)
    if error is not None:
        raise error
