"""The runs below a folder: one row per run, read again only when its files have changed.

Rows need the ends of files only, so that hundreds of long runs open quickly; the loss sparkline reads single lines at
even distances in ``metrics.jsonl``.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vorox.core.errors import ConfigError
from vorox.core.files.file_holder import lock_holder
from vorox.core.files.json_lines import read_lines
from vorox.core.run_layout import RunLayout
from vorox.dashboard.metrics.series import MetricSeries
from vorox.experiments.artifacts import RunSummary, inspect_any, unreadable_run
from vorox.experiments.metrics_lines import metrics_line
from vorox.experiments.tracking import read_metrics
from vorox.records.run_lookup import attempt_notes, is_run, run_argument, run_attempts, run_directories

_SPARKLINE_POINTS = 48
_TAIL_BYTES = 1 << 13
_MAX_OPEN_SERIES = 24
_LARGE_BYTES = 1 << 26

Signature = tuple[object, ...]


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
    """Return what differs once a run trains, ends or resumes: sizes and times of files, and who holds its lock.

    A process that is killed changes no file.
    """
    layout = RunLayout(directory)
    watched = (
        layout.metrics, layout.record, layout.events, layout.evaluations, layout.failure, layout.checkpoints,
        layout.verdicts,
    )  # fmt: skip
    found: list[object] = [lock_holder(layout.lock)]
    for path in watched:
        try:
            status = path.stat()
            found.append((status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((-1, 0))
    return tuple(found)


@dataclass(frozen=True)
class _RowFacts:
    """What a row shows besides the summary; the defaults are those of a run whose files cannot be read.

    Attributes:
        attempts: Its starts and resumes.
        recent: The newest values of its metrics.
        environment: The engine's facts.
        logged_at: When the newest step was logged, seconds since the epoch.
        sparkline: Losses.
    """

    attempts: Sequence[Mapping[str, Any]] = ()
    recent: Mapping[str, float] = field(default_factory=dict[str, float])
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])
    logged_at: float | None = None
    sparkline: Sequence[float] = ()


def _row(run_id: str, directory: Path) -> dict[str, Any]:
    summary = inspect_any(directory)
    try:
        facts = _RowFacts(
            run_attempts(directory), _newest_values(directory), environment_of(directory), _last_time(directory),
            _sparkline(directory),
        )  # fmt: skip
        return _row_of(run_id, directory, summary, facts)
    except Exception as error:  # others may have written the files: no list may end at one of them
        problem = summary.problem or f"{type(error).__name__}: {error}"
        return _row_of(run_id, directory, unreadable_run(directory, problem), _RowFacts())


def _row_of(run_id: str, directory: Path, summary: RunSummary, facts: _RowFacts) -> dict[str, Any]:
    row = {key: value for key, value in asdict(summary).items() if key not in {"run_id", "directory", "failure"}}
    step_seconds = facts.recent.get("step_seconds")
    remaining = None if summary.total_steps is None else max(0, summary.total_steps - summary.step)
    is_running = summary.state == "running" and remaining is not None and step_seconds is not None
    newest = facts.attempts[-1] if facts.attempts else {}
    code = newest.get("code") or newest.get("git") or {}
    return {
        **row,
        "id": run_id,
        "argument": run_argument(directory),
        "failure": _failure(summary),
        "tokens_per_second": facts.recent.get("tokens_per_second"),
        "mfu_fraction": facts.recent.get("mfu_fraction"),
        "tokens": facts.recent.get("tokens_total"),
        "eta_seconds": remaining * step_seconds if is_running and remaining is not None and step_seconds else None,
        "hardware": _hardware(facts.environment),
        "engine": facts.environment.get("engine"),
        "commit": str(code.get("commit") or "")[:10],
        "branch": str(code.get("branch") or ""),
        "is_dirty": bool(code.get("dirty")),
        "logged_at": facts.logged_at,
        "settings": _typed_settings(facts.attempts),
        "sparkline": list(facts.sparkline),
    }


def _typed_settings(attempts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the settings on the command line that started the run, such as those that a sweep chose."""
    words: Any = attempts[0].get("argv") if attempts else None
    found: dict[str, str] = {}
    for word in words if isinstance(words, list) else ():
        key, equals, value = str(word).partition("=")
        if equals and "." in key and key.replace(".", "").replace("_", "").isalnum():
            found[key] = value
    return found


def _failure(summary: RunSummary) -> str | None:
    """Return what the list shows of how a run ended."""
    if summary.problem:
        return f"unreadable, because {summary.problem}"
    what = None if summary.failure is None or summary.state == "running" else summary.failure.get("what")
    return None if what is None else str(what)


def environment_of(directory: Path) -> dict[str, Any]:
    """Return the engine's facts of the newest attempt: device, precision, framework."""
    found = next(iter(attempt_notes(directory, "environment")), None)
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


def _hardware(environment: Mapping[str, Any]) -> str:
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
    lines = [metrics_line(record) for record in read_lines(RunLayout(directory).metrics, last_bytes=_TAIL_BYTES)]
    return next((line.time for line in reversed(lines) if line is not None and line.time is not None), None)


def _sparkline(directory: Path) -> list[float]:
    """Return about 48 losses at even distances in the file, without those that a resume rolled back."""
    _, losses = MetricSeries.sampled(directory, _SPARKLINE_POINTS).points("loss")
    return losses[np.isfinite(losses)].tolist()
