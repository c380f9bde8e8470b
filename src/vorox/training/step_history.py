"""Crash-safe append-only log by step, used for ``chain.jsonl`` and ``evaluations.jsonl``.

A line is a JSON object with a ``step``, the number of finished steps, so line 1,000 and checkpoint 1,000 describe the
same state. A process that resumes at step S first writes the marker ``{"resume": S}``: earlier lines of later steps,
intact or damaged, are void. A torn last line is dropped. Lines are buffered; ``flush`` makes them durable, before the
checkpoint that depends on them.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vorox.core import atomic
from vorox.core.errors import DataError
from vorox.core.json_lines import LineFile

BUFFERED_LINES = 256
_FIRST_WINDOW_BYTES = 1 << 18


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
            self._buffer.append(atomic.canonical_json({"resume": resume_step}))

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record with a ``step``."""
        self._buffer.append(atomic.canonical_json(record))
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
