"""Append-only JSON lines: logs that never stop a run, and histories by step that a resume rewinds.

A log (``LineFile``: ``metrics.jsonl``, ``events.jsonl`` and others) is not needed to resume, so it never stops a run:
lines that cannot be written are kept in memory and written later. A crash tears at most the last line; the next writer
truncates it and readers skip it. Non-finite floats are written as ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, so
every line is strict JSON; ``as_number`` converts them.

A history (``StepHistory``: ``chain.jsonl``, ``evaluations.jsonl``) is a log whose lines have a ``step``, the number of
finished steps, so line 1,000 and checkpoint 1,000 describe the same state. A process that resumes at step S first
writes the marker ``{"resume": S}``: earlier lines of later steps, intact or damaged, are void. Lines are buffered;
``flush`` makes them durable, before the checkpoint that depends on them.
"""

from __future__ import annotations

import bisect
import json
import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from vorox.core import atomic
from vorox.core.atomic import canonical_json
from vorox.core.errors import DataError

MAX_PENDING_LINES = 100_000
_BLOCK_BYTES = 1 << 20
BUFFERED_LINES = 256
_FIRST_WINDOW_BYTES = 1 << 18
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class LineFile:
    """The writer of a log; one process at a time, thread-safe.

    Args:
        path: The file, created with its directory by the first line.

    Attributes:
        is_held: Whether lines stay in memory until a flush after this is unset.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_held = False
        self.dropped_lines = 0
        self._pending: deque[bytes] = deque()
        self._size_bytes: int | None = None
        self._failed = False
        self._lock = threading.RLock()

    def append(self, line: bytes) -> OSError | None:
        """Write a line, given without its newline. Returns the error, if any; the line is then kept in memory."""
        with self._lock:
            self._pending.append(line + b"\n")
            while len(self._pending) > MAX_PENDING_LINES:
                self._pending.popleft()
                self.dropped_lines += 1
            return self.flush()

    def flush(self, *, sync: bool = False) -> OSError | None:
        """Write pending lines, durably if ``sync``. Returns the error, if any."""
        with self._lock:
            return None if self.is_held else self._flush(sync)

    def _flush(self, sync: bool) -> OSError | None:
        data = b"".join(self._pending)
        try:
            if self._size_bytes is None:
                atomic.make_directory(self.path.parent)
                self._size_bytes = _truncate_torn_line(self.path)
            if data or (sync and self.path.exists()):
                if self.path.exists() and self.path.stat().st_size > self._size_bytes and self._failed:
                    atomic.truncate(self.path, self._size_bytes)  # the remains of a failed write
                self._failed = True
                atomic.append(self.path, data, sync=sync)
        except OSError as error:
            return error
        self._failed = False
        self._size_bytes = (self._size_bytes or 0) + len(data)
        self._pending.clear()
        return None


def encode(record: Mapping[str, Any]) -> bytes:
    """Encode a record as a line of ASCII JSON in key order, without newline."""
    text = json.dumps(finite_json(record), separators=(",", ":"), allow_nan=False, default=str)
    return text.encode("ascii")


def read_lines(path: Path, *, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield all complete records of a file, in order. Torn and damaged lines are skipped; the file may not exist.

    Args:
        path: The file.
        last_bytes: Read only this many bytes from the end.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        if last_bytes is not None and (start := path.stat().st_size - last_bytes) > 0:
            file.seek(start - 1)
            file.readline()  # skip the rest of a line that started before
        for line in file:
            record = _record(line) if line.endswith(b"\n") else None
            if record is not None:
                yield record


def sample_lines(path: Path, num_lines: int) -> Iterator[dict[str, Any]]:
    """Yield at most ``num_lines`` records at even distances in a file, in order, reading only those lines."""
    if not path.exists():
        return
    size_bytes, end = path.stat().st_size, 0
    with path.open("rb") as file:
        for number in range(num_lines):
            start = number * size_bytes // num_lines
            if start < end:
                continue  # the last line that was read is longer than the distance
            file.seek(max(0, start - 1))
            if start:
                file.readline()  # the rest of a line that started before
            line = file.readline()
            end = file.tell()
            record = _record(line) if line.endswith(b"\n") else None
            if record is not None:
                yield record


class LineTail:
    """Reads the records that were appended to a file since the last read. Torn and damaged lines are skipped.

    Args:
        path: The file; it may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset: int = 0
        self._inode: int = -1

    def read(self) -> tuple[Iterator[dict[str, Any]], bool]:
        """Return the new complete records, to be consumed before the next read, and whether the file was replaced:
        earlier records are then void."""
        is_replaced = self._begin_read()
        return self._new_records(), is_replaced

    def read_blocks(self, block_bytes: int) -> tuple[Iterator[bytes], bool]:
        """Like ``read``, but return the new complete lines undecoded, in blocks of about ``block_bytes``."""
        is_replaced = self._begin_read()
        return self._new_blocks(block_bytes), is_replaced

    def _begin_read(self) -> bool:
        """Start over where the file was replaced; return whether it was."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            is_replaced, self._offset, self._inode = self._offset > 0, 0, -1
            return is_replaced
        is_replaced = self._offset > 0 and (status.st_size < self._offset or status.st_ino != self._inode)
        self._offset, self._inode = 0 if is_replaced else self._offset, status.st_ino
        return is_replaced

    @property
    def unread_bytes(self) -> int:
        """The size of what a read would read."""
        return max(0, self.path.stat().st_size - self._offset) if self.path.exists() else 0

    def _new_records(self) -> Iterator[dict[str, Any]]:
        for block in self._new_blocks(_BLOCK_BYTES):
            yield from decode_lines(block)

    def _new_blocks(self, block_bytes: int) -> Iterator[bytes]:
        if not self.unread_bytes:
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            while block := file.read(block_bytes) + file.readline():
                lines = block[: block.rfind(b"\n") + 1]
                self._offset += len(lines)
                if lines:
                    yield lines
                if len(lines) < len(block):  # the last line is torn; the next read may find it complete
                    return


def decode_lines(block: bytes) -> Iterator[dict[str, Any]]:
    """Yield the records of complete lines; damaged lines are skipped."""
    for line in block.split(b"\n"):
        record = _record(line)
        if record is not None:
            yield record


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def as_number(value: Any) -> float | None:
    """Return the number that ``encode`` was given, or ``None`` if the value is not a number."""
    if isinstance(value, str):
        return _NON_FINITE.get(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def finite_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): finite_json(item) for key, item in cast("Mapping[object, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in cast("list[Any]", value)]
    return value


def _truncate_torn_line(path: Path) -> int:
    """Truncate the file after its last newline; return the new size."""
    if not path.exists():
        return 0
    size_bytes = path.stat().st_size
    end, position = 0, size_bytes
    with path.open("rb") as file:
        while position and not end:
            start = max(0, position - (1 << 16))
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            end, position = (start + found + 1 if found >= 0 else 0), start
    if end < size_bytes:
        atomic.truncate(path, end)
    return end


class StepHistory:
    """Appends to one file.

    Args:
        path: The file, created by the first flush; ``None`` if another rank writes it.
        resume_step: Finished steps when this process starts.
    """

    def __init__(self, path: Path | None, resume_step: int) -> None:
        self._file = None if path is None else LineFile(path)
        self._buffer: list[bytes] = []
        if path is not None and path.exists():
            self._buffer.append(canonical_json({"resume": resume_step}))

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record with a ``step``."""
        self._buffer.append(canonical_json(record))
        if len(self._buffer) >= BUFFERED_LINES:
            self._write()

    def flush(self) -> None:
        """Make all records durable. A failure loses none: the next flush writes them again.

        Raises:
            OSError: The disk is full or failed.
        """
        self._write()
        error = None if self._file is None else self._file.flush(sync=True)
        if error is not None:
            raise error

    def _write(self) -> None:
        if self._buffer and self._file is not None:
            self._file.append(b"\n".join(self._buffer))  # unwritten lines stay queued; ``flush`` reports it
        self._buffer.clear()


