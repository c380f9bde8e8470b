"""The unit list of a stream, which is extended on demand.

A splitter of the source goes in; units come out, recorded before they are used. Any number of processes share a
directory: one splits at a time, the others read its records. Invariants: the list only grows; it is a prefix of the
units of the whole source; duplicates among recorded units are known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from vorox.core.errors import ConfigError
from vorox.core.files.atomic import make_directory
from vorox.core.files.file_holder import FileLock
from vorox.data.cache.building.initialize import check_units, planning_lock, record_inputs
from vorox.data.cache.files.manifest import Manifest, planned_entry
from vorox.data.cache.units.first_pass import FirstPass, find_duplicates
from vorox.data.cache.units.unit_builder import UnitBuilder
from vorox.data.cache.upkeep.disk_budget import mark_evictable
from vorox.data.documents import Unit
from vorox.data.recipe import UnitLog

LOCK_NAME = "CUTTING"
"""Lock file of the process that splits the source."""


class Splitter(Protocol):
    """Splits a source into units: ``text.unit_splitter.UnitSplitter``."""

    def units_after(self, known: Sequence[Unit], /) -> Iterator[tuple[Unit, bool]]:
        """Yield the units after the known ones, each with whether it is the last."""
        ...

    def estimated_bytes(self, first: Sequence[Unit], /) -> int:
        """Return the estimated bytes of all units, extrapolated from the first ones."""
        ...


def _never() -> bool:
    return False


class UnitList:
    """The known units of one split of a source. For one thread.

    Args:
        directory: The stream's directory; it need not exist.
        builder: The builder of the units.
        splitter: Splits more units from the source.

    Attributes:
        units: The known units; ``unit_id`` is the index.
        is_complete: Whether these are all units of the source.
    """

    def __init__(self, directory: Path, builder: UnitBuilder, splitter: Splitter) -> None:
        self.units: list[Unit] = []
        self.is_complete = False
        self._directory, self._builder, self._splitter = directory, builder.with_directory(directory), splitter
        self._log = UnitLog(directory)
        self._pieces: Iterator[tuple[Unit, bool]] | None = None
        self._passes: dict[int, FirstPass] = {}
        self._num_checked = 0
        self._is_recorded = False
        self._manifest = Manifest.empty()
        self.update_from(Manifest.open(directory))

    def update_from(self, manifest: Manifest) -> None:
        """Add the units recorded in a newer manifest.

        Raises:
            DataError: They differ from the units that this process has split.
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
            self.is_complete = manifest.units_final
            self._pieces = None  # the next split starts after these
        elif planned and planned == len(self.units):
            self.is_complete = self.is_complete or manifest.units_final

    def split(self, num_units: int, stop: Callable[[], bool] = _never) -> None:
        """Split until ``num_units`` (or all) are known, or ``stop`` returns true. Nothing is recorded.

        Raises:
            DataError: The text cannot be read.
        """
        if self._pieces is None:
            self._pieces = self._splitter.units_after(self.units)
        try:
            while len(self.units) < num_units and not self.is_complete and not stop():
                found = next(self._pieces, None)
                if found is None:
                    self.is_complete = True
                else:
                    unit, self.is_complete = found
                    self.units.append(unit)
        except BaseException:
            self._pieces = None
            raise

    def record(self) -> Manifest:
        """Record the known units in the directory, and add those of other processes.

        Raises:
            DataError: The directory has a different recipe or source.
        """
        find_duplicates(self._builder, self.units, passes=self._passes)
        with contextlib.ExitStack() as stack:
            if self._is_recorded:
                manifest = stack.enter_context(self._manifest.exclusive(self._directory))
            else:
                manifest = stack.enter_context(planning_lock(self._directory, self._builder))
                self._log.refresh()
                listed = self._log.units[: manifest.planned_units]
                record_inputs(self._directory, manifest, self._builder.files, listed)
            self._is_recorded = True
            self.update_from(manifest)
            fresh = self.units[manifest.planned_units :]
            if fresh or manifest.units_final != self.is_complete:
                self._log.append(manifest.planned_units, fresh)
                manifest = manifest.append(self._directory, [self._entry(manifest)])
                self.update_from(manifest)
        return manifest

    def _entry(self, manifest: Manifest) -> dict[str, object]:
        estimated_bytes = None
        if not self.is_complete:
            estimated_bytes = manifest.estimated_bytes or self._splitter.estimated_bytes(self.units)
        num_files = len(self._builder.files)
        return planned_entry(len(self.units), self._builder.recipe.digest, num_files, estimated_bytes=estimated_bytes)

    def extend(self, num_units: int, stop: Callable[[], bool] = _never) -> Manifest | None:
        """Split and record until ``num_units`` (or all) are recorded, or ``stop`` returns true.

        Returns:
            The new manifest; ``None`` if another process is splitting.

        Raises:
            DataError: The text cannot be read, or has changed.
        """
        try:
            lock = FileLock(self._directory / LOCK_NAME, blocking=False).acquire()
        except ConfigError:
            return None
        try:
            self.update_from(self._manifest.refreshed(self._directory))
            self.split(num_units, stop)
            return self.record()
        finally:
            lock.release()

    def close(self) -> None:
        """Close the source's files. Idempotent."""
        self._pieces = None


def open_directory(directory: Path, units: UnitList, num_units: int) -> None:
    """Create or open the directory of a stream; record its recipe, files and first ``num_units`` units.

    Raises:
        DataError: The directory has a different recipe or source, or a cache that is not evictable; or the text cannot
            be read.
    """
    make_directory(directory)
    mark_evictable(directory)
    units.split(num_units)
    units.record()
