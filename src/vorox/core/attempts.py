"""Which steps each attempt of a run did: ``attempts.bin``, one record of 64 bytes per attempt.

A record is appended, durably, when an attempt is about to begin its first step; from then on its two counters (the
last step that was started, the last one that a checkpoint holds) are stored in place through mapped memory. A store
costs no system call and outlives ``kill -9``, so the record is exact to the step for attempts that were killed too;
after a power cut it is exact at least up to the newest checkpoint.

``intervals`` makes history of it: steps that are kept, steps that a later attempt rolled back and did again, and steps
that are still open because no checkpoint holds them yet. Steps count from 1: step N is the one after which N are
finished.
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

from vorox.core import atomic
from vorox.core.run_layout import RunLayout

Outcome = Literal["kept", "rolled_back", "open"]

_MAGIC = b"VXATTEM1"
_FIXED = struct.Struct("<8s QQQ")  # magic, attempt, state that it began from, position of that state
_COUNTERS = struct.Struct("<QQ")  # last step started, last step saved
_RECORD_BYTES = 64
_COUNTERS_OFFSET = 40
assert _FIXED.size + 4 <= _COUNTERS_OFFSET, "the checksum and four zero bytes lie between the two"


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one process did of a run.

    Attributes:
        number: Number of the attempt, from 1.
        start_step: Finished steps of the state that it began from; its first step is the one after.
        first_position: Position in the data of that state.
        last_step: The last step that it started; ``start_step`` if none.
        saved_step: The last state that it began from or saved.
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
        attempt: The attempt that did them.
        parent: The attempt whose work it went on from; ``None`` from the start of the run.
        first_step: From 1.
        last_step: The last of them, included.
        outcome: ``kept``: part of the run as it stands. ``rolled_back``: done, lost, and done again or left out.
            ``open``: done by the newest attempt after its newest checkpoint.
    """

    attempt: int
    parent: int | None
    first_step: int
    last_step: int
    outcome: Outcome


class AttemptRecord:
    """The record of the attempt that this process makes. Use it as a context manager.

    Args:
        run_directory: The run; this process holds its lock.
        number: Number of the attempt. A higher one is taken if the file has it already.
        start_step: Finished steps of the state that the process begins from.
        first_position: Position in the data of that state.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, run_directory: Path, number: int, start_step: int, first_position: int) -> None:
        path = RunLayout(run_directory).attempts
        before = read_attempts(run_directory)
        if path.exists() and path.stat().st_size > len(before) * _RECORD_BYTES:
            atomic.truncate(path, len(before) * _RECORD_BYTES)  # what a crash in the middle of an append left
        self.number = max([number, *(attempt.number + 1 for attempt in before)])
        fixed = _FIXED.pack(_MAGIC, self.number, start_step, first_position)
        record = fixed + struct.pack("<I", zlib.crc32(fixed)) + bytes(4) + _COUNTERS.pack(start_step, start_step)
        atomic.append(path, record.ljust(_RECORD_BYTES, b"\0"), sync=True)
        with path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), (len(before) + 1) * _RECORD_BYTES)
        start = len(before) * _RECORD_BYTES + _COUNTERS_OFFSET
        self._view = memoryview(self._mapped)[start : start + _COUNTERS.size]
        self._counters = self._view.cast("Q")

    def reached(self, step: int) -> None:
        """A step was started. One store into memory."""
        self._counters[0] = step

    def saved(self, step: int) -> None:
        """A checkpoint holds this step. Makes the record durable as well."""
        self._counters[1] = step
        self._mapped.flush()

    def close(self) -> None:
        """Let go of the file. What was stored stays."""
        if not self._mapped.closed:
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
    """The attempts that began a first step, in order; none if the run never came so far."""
    path = RunLayout(run_directory).attempts
    raw = path.read_bytes() if path.exists() else b""
    found: list[Attempt] = []
    for start in range(0, len(raw) - _RECORD_BYTES + 1, _RECORD_BYTES):
        fixed = raw[start : start + _FIXED.size]
        magic, number, start_step, first_position = _FIXED.unpack(fixed)
        (checksum,) = struct.unpack_from("<I", raw, start + _FIXED.size)
        if magic != _MAGIC or checksum != zlib.crc32(fixed):
            break  # the torn end of an interrupted append
        last_step, saved_step = _COUNTERS.unpack_from(raw, start + _COUNTERS_OFFSET)
        found.append(Attempt(number, start_step, first_position, last_step, saved_step))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Lineage:
    """What became of an attempt.

    Attributes:
        attempt: The attempt.
        parent: The attempt whose work it went on from; ``None`` from the start of the run.
        kept_until: The last of its steps that is kept; ``start_step`` if none is.
        is_newest: Whether no other attempt came after it: what it did after ``kept_until`` is open, not rolled back.
    """

    attempt: Attempt
    parent: int | None
    kept_until: int
    is_newest: bool


def lineage(attempts: Sequence[Attempt]) -> tuple[Lineage, ...]:
    """What became of each attempt, in order."""
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
    """What became of every step that was ever done, by attempt and step."""
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