def read_history(path: Path, *, skip_damaged: bool = False) -> dict[int, dict[str, Any]]:
    """Return the valid record of every step, in step order. Reads the whole file.

    Args:
        path: The file; a missing file has no records.
        skip_damaged: Skip damaged lines instead of raising.

    Raises:
        DataError: A line that is not void is damaged.
    """
    records: dict[int, dict[str, Any]] = {}
    steps: list[int] = []  # of the records, ascending
    last_step, damaged_line = 0, 0
    for number, line in enumerate(_complete_lines(path), start=1):
        value = _parse(line)
        if value is None:
            damaged_line = 0 if skip_damaged else damaged_line or number
        elif "resume" in value:
            while steps and steps[-1] > value["resume"]:
                del records[steps.pop()]
            damaged_line = 0 if value["resume"] <= last_step else damaged_line
        elif not damaged_line:
            last_step = value["step"]
            if last_step not in records:
                bisect.insort(steps, last_step)  # at the end, unless lines are missing
            records[last_step] = value
    if damaged_line:
        raise DataError("A line is damaged", where=f"{path}:{damaged_line}", hint="restore the file from a copy")
    return {step: records[step] for step in steps}


def last_record(path: Path, at_or_before: int) -> dict[str, Any] | None:
    """Return the valid record of the highest step up to ``at_or_before``, reading from the end of the file."""
    limit = at_or_before
    for line in _lines_backwards(path):
        value = _parse(line)
        if value is None:
            continue  # damaged
        if "resume" in value:
            limit = min(limit, value["resume"])
        elif value["step"] <= limit:
            return value
    return None


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
        key = "resume" if "resume" in value else "step"
        return value if type(value[key]) is int else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _complete_lines(path: Path) -> list[bytes]:
    raw = path.read_bytes() if path.exists() else b""
    return raw.split(b"\n")[:-1]  # a last line without a line end is torn


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """Yield complete lines from last to first, reading growing windows at the end of the file."""
    if not path.exists():
        return
    size_bytes = path.stat().st_size
    window_bytes, num_yielded = _FIRST_WINDOW_BYTES, 0
    while True:
        with path.open("rb") as file:
            file.seek(max(0, size_bytes - window_bytes))
            lines = file.read(window_bytes).split(b"\n")[:-1]
        whole = window_bytes >= size_bytes
        known = lines if whole else lines[1:]  # the first line of a window may be incomplete
        for line in reversed(known[: len(known) - num_yielded]):
            num_yielded += 1
            yield line
        if whole:
            return
        window_bytes *= 4
