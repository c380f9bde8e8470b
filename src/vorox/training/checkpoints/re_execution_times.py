"""How long a re-execution of a run takes: its start (caches, model, checkpoint, the state it writes), and each step.

In: a run. Out: the times that the last re-execution took on this machine, kept beside the states that it wrote, and
before the first one, those of the run itself. An attempt starts as a re-execution does, without the time for its data;
the shortest start of all attempts counts. Neither has the imports of the command itself, before it computes anything.
"""

from __future__ import annotations

import contextlib
import math
import platform
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from vorox.core.errors import VoroxError
from vorox.core.files import atomic
from vorox.core.files.json_lines import read_lines
from vorox.core.files.json_reader import MalformedJson, mapping, read_json
from vorox.core.run_layout import RunLayout
from vorox.experiments.tracking import read_metrics
from vorox.records.executed_steps import STEPS_NOTE
from vorox.records.log import DATA_READY, SAVED
from vorox.records.run_lookup import run_attempts
from vorox.records.run_record import ENTERED_NOTE, LAUNCH_NOTE
from vorox.records.step_times import PHASES, Phase, read_step_times
from vorox.training.checkpoints.materialized_cache import folder

_NAME = "times.json"
_REPEATED: tuple[Phase, ...] = ("data", "step", "sync", "settle")
"""The phases of a step that a re-execution repeats."""
_FEWEST_ROWS = 5


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


def expected_times(run_directory: Path, first_step: int = 0, last_step: int | None = None) -> ReExecutionTimes:
    """Return the times that a re-execution of a run will take.

    Args:
        run_directory: The run.
        first_step: The state that it starts from; the times of the steps after it count, if they are on record.
        last_step: The state that it ends with; ``None``: the last one.
    """
    with contextlib.suppress(OSError, MalformedJson, VoroxError):
        found = read_json(folder(run_directory) / _NAME, dict)
        start, step = found.get("start_seconds"), found.get("step_seconds")
        if found.get("machine") == platform.node() and isinstance(start, float) and isinstance(step, float):
            return ReExecutionTimes(max(0.0, start), max(0.0, step))
    step_seconds = _step_seconds(run_directory, first_step, last_step)
    if step_seconds is None:
        return ReExecutionTimes(None, None)
    start = _shortest_start(run_directory, step_seconds)
    if start is not None:  # the state is written, and one is read unless the first step is computed again
        start += (2 if first_step else 1) * _save_seconds(run_directory)
    return ReExecutionTimes(start, step_seconds)


def _step_seconds(run_directory: Path, first_step: int, last_step: int | None) -> float | None:
    """Return the mean time of steps without what a re-execution leaves out; ``None`` if it is not recorded.

    A step counts at most as three times the median one: a machine may have been suspended.
    """
    with contextlib.suppress(OSError, MalformedJson):
        rows = read_step_times(run_directory)
        rows = rows[rows["step"] > 1]  # an attempt begins with rows of its own, and step 1 may compile
        inside = rows[(rows["step"] > first_step) & (rows["step"] <= (last_step or math.inf))]
        rows = rows if len(inside) < _FEWEST_ROWS else inside
        seconds = rows["seconds"][:, [PHASES.index(phase) for phase in _REPEATED]].sum(axis=1)
        seconds = seconds[seconds > 0]
        if len(seconds):
            return float(np.minimum(seconds, 3 * np.median(seconds)).mean())
    logged = (values.get("step_seconds") for values in read_metrics(run_directory).values())
    found = [float(value) for value in logged if value]
    return statistics.median(found) if found else None


def _save_seconds(run_directory: Path) -> float:
    """Return the median time of a save; 0 without any."""
    return statistics.median([seconds for _, seconds in _event_seconds(run_directory, SAVED)] or [0.0])


def _shortest_start(run_directory: Path, step_seconds: float) -> float | None:
    """Return the shortest time from the begin of an attempt to its first step; ``None`` if none is recorded.

    It begins where a command begins to compute, before the imports of PyTorch or JAX. A rank is a process of its own,
    so its other imports count as well. Building caches does not count.
    """
    first_rows = dict[int, dict[str, Any]]()
    for row in read_lines(RunLayout(run_directory).metrics):
        if type(row.get("attempt")) is type(row.get("step")) is int and isinstance(row.get("time"), int | float):
            first_rows.setdefault(row["attempt"], row)
    data = dict(_event_seconds(run_directory, DATA_READY))
    starts, processes = list[float](), set[object]()
    for attempt in run_attempts(run_directory):
        number, notes = attempt.get("attempt", 0), mapping(attempt.get("notes"))
        row, first = first_rows.get(number), mapping(notes.get(STEPS_NOTE)).get("start_step")
        is_new = attempt.get("pid") not in processes  # after a rollback, the process has imported all that it needs
        processes.add(attempt.get("pid"))
        began = _began_at(attempt, notes)
        if row is not None and type(first) is int and is_new and began is not None:
            steps_seconds = (int(row["step"]) - first) * step_seconds
            starts.append(float(row["time"]) - began - steps_seconds - data.get(number, 0.0))
    return max(0.0, min(starts)) if starts else None


def _began_at(attempt: Mapping[str, Any], notes: Mapping[str, Any]) -> float | None:
    """Return when an attempt began to do what a re-execution does; ``None`` if it is not recorded."""
    is_rank = mapping(notes.get("environment")).get("num_processes", 1) != 1
    recorded = notes.get(LAUNCH_NOTE if is_rank else ENTERED_NOTE)
    if isinstance(recorded, int | float):
        return float(recorded)
    with contextlib.suppress(ValueError, TypeError):
        return datetime.fromisoformat(str(attempt.get("started_at"))).timestamp()
    return None


def _event_seconds(run_directory: Path, kind: str) -> Iterator[tuple[int, float]]:
    """Yield attempt and duration of the events of a kind."""
    for row in read_lines(RunLayout(run_directory).events):
        attempt, seconds = row.get("attempt"), mapping(row.get("fields")).get("seconds")
        if row.get("kind") == kind and type(attempt) is int and isinstance(seconds, int | float):
            yield attempt, float(seconds)
