"""Hash-chained, append-only logs of JSON lines: the form of plans and cache manifests.

Every line has the hash of the previous line and a checksum of its own. A crash during an append may leave a torn last
line, which readers ignore and the next append truncates; damage anywhere else is an error. Writes go through
``core.files.atomic``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from vorox.core.errors import DataError
from vorox.core.files.atomic import append, canonical_json, truncate
from vorox.core.files.json_reader import open_regular, parse_json


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A position in a ``HashChainedLog``, at the end of a line, from which reading can continue.

    Attributes:
        num_entries: Number of lines up to here.
        line_start_bytes: Start offset of the last of them.
        end_bytes: Its end offset.
        head: Its SHA-256; empty at the start of the log.
    """

    num_entries: int = 0
    line_start_bytes: int = 0
    end_bytes: int = 0
    head: str = ""


class HashChainedLog:
    """An append-only file of JSON lines, each with the hash of the previous one.

    A line is ``{"body": {...}, "prev": "<sha256 of the previous line>", "xxh3": "<hash of body and prev>"}``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def _line(body: Mapping[str, Any], previous: str) -> bytes:
        payload = canonical_json({"body": body, "prev": previous})
        checksum = format(xxhash.xxh3_64_intdigest(payload), "016x")
        return payload[:-1] + b',"xxh3":"' + checksum.encode() + b'"}\n'

    def read(self) -> tuple[list[dict[str, Any]], str]:
        """Return all complete entries and the hash of the last line (empty for an empty log).

        Raises:
            DataError: A line before the last is damaged or the chain is broken.
        """
        bodies, position = self.read_after(LogPosition())
        return bodies, position.head

    def read_after(self, position: LogPosition) -> tuple[list[dict[str, Any]], LogPosition]:
        """Return the complete entries after a position, and the position after the last of them.

        Raises:
            DataError: The line before the position has changed, or a line before the last is damaged.
        """
        try:
            with open_regular(self.path) as file:
                file.seek(position.line_start_bytes)
                last = file.read(position.end_bytes - position.line_start_bytes)
                raw = file.read()
        except FileNotFoundError:
            last = raw = b""
        if hashlib.sha256(last).hexdigest() != position.head and position.head:
            raise self._damaged(position.num_entries)
        bodies: list[dict[str, Any]] = []
        offset, base = 0, position.end_bytes
        while offset < len(raw):
            end = raw.find(b"\n", offset)
            line = raw[offset : end + 1] if end >= 0 else raw[offset:]
            body = self._parse(line, position.head) if end >= 0 else None
            if body is None:
                if end < 0 or end + 1 == len(raw):
                    break  # a torn last line
                raise self._damaged(position.num_entries + 1)
            bodies.append(body)
            position = LogPosition(
                position.num_entries + 1, base + offset, base + end + 1, hashlib.sha256(line).hexdigest()
            )
            offset = end + 1
        return bodies, position

    def _damaged(self, line_number: int) -> DataError:
        return DataError(
            f"Line {line_number} is damaged or out of sequence", where=str(self.path),
            hint="restore the file from a copy; the lines after the damage cannot be trusted",
        )  # fmt: skip

    @classmethod
    def _parse(cls, line: bytes, previous: str) -> dict[str, Any] | None:
        try:
            value = parse_json(line, "")
            body = value["body"]
            return body if cls._line(body, previous) == line else None
        except (ValueError, KeyError, TypeError):
            return None

    def append(self, bodies: Iterable[Mapping[str, Any]], *, after: LogPosition | None = None) -> LogPosition:
        """Append entries durably and return the new end. The caller holds the lock of the file, if it has one.

        Args:
            bodies: The entries.
            after: A position that the caller has already read up to; nothing before it is read again.
        """
        _, position = self.read_after(after or LogPosition())
        if self.path.exists() and self.path.stat().st_size > position.end_bytes:
            truncate(self.path, position.end_bytes)
        lines: list[bytes] = []
        for body in bodies:
            line = self._line(body, position.head)
            start, end = position.end_bytes, position.end_bytes + len(line)
            position = LogPosition(position.num_entries + 1, start, end, hashlib.sha256(line).hexdigest())
            lines.append(line)
        if lines:
            append(self.path, b"".join(lines), sync=True)
        return position
