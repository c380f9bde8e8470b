"""The runs below a folder: one row per run, read again only when its files have changed.

Rows need the ends of files only, so that hundreds of long runs open quickly; the loss sparkline reads single lines at
even distances in ``metrics.jsonl``.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vorox.core.errors import ConfigError
from vorox.core.json_lines import as_number, read_lines, sample_lines
from vorox.core.run_layout import RunLayout
from vorox.core.run_lookup import is_run, run_argument, run_attempts, run_directories
from vorox.dashboard.metric_series import MetricSeries
from vorox.data.run_data_index import attempt_notes
from vorox.experiments.artifacts import inspect_run
from vorox.experiments.tracking import read_metrics

_SPARKLINE_POINTS = 48
_TAIL_BYTES = 1 << 13
_MAX_OPEN_SERIES = 24
_LARGE_BYTES = 1 << 26

Signature = tuple[tuple[int, int], ...]


class RunIndex:
    """The runs that a dashboard shows. Thread-safe.

    Args:
        root: A folder of runs, or one run directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock, self._series_lock = threading.Lock(), threading.Lock()
        self._rows: dict[str, tuple[Signature, dict[str, Any]]] = {}
        self._series: OrderedDict[str, MetricSeries] = OrderedDict()
        self._reading: dict[str, threading.Thread] = {}

    def directories(self) -> dict[str, Path]:
        """Return the run directories by id."""
        found = [self.root] if is_run(self.root) else run_directories(self.root)
        return {directory.resolve().name: directory for directory in found}

    def directory(self, run_id: str) -> Path:
        """Return the directory of a run; ids come from the network, so only exact names of known runs count.

        Raises:
            ConfigError: The run is unknown.
        """
        directory = self.directories().get(run_id)
        if directory is None:
            raise ConfigError(f"Run {run_id} not found", where=str(self.root), hint="choose one of the list of runs")
        return directory

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per run, the last started first."""
        with self._lock:
            directories = self.directories()
            for run_id in set(self._rows) - set(directories):
                del self._rows[run_id]
            for run_id, directory in directories.items():
                signature = signature_of(directory)
                if self._rows.get(run_id, ((), {}))[0] != signature:
                    self._rows[run_id] = (signature, _row(run_id, directory))
            rows = [row for _, row in self._rows.values()]
        return sorted(rows, key=lambda row: (row["created_at"] or "", row["id"]), reverse=True)

    def series(self, run_id: str, *, preview: bool = False) -> MetricSeries:
        """Return the up-to-date metrics of a run; the most recently used ones stay in memory.

        Args:
            run_id: The run.
            preview: Return a sample of a large file at first, while a thread reads all of it.
        """
        directory = self.directory(run_id)
        with self._series_lock:
            series = self._series.setdefault(run_id, MetricSeries(directory))
            self._series.move_to_end(run_id)
            if len(self._series) > _MAX_OPEN_SERIES:
                self._series.popitem(last=False)
            is_large = preview and series.unread_bytes > _LARGE_BYTES
        if is_large:
            sample = MetricSeries.sampled(directory)  # before the other thread competes for the interpreter
            with self._series_lock:
                if run_id not in self._reading:
                    self._reading[run_id] = threading.Thread(target=series.refresh, daemon=True)
                    self._reading[run_id].start()
                if self._reading[run_id].is_alive():
                    return sample
        series.refresh()
        self._reading.pop(run_id, None)
        return series


def signature_of(directory: Path) -> Signature:
    """Return sizes and times of the files that change while a run trains, ends or resumes."""
    layout = RunLayout(directory)
    watched = (
        layout.metrics, layout.record, layout.events, layout.evaluations, layout.lock, layout.checkpoints,
        layout.verdicts,
    )  # fmt: skip
    found: list[tuple[int, int]] = []
    for path in watched:
        try:
            status = path.stat()
            found.append((status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((-1, 0))
    return tuple(found)


def _row(run_id: str, directory: Path) -> dict[str, Any]:
    summary, attempts = inspect_run(directory), run_attempts(directory)
    row = {key: value for key, value in asdict(summary).items() if key not in {"run_id", "directory", "failure"}}
    recent = _newest_values(directory)
    step_seconds, environment = recent.get("step_seconds"), environment_of(directory)
    remaining = None if summary.total_steps is None else max(0, summary.total_steps - summary.step)
    is_running = summary.state == "running" and remaining is not None and step_seconds is not None
    code = (attempts[-1].get("code") or attempts[-1].get("git") or {}) if attempts else {}
    return {
        **row,
        "id": run_id,
        "argument": run_argument(directory),
        "failure": (summary.failure or {}).get("what") if summary.state != "running" else None,
        "tokens_per_second": recent.get("tokens_per_second"),
        "mfu_fraction": recent.get("mfu_fraction"),
        "tokens": recent.get("tokens_total"),
        "eta_seconds": remaining * step_seconds if is_running and remaining is not None and step_seconds else None,
        "hardware": _hardware(environment),
        "engine": environment.get("engine"),
        "commit": str(code.get("commit") or "")[:10],
        "branch": str(code.get("branch") or ""),
        "is_dirty": bool(code.get("dirty")),
        "logged_at": _last_time(directory),
        "sparkline": _sparkline(RunLayout(directory).metrics),
    }


def environment_of(directory: Path) -> dict[str, Any]:
    """Return the engine's facts of the newest attempt: device, precision, framework."""
    found = next(iter(attempt_notes(directory, "environment")), None)
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


def _hardware(environment: dict[str, Any]) -> str:
    number = environment.get("num_devices") or environment.get("world_size") or 1
    device = str(environment.get("device") or "")
    return f"{number} x {device}" if device and number != 1 else device


def _newest_values(directory: Path) -> dict[str, float]:
    newest: dict[str, float] = {}
    for values in read_metrics(directory, last_bytes=_TAIL_BYTES).values():
        newest.update(values)
    return newest


def _last_time(directory: Path) -> float | None:
    """Return when the newest logged step was logged, in seconds since the epoch."""
    times = [
        as_number(record.get("time")) for record in read_lines(RunLayout(directory).metrics, last_bytes=_TAIL_BYTES)
    ]
    return next((time for time in reversed(times) if time is not None), None)


def _sparkline(path: Path) -> list[float]:
    """Return about 48 losses at even distances in the file; those that a later resume rolled back are dropped."""
    points = [_loss_of(record) for record in sample_lines(path, _SPARKLINE_POINTS)]
    found = [point for point in points if point is not None]
    kept: list[float] = []
    first_later_step = 1 << 62
    for step, loss in reversed(found):
        if step < first_later_step:
            kept.append(loss)
            first_later_step = step
    return kept[::-1]


def _loss_of(record: dict[str, Any]) -> tuple[int, float] | None:
    try:
        loss = as_number(record["values"]["loss"])
        return None if loss is None or loss - loss != 0 else (int(record["step"]), loss)
    except (KeyError, TypeError, ValueError):
        return None
