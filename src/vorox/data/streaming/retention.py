"""The room that streamed chunks may take on disk, and which of them go when it is used up.

Streams register, ask for room before they write a chunk, and say of each unit how dispensable it is. Chunk files live
in directories that carry a file ``CACHE``: everything below ``chunks/`` there can be made again, nothing else is ever
removed, and from a directory without it nothing at all. Invariants: the chunk files of all streams together never
exceed the limit, half-written ones included; a unit only ever makes room for a less dispensable one.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Protocol

from vorox.core.atomic import remove_file, write_file
from vorox.core.errors import DataError

MARKER_NAME = "CACHE"
_MARKER = b"""The chunk files in here are made again when they are needed: a stream of Vorox removes and rebuilds them.
What is in manifest/ cannot be made again without reading the whole source; keep it as long as the runs that use it.
"""
_LOOK_AGAIN_SECONDS = 1.0
"""Other processes remove chunks as well, and nobody tells."""

_CHUNK = re.compile(r"u(\d{9,})-(\d+)\.psc")


class Tenant(Protocol):
    """A stream, as the ring sees it. Its methods are called while ``Ring.changed`` is held."""

    @property
    def directory(self) -> Path: ...

    def look_around(self) -> None:
        """Find out what other processes read; called before units are ranked."""
        ...

    def dispensability(self, unit: int, /) -> int:
        """0 for what is being read or waited for; the higher, the later it is needed."""
        ...

    def evicted(self, unit: int, /) -> None:
        """The chunk files of a unit are gone."""
        ...


def mark(directory: Path) -> None:
    """Say durably that the chunks of a directory may be removed.

    Raises:
        DataError: It already holds chunks that were not put there by a stream.
    """
    if is_marked(directory):
        return
    if resident_units(directory):
        raise DataError(
            "the directory holds chunks of a cache that is meant to stay", where=str(directory),
            hint="a stream needs a directory of its own: set data.cache.directory to another place",
        )  # fmt: skip
    write_file(directory / MARKER_NAME, _MARKER)


def is_marked(directory: Path) -> bool:
    """Whether the chunks of a directory may be removed."""
    return (directory / MARKER_NAME).exists()


def resident_units(directory: Path) -> dict[int, dict[Path, int]]:
    """The chunk files on disk, half-written ones included, with their sizes, by unit."""
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
    """Remove chunk files and say how many bytes they had; half-written ones belong to who writes them."""
    removed_bytes = 0
    for path, size in files.items():
        if path.name.startswith("u"):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                remove_file(path)
            removed_bytes += size
    return removed_bytes


class Ring:
    """The room of all streams of a process.

    Args:
        limit_bytes: What the chunk files of all streams may take together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.changed = threading.Condition()
        """Guards the ring and all of its streams; notified whenever one of them changes."""
        self.closed = False
        self._tenants: list[Tenant] = []
        self._reserved: dict[tuple[Path, int], int] = {}

    def join(self, tenant: Tenant) -> None:
        with self.changed:
            self._tenants.append(tenant)

    def close(self) -> None:
        """Wake everybody up to find that it is over."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    @contextlib.contextmanager
    def room(self, tenant: Tenant, unit: int, size_bytes: int, *, given_up: Callable[[], bool]) -> Generator[bool]:
        """Room for the chunks of a unit while they are written; waits until enough others may go.

        Args:
            tenant: Whose they are.
            unit: Their unit.
            size_bytes: Their bytes.
            given_up: Whether something else became more urgent; asked whenever something changes.

        Yields:
            Whether there is room. If not, it was given up or the ring was closed.

        Raises:
            DataError: They are waited for, and so is everything that is there.
        """
        with self.changed:
            there_is_room = self._make_room(tenant, unit, size_bytes, given_up)
            if there_is_room:
                self._reserved[tenant.directory, unit] = size_bytes
        if not there_is_room:
            yield False
            return
        try:
            yield True
        finally:
            with self.changed:
                del self._reserved[tenant.directory, unit]
                self.changed.notify_all()

    def _make_room(self, tenant: Tenant, unit: int, size_bytes: int, given_up: Callable[[], bool]) -> bool:
        while not self.closed:
            resident = self._resident()
            used_bytes = sum(self._reserved.values()) + sum(sum(files.values()) for _, _, files in resident)
            for one in self._tenants:
                one.look_around()
            own = tenant.dispensability(unit)
            ranked = [
                (owner.dispensability(other), number, owner, other, files)
                for number, (owner, other, files) in enumerate(resident)
                if (owner, other) != (tenant, unit)
            ]
            for rank, _, owner, other, files in sorted(ranked, key=lambda entry: entry[:2], reverse=True):
                if used_bytes + size_bytes <= self.limit_bytes or rank <= own:
                    break
                used_bytes -= remove_chunks(files)
                owner.evicted(other)
            if used_bytes + size_bytes <= self.limit_bytes:
                return True
            if given_up():
                return False
            if own == 0:
                raise self._too_small(tenant, used_bytes + size_bytes)
            self.changed.wait(_LOOK_AGAIN_SECONDS)
        return False

    def _resident(self) -> list[tuple[Tenant, int, dict[Path, int]]]:
        """What is on disk, without what is just being written."""
        return [
            (tenant, unit, files)
            for tenant in self._tenants
            if is_marked(tenant.directory)
            for unit, files in resident_units(tenant.directory).items()
            if (tenant.directory, unit) not in self._reserved
        ]

    def _too_small(self, tenant: Tenant, needed_bytes: int) -> DataError:
        return DataError(
            f"data.streaming.retention_bytes is {self.limit_bytes:,}, and the segments that are read at the same time "
            f"need at least {needed_bytes:,}",
            where=str(tenant.directory),
            hint="raise data.streaming.retention_bytes, or lower data.growth.max_segment_units (in a new run)",
        )
