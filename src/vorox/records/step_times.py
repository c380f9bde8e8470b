"""How long the loop was in each of its phases, step by step: ``times.bin``, one row of 64 bytes per step.

The row of a step has the time from its wait for a batch to the one of the next step, so a save or a validation after
the step is in its row. The first row of an attempt has the step that it starts from, and the time until its first step.
Rows are mapped into memory: a change of phase needs no system call and survives ``kill -9``. A thread notes twice a
second that the process is alive. Only the main rank writes. A file that cannot be written stops nothing; the times of
the steps are then missing.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from vorox.core.files import atomic
from vorox.core.files.json_reader import MalformedJson, read_regular
from vorox.core.run_layout import RunLayout

Phase = Literal["start", "compile", "data", "step", "sync", "settle", "save", "validation", "end"]
"""``data``: waits for a batch; ``step``: forward, backward and update; ``sync``: waits for the other ranks; ``settle``:
waits for the numbers of a step from the device. The others may be long."""

PHASES: tuple[Phase, ...] = get_args(Phase)

ROW = np.dtype([
    ("entered_at", "<f8"), ("step", "<u8"), ("attempt", "<u4"), ("phase", "<u4"), ("alive_seconds", "<f4"),
    ("seconds", "<f4", (len(PHASES),)),
])  # fmt: skip
"""A row: when its last phase began (seconds since the epoch), the step, the attempt from 1, this phase (an index of
``PHASES``), for how long the process is known to have lived in it, and the seconds in all phases that have ended."""

_ENTERED, _STEP, _ATTEMPT, _PHASE, _ALIVE, _SECONDS = 0, 1, 4, 5, 6, 7  # offsets, in cells of 8 and 4 bytes
_BLOCK_ROWS = 1024
assert ROW.itemsize == 64, "the offsets above are those of this row"


class StepTimes:
    """The rows of this attempt.

    Args:
        run_directory: The run; this process holds its lock.
        attempt: Number of the attempt.
        step: Finished steps at its start.
        clock: The wall clock.
    """

    def __init__(self, run_directory: Path, attempt: int, step: int, clock: Callable[[], float] = time.time) -> None:
        self._path, self._attempt, self._step, self._clock = RunLayout(run_directory).times, attempt, step, clock
        self._mapped: mmap.mmap | None = None
        self._row, self._num_rows = 0, 0
        self._map(memoryview(bytearray(ROW.itemsize)))  # until ``open``, and if there is no file

    def open(self) -> None:
        """Append the first row of the attempt to the file, after removing what an earlier process left unused."""
        with contextlib.suppress(OSError, MalformedJson, ValueError):
            size_bytes = self._path.stat().st_size if self._path.exists() else 0
            used = _used_bytes(self._path) if size_bytes else 0
            if used < size_bytes:
                atomic.truncate(self._path, used)
            self._extend(used // ROW.itemsize)
        self._begin_row(self._step, "start")

    def begin_step(self, step: int) -> None:
        """Begin the row of a step, which waits for its batch."""
        self._row += 1
        if self._row >= self._num_rows:
            try:
                if self._mapped is None:
                    raise OSError
                self._extend(self._row)
            except (OSError, ValueError):  # the disk is full: later rows go nowhere
                self._mapped = None
                self._row, self._num_rows = 0, 0
                self._map(memoryview(bytearray(ROW.itemsize)))
        self._begin_row(step, "data")

    def enter(self, ended: int, seconds: float, entered: int) -> None:
        """Add the time of the phase that ended, and begin another; both are indices of ``PHASES``."""
        base = 16 * self._row
        self._numbers[base + _SECONDS + ended] += seconds
        self._counts[base + _PHASE] = entered
        self._numbers[base + _ALIVE] = 0.0
        self._times[8 * self._row + _ENTERED] = self._clock()

    def wait_for_ranks(self, seconds: float) -> None:
        """Count a part of the step's time as waiting for other ranks, which its collectives contained."""
        step, sync = (16 * self._row + _SECONDS + PHASES.index(phase) for phase in ("step", "sync"))
        seconds = min(max(0.0, seconds), self._numbers[step])
        self._numbers[step] -= seconds
        self._numbers[sync] += seconds

    def live(self) -> None:
        """Note that the process is alive; from any thread."""
        row, numbers, times = self._row, self._numbers, self._times
        if (row + 1) * 16 <= len(numbers):
            numbers[16 * row + _ALIVE] = max(0.0, self._clock() - times[8 * row + _ENTERED])

    def close(self) -> None:
        """Remove the unused rows from the file; no thread calls ``live`` any more."""
        mapped, used = self._mapped, self._row + 1
        self._mapped = None
        self._map(memoryview(bytearray(ROW.itemsize)))
        self._row, self._num_rows = 0, 0
        if mapped is not None:
            with contextlib.suppress(OSError, BufferError):
                mapped.flush()
                mapped.close()
                atomic.truncate(self._path, used * ROW.itemsize)

    def _extend(self, num_rows: int) -> None:
        """Append a block of rows to a file of ``num_rows``; written, so that a full disk is an error here."""
        atomic.append(self._path, bytes(_BLOCK_ROWS * ROW.itemsize), sync=False)
        with self._path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), (num_rows + _BLOCK_ROWS) * ROW.itemsize)
        self._map(memoryview(mapped))
        self._mapped, self._row, self._num_rows = mapped, num_rows, num_rows + _BLOCK_ROWS

    def _map(self, view: memoryview) -> None:
        self._times, self._counts, self._numbers = view.cast("B").cast("d"), view.cast("I"), view.cast("f")
        self._steps = view.cast("Q")

    def _begin_row(self, step: int, phase: Phase) -> None:
        self._steps[8 * self._row + _STEP] = step
        self._counts[16 * self._row + _ATTEMPT] = self._attempt
        self._counts[16 * self._row + _PHASE] = PHASES.index(phase)
        self._times[8 * self._row + _ENTERED] = self._clock()


def read_step_times(run_directory: Path) -> npt.NDArray[Any]:
    """Return the rows of a run in the order of the file, as ``ROW``; empty without the file.

    Raises:
        MalformedJson: The file is not a regular one.
        OSError: It cannot be read.
    """
    path = RunLayout(run_directory).times
    try:
        raw = read_regular(path, path.stat().st_size + _BLOCK_ROWS * ROW.itemsize)
    except FileNotFoundError:
        raw = b""
    rows = np.frombuffer(raw, ROW, count=len(raw) // ROW.itemsize)
    return rows[rows["attempt"] > 0]


def _used_bytes(path: Path) -> int:
    """Return the size of a file up to its last row that is not empty."""
    raw = np.frombuffer(read_regular(path, path.stat().st_size), ROW, count=path.stat().st_size // ROW.itemsize)
    used = np.flatnonzero(raw["attempt"])
    return int(used[-1] + 1) * ROW.itemsize if len(used) else 0
