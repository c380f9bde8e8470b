"""How long a re-execution of a run takes: its start (caches, model, checkpoint, the state it writes), and each step.

In: a run. Out: the times that the last re-execution took on this machine, kept beside the states that it wrote, and
before the first one, those of the run itself. An attempt starts as a re-execution does, unless it builds caches; so the
shortest start of all attempts counts.
"""

from __future__ import annotations

import contextlib
import platform
import statistics
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from vorox.core.errors import VoroxError
from vorox.core.files import atomic
from vorox.core.files.json_lines import read_lines
from vorox.core.files.json_reader import MalformedJson, mapping, read_json
from vorox.core.run_layout import RunLayout
from vorox.experiments.tracking import read_metrics
from vorox.records.executed_steps import STEPS_NOTE
from vorox.records.run_lookup import run_attempts
from vorox.training.checkpoints.materialized_cache import folder

_NAME = "times.json"


@dataclass(frozen=True, slots=True)
class ReExecutionTimes:
    """Times of a re-execution.

    Attributes:
        start_seconds: Everything but the steps; ``None``: no attempt recorded it.
        step_seconds: One step; ``None``: the run did not log it.
    """

    start_seconds: float | None
    step_seconds: float | None

    def seconds(self, num_steps: int) -> float | None:
        """Return the time of a number of steps with the start, as far as it is known."""
        return None if self.step_seconds is None else (self.start_seconds or 0.0) + num_steps * self.step_seconds


def record_times(run_directory: Path, times: ReExecutionTimes) -> None:
    """Keep the times of a re-execution, if the cache can be written."""
    value = {"machine": platform.node(), "start_seconds": times.start_seconds, "step_seconds": times.step_seconds}
    with contextlib.suppress(OSError, VoroxError):
        path = folder(run_directory) / _NAME
        atomic.make_directory(path.parent)
        atomic.write_file(path, atomic.pretty_json(value))


def expected_times(run_directory: Path) -> ReExecutionTimes:
    """Return the times that a re-execution of a run will take."""
    with contextlib.suppress(OSError, MalformedJson, VoroxError):
        found = read_json(folder(run_directory) / _NAME, dict)
        start, step = found.get("start_seconds"), found.get("step_seconds")
        if found.get("machine") == platform.node() and isinstance(start, float) and isinstance(step, float):
            return ReExecutionTimes(max(0.0, start), max(0.0, step))
    logged = (values.get("step_seconds") for values in read_metrics(run_directory).values())
    seconds = [float(value) for value in logged if value]
    if not seconds:
        return ReExecutionTimes(None, None)
    step_seconds = statistics.median(seconds)
    return ReExecutionTimes(_shortest_start(run_directory, step_seconds), step_seconds)


def _shortest_start(run_directory: Path, step_seconds: float) -> float | None:
    """Return the shortest time from the begin of an attempt to its first step; ``None`` if none is recorded."""
    first_rows = dict[int, dict[str, Any]]()
    for row in read_lines(RunLayout(run_directory).metrics):
        if type(row.get("attempt")) is int and isinstance(row.get("time"), int | float):
            first_rows.setdefault(row["attempt"], row)
    starts: list[float] = []
    for attempt in run_attempts(run_directory):
        row = first_rows.get(attempt.get("attempt", 0))
        first = mapping(mapping(attempt.get("notes")).get(STEPS_NOTE)).get("start_step")
        if row is None or type(first) is not int:
            continue
        with contextlib.suppress(ValueError, TypeError):
            began = datetime.fromisoformat(str(attempt.get("started_at"))).timestamp()
            starts.append(float(row["time"]) - began - (int(row["step"]) - first) * step_seconds)
    return max(0.0, min(starts)) if starts else None
