"""What can go: files in a cache that nothing names any more, and caches that no run reads and nobody pinned.

The root of the caches goes in; what was found comes out, with sizes and reasons, and is removed when asked to.
Invariants: nothing that a manifest names and nothing that a living process holds is ever found, wherever the wall clock
may have jumped; a cache goes with its recipe first, so that a half-removed one does not count as a cache.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vorox.core.atomic import is_temporary_of_the_dead, remove_directory, remove_file, sync_directory
from vorox.core.chained_log import HashChainedLog
from vorox.core.errors import DataError
from vorox.core.run_layout import RunLayout
from vorox.data.cache.leases import DIRECTORY_NAME as LEASES_NAME
from vorox.data.cache.leases import STALE_SECONDS, is_held, lease_path
from vorox.data.cache.manifest import Manifest
from vorox.data.cache.recipe import RECIPE_NAME, read_recipe
from vorox.data.cache.replacement import REBUILD_PREFIX, REPLACED_PREFIX
from vorox.data.cache.retention import Pin, disk_time_or_local, idle_seconds, read_pins

STREAMS_NAME = "streams"
"""Below the root: caches of which chunks come and go."""
_CHUNK_NAME = re.compile(r"u(?P<unit>\d{9,})-(?P<part>\d+)\.psc")


@dataclass(frozen=True, slots=True)
class Garbage:
    """Something that can be removed.

    Attributes:
        path: A file, or a directory with all that is in it.
        size_bytes: What removing it frees.
        reason: Why it can go.
    """

    path: Path
    size_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class CacheUse:
    """A cache and who uses it.

    Attributes:
        directory: It.
        size_bytes: All of its files.
        idle_seconds: Time since it was last opened or built.
        runs: Runs whose plan reads it.
        is_busy: Whether it is being built.
        pins: Who wants it to stay.
    """

    directory: Path
    size_bytes: int
    idle_seconds: float
    runs: tuple[str, ...]
    is_busy: bool
    pins: tuple[Pin, ...]

    @property
    def may_go(self) -> bool:
        """Whether nobody needs it that is known."""
        return not (self.runs or self.is_busy or self.pins)


def find_garbage(root: Path) -> list[Garbage]:
    """What in the caches below a root nothing names and nobody holds."""
    found: list[Garbage] = []
    now = disk_time_or_local(root)
    for directory in _caches(root):
        if directory.name.startswith((REBUILD_PREFIX, REPLACED_PREFIX)):
            if not _is_busy(directory, now) and idle_seconds(directory, now) > STALE_SECONDS:
                reason = "a rebuild that was given up" if REBUILD_PREFIX in directory.name else "replaced by a rebuild"
                found.append(Garbage(directory, _size(directory), reason))
        else:
            found += _in_cache(directory, now)
    return found


def remove(garbage: Sequence[Garbage]) -> int:
    """Remove what was found, as far as it still is garbage; returns the bytes that were freed."""
    freed = 0
    for item in garbage:
        if item.path.is_dir():
            if _is_busy(item.path, disk_time_or_local(item.path)):
                continue
            remove_cache(item.path)
        elif _CHUNK_NAME.fullmatch(item.path.name):
            directory = item.path.parents[2]
            with Manifest.open(directory).exclusive(directory) as manifest:
                if not _is_unnamed(directory, item.path, manifest, disk_time_or_local(directory)):
                    continue
                remove_file(item.path)
        else:
            remove_file(item.path)
        freed += item.size_bytes
    return freed


def find_caches(root: Path, runs: Path) -> list[CacheUse]:
    """All caches below a root.

    Args:
        root: Root of the caches.
        runs: Where run directories are.
    """
    readers = _recipes_of_runs(runs)
    found: list[tuple[Path, tuple[str, ...]]] = []
    for directory in (*_caches(root), *_caches(root / STREAMS_NAME)):
        if directory.name.startswith("."):
            continue
        with contextlib.suppress(DataError):
            found.append((directory, tuple(sorted(readers.get(read_recipe(directory).digest, ())))))
    by_source = {_source_and_content(directory): users for directory, users in found if users}
    now = disk_time_or_local(root)
    return [
        CacheUse(
            directory,
            _size(directory),
            idle_seconds(directory, now),
            users or by_source.get(_source_and_content(directory), ()),
            _is_busy(directory, now),
            read_pins(directory),
        )
        for directory, users in found
    ]


def remove_unused(caches: Sequence[CacheUse]) -> int:
    """Remove whole caches, but for those that were pinned or taken up since; returns the bytes that were freed."""
    freed = 0
    for cache in caches:
        directory = cache.directory
        if cache.may_go and not read_pins(directory) and not _is_busy(directory, disk_time_or_local(directory)):
            remove_cache(directory)
            freed += cache.size_bytes
    return freed


def remove_cache(directory: Path) -> None:
    """Remove a cache as a whole; of a symbolic link, the link alone."""
    if directory.is_symlink():
        remove_file(directory)
        return
    remove_file(directory / RECIPE_NAME)
    sync_directory(directory)
    remove_directory(directory)


def _caches(root: Path) -> Iterator[Path]:
    """The cache directories right below a root; what a symbolic link leads to belongs to somebody else."""
    if root.is_dir():
        found = (path for path in sorted(root.iterdir()) if path.is_dir() and not path.is_symlink())
        yield from (path for path in found if (path / RECIPE_NAME).exists())


def _in_cache(directory: Path, now: float) -> Iterator[Garbage]:
    folders = [directory / name for name in ("manifest", "quarantine", LEASES_NAME, "chunks")]
    linked = {folder.name for folder in folders if folder.is_symlink()}
    chunks = [] if "chunks" in linked else [path for path in (directory / "chunks").glob("*") if not path.is_symlink()]
    for place in [directory, *(folder for folder in folders if folder.name not in linked), *sorted(chunks)]:
        for path in sorted(place.glob(".tmp-*")):
            if is_temporary_of_the_dead(path):
                yield _file(path, "left by a process that died")
    for path in [] if LEASES_NAME in linked else sorted((directory / LEASES_NAME).glob("u*")):
        if not is_held(path, now):
            yield _file(path, "lease of a process that died")
    with contextlib.suppress(DataError):  # a manifest that cannot be read names nothing for sure
        manifest = Manifest.open(directory)
        for path in sorted(path for place in chunks for path in place.glob("*.psc")):
            if _is_unnamed(directory, path, manifest, now):
                yield _file(path, "chunk that the manifest does not name")


def _is_unnamed(directory: Path, path: Path, manifest: Manifest, now: float) -> bool:
    match = _CHUNK_NAME.fullmatch(path.name)
    if match is None:
        return False
    unit, part = int(match["unit"]), int(match["part"])
    if lease_path(directory, unit).exists() and is_held(lease_path(directory, unit), now):
        return False
    return part not in {record.part for record in manifest.unit_chunks(unit)}


def _file(path: Path, reason: str) -> Garbage:
    with contextlib.suppress(OSError):
        return Garbage(path, path.lstat().st_size, reason)
    return Garbage(path, 0, reason)


def _size(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file())


def _is_busy(directory: Path, now: float) -> bool:
    return any(is_held(path, now) for path in sorted((directory / LEASES_NAME).glob("u*")))


def _source_and_content(directory: Path) -> tuple[str, str]:
    """Source and content by a cache's name: what its training and its held-out half have in common."""
    source, _, _, content = (directory.name.rsplit("-", 3) + [""] * 4)[:4]
    return source, content


def _recipes_of_runs(runs: Path) -> dict[str, set[str]]:
    """Recipe digests of the caches that the plans of runs speak of, with the names of the runs."""
    found: dict[str, set[str]] = {}
    for path in sorted(runs.glob(f"*/{RunLayout.plan.name}")):
        try:
            bodies = HashChainedLog(path).read()[0]
        except (DataError, OSError, json.JSONDecodeError) as error:
            raise DataError(
                f"the plan of run {path.parent.name} cannot be read, so it cannot be told what the run uses",
                where=str(path), hint="mend or remove the run first",
            ) from error  # fmt: skip
        for recipe in _values(bodies, "recipe"):
            found.setdefault(recipe, set()).add(path.parent.name)
    return found


def _values(value: Any, key: str) -> Iterator[str]:
    """All texts that stand under a key, however deep."""
    if isinstance(value, Mapping):
        for name, inner in value.items():  # pyright: ignore[reportUnknownVariableType]
            if name == key and isinstance(inner, str):
                yield inner
            yield from _values(inner, key)
    elif isinstance(value, list):
        for inner in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _values(inner, key)
