"""Garbage collection: unreferenced files in caches, units in no cache, and unpinned caches that no run uses.

The root of the caches goes in; removable files and caches come out, with sizes and reasons. A unit of the store is in
use while a cache has links to its chunks, so no list of users can be out of date. Invariants: no file that a
manifest names or that a live process holds counts as garbage, even if the wall clock jumps; a cache's recipe is removed
first, so a partly removed cache is not a cache.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vorox.core.errors import DataError
from vorox.core.files.atomic import is_stale_temporary, remove_directory, remove_file, sync_directory
from vorox.core.files.chained_log import HashChainedLog
from vorox.core.files.json_reader import read_json
from vorox.core.run_layout import RunLayout
from vorox.data.cache.files.leases import DIRECTORY_NAME as LEASES_NAME
from vorox.data.cache.files.leases import STALE_SECONDS, is_held, lease_path
from vorox.data.cache.files.manifest import Manifest
from vorox.data.cache.upkeep.replacement import REBUILD_PREFIX, REPLACED_PREFIX
from vorox.data.cache.upkeep.retention import Pin, disk_time_or_local, idle_seconds, read_pins, removed_runs
from vorox.data.cache.upkeep.unit_store import UnitStore, is_stored
from vorox.data.recipe import FORMAT, RECIPE_NAME, read_recipe

STREAMS_NAME = "streams"
"""Folder below the root with the caches of streams, whose chunks are evicted and rebuilt."""
_CACHE_NAME = re.compile(r"(?P<source>.+)-(?:train|validation)-[0-9a-f]+-(?P<content>grow-[0-9a-f]+|[^-]+)(?:-\d+)?")
"""``SOURCE-SPLIT-RECIPE-FILES``, or of a growing cache ``SOURCE-SPLIT-RECIPE-grow-LISTING-NUMBER``."""
_CHUNK_NAME = re.compile(r"u(?P<unit>\d{9,})-(?P<part>\d+)\.psc")


@dataclass(frozen=True, slots=True)
class Garbage:
    """A removable file or directory.

    Attributes:
        path: A file, or a directory with its content.
        size_bytes: Bytes that removing it frees.
        reason: Why it is garbage.
    """

    path: Path
    size_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class CacheUse:
    """A cache and its users.

    Attributes:
        directory: The cache.
        size_bytes: Size of all its files.
        idle_seconds: Time since it was last opened or built.
        runs: Runs whose plan reads it.
        is_busy: Whether it is being built.
        pins: Its pins, of people and of runs.
        removed_runs: The paths of runs that read it and were removed, or moved to another disk.
    """

    directory: Path
    size_bytes: int
    idle_seconds: float
    runs: tuple[str, ...]
    is_busy: bool
    pins: tuple[Pin, ...]
    removed_runs: tuple[str, ...] = ()

    @property
    def is_removable(self) -> bool:
        """Whether it has no run, no builder and no pin."""
        return not (self.runs or self.is_busy or self.pins)


def find_garbage(root: Path) -> list[Garbage]:
    """Return the unreferenced files in the caches below a root, and abandoned rebuilds."""
    found: list[Garbage] = []
    now = disk_time_or_local(root)
    for directory in _cache_directories(root):
        if directory.name.startswith((REBUILD_PREFIX, REPLACED_PREFIX)):
            if not _is_busy(directory, now) and idle_seconds(directory, now) > STALE_SECONDS:
                reason = "abandoned rebuild" if REBUILD_PREFIX in directory.name else "replaced by a rebuild"
                found.append(Garbage(directory, _directory_bytes(directory), reason))
        else:
            found += _find_in_cache(directory, now)
    return [*found, *_find_in_store(root, now), *_find_other_formats(root)]


def _find_in_store(root: Path, now: float) -> Iterator[Garbage]:
    store = UnitStore(root)
    for place in [store.directory, *(path for path in store.directory.glob("*") if path.is_dir())]:
        for path in sorted(place.glob(".tmp-*")):
            if is_stale_temporary(path):
                yield _file_garbage(path, "temporary file of a dead process")
    for path in sorted((store.directory / LEASES_NAME).glob("u*")):
        if not is_held(path, now):
            yield _file_garbage(path, "lease of a dead process")
    for path, size_bytes in store.garbage():
        yield Garbage(path, size_bytes, "unit in no cache")


def _find_other_formats(root: Path) -> Iterator[Garbage]:
    """Yield the caches of earlier formats, which no command opens, unless they are pinned."""
    for directory in (*_cache_directories(root), *_cache_directories(root / STREAMS_NAME)):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = str(read_json(directory / RECIPE_NAME)["recipe"]["format"])
            family, _, number = found.partition("/")
            own_family, _, own_number = FORMAT.partition("/")
            if family == own_family and int(number) < int(own_number) and not read_pins(directory):
                yield Garbage(directory, _directory_bytes(directory), f"cache of an earlier format ({found})")


def remove_garbage(garbage: Sequence[Garbage]) -> int:
    """Remove what is still garbage; return the bytes freed."""
    freed = 0
    for item in garbage:
        if item.path.is_dir():
            is_cache = not item.path.name.startswith((REBUILD_PREFIX, REPLACED_PREFIX))
            if _is_busy(item.path, disk_time_or_local(item.path)) or (is_cache and read_pins(item.path)):
                continue
            remove_cache(item.path)
        elif is_stored(item.path):
            if not UnitStore.is_unshared(item.path):
                continue
            remove_file(item.path)
        elif _CHUNK_NAME.fullmatch(item.path.name):
            directory = item.path.parents[2]
            with Manifest.open(directory).exclusive(directory) as manifest:
                if not _is_unreferenced(directory, item.path, manifest, disk_time_or_local(directory)):
                    continue
                remove_file(item.path)
        else:
            remove_file(item.path)
        freed += item.size_bytes
    return freed


def find_caches(root: Path, runs: Path) -> list[CacheUse]:
    """Return all caches below a root.

    Args:
        root: Root of the caches.
        runs: The parent of the run directories.
    """
    readers = _runs_by_text(runs)
    found: list[tuple[Path, tuple[str, ...]]] = []
    for directory in (*_cache_directories(root), *_cache_directories(root / STREAMS_NAME)):
        if directory.name.startswith("."):
            continue
        with contextlib.suppress(DataError):
            found.append((directory, tuple(sorted(readers.get(read_recipe(directory).digest, ())))))
    by_source = {_source_and_content(directory): users for directory, users in found if users}
    now = disk_time_or_local(root)
    return [
        CacheUse(
            directory,
            _directory_bytes(directory),
            idle_seconds(directory, now),
            tuple(
                sorted(
                    {
                        *(users or by_source.get(_source_and_content(directory), ())),
                        *(pin.run for pin in pins if pin.run),
                    }
                )
            ),
            _is_busy(directory, now),
            pins,
            removed_runs(directory),
        )
        for directory, users in found
        for pins in [read_pins(directory)]
    ]


def remove_unused(caches: Sequence[CacheUse]) -> int:
    """Remove caches that are still unpinned and not being built; return the bytes freed."""
    freed = 0
    roots: set[Path] = set()
    for cache in caches:
        directory = cache.directory
        if cache.is_removable and not read_pins(directory) and not _is_busy(directory, disk_time_or_local(directory)):
            freed += _unshared_bytes(directory)
            remove_cache(directory)
            roots.add(directory.parent)
    garbage = [item for root in roots for item in _find_in_store(root, disk_time_or_local(root))]
    return freed + remove_garbage(garbage)


def remove_cache(directory: Path) -> None:
    """Remove a whole cache; if it is a symbolic link, only the link."""
    if directory.is_symlink():
        remove_file(directory)
        return
    remove_file(directory / RECIPE_NAME)
    sync_directory(directory)
    remove_directory(directory)


def _cache_directories(root: Path) -> Iterator[Path]:
    """Yield the cache directories directly below a root. Symbolic links are skipped: their targets belong elsewhere."""
    if root.is_dir():
        found = (path for path in sorted(root.iterdir()) if path.is_dir() and not path.is_symlink())
        yield from (path for path in found if (path / RECIPE_NAME).exists())


def caches_beside(directory: Path) -> Iterator[Path]:
    """Yield the other caches of the root that a cache is in, with those of streams and unfinished rebuilds."""
    root = directory.parent.parent if directory.parent.name == STREAMS_NAME else directory.parent
    found = (*_cache_directories(root), *_cache_directories(root / STREAMS_NAME))
    yield from (other for other in found if other != directory)


def _find_in_cache(directory: Path, now: float) -> Iterator[Garbage]:
    folders = [directory / name for name in ("manifest", "quarantine", LEASES_NAME, "chunks")]
    linked = {folder.name for folder in folders if folder.is_symlink()}
    chunks = [] if "chunks" in linked else [path for path in (directory / "chunks").glob("*") if not path.is_symlink()]
    for place in [directory, *(folder for folder in folders if folder.name not in linked), *sorted(chunks)]:
        for path in sorted(place.glob(".tmp-*")):
            if is_stale_temporary(path):
                yield _file_garbage(path, "temporary file of a dead process")
    for path in [] if LEASES_NAME in linked else sorted((directory / LEASES_NAME).glob("u*")):
        if not is_held(path, now):
            yield _file_garbage(path, "lease of a dead process")
    with contextlib.suppress(DataError):  # an unreadable manifest proves nothing
        manifest = Manifest.open(directory)
        for path in sorted(path for place in chunks for path in place.glob("*.psc")):
            if _is_unreferenced(directory, path, manifest, now):
                yield _file_garbage(path, "chunk not in the manifest")


def _is_unreferenced(directory: Path, path: Path, manifest: Manifest, now: float) -> bool:
    match = _CHUNK_NAME.fullmatch(path.name)
    if match is None:
        return False
    unit, part = int(match["unit"]), int(match["part"])
    if lease_path(directory, unit).exists() and is_held(lease_path(directory, unit), now):
        return False
    return part not in {record.part for record in manifest.unit_chunks(unit)}


def _file_garbage(path: Path, reason: str) -> Garbage:
    with contextlib.suppress(OSError):
        return Garbage(path, path.lstat().st_size, reason)
    return Garbage(path, 0, reason)


def _unshared_bytes(directory: Path) -> int:
    """Return the bytes that removing a cache frees at once; those that the store shares are freed with their units."""
    files = (path.lstat() for path in directory.rglob("*") if path.is_file())
    return sum(status.st_size for status in files if status.st_nlink == 1)


def _directory_bytes(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file())


def _is_busy(directory: Path, now: float) -> bool:
    return any(is_held(path, now) for path in sorted((directory / LEASES_NAME).glob("u*")))


def _source_and_content(directory: Path) -> tuple[str, str]:
    """Return source and content from a cache's name: the parts that its training and validation caches share."""
    found = _CACHE_NAME.fullmatch(directory.name)
    return (found["source"], found["content"]) if found else (directory.name, "")


def _runs_by_text(runs: Path) -> dict[str, set[str]]:
    """Return all texts in the plans of all runs, recipe digests among them, each with the names of the runs.

    Not by the names of fields: a plan of another format counts as well.
    """
    found: dict[str, set[str]] = {}
    for path in sorted(runs.glob(f"*/{RunLayout.plan.name}")):
        try:
            bodies = HashChainedLog(path).read()[0]
        except (DataError, OSError, json.JSONDecodeError) as error:
            raise DataError(
                f"Cannot read the data plan of run {path.parent.name}, so the caches that it uses are unknown",
                where=str(path), hint="repair or remove the run first",
            ) from error  # fmt: skip
        for text in _texts(bodies):
            found.setdefault(text, set()).add(path.parent.name)
    return found


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():  # pyright: ignore[reportUnknownVariableType]
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _texts(inner)
