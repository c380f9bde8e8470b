"""The manifest of a cache: a hash-chained log of units and chunks, with a snapshot for fast opening.

``manifest/log.jsonl`` has one entry per event:

    {"planned": 812, "files": 90, "recipe": "<sha256>"}       812 units of 90 files are planned, built or not; with
                                                              "cutting": <bytes>, more units will follow
    {"add": [chunk, ...], "done": [unit statistics, ...]}     complete units with all their chunks (and, in
                                                              "transforms", the counts of each transform)
    {"erased": [document, ...]}                               documents that no chunk may hold: unit, number of the
                                                              file in the unit, ordinal

A unit is committed when its entry is complete; its chunks are durable before the entry is written. A later entry for
the same chunk (a repair) may change the file but not the content. ``manifest/snapshot.bin`` holds the state after one
line of the log and can be deleted at any time. Invariants: chunks are ordered by (unit, part), independent of commit
order; a row's address (unit, part, row) never changes; missing units are those planned and not committed. The log names
chunks by number, never by path, and belongs to one recipe. Any number of processes may append, each under ``LOCK``; the
number of lines is the cache's generation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import struct
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.core.files.atomic import write_file
from vorox.core.files.chained_log import HashChainedLog, LogPosition
from vorox.core.files.file_holder import FileLock
from vorox.data.cache.files.format import ChunkRecord

LOG_NAME = "manifest/log.jsonl"
SNAPSHOT_NAME = "manifest/snapshot.bin"
LOCK_NAME = "LOCK"
SNAPSHOT_INTERVAL_ENTRIES = 1024

_SNAPSHOT_MAGIC = b"VXSNAP5\n"
_ERASED_SNAPSHOT_MAGIC = b"VXSNAP6\n"
"""Of a cache with erased documents, which follow the units: a version that does not know them reads the log."""
# magic, planned units, planned files, estimated bytes, whether more units follow, recipe, log position (entries, line
# start, line end, head), chunks, units
_SNAPSHOT = struct.Struct("<8s QQQ? 32s QQQ 32s QQ")
_LARGEST_UNIT = (1 << 48) - 1
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class UnitStatistics:
    """Counts of a unit.

    Attributes:
        documents: Documents read.
        text_bytes: UTF-8 bytes of their texts.
        tokens: Their tokens including end-of-text tokens, each counted once.
        quarantined: Quarantined records.
        targets: Tokens of their rows that are trained on.
    """

    unit: int
    documents: int
    text_bytes: int
    tokens: int
    quarantined: int
    targets: int


_CHUNK_FIELDS = [field.name for field in dataclasses.fields(ChunkRecord)]
_UNIT_FIELDS = [field.name for field in dataclasses.fields(UnitStatistics)]
_HASH_FIELDS = frozenset({"content", "file_sha256"})
_KINDS = {"planned", "files", "recipe", "cutting", "add", "done", "erased"}
_CHUNK = np.dtype([(name, "V32" if name in _HASH_FIELDS else "<u8") for name in _CHUNK_FIELDS])
_UNIT = np.dtype([(name, "<u8") for name in _UNIT_FIELDS])
_ERASED_FIELDS = ["unit", "file", "ordinal"]
_ERASED = struct.Struct("<QQQ")

Records = npt.NDArray[np.void]


@dataclass(frozen=True)
class Manifest:
    """The state of a cache after a line of its log.

    Attributes:
        planned_units: Number of planned units, built or not.
        chunks: One record per chunk, sorted by (unit, part).
        units: One record per committed unit, sorted.
        position: The last log line included.
        recipe: Digest of the recipe of the log; empty while nothing is planned.
        planned_files: Number of source files of the planned units.
        units_final: Whether all units are planned; else more follow on request.
        estimated_bytes: Estimated source bytes of all units when the first were planned; 0 if all were planned
            together.
        erased: The erased documents: unit, number of the file in the unit, and ordinal.
    """

    planned_units: int
    chunks: Records
    units: Records
    position: LogPosition
    recipe: str = ""
    planned_files: int = 0
    units_final: bool = True
    estimated_bytes: int = 0
    erased: frozenset[tuple[int, int, int]] = frozenset()

    @classmethod
    def empty(cls) -> Manifest:
        """Return the state before the first line."""
        return cls(0, np.zeros(0, _CHUNK), np.zeros(0, _UNIT), LogPosition())

    @classmethod
    def open(cls, directory: Path) -> Manifest:
        """Read the snapshot and the log entries after it.

        Raises:
            DataError: The log is damaged before its last line, or inconsistent.
        """
        try:
            return _read_snapshot(directory).refreshed(directory)
        except (OSError, ValueError, DataError):  # missing, damaged or of another log; the log is complete
            return cls.read_log(directory)

    @classmethod
    def read_log(cls, directory: Path) -> Manifest:
        """Read the whole log, checking every line."""
        return cls.empty().refreshed(directory)

    def refreshed(self, directory: Path) -> Manifest:
        """Return the current state, with the entries append since."""
        while True:
            before = _signature(directory / LOG_NAME)
            try:
                return self._refreshed(directory)
            except DataError:
                if _signature(directory / LOG_NAME) != before:
                    continue  # another process replaced a torn line during the read
                if self.position.num_entries and self._is_part_of(rebuilt := Manifest.read_log(directory)):
                    return rebuilt  # the cache was rebuilt, in a different commit order
                raise

    def _is_part_of(self, other: Manifest) -> bool:
        return self.recipe == other.recipe and self.contents <= other.contents

    @cached_property
    def contents(self) -> set[tuple[int, int, bytes]]:
        """Address and content digest of every chunk."""
        return set(self.chunks[["unit", "part", "content"]].tolist())

    def _refreshed(self, directory: Path) -> Manifest:
        path = directory / LOG_NAME
        bodies, position = HashChainedLog(path).read_after(self.position)
        if not bodies:
            return self
        unknown = sorted({kind for body in bodies for kind in body} - _KINDS)
        if unknown:
            raise DataError(
                f"The manifest has entries of unknown kinds: {', '.join(unknown)}",
                where=str(path), hint="read the cache with the version that wrote it",
            )  # fmt: skip
        recipes = {str(body["recipe"]) for body in bodies if "recipe" in body} | ({self.recipe} - {""})
        if len(recipes) > 1:
            raise _inconsistent(path, f"it names several recipes: {', '.join(sorted(recipes))}")
        try:
            chunks = [_parse_chunk(chunk) for body in bodies for chunk in body.get("add", ())]
            units = [_parse_unit(unit) for body in bodies for unit in body.get("done", ())]
            erased = [_parse_erased(one) for body in bodies for one in body.get("erased", ())]
            planned = max(
                [self.planned_units, *(_parse_number(body["planned"]) for body in bodies if "planned" in body)]
            )
            files = max([self.planned_files, *(_parse_number(body["files"]) for body in bodies if "files" in body)])
            plans = [body for body in bodies if "planned" in body]
            estimates = [self.estimated_bytes, *(_parse_number(body["cutting"]) for body in plans if "cutting" in body)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _inconsistent(path, f"an entry is malformed: {error}") from error
        outside = [row[0] for row in (*chunks, *units, *erased) if row[0] >= planned]
        if outside:
            raise _inconsistent(path, f"it names unit {outside[0]}, but only {planned:,} units are planned")
        return Manifest(
            planned,
            _merge_chunks(directory, self.chunks, np.array(chunks, _CHUNK)),
            _merge(self.units, np.array(units, _UNIT), ["unit"])[0],
            position,
            next(iter(recipes), ""),
            files,
            "cutting" not in plans[-1] if plans else self.units_final,
            next((estimate for estimate in estimates if estimate), 0),
            self.erased.union(erased),
        )

    def check_recipe(self, directory: Path, recipe: str) -> None:
        """Refuse the manifest of another cache.

        Raises:
            DataError: It names a different recipe.
        """
        if self.recipe not in {"", recipe}:
            raise DataError(
                f"The manifest belongs to another cache: its recipe is {self.recipe}, expected {recipe}",
                where=str(directory / LOG_NAME),
                hint="restore the cache's own manifest, or remove the directory and build the cache again",
            )

    @contextlib.contextmanager
    def exclusive(self, directory: Path) -> Generator[Manifest]:
        """Hold the write lock and yield the current state; ``append`` adds entries to it."""
        with FileLock(directory / LOCK_NAME):
            yield self.refreshed(directory)

    def append(self, directory: Path, entries: Sequence[Mapping[str, Any]]) -> Manifest:
        """Append entries durably and return the new state. The caller holds ``exclusive``."""
        HashChainedLog(directory / LOG_NAME).append(entries, after=self.position)
        return self.refreshed(directory)

    def commit(self, directory: Path, entries: Sequence[Mapping[str, Any]]) -> Manifest:
        """Append entries durably under the lock and return the new state."""
        with self.exclusive(directory) as manifest:
            return manifest.append(directory, entries)

    @property
    def generation(self) -> int:
        """Number of changes of the cache so far."""
        return self.position.num_entries

    def write_snapshot(self, directory: Path) -> None:
        position = self.position
        header = _SNAPSHOT.pack(
            *(_ERASED_SNAPSHOT_MAGIC if len(self.erased) else _SNAPSHOT_MAGIC, self.planned_units, self.planned_files),
            *(self.estimated_bytes, not self.units_final),
            bytes.fromhex(self.recipe) or bytes(32),
            *(position.num_entries, position.line_start_bytes),
            *(position.end_bytes, bytes.fromhex(position.head), len(self.chunks), len(self.units)),
        )
        body = header + self.chunks.tobytes() + self.units.tobytes()
        body += np.array(sorted(self.erased), "<u8").tobytes()
        write_file(directory / SNAPSHOT_NAME, body + hashlib.sha256(body).digest())

    @cached_property
    def unit_row_starts(self) -> npt.NDArray[np.int64]:
        """First row of each unit, then the total number of rows; missing units have no rows."""
        starts = np.zeros(self.planned_units + 1, np.int64)
        np.add.at(starts, self.chunks["unit"].astype(np.int64) + 1, self.chunks["rows"].astype(np.int64))
        return np.cumsum(starts)

    @cached_property
    def chunk_row_starts(self) -> npt.NDArray[np.int64]:
        """First row of each chunk, then the total number of rows."""
        return np.append(np.int64(0), np.cumsum(self.chunks["rows"].astype(np.int64)))

    @property
    def num_rows(self) -> int:
        return int(self.chunk_row_starts[-1])

    def missing_units(self, first: int = 0, last: int | None = None) -> npt.NDArray[np.int64]:
        """Return the units of ``[first, last)`` that are planned and not committed."""
        done = np.zeros(self.planned_units, np.bool_)
        done[self.units["unit"].astype(np.int64)] = True
        end = self.planned_units if last is None else last
        return first + np.flatnonzero(~done[first:end])

    def has_unit(self, unit: int) -> bool:
        """Whether a unit is committed."""
        place = int(np.searchsorted(self.units["unit"], unit))
        return place < len(self.units) and int(self.units["unit"][place]) == unit

    def erased_in(self, unit: int) -> frozenset[tuple[int, int]]:
        """Return the erased documents of a unit: number of the file in the unit, and ordinal."""
        return self._erased_by_unit.get(unit, frozenset())

    @cached_property
    def _erased_by_unit(self) -> dict[int, frozenset[tuple[int, int]]]:
        found: dict[int, set[tuple[int, int]]] = {}
        for unit, file, ordinal in self.erased:
            found.setdefault(unit, set()).add((file, ordinal))
        return {unit: frozenset(documents) for unit, documents in found.items()}

    def content_digest(self, first: int, last: int) -> str:
        """Return the SHA-256 of the content digests of the units ``[first, last)``, in unit order."""
        low, high = np.searchsorted(self.chunks["unit"], [first, last])
        return hashlib.sha256(self.chunks["content"][low:high].tobytes()).hexdigest()

    def chunk(self, index: int) -> ChunkRecord:
        """Return the record at an index of ``chunks``."""
        row: dict[str, Any] = dict(zip(_CHUNK_FIELDS, self.chunks[index].item(), strict=True))
        return ChunkRecord(**{**row, "content": row["content"].hex(), "file_sha256": row["file_sha256"].hex()})

    def unit_chunks(self, unit: int) -> list[ChunkRecord]:
        low, high = np.searchsorted(self.chunks["unit"], [unit, unit + 1])
        return [self.chunk(index) for index in range(low, high)]


def unit_entry(
    statistics: UnitStatistics, chunks: Iterable[ChunkRecord], transforms: Mapping[str, Sequence[int]] | None = None
) -> dict[str, Any]:
    """Return the log entry that commits a unit, with the counts of each transform."""
    done = dataclasses.asdict(statistics) | ({"transforms": transforms} if transforms else {})
    return {"add": [dataclasses.asdict(chunk) for chunk in chunks], "done": [done]}


def planned_entry(
    num_units: int, recipe: str = "", num_files: int = 0, *, estimated_bytes: int | None = None
) -> dict[str, Any]:
    """Return the log entry that plans units: their number, files and recipe.

    ``estimated_bytes`` marks the plan as incomplete: more units follow, and this estimates the source bytes of all.
    """
    entry: dict[str, Any] = {"planned": num_units}
    if estimated_bytes is not None:
        entry["cutting"] = estimated_bytes
    return entry | ({"recipe": recipe} if recipe else {}) | ({"files": num_files} if num_files else {})


def erased_entry(documents: Iterable[tuple[int, int, int]]) -> dict[str, Any]:
    """Return the log entry that names erased documents: unit, number of the file in the unit, and ordinal of each."""
    return {"erased": [dict(zip(_ERASED_FIELDS, document, strict=True)) for document in documents]}


def chunk_path(directory: Path, unit: int, part: int) -> Path:
    """Return the path of a chunk; a directory holds every 256th unit."""
    return directory / f"chunks/{unit & 0xFF:02x}/u{unit:09d}-{part}.psc"


def _signature(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def check_contained(directory: Path, path: Path) -> None:
    """Refuse a path that a symbolic link leads out of the cache.

    Raises:
        DataError: ``path`` is, or is below, such a link.
    """
    place = str(directory)
    for name in path.parts[len(directory.parts) :]:
        place = f"{place}{os.sep}{name}"
        if os.path.islink(place):  # noqa: PTH114 - runs for every chunk; creating a Path costs more than the check
            break
    else:
        return
    real = os.path.realpath(path)
    if os.path.commonpath([real, os.path.realpath(directory)]) != os.path.realpath(directory):
        raise DataError(
            f"A symbolic link leads out of the cache, to {real}", where=str(path),
            hint="remove the link, then run `vorox data fill` with the same configuration to rebuild its content",
        )  # fmt: skip


def _parse_number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST_UNIT:
        raise ValueError(f"{value!r} is out of range")
    return value


def _parse_hash(value: object) -> bytes:
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise ValueError(f"{value!r} is not a SHA-256 hash")
    return bytes.fromhex(value)


def _parse_chunk(chunk: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((_parse_hash if name in _HASH_FIELDS else _parse_number)(chunk[name]) for name in _CHUNK_FIELDS)


def _parse_unit(unit: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(_parse_number(unit[name]) for name in _UNIT_FIELDS)


def _parse_erased(document: Mapping[str, Any]) -> tuple[int, int, int]:
    unit, file, ordinal = (_parse_number(document[name]) for name in _ERASED_FIELDS)
    return unit, file, ordinal


def _inconsistent(path: Path, what: str) -> DataError:
    return DataError(
        f"The manifest is inconsistent: {what}", where=str(path),
        hint="restore the file from a copy, or run `vorox data build --force-rebuild` with the same configuration",
    )  # fmt: skip


def _merge(old: Records, new: Records, key: list[str]) -> tuple[Records, Records, Records]:
    """Merge by key, keeping the newer record; also return the replaced records and their replacements."""
    both = np.concatenate([old, new])
    both = both[np.lexsort([np.arange(len(both)), *(both[name] for name in reversed(key))])]
    replaced = np.zeros(len(both), np.bool_)
    replaced[:-1] = np.all([both[name][1:] == both[name][:-1] for name in key], axis=0)
    return both[~replaced], both[replaced], both[np.flatnonzero(replaced) + 1]


def _merge_chunks(directory: Path, old: Records, new: Records) -> Records:
    merged, before, after = _merge(old, new, ["unit", "part"])
    if before["content"].tobytes() != after["content"].tobytes():
        raise DataError(
            "The manifest has two different contents for one chunk",
            where=str(directory / LOG_NAME),
            hint="build the cache again in another data.cache.directory",
        )
    return merged


def _read_snapshot(directory: Path) -> Manifest:
    raw = (directory / SNAPSHOT_NAME).read_bytes()
    body = memoryview(raw)[:-32]
    if hashlib.sha256(body).digest() != raw[-32:]:
        raise ValueError("the snapshot is damaged")
    magic, planned, files, estimate, partial, recipe, *place, head, num_chunks, num_units = _SNAPSHOT.unpack_from(body)
    if magic not in {_SNAPSHOT_MAGIC, _ERASED_SNAPSHOT_MAGIC}:
        raise ValueError("the snapshot has another version")
    chunks = np.frombuffer(body, _CHUNK, num_chunks, _SNAPSHOT.size)
    units = np.frombuffer(body, _UNIT, num_units, _SNAPSHOT.size + chunks.nbytes)
    entries, line_start, line_end = place
    rest = body[_SNAPSHOT.size + chunks.nbytes + units.nbytes :]
    erased: list[tuple[Any, ...]] = list(_ERASED.iter_unpack(rest)) if magic == _ERASED_SNAPSHOT_MAGIC else []
    position = LogPosition(entries, line_start, line_end, head.hex())
    digest = recipe.hex() if any(recipe) else ""
    return Manifest(
        planned,
        chunks,
        units,
        position,
        digest,
        files,
        not partial,
        estimate,
        frozenset((unit, file, ordinal) for unit, file, ordinal in erased),
    )
