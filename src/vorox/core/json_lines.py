"""Observations as lines of JSON: the form of ``metrics.jsonl`` and ``events.jsonl``, and of every other log.

Nothing here is needed to go on with a run, so nothing here may stop one: a line that cannot be written waits in memory
and goes with the next one. A crash tears at most the last line; the next writer cuts it off and readers skip it.
Floats that JSON does not have are written as the texts ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, so every line is
valid JSON for every parser; ``as_number`` turns them back.
"""

from __future__ import annotations

import json
import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from vorox.core import atomic

MAX_PENDING_LINES = 100_000
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class LineFile:
    """The writing end of a log; one process writes at a time, from any of its threads.

    Args:
        path: The file; made by the first line, together with its directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped_lines = 0
        self._pending: deque[bytes] = deque()
        self._size_bytes: int | None = None
        self._failed = False
        self._lock = threading.RLock()

    def append(self, line: bytes) -> OSError | None:
        """Write one line (without its end). Returns what went wrong, if anything; the line then waits."""
        with self._lock:
            self._pending.append(line + b"\n")
            while len(self._pending) > MAX_PENDING_LINES:
                self._pending.popleft()
                self.dropped_lines += 1
            return self.flush()

    def flush(self, *, sync: bool = False) -> OSError | None:
        """Write what waits, durably if ``sync``. Returns what went wrong, if anything."""
        with self._lock:
            return self._flush(sync)

    def _flush(self, sync: bool) -> OSError | None:
        data = b"".join(self._pending)
        try:
            if self._size_bytes is None:
                atomic.make_directory(self.path.parent)
                self._size_bytes = _cut_torn_line(self.path)
            if data or (sync and self.path.exists()):
                if self.path.exists() and self.path.stat().st_size > self._size_bytes and self._failed:
                    atomic.truncate(self.path, self._size_bytes)  # what a failed write left
                self._failed = True
                atomic.append(self.path, data, sync=sync)
        except OSError as error:
            return error
        self._failed = False
        self._size_bytes = (self._size_bytes or 0) + len(data)
        self._pending.clear()
        return None


def encode(record: Mapping[str, Any]) -> bytes:
    """One record as a line of ASCII JSON in the order of its keys, without line end."""
    text = json.dumps(finite_json(record), separators=(",", ":"), allow_nan=False, default=str)
    return text.encode("ascii")


def read_lines(path: Path, *, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Every complete record of a file, in order. Torn and damaged lines are skipped; no file is no records.

    Args:
        path: The file.
        last_bytes: Read only so much of its end.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        if last_bytes is not None and (start := path.stat().st_size - last_bytes) > 0:
            file.seek(start - 1)
            file.readline()  # the rest of a line whose beginning is left out
        for line in file:
            try:
                value = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                continue
            if isinstance(value, dict):
                yield cast("dict[str, Any]", value)


def as_number(value: Any) -> float | None:
    """The number that ``encode`` was given, or ``None`` if the value is none."""
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


def _cut_torn_line(path: Path) -> int:
    """Cut what follows the last line end; returns the size that is left."""
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
