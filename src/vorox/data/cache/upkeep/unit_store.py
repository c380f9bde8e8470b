"""The built units of all caches below a root, by key, so that no text is tokenized twice.

A unit's key covers everything that its rows are a function of: the recipe, its ranges of records, the versions of their
files, and the duplicates removed from it. ``units/<key>.json`` records a built unit, ``units/<key>-<part>.psc`` are its
chunks: hard links to those of the cache that built it. A cache that plans a unit of the same key links them in.

Every cache keeps its own name of every chunk, so nothing that happens to the store or to another cache can take rows
from it. A chunk with one link is in no cache: garbage, without a list of users to keep. On file systems without hard
links the store only records which cache has the unit, and chunks are copied.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vorox.core.errors import DataError
from vorox.core.files.atomic import (
    canonical_json,
    discard_staged,
    make_directory,
    remove_file,
    rename,
    stage_file,
    sweep_temporary,
    temporary_name,
    write_file,
)
from vorox.core.files.json_reader import read_json
from vorox.data.cache.files.chunk import Chunk
from vorox.data.cache.files.format import ChunkOrigin, ChunkRecord
from vorox.data.cache.files.manifest import UnitStatistics, chunk_path
from vorox.data.cache.units.unit_builder import BuiltUnit
from vorox.data.cache.upkeep.replacement import REBUILD_PREFIX
from vorox.data.documents import BadRecord, Unit
from vorox.data.images.reading import image_path

DIRECTORY_NAME = "units"
_FORMAT = "vorox-unit/1"


def is_stored(path: Path) -> bool:
    """Whether a file is one of a unit store."""
    return DIRECTORY_NAME in {folder.name for folder in (path.parent.parent, path.parent.parent.parent)}


@dataclass(frozen=True, slots=True)
class StoredUnit:
    """A unit in the store; its files are numbered within the unit.

    Attributes:
        chunks: The records of its chunks, as of unit 0 of a cache.
        statistics: Its counts, as of unit 0.
        bad_records: Unreadable records.
        records_read: Records read, including bad and removed ones.
        transforms: Counts of each transform.
        images: Hashes of its images.
        cache: The cache that built it, and its number there.
    """

    chunks: tuple[ChunkRecord, ...]
    statistics: UnitStatistics
    bad_records: tuple[BadRecord, ...]
    records_read: int
    transforms: Mapping[str, Sequence[int]]
    images: tuple[int, ...]
    cache: tuple[str, int]

    def records(self, unit: int) -> list[ChunkRecord]:
        """Return the records of its chunks in a cache where it has the number ``unit``."""
        return [replace(record, unit=unit) for record in self.chunks]

    def bad_records_of(self, unit: Unit) -> tuple[BadRecord, ...]:
        """Return its unreadable records in a cache."""
        indexes = unit.file_indexes
        return tuple(replace(record, file_index=indexes[record.file_index]) for record in self.bad_records)


class UnitStore:
    """The store of the caches below a root.

    Args:
        root: The root of the caches.
        serves: Whether units are taken from it; a forced rebuild only replaces them.
    """

    def __init__(self, root: Path, *, serves: bool = True) -> None:
        self.root, self.directory, self.serves = root, root / DIRECTORY_NAME, serves

    @classmethod
    def of_cache(cls, directory: Path) -> UnitStore | None:
        """Return the store that a cache shares with those beside it; ``None`` if their folder is no root."""
        if not (directory.parent / DIRECTORY_NAME).is_dir():
            return None
        return cls(directory.parent, serves=not directory.name.startswith(REBUILD_PREFIX))

    def has(self, key: str) -> bool:
        """Whether the store may have a unit."""
        return self.serves and self._record_path(key).exists()

    def find(self, key: str, origin: ChunkOrigin) -> StoredUnit | None:
        """Return a unit whose chunks are on disk and are what its record says; ``None`` if there is none.

        Args:
            key: Its key.
            origin: The origin of its chunks, of any part.
        """
        if not self.serves:
            return None
        try:
            found = _decode(read_json(self._record_path(key)), key)
            for record in found.chunks:
                chunk = Chunk.open(self._chunk(key, found, record.part))
                expected = replace(origin, part=record.part, num_parts=len(found.chunks))
                if not chunk.matches(record) or chunk.origin != expected or chunk.is_erased:
                    return None
        except (OSError, ValueError, KeyError, TypeError, DataError):
            return None  # lost or damaged: the unit is built again
        return found

    def is_intact(self, key: str, found: StoredUnit) -> bool:
        """Whether every byte of the chunks of a unit is intact."""
        try:
            for record in found.chunks:
                Chunk.open(self._chunk(key, found, record.part)).verify()
        except DataError:
            return False
        return True

    def stage(self, key: str, found: StoredUnit, directory: Path, unit: int) -> Iterator[tuple[Path, Path]]:
        """Yield temporary and final name of each chunk in a cache, durable under the temporary one.

        Raises:
            OSError: A file cannot be linked or copied.
        """
        for digest in found.images:
            path = image_path(directory, digest)
            if not path.exists():
                make_directory(path.parent)
                self._place(self._image(found, digest), path)
        for record in found.chunks:
            path = chunk_path(directory, unit, record.part)
            make_directory(path.parent)
            temporary = _linked(self._chunk(key, found, record.part), path)
            assert temporary is not None, "a chunk that cannot be linked is copied"
            yield temporary, path

    def publish(self, key: str, directory: Path, built: BuiltUnit, *, replace_unit: bool = False) -> None:
        """Add a unit that a cache has committed. Without room or permission, other caches build it themselves."""
        path = self._record_path(key)
        if path.exists() and self.serves and not replace_unit:
            return
        numbers = {index: number for number, index in enumerate(built.unit.file_indexes)}
        stored = StoredUnit(
            tuple(replace(record, unit=0) for _, record in built.chunks),
            replace(built.statistics, unit=0),
            tuple(replace(record, file_index=numbers[record.file_index]) for record in built.bad_records),
            built.records_read,
            {name: count.to_json() for name, count in built.transforms.items()},
            built.images,
            (_final_name(directory), built.unit_id),
        )
        with contextlib.suppress(OSError):
            make_directory(path.parent)
            for digest in built.images:
                target = image_path(self.directory, digest)
                if not target.exists():
                    make_directory(target.parent)
                    self._place(image_path(directory, digest), target, copies=False)
            for record in stored.chunks:
                source = chunk_path(directory, built.unit_id, record.part)
                self._place(source, self._chunk_path(key, record.part), copies=False)
            write_file(path, _encode(stored, key))

    def forget(self, contents: Collection[str], paths: Iterable[Path]) -> None:
        """Remove the units with a chunk of some content, all names of some files, and the files in no cache."""
        own = set(self.names_of(paths))
        for folder in sorted(path for path in self.directory.glob("*") if path.is_dir()):
            sweep_temporary(folder)
        keys = set[str]()
        for path in sorted(self.directory.glob("*/*.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if any(record.content in contents for record in _decode(read_json(path), path.stem).chunks):
                    keys.add(path.stem)
                    remove_file(path)
        for path in sorted(self.directory.glob("*/*.psc")):
            with contextlib.suppress(FileNotFoundError):
                if path.stem.rpartition("-")[0] in keys or path in own or path.stat().st_nlink == 1:
                    remove_file(path)

    def names_of(self, paths: Iterable[Path]) -> list[Path]:
        """Return the files of the store that are other names of some files."""
        files = {(status.st_dev, status.st_ino) for status in map(Path.stat, paths)}
        found: list[Path] = []
        for path in sorted(self.directory.glob("*/*.psc")):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found += [path] if (status.st_dev, status.st_ino) in files else []
        return found

    def garbage(self) -> Iterator[tuple[Path, int]]:
        """Yield the files that no cache shares, and the bytes that removing each frees."""
        for path in sorted(self.directory.glob("*/*.psc")) + sorted(self.directory.glob("images/*/*")):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if status.st_nlink == 1:
                    yield path, status.st_size
        for path in sorted(self.directory.glob("*/*.json")):
            try:
                found = _decode(read_json(path), path.stem)
                places = [self._chunk(path.stem, found, record.part) for record in found.chunks]
                if places and all(place.lstat().st_nlink > 1 or place.parent != path.parent for place in places):
                    continue
            except FileNotFoundError:
                pass
            except (OSError, ValueError, KeyError, TypeError):
                pass  # damaged: the unit would be built again
            with contextlib.suppress(OSError):
                yield path, path.lstat().st_size

    @staticmethod
    def is_unshared(path: Path) -> bool:
        """Whether a file of the store is still garbage."""
        chunk = path.with_name(f"{path.stem}-0.psc") if path.suffix == ".json" else path
        with contextlib.suppress(OSError):
            return chunk.lstat().st_nlink == 1
        return path.suffix == ".json"

    def _record_path(self, key: str) -> Path:
        return self.directory / key[:2] / f"{key}.json"

    def _chunk_path(self, key: str, part: int) -> Path:
        return self.directory / key[:2] / f"{key}-{part}.psc"

    def _chunk(self, key: str, found: StoredUnit, part: int) -> Path:
        """Return the path of a chunk: in the store, or without hard links in the cache that built it."""
        own, (cache, unit) = self._chunk_path(key, part), found.cache
        return own if own.exists() else chunk_path(self.root / cache, unit, part)

    def _image(self, found: StoredUnit, digest: int) -> Path:
        own = image_path(self.directory, digest)
        return own if own.exists() else image_path(self.root / found.cache[0], digest)

    def _place(self, source: Path, target: Path, *, copies: bool = True) -> None:
        """Link a file to a name, durably, replacing what is there; copy it if it cannot be linked and may be copied."""
        temporary = _linked(source, target, copies=copies)
        if temporary is not None:
            try:
                rename(temporary, target)
            finally:
                discard_staged(temporary)  # renaming one link of a file to another does nothing


def _linked(source: Path, target: Path, *, copies: bool = True) -> Path | None:
    """Link or copy a file to a temporary name next to ``target``; ``None`` if it can be neither."""
    temporary = temporary_name(target)
    try:
        os.link(source, temporary)
    except FileNotFoundError:
        raise
    except OSError:  # exFAT, some network file systems, another disk, too many links, or links are forbidden
        return stage_file(target, source.read_bytes()) if copies else None
    return temporary


def _final_name(directory: Path) -> str:
    return directory.name.removeprefix(REBUILD_PREFIX)


def _encode(stored: StoredUnit, key: str) -> bytes:
    body: dict[str, Any] = {"format": _FORMAT, "key": key, **asdict(stored)}
    return canonical_json({**body, "sha256": hashlib.sha256(canonical_json(body)).hexdigest()}) + b"\n"


def _decode(body: Any, key: str) -> StoredUnit:
    """Decode the record of a unit.

    Raises:
        ValueError, KeyError, TypeError: It is damaged, or of another version or unit.
    """
    digest = body.pop("sha256")
    if (body["format"], body["key"]) != (_FORMAT, key) or hashlib.sha256(canonical_json(body)).hexdigest() != digest:
        raise ValueError("the record of a unit is damaged")
    cache, unit = body["cache"]
    if Path(cache).name != cache:
        raise ValueError("the record of a unit leads out of the root")
    return StoredUnit(
        tuple(ChunkRecord(**record) for record in body["chunks"]),
        UnitStatistics(**body["statistics"]),
        tuple(BadRecord(**record) for record in body["bad_records"]),
        body["records_read"],
        body["transforms"],
        tuple(body["images"]),
        (cache, unit),
    )
