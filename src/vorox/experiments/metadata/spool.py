"""Spool of rows for an unavailable metadata database: ``metadata.spool`` in the run directory.

A line is a CRC-32 and then JSON of number, table and values. Lines are append-only; draining writes the newest row of
every key in one transaction and then removes the file, so a crash in between only repeats idempotent writes. Torn or
damaged lines are skipped and counted. Invariant: numbers increase across processes, and so order the rows of a key.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vorox.core import atomic
from vorox.core.run_layout import RunLayout
from vorox.experiments.metadata.tables import TABLES, Row

_COMPACT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Spooled:
    """The content of a spool.

    Attributes:
        rows: The newest row of every key, in order.
        last_number: The highest number.
        damaged_lines: Number of unreadable lines.
    """

    rows: tuple[Row, ...]
    last_number: int
    damaged_lines: int


class Spool:
    """The spool of a run, with one writing process at a time."""

    def __init__(self, run_directory: Path) -> None:
        self.path = RunLayout(run_directory).metadata_spool
        self.size_bytes = self.path.stat().st_size if self.path.exists() else 0
        self._compacted_bytes = 0

    def append(self, rows: Iterable[tuple[int, Row]], *, sync: bool) -> None:
        """Append numbered rows.

        Raises:
            OSError: The disk is full or fails.
        """
        data = b"".join(_line(number, row) for number, row in rows)
        if not data:
            return
        atomic.append(self.path, self._separator() + data, sync=sync, private=True)
        self.size_bytes = self.path.stat().st_size
        if self.size_bytes > max(_COMPACT_BYTES, 4 * self._compacted_bytes):
            self._compact()

    def read(self) -> Spooled:
        raw = self.path.read_bytes() if self.path.exists() else b""
        newest: dict[tuple[Any, ...], tuple[int, Row]] = {}
        last_number = damaged = 0
        for line in raw.split(b"\n"):
            if not line:
                continue
            entry = _parse(line)
            if entry is None:
                damaged += 1
                continue
            number, row = entry
            last_number = max(last_number, number)
            known = newest.get(row.key)
            if known is None or known[0] <= number:
                newest[row.key] = entry
        rows = tuple(row for _, row in sorted(newest.values(), key=lambda entry: entry[0]))
        return Spooled(rows, last_number, damaged)

    def clear(self) -> None:
        """Remove all rows, once they are in the database."""
        if self.path.exists():
            atomic.remove_file(self.path)
        self.size_bytes = self._compacted_bytes = 0

    def _separator(self) -> bytes:
        """Return a line end if a crash left the last line without one."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return b""
        with self.path.open("rb") as file:
            file.seek(-1, 2)
            return b"" if file.read(1) == b"\n" else b"\n"

    def _compact(self) -> None:
        """Keep only the newest row of every key, so that a long outage does not fill the disk."""
        kept = self.read()
        first = kept.last_number - len(kept.rows) + 1
        lines = (_line(first + index, row) for index, row in enumerate(kept.rows))
        atomic.write_file(self.path, b"".join(lines), private=True)
        self.size_bytes = self._compacted_bytes = self.path.stat().st_size


def _line(number: int, row: Row) -> bytes:
    body = atomic.canonical_json([number, row.table, dict(row.values)])
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _parse(line: bytes) -> tuple[int, Row] | None:
    checksum, _, body = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(body):
            return None
        number, table, values = json.loads(body)
        row = Row(table, values)
        return (number, row) if table in TABLES and len(row.key) > 1 else None
    except (ValueError, KeyError, TypeError):
        return None
