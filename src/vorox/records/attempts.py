"""The steps of each attempt of a run: ``attempts.bin``, one record of 64 bytes per attempt.

A record is appended durably before the first step of an attempt. Afterwards its two counters (the last step started,
the last step in a checkpoint) are updated in place through a memory map. An update needs no system call and survives
``kill -9``, so the record is exact to the step even for killed attempts; after a power cut it is exact at least up to
the newest checkpoint.

``intervals`` derives the history: steps that are kept, steps that a later attempt rolled back, and steps that are still
open because no checkpoint holds them. Steps count from 1: after step N, N steps are finished.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

from vorox.core.files import atomic
from vorox.core.files.json_reader import read_regular
from vorox.core.run_layout import RunLayout

Outcome = Literal["kept", "rolled_back", "open"]

_MAGIC = b"VXATTEM1"
_FIXED = struct.Struct("<8s QQQ")  # magic, attempt, start step, data position of the start
_COUNTERS = struct.Struct("<QQ")  # last step started, last step saved
_RECORD_BYTES = 64
_COUNTERS_OFFSET = 40
assert _FIXED.size + 4 <= _COUNTERS_OFFSET, "the checksum and four zero bytes are between the two"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One process's part of a run.

    Attributes:
        number: Number of the attempt, from 1.
        start_step: Finished steps at its start; its first step is the next one.
        first_position: Data position at its start.
        last_step: The last step it started; ``start_step`` if none.
        saved_step: The last step it saved; ``start_step`` if none.
    """

    number: int
    start_step: int
    first_position: int
    last_step: int
    saved_step: int


@dataclass(frozen=True, slots=True)
class StepInterval:
    """Consecutive steps of one attempt with one outcome.

    Attributes:
        attempt: The attempt that ran them.
        parent: The attempt that it resumed; ``None`` at the start of the run.
        first_step: From 1.
        last_step: Inclusive.
        outcome: ``kept``: part of the run. ``rolled_back``: lost, and repeated or dropped by a later attempt.
            ``open``: run by the newest attempt after its newest checkpoint.
    """

    attempt: int
    parent: int | None
    first_step: int
    last_step: int
    outcome: Outcome


