"""What a cache is built from: the source's files in ``FILES.jsonl`` and its units of work in ``UNITS.jsonl``.

Both are append-only, hash-chained lists whose indices are valid for ever once the manifest has planned them: documents
name their file by its index and rows their unit. A list that is asked for must begin with what is planned; what comes
after is appended. A file may move (same content under another uri: the later name counts), it may not change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vorox.core.atomic import canonical_json
from vorox.core.chained_log import HashChainedLog, LogPosition
from vorox.core.errors import DataError
from vorox.data.cache.manifest import Manifest
from vorox.data.documents import SourceFile, Unit, UnitSpan

FILES_NAME = "FILES.jsonl"
UNITS_NAME = "UNITS.jsonl"
_ENTRIES_PER_LINE = 1000
_HINT = "the source was changed after the cache was built: restore it, or build into another data.cache.directory"


def read_files(directory: Path) -> list[SourceFile]:
    """The files that the cache's documents point to."""
    files: list[SourceFile] = []
    for body in HashChainedLog(directory / FILES_NAME).read()[0]:
        first = int(body["first"])
        entries = [SourceFile(uri, int(size_bytes), version) for uri, size_bytes, version in body["files"]]
        if "void_from" in body:
            del files[int(body["void_from"]) :]
        files[first : first + len(entries)] = entries
    return files


def read_units(directory: Path) -> list[Unit]:
    """The units that were planned, ``unit_id`` being the index."""
    return UnitLog(directory).units


class UnitLog:
    """The list of units, read and written on from where it was left.

    Attributes:
        units: What is listed; what is planned of it counts.
    """

    def __init__(self, directory: Path) -> None:
        self.units: list[Unit] = []
        self._log, self._position = HashChainedLog(directory / UNITS_NAME), LogPosition()
        self.refresh()

    def refresh(self) -> None:
        """See what was added."""
        bodies, self._position = self._log.read_after(self._position)
        for body in bodies:
            del self.units[int(body["first"]) :]
            for spans in body["units"]:
                self.units.append(Unit(len(self.units), tuple(UnitSpan(*span) for span in spans)))

    def append(self, first: int, units: Sequence[Unit]) -> None:
        """List units from number ``first`` on, durably. The caller holds the cache's lock."""
        self._log.append(_unit_bodies(first, units), after=self._position)
        self.refresh()


def _unit_bodies(first: int, units: Sequence[Unit]) -> list[dict[str, Any]]:
    starts = range(0, len(units), _ENTRIES_PER_LINE)
    return [
        {"first": first + at, "units": [unit_spans(unit) for unit in units[at : at + _ENTRIES_PER_LINE]]}
        for at in starts
    ]


def planned(directory: Path, manifest: Manifest) -> tuple[list[SourceFile], list[Unit]]:
    """The files and units that count. What is listed beyond them was left by a build that died before it planned it."""
    files, units = read_files(directory), read_units(directory)
    num_files = manifest.planned_files or (len(files) if manifest.planned_units else 0)
    return files[:num_files], units[: manifest.planned_units]


def is_recorded(directory: Path, manifest: Manifest, files: Sequence[SourceFile], units: Sequence[Unit]) -> bool:
    """Whether the cache lists exactly these files and units.

    Raises:
        DataError: It lists something that contradicts them.
    """
    known_files, known_units = planned(directory, manifest)
    _check_files(directory, known_files, files)
    check_units(directory, known_units, units)
    return known_files == list(files) and len(known_units) == len(units)


def record(directory: Path, manifest: Manifest, files: Sequence[SourceFile], units: Sequence[Unit]) -> None:
    """Bring both lists up to the given ones, durably. The caller holds the cache's lock.

    Raises:
        DataError: What is planned contradicts them.
    """
    known_files, known_units = planned(directory, manifest)
    _check_files(directory, known_files, files)
    check_units(directory, known_units, units)
    listed_files, listed_units = read_files(directory), read_units(directory)
    if listed_files != list(files):
        runs = [(index, index + 1) for index, known in enumerate(known_files) if known != files[index]]  # moved
        start = len(known_files)
        runs += [(index, index + _ENTRIES_PER_LINE) for index in range(start, len(files), _ENTRIES_PER_LINE)]
        bodies: list[dict[str, Any]] = [
            {"first": first, "files": [[file.uri, file.size_bytes, file.version] for file in files[first:last]]}
            for first, last in runs
        ]
        if len(listed_files) > start:
            bodies.insert(0, {"first": start, "void_from": start, "files": []})
        HashChainedLog(directory / FILES_NAME).append(bodies)
    if listed_units != list(units):
        HashChainedLog(directory / UNITS_NAME).append(_unit_bodies(len(known_units), units[len(known_units) :]))


def unit_spans(unit: Unit) -> list[list[int]]:
    return [[span.file_index, span.start_byte, span.end_byte, span.first_ordinal] for span in unit.spans]


def source_set_digest(unit: Unit, files: Sequence[SourceFile]) -> bytes:
    """SHA-256 over the bytes that a unit is made of: its spans and the content of their files, wherever they lie."""
    pinned = [[files[span.file_index].size_bytes, files[span.file_index].version] for span in unit.spans]
    return hashlib.sha256(canonical_json([unit_spans(unit), pinned])).digest()


def _check_files(directory: Path, known: Sequence[SourceFile], files: Sequence[SourceFile]) -> None:
    if len(known) > len(files):
        missing = known[len(files)]
        raise DataError(
            f"the source has {len(files):,} files, the cache was built from {len(known):,}; missing: {missing.uri}",
            where=str(directory), hint=_HINT,
        )  # fmt: skip
    for recorded, file in zip(known, files, strict=False):
        if (recorded.size_bytes, recorded.version) != (file.size_bytes, file.version):
            raise DataError(
                f"{file.uri} ({file.size_bytes:,} bytes, version {file.version}) is not what the cache was built from: "
                f"{recorded.uri} ({recorded.size_bytes:,} bytes, version {recorded.version})",
                where=str(directory), hint=_HINT,
            )  # fmt: skip


def check_units(directory: Path, known: Sequence[Unit], units: Sequence[Unit]) -> None:
    """Refuse units that do not begin with those that are known.

    Raises:
        DataError: Naming the first that differs.
    """
    if list(known) != list(units[: len(known)]):
        first = next(index for index, unit in enumerate(known) if index >= len(units) or unit != units[index])
        raise DataError(
            f"unit {first} is no longer cut as it was when the cache was built ({len(known):,} units then, "
            f"{len(units):,} now)",
            where=str(directory), hint=_HINT,
        )  # fmt: skip
