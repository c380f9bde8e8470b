"""The units of a stream: those that are recorded, and more as they are needed.

A splitter of the source goes in; units come out, recorded before anybody sees them. Any number of processes share a
directory: one splits at a time, the others read what it records. Invariants: the list only grows; what is recorded is
what splitting the whole source at once would have given; duplicates among recorded units are known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from vorox.core.atomic import make_directory
from vorox.core.errors import ConfigError
from vorox.core.lock import FileLock
from vorox.data.cache.manifest import Manifest, planned_entry
from vorox.data.cache.planning import check_units, planning_lock, record_inputs
from vorox.data.cache.recipe import UnitLog
from vorox.data.cache.residency import mark_evictable
from vorox.data.cache.unit_builder import UnitBuilder
from vorox.data.documents import Unit
from vorox.data.pipeline.duplicates import FirstPass

LOCK_NAME = "CUTTING"
"""Held while a process splits the source further."""


class Splitter(Protocol):
    """Splits a source into units: ``text.unit_splitter.UnitSplitter``."""

    def units_after(self, known: Sequence[Unit], /) -> Iterator[tuple[Unit, bool]]:
        """Yield the units after those that are known, each with whether it is the last."""
        ...

    def estimated_bytes(self, first: Sequence[Unit], /) -> int:
        """Return the bytes that all units will span, estimated from the first of them."""
        ...


def _never() -> bool:
    return False


class UnitList:
    """The units of one split of a source, as far as they are known. For one thread.

    Args:
        directory: That of the stream; it need not exist.
        builder: What the units are a function of.
        splitter: Where more of them come from.

    Attributes:
        units: The units so far, ``unit_id`` being the index.
        is_all: Whether no more follow.
    """

    def __init__(self, directory: Path, builder: UnitBuilder, splitter: Splitter) -> None:
        self.units: list[Unit] = []
        self.is_all = False
        self._directory, self._builder, self._splitter = directory, builder.with_directory(directory), splitter
        self._log = UnitLog(directory)
        self._pieces: Iterator[tuple[Unit, bool]] | None = None
        self._passes: dict[int, FirstPass] = {}
        self._num_checked = 0
        self._is_recorded = False
        self._manifest = Manifest.empty()
        self.see(Manifest.open(directory))

    def see(self, manifest: Manifest) -> None:
        """Take up the units that are recorded by now.

        Raises:
            DataError: They are not those that were split here.
        """
        self._manifest = manifest
        planned = manifest.planned_units
        if planned > len(self._log.units):
            self._log.refresh()
        first, last = self._num_checked, min(planned, len(self.units))
        check_units(self._directory, self._log.units[first:last], self.units[first:])
        self._num_checked = max(first, planned)
        if planned > len(self.units):
            self.units += self._log.units[len(self.units) : planned]
            self.is_all = manifest.units_final
            self._pieces = None  # the next split starts after these
        elif planned and planned == len(self.units):
            self.is_all = self.is_all or manifest.units_final

    def split(self, num_units: int, stop: Callable[[], bool] = _never) -> None:
        """Split until ``num_units`` are known, or all, or ``stop`` returns true. Nothing is recorded.

        Raises:
            DataError: The text cannot be read.
        """
        if self._pieces is None:
            self._pieces = self._splitter.units_after(self.units)
        try:
            while len(self.units) < num_units and not self.is_all and not stop():
                found = next(self._pieces, None)
                if found is None:
                    self.is_all = True
                else:
                    unit, self.is_all = found
                    self.units.append(unit)
        except BaseException:
            self._pieces = None
            raise

    def record(self) -> Manifest:
        """Record the known units in the directory, or take up those of another process.

        Raises:
            DataError: The directory is of another recipe or source.
        """
        self._builder.find_duplicates(self.units, passes=self._passes)
        with contextlib.ExitStack() as stack:
            if self._is_recorded:
                manifest = stack.enter_context(self._manifest.exclusive(self._directory))
            else:
                manifest = stack.enter_context(planning_lock(self._directory, self._builder))
                self._log.refresh()
                listed = self._log.units[: manifest.planned_units]
                record_inputs(self._directory, manifest, self._builder.files, listed)
            self._is_recorded = True
            self.see(manifest)
            fresh = self.units[manifest.planned_units :]
            if fresh or manifest.units_final != self.is_all:
                self._log.append(manifest.planned_units, fresh)
                manifest = manifest.appended(self._directory, [self._entry(manifest)])
                self.see(manifest)
        return manifest

    def _entry(self, manifest: Manifest) -> dict[str, object]:
        estimated_bytes = None
        if not self.is_all:
            estimated_bytes = manifest.estimated_bytes or self._splitter.estimated_bytes(self.units)
        num_files = len(self._builder.files)
        return planned_entry(len(self.units), self._builder.recipe.digest, num_files, estimated_bytes=estimated_bytes)

    def extend(self, num_units: int, stop: Callable[[], bool] = _never) -> Manifest | None:
        """Split and record until ``num_units`` are recorded, or all, or ``stop`` returns true.

        Returns:
            The manifest with them; ``None`` if another process is splitting.

        Raises:
            DataError: The text cannot be read, or is not what it was.
        """
        try:
            lock = FileLock(self._directory / LOCK_NAME, blocking=False).acquire()
        except ConfigError:
            return None
        try:
            self.see(self._manifest.refreshed(self._directory))
            self.split(num_units, stop)
            return self.record()
        finally:
            lock.release()

    def close(self) -> None:
        """Close the text. Repeatable."""
        self._pieces = None


def open_directory(directory: Path, units: UnitList, num_units: int) -> None:
    """Create or open the directory of a stream: recipe, files and ``num_units`` units recorded.

    Raises:
        DataError: It is of another recipe or source, or holds a cache that is not evictable; the text cannot be read.
    """
    make_directory(directory)
    mark_evictable(directory)
    units.split(num_units)
    units.record()
