"""The metrics of a run as columns, read incrementally while the run trains.

``metrics.jsonl`` goes in; per metric, ascending steps and values come out, and for each step the tokens, the seconds of
training and the FLOPs. As in ``tracking.read_metrics``, values of steps that a resume rolled back are void, and of
several values of a step the one of the latest attempt counts.
"""

from __future__ import annotations

import threading
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from vorox.core.files.json_lines import LineTail, as_number, decode_lines, sample_lines, valid_until
from vorox.core.files.json_reader import is_step
from vorox.core.run_layout import RunLayout
from vorox.dashboard.metrics.downsampling import Numbers
from vorox.experiments.metrics_lines import MetricsLine, metrics_line

if TYPE_CHECKING:
    from vorox.dashboard.metrics.blocks import MetricBlock

_BLOCK_BYTES = 1 << 21
_MIN_DECODED_BYTES = 1 << 14
"""Shorter blocks, as a live run appends them, are read line by line."""
Steps = npt.NDArray[np.int64]
Position = Literal["steps", "tokens", "seconds"]
"""What places the points of a curve."""


class MetricSeries:
    """The metrics of one run. Thread-safe.

    Args:
        directory: The run directory.

    Attributes:
        is_sample: Whether this is only a sample of the file.
    """

    is_sample = False

    def __init__(self, directory: Path) -> None:
        self._tail, self._lock = LineTail(RunLayout(directory).metrics), threading.RLock()
        self._clear()

    @classmethod
    def sampled(cls, directory: Path, num_places: int = 400) -> MetricSeries:
        """Return a sample of the metrics of a run, read from evenly distributed lines. It is not refreshed."""
        series = cls(directory)
        series.is_sample = True
        for record in sample_lines(RunLayout(directory).metrics, num_places):
            attempt, step = record.get("attempt"), record.get("step")
            is_later = series._attempts and type(attempt) is int and attempt > series._attempts[-1]
            if is_later and type(step) is int:
                series._resumes.append((len(series._steps), step - 1))  # the line of the resume may not be a sample
            series._read(record)
        return series

    @property
    def unread_bytes(self) -> int:
        """The size of what a refresh would read."""
        return self._tail.unread_bytes

    def _clear(self) -> None:
        self._steps, self._attempts, self._times = array("q"), array("q"), array("d")
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._resumes: list[tuple[int, int]] = []
        self._alive: npt.NDArray[np.bool_] | None = None
        self._clock: tuple[Steps, Numbers] | None = None

    def refresh(self) -> bool:
        """Read what was appended; return whether anything was."""
        with self._lock:
            blocks, is_replaced = self._tail.read_blocks(_BLOCK_BYTES)
            if is_replaced:
                self._clear()
            num_blocks = 0
            for num_blocks, block in enumerate(blocks, start=1):  # noqa: B007 - counted below
                columns = _decode(block) if len(block) >= _MIN_DECODED_BYTES else None
                if columns is not None:
                    self._extend(columns)
                    continue
                for record in decode_lines(block):
                    self._read(record)
            if num_blocks:
                self._alive = self._clock = None
            return num_blocks > 0 or is_replaced

    def _extend(self, block: MetricBlock) -> None:
        first_row = len(self._steps)
        self._steps.frombytes(block.steps.tobytes())
        self._attempts.frombytes(block.attempts.tobytes())
        self._times.frombytes(block.times.tobytes())
        for name, (rows, numbers) in block.values.items():
            column = self._columns.setdefault(name, (array("q"), array("d")))
            column[0].frombytes((rows + first_row).tobytes())
            column[1].frombytes(numbers.tobytes())

    def _read(self, record: dict[str, Any]) -> None:
        resume_step = record.get("resume_step")
        if is_step(record.get("attempt")) and is_step(resume_step):
            self._resumes.append((len(self._steps), resume_step))
        elif (line := metrics_line(record)) is not None:
            self._add(line)

    def _add(self, line: MetricsLine) -> None:
        row = len(self._steps)
        self._steps.append(line.step)
        self._attempts.append(line.attempt)
        self._times.append(float("nan") if line.time is None else line.time)
        columns = self._columns
        for name, value in line.values.items():
            number = value if type(value) is float else as_number(value)
            if number is None:
                continue
            column = columns.get(name)
            if column is None:
                column = columns[name] = (array("q"), array("d"))
            column[0].append(row)
            column[1].append(number)

    @property
    def names(self) -> list[str]:
        """The names of all metrics, in the order of their first value."""
        with self._lock:
            return list(self._columns)

    @property
    def last_step(self) -> int:
        """The last step with a valid record; 0 if there is none."""
        with self._lock:
            steps = np.array(self._steps)[self._valid_rows()]
            return int(steps.max()) if steps.size else 0

    def points(self, name: str) -> tuple[Steps, Numbers]:
        """Return the steps and values of a metric, steps ascending; empty if the run does not have it."""
        with self._lock:
            if name not in self._columns:
                return np.empty(0, np.int64), np.empty(0)
            rows, numbers = (np.array(column) for column in self._columns[name])
            keep = self._valid_rows()[rows]
            rows, numbers = rows[keep], numbers[keep]
            return self._latest(rows, numbers)

    def _latest(self, rows: Steps, numbers: Numbers) -> tuple[Steps, Numbers]:
        """Sort by step; of several rows of a step keep the one of the latest attempt."""
        steps, attempts = np.array(self._steps)[rows], np.array(self._attempts)[rows]
        order = np.lexsort((rows, attempts, steps))
        steps, numbers = steps[order], numbers[order]
        is_last = np.append(steps[1:] != steps[:-1], True) if steps.size else np.empty(0, bool)
        return steps[is_last], numbers[is_last]

    def seconds_at(self, steps: Steps) -> Numbers:
        """Return the seconds of training at some steps; time between attempts does not count."""
        with self._lock:
            if self._clock is None:
                self._clock = self._read_clock()
            known, seconds = self._clock
        return np.interp(steps, known, seconds) if known.size else np.zeros(len(steps))

    def _read_clock(self) -> tuple[Steps, Numbers]:
        """Return all steps, and the seconds of training until each."""
        valid = np.flatnonzero(self._valid_rows())
        known, times = self._latest(valid, np.array(self._times)[valid])
        _, attempts = self._latest(valid, np.array(self._attempts)[valid].astype(np.float64))
        if known.size == 0:
            return known, times
        same = attempts[1:] == attempts[:-1]
        gaps = np.where(same, np.maximum(np.nan_to_num(np.diff(times)), 0.0), 0.0)
        return known, np.concatenate([[0.0], np.cumsum(gaps)])

    def tokens_at(self, steps: Steps) -> Numbers:
        """Return the tokens processed at some steps; NaN if the run recorded none."""
        known, tokens = self.points("tokens_total")
        if known.size == 0:
            return np.full(len(steps), np.nan)
        return np.interp(steps, np.append(0, known), np.append(0.0, tokens))

    def flops_per_token(self) -> float:
        """Return the FLOPs that a token costs, by the recorded rates; NaN if unknown."""
        steps, rates = self.points("model_flops_per_second")
        speed_steps, speeds = self.points("tokens_per_second")
        shared, first, second = np.intersect1d(steps, speed_steps, return_indices=True)
        ratios = rates[first] / np.where(speeds[second] > 0, speeds[second], np.nan) if shared.size else np.empty(0)
        ratios = ratios[np.isfinite(ratios)]
        return float(np.median(ratios)) if ratios.size else float("nan")

    def _valid_rows(self) -> npt.NDArray[np.bool_]:
        if self._alive is None:
            steps = np.array(self._steps, np.int64)
            first_rows = [num_rows for num_rows, _ in self._resumes]
            limits = valid_until([resume_step for _, resume_step in self._resumes])
            self._alive = steps <= np.repeat(limits, np.diff([0, *first_rows, len(steps)]))
        return self._alive


def _decode(block: bytes) -> MetricBlock | None:
    from vorox.dashboard.metrics.blocks import decode  # loads pyarrow, which short files need not

    return decode(block)