class AttemptRecord:
    """The record of this process's attempt. Use it as a context manager.

    Args:
        run_directory: The run; this process holds its lock.
        number: Number of the attempt; the next free one is used if it is in the file already.
        start_step: Finished steps at its start.
        first_position: Data position at its start.
        writes: Whether this rank writes the file; the others count in memory only.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(
        self, run_directory: Path, number: int, start_step: int, first_position: int, *, writes: bool = True
    ) -> None:
        self.number, self._start_step, self._first_position = number, start_step, first_position
        self._mapped: mmap.mmap | None = None
        self._view = memoryview(bytearray(_COUNTERS.pack(start_step, start_step)))
        self._counters = self._view.cast("Q")
        if not writes:
            return
        path = RunLayout(run_directory).attempts
        before = read_attempts(run_directory)
        size_bytes = path.stat().st_size if path.exists() else 0
        start_bytes = size_bytes - size_bytes % _RECORD_BYTES
        if size_bytes > start_bytes:
            atomic.truncate(path, start_bytes)  # the torn end of an interrupted append
        self.number = max([number, *(attempt.number + 1 for attempt in before)])
        fixed = _FIXED.pack(_MAGIC, self.number, start_step, first_position)
        record = fixed + struct.pack("<I", zlib.crc32(fixed)) + bytes(4) + _COUNTERS.pack(start_step, start_step)
        atomic.append(path, record.ljust(_RECORD_BYTES, b"\0"), sync=True)
        with path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), start_bytes + _RECORD_BYTES)
        start = start_bytes + _COUNTERS_OFFSET
        self._view = memoryview(self._mapped)[start : start + _COUNTERS.size]
        self._counters = self._view.cast("Q")

    @property
    def attempt(self) -> Attempt:
        """The attempt so far; not after ``close``."""
        return Attempt(self.number, self._start_step, self._first_position, *self._counters)

    def record_started(self, step: int) -> None:
        """Record that the engine has taken a step, with one memory store; a device may still compute it."""
        self._counters[0] = step

    def record_saved(self, step: int) -> None:
        """Record that a checkpoint holds a step, and make the record durable."""
        self._counters[1] = step
        if self._mapped is not None:
            self._mapped.flush()

    def close(self) -> None:
        """Flush and close the file."""
        if self._mapped is not None and not self._mapped.closed:
            self._mapped.flush()
            self._counters.release()
            self._view.release()
            self._mapped.close()

    def __enter__(self) -> AttemptRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_attempts(run_directory: Path) -> tuple[Attempt, ...]:
    """Return the attempts in the file, in order; ``executed_steps.executed_attempts`` also finds lost ones."""
    return scan_attempts(run_directory)[0]


def scan_attempts(run_directory: Path) -> tuple[tuple[Attempt, ...], int]:
    """Return the readable attempts, in order, and the number of damaged records.

    The torn end of an interrupted append is no record: its attempt has started no step.
    """
    path = RunLayout(run_directory).attempts
    try:
        raw = read_regular(path)
    except FileNotFoundError:
        raw = b""
    found: list[Attempt] = []
    num_damaged = 0
    for start in range(0, len(raw) - _RECORD_BYTES + 1, _RECORD_BYTES):
        fixed = raw[start : start + _FIXED.size]
        magic, number, start_step, first_position = _FIXED.unpack(fixed)
        (checksum,) = struct.unpack_from("<I", raw, start + _FIXED.size)
        if magic != _MAGIC or checksum != zlib.crc32(fixed):
            num_damaged += any(raw[start : start + _RECORD_BYTES])
            continue
        last_step, saved_step = _COUNTERS.unpack_from(raw, start + _COUNTERS_OFFSET)
        found.append(Attempt(number, start_step, first_position, last_step, saved_step))
    return tuple(found), num_damaged


@dataclass(frozen=True, slots=True)
class Lineage:
    """An attempt's place in the history of the run.

    Attributes:
        attempt: The attempt.
        parent: The attempt that it resumed; ``None`` at the start of the run.
        kept_until: Its last step that is kept; ``start_step`` if none is.
        is_newest: Whether it is the last attempt: its steps after ``kept_until`` are open, not rolled back.
    """

    attempt: Attempt
    parent: int | None
    kept_until: int
    is_newest: bool


def lineage(attempts: Sequence[Attempt]) -> tuple[Lineage, ...]:
    """Return the lineage of each attempt, in order."""
    kept: list[int] = []
    parents: list[int | None] = []
    for index, attempt in enumerate(attempts):
        parent: int | None = None
        for earlier in range(index):
            kept[earlier] = min(kept[earlier], attempt.start_step)
            if attempts[earlier].start_step < attempt.start_step <= kept[earlier]:
                parent = attempts[earlier].number
        parents.append(parent)
        kept.append(attempt.last_step)
    if attempts:
        kept[-1] = min(attempts[-1].last_step, attempts[-1].saved_step)
    return tuple(
        Lineage(attempt, parent, max(until, attempt.start_step), index + 1 == len(attempts))
        for index, (attempt, parent, until) in enumerate(zip(attempts, parents, kept, strict=True))
    )


def intervals(attempts: Sequence[Attempt]) -> tuple[StepInterval, ...]:
    """Return the outcome of every step ever started, as intervals by attempt and step."""
    found: list[StepInterval] = []
    for line in lineage(attempts):
        attempt, until = line.attempt, line.kept_until
        whole = StepInterval(attempt.number, line.parent, attempt.start_step + 1, attempt.last_step, "kept")
        if until > attempt.start_step:
            found.append(replace(whole, last_step=until))
        if attempt.last_step > until:
            outcome: Outcome = "open" if line.is_newest else "rolled_back"
            found.append(replace(whole, first_step=until + 1, outcome=outcome))
    return tuple(found)
