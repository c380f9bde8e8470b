"""Append-only records by step that survive kill -9: the form of ``chain.jsonl`` and ``evaluations.jsonl``.

A line is a JSON object with a ``step``: the number of finished steps when it was written, so that line 1,000 and
checkpoint 1,000 speak of the same state. A process that resumes at step S first writes the marker ``{"resume": S}``:
what stands above it for later steps, and what a power cut made of it, belongs to work that was lost and is void. A
torn last line is cut off.
Lines are buffered; ``flush`` makes them durable and goes before the checkpoint that relies on them.
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
    """The writing end of one file.

    Args:
        path: The file, made by the first flush; ``None`` where another process of the run writes it.
        resume_step: Finished steps of the state that this process starts from.
    """

    def __init__(self, path: Path | None, resume_step: int) -> None:
        self._file = None if path is None else LineFile(path)
        self._buffer: list[bytes] = []
        if path is not None and path.exists():
            self._buffer.append(atomic.canonical_json({"resume": resume_step}))

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record, ``step`` among its keys."""
        self._buffer.append(atomic.canonical_json(record))
        if len(self._buffer) >= BUFFERED_LINES:
            self._write()

    def flush(self) -> None:
        """Make everything durable. After a failure nothing is lost: the next flush writes it again.

        Raises:
            OSError: The disk is full or gone.
        """
        self._write()
        error = None if self._file is None else self._file.flush(sync=True)
        if error is not None:
            raise error

    def _write(self) -> None:
        if self._buffer and self._file is not None:
            self._file.append(b"\n".join(self._buffer))  # what cannot be written now waits; ``flush`` will say so
        self._buffer.clear()


def read_history(path: Path, *, skip_damaged: bool = False) -> dict[int, dict[str, Any]]:
    """Return the valid record of every step, in step order. Takes time in proportion to the file.

    Args:
        path: The file; none is no records.
        skip_damaged: Leave out damaged lines instead of refusing them.

    Raises:
        DataError: A line that counts is not a record.
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
        raise DataError("a line is damaged", where=f"{path}:{damaged_line}", hint="restore the file from a copy")
    return {step: records[step] for step in steps}


def last_record(path: Path, at_or_before: int) -> dict[str, Any] | None:
    """The valid record of the highest step up to ``at_or_before``, found from the end of the file."""
    limit = at_or_before
    for line in _lines_backwards(path):
        value = _parse(line)
        if value is None:
            continue  # after the record that is looked for, or it will be missed
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
    return raw.split(b"\n")[:-1]  # what follows the last line end is torn


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """Complete lines from the last to the first, reading ever larger pieces of the end of the file."""
    if not path.exists():
        return
    size_bytes = path.stat().st_size
    window_bytes, given = _FIRST_WINDOW_BYTES, 0
    while True:
        with path.open("rb") as file:
            file.seek(max(0, size_bytes - window_bytes))
            lines = file.read(window_bytes).split(b"\n")[:-1]
        whole = window_bytes >= size_bytes
        known = lines if whole else lines[1:]  # the first line of a piece may lack its beginning
        for line in reversed(known[: len(known) - given]):
            given += 1
            yield line
        if whole:
            return
        window_bytes *= 4
