"""Append-only JSON lines: logs that never stop a run, and histories by step that a resume rewinds.

A log (``LineFile``: ``metrics.jsonl``, ``events.jsonl`` and others) is not needed to resume, so it never stops a run:
lines that cannot be written are kept in memory and written later. A crash tears at most the last line; the next writer
truncates it and readers skip it. Non-finite floats are written as ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, so
every line is strict JSON; ``as_number`` converts them.

A history (``chain.jsonl``, ``evaluations.jsonl``, ``metrics.jsonl``) is a log whose lines have a ``step``, the number
of finished steps, so line 1,000 and checkpoint 1,000 describe the same state. A process that resumes at step S first
writes a line with ``"resume_step": S``: earlier lines of later steps, intact or damaged, are void (``valid_until``).
``StepHistory`` buffers lines; ``flush`` makes them durable, before the checkpoint that depends on them.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import operator
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from vorox.core.errors import DataError
from vorox.core.files import atomic
from vorox.core.files.atomic import canonical_json
from vorox.core.files.json_reader import MAX_STEP, MalformedJson, is_step, open_regular, parse_line

MAX_PENDING_LINES = 100_000
_BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 24
_LINES_AT_A_PLACE = 4
BUFFERED_LINES = 256
_TAILS_BYTES = tuple(1 << bits for bits in (13, 16, 19, 22, 25))
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


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the complete lines of a file; a line that is too long for a record is skipped."""
    while line := file.readline(MAX_LINE_BYTES):
        if line.endswith(b"\n"):
            yield line
        elif len(line) == MAX_LINE_BYTES:
            _skip_line(file)


def _skip_line(file: BinaryIO) -> None:
    while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
        pass


def _open(path: Path) -> BinaryIO | None:
    """Open a file of lines; ``None`` if it does not exist or is not a regular file."""
    try:
        return open_regular(path)
    except (FileNotFoundError, MalformedJson):
        return None


def _open_or_fail(path: Path) -> BinaryIO:
    """Open a file of lines; raises ``OSError`` if it is not a regular file, where a FIFO would be waited for."""
    try:
        return open_regular(path)
    except MalformedJson as error:
        raise OSError(errno.EINVAL, error.what, str(path)) from error


def read_lines(path: Path, *, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield all complete records of a file, in order. Torn and damaged lines are skipped; the file may not exist.

    Args:
        path: The file.
        last_bytes: Read only this many bytes from the end.
    """
    file = _open(path)
    if file is None:
        return
    with file:
        if last_bytes is not None and (start := os.fstat(file.fileno()).st_size - last_bytes) > 0:
            file.seek(start - 1)
            _skip_line(file)  # the rest of a line that started before
        for line in _lines(file):
            if (record := parse_line(line)) is not None:
                yield record


def sample_lines(path: Path, num_places: int) -> Iterator[dict[str, Any]]:
    """Yield the records at ``num_places`` even distances in a file, in order, reading only those lines.

    At each place, the next ``_LINES_AT_A_PLACE`` lines are read: after a long line of a training step always comes the
    same short one, where a validation follows every step, so that single lines would never be those of the steps.
    """
    opened = _open(path)
    if opened is None:
        return
    with opened as file:
        size_bytes, end = os.fstat(file.fileno()).st_size, 0
        for number in range(num_places):
            start = number * size_bytes // num_places
            if start < end:
                continue  # the last lines that were read are longer than the distance
            file.seek(max(0, start - 1))
            if start:
                _skip_line(file)  # the rest of a line that started before
            for _ in range(_LINES_AT_A_PLACE):
                line = file.readline(MAX_LINE_BYTES)
                record = parse_line(line) if line.endswith(b"\n") else None
                if record is not None:
                    yield record
            end = file.tell()


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
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ELOOP}:  # a link to itself has no lines
                raise
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
        opened = _open(self.path) if self.unread_bytes else None
        if opened is None:
            return
        with opened as file:
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
        record = parse_line(line)
        if record is not None:
            yield record


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
    with _open_or_fail(path) as file:
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
            self._buffer.append(canonical_json({"resume_step": resume_step}))

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


def valid_until(resume_steps: Sequence[int]) -> list[int]:
    """Return the last valid step of the records before the first resume, between resumes, and after the last one.

    Args:
        resume_steps: The step of each resume in the file, in order.
    """
    return list(itertools.accumulate((MAX_STEP, *reversed(resume_steps)), min))[::-1]


def valid_records(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records with a step that no later resume voids, in the order of the file."""
    parts: list[list[dict[str, Any]]] = [[]]
    resume_steps: list[int] = []
    for record in records:
        if is_step(resume_step := record.get("resume_step")):
            resume_steps.append(resume_step)
            parts.append([])
        elif is_step(record.get("step")):
            parts[-1].append(record)
    limits = zip(parts, valid_until(resume_steps), strict=True)
    return [record for part, last_step in limits for record in part if record["step"] <= last_step]


def read_history(path: Path, *, skip_damaged: bool = False) -> dict[int, dict[str, Any]]:
    """Return the valid record of every step, in step order. Reads the whole file.

    Args:
        path: The file; a missing file has no records.
        skip_damaged: Skip damaged lines instead of raising.

    Raises:
        DataError: A line that is not void is damaged.
    """
    records: list[dict[str, Any]] = []
    last_step = 0
    for number, line in enumerate(_complete_lines(path), start=1):
        record = parse_line(line) or {}
        step = record.get("resume_step" if "resume_step" in record else "step")
        if is_step(step):
            last_step = step
            records.append(record)
        elif not skip_damaged:
            records.append(_DamagedLine(step=last_step + 1, number=number))
    found = valid_records(records)
    damaged = next((record for record in found if isinstance(record, _DamagedLine)), None)
    if damaged is not None:
        raise DataError("A line is damaged", where=f"{path}:{damaged['number']}", hint="restore the file from a copy")
    return {record["step"]: record for record in sorted(found, key=operator.itemgetter("step"))}


def lines_up_to(path: Path, last_step: int) -> bytes:
    """Return the valid records of the steps up to one, as the lines of a file of their own."""
    records = valid_records(read_lines(path))
    return b"".join(canonical_json(record) + b"\n" for record in records if record["step"] <= last_step)


class _DamagedLine(dict[str, Any]):
    """Stands for a line that cannot be read: of the step after the one before it, with its ``number`` in the file."""


def last_record(path: Path, at_or_before: int = MAX_STEP) -> dict[str, Any] | None:
    """Return the last valid record of a step up to ``at_or_before``; reads only as much of the file as needed."""
    for records in read_tails(path):
        known = [record for record in valid_records(records) if record["step"] <= at_or_before]
        if known:
            return known[-1]
    return None


def read_tails(path: Path) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the records at the end of a file: of ever more bytes, at last of the whole file."""
    for last_bytes in _TAILS_BYTES:
        yield read_lines(path, last_bytes=last_bytes)
        if not path.exists() or path.stat().st_size <= last_bytes:
            return
    yield read_lines(path)


def _complete_lines(path: Path) -> list[bytes]:
    try:
        with _open_or_fail(path) as file:
            raw = file.read()
    except FileNotFoundError:
        raw = b""
    return raw.split(b"\n")[:-1]  # a last line without a line end is torn
