"""The disk budget of evictable caches: which chunks are removed when another unit needs their room.

The caches of a stream are evictable: they join a ``DiskBudget``, reserve room before they write a unit, and rank their
units by how soon each is needed. A directory with a ``CACHE`` file is evictable: everything below its ``chunks/`` can
be rebuilt, and nothing else is ever removed.

Invariants: residency decides which chunks are on disk, never what they contain; the chunk files of all caches of a
budget, partial ones included, never exceed its limit; a unit is evicted only for one that is needed sooner.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Protocol

from vorox.core.errors import DataError
from vorox.core.files.atomic import remove_file, write_file

MARKER_NAME = "CACHE"
_MARKER = b"""The chunk files in here are made again when they are needed: a stream of Vorox removes and rebuilds them.
What is in manifest/ cannot be made again without reading the whole source; keep it as long as the runs that use it.
"""
_POLL_SECONDS = 1.0
"""Evictions by other processes are found by polling."""
_PEER_PATIENCE_SECONDS = 60.0
"""How long a reader waits for units that other processes read at the moment, before the budget counts as too small."""

_CHUNK = re.compile(r"u(\d{9,})-(\d+)\.psc")


class Evictable(Protocol):
    """A cache under a disk budget. Its methods are called while ``DiskBudget.changed`` is held."""

    @property
    def directory(self) -> Path: ...

    def poll_peers(self) -> bool:
        """Find out what other processes read, before units are ranked; return whether any does."""
        ...

    def eviction_priority(self, unit: int, /) -> int:
        """0 for a unit that is being read or awaited, which is never evicted; the higher, the later it is needed."""
        ...

    def mark_evicted(self, unit: int, /) -> None:
        """Record that the chunk files of a unit have been removed."""
        ...


def mark_evictable(directory: Path) -> None:
    """Record durably that the chunks of a directory may be removed.

    Raises:
        DataError: It already holds chunks of a permanent cache.
    """
    if is_evictable(directory):
        return
    if resident_units(directory):
        raise DataError(
            "The directory holds chunks of a permanent cache", where=str(directory),
            hint="a stream needs a directory of its own: set data.cache.directory to another path",
        )  # fmt: skip
    write_file(directory / MARKER_NAME, _MARKER)


def is_evictable(directory: Path) -> bool:
    """Whether the chunks of a directory may be removed."""
    return (directory / MARKER_NAME).exists()


def resident_units(directory: Path) -> dict[int, dict[Path, int]]:
    """Return the chunk files on disk with their sizes, by unit; partial files are included."""
    found: dict[int, dict[Path, int]] = {}
    chunks = directory / "chunks"
    with contextlib.suppress(FileNotFoundError):
        for folder in sorted(os.scandir(chunks), key=lambda entry: entry.name):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                for entry in sorted(os.scandir(folder.path), key=lambda entry: entry.name):
                    match = _CHUNK.search(entry.name)
                    with contextlib.suppress(FileNotFoundError):
                        size = entry.stat().st_size
                        found.setdefault(int(match[1]) if match else -1, {})[Path(entry.path)] = size
    return found


def remove_chunks(files: Mapping[Path, int]) -> int:
    """Remove chunk files and return their size in bytes; partial files belong to their writer and stay."""
    removed_bytes = 0
    for path, size in files.items():
        if path.name.startswith("u"):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                remove_file(path)
            removed_bytes += size
    return removed_bytes


class DiskBudget:
    """The disk space that the evictable caches of a process share.

    Args:
        limit_bytes: Limit on the total size of their chunk files.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.changed = threading.Condition()
        """Guards the budget and all of its caches; notified on every change."""
        self.closed = False
        self._caches: list[Evictable] = []
        self._reserved: dict[tuple[Path, int], int] = {}

    def join(self, cache: Evictable) -> None:
        with self.changed:
            self._caches.append(cache)

    def close(self) -> None:
        """Release every thread that waits for room."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    @contextlib.contextmanager
    def room(self, cache: Evictable, unit: int, size_bytes: int, *, gives_way: Callable[[], bool]) -> Generator[bool]:
        """Reserve room for the chunks of a unit while they are written; wait until enough other units can be evicted.

        Args:
            cache: The cache of the unit.
            unit: The unit.
            size_bytes: Size of its chunks.
            gives_way: Whether another unit has become more urgent; polled on every change.

        Yields:
            Whether there is room. False: a more urgent unit is pending, or the budget was closed.

        Raises:
            DataError: The unit is awaited, and so is every unit on disk; by other processes for a minute.
        """
        with self.changed:
            there_is_room = self._make_room(cache, unit, size_bytes, gives_way)
            if there_is_room:
                self._reserved[cache.directory, unit] = size_bytes
        if not there_is_room:
            yield False
            return
        try:
            yield True
        finally:
            with self.changed:
                del self._reserved[cache.directory, unit]
                self.changed.notify_all()

    def _make_room(self, cache: Evictable, unit: int, size_bytes: int, gives_way: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + _PEER_PATIENCE_SECONDS
        while not self.closed:
            resident = self._resident()
            used_bytes = sum(self._reserved.values()) + sum(sum(files.values()) for _, _, files in resident)
            polled = [one.poll_peers() for one in self._caches]
            own = cache.eviction_priority(unit)
            ranked = [
                (owner.eviction_priority(other), number, owner, other, files)
                for number, (owner, other, files) in enumerate(resident)
                if (owner, other) != (cache, unit)
            ]
            for priority, _, owner, other, files in sorted(ranked, key=lambda entry: entry[:2], reverse=True):
                if used_bytes + size_bytes <= self.limit_bytes or priority <= own:
                    break
                used_bytes -= remove_chunks(files)
                owner.mark_evicted(other)
            if used_bytes + size_bytes <= self.limit_bytes:
                return True
            if gives_way():
                return False
            if own == 0 and not (any(polled) and time.monotonic() < deadline):
                raise self._too_small(cache, used_bytes + size_bytes)
            self.changed.wait(_POLL_SECONDS)
        return False

    def _resident(self) -> list[tuple[Evictable, int, dict[Path, int]]]:
        """The units on disk, except those being written."""
        return [
            (cache, unit, files)
            for cache in self._caches
            if is_evictable(cache.directory)
            for unit, files in resident_units(cache.directory).items()
            if (cache.directory, unit) not in self._reserved
        ]

    def _too_small(self, cache: Evictable, needed_bytes: int) -> DataError:
        return DataError(
            f"data.streaming.retention_bytes is {self.limit_bytes:,}, but the segments that are read at the same time "
            f"need at least {needed_bytes:,}",
            where=str(cache.directory),
            hint="raise data.streaming.retention_bytes, or lower data.growth.max_segment_units (in a new run)",
        )
