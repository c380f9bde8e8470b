"""A stream: a cache whose chunks are built while it is read, evicted, and rebuilt when needed.

Readers report what they read; the build scheduler builds the units that the queue requests, within the budget. A unit
stays recorded in the manifest once it was built; if it is needed after eviction, it is rebuilt from its text and must
have the recorded content. Invariant: a reader returns the rows of a complete cache of the same recipe, or raises an
error; neither the network nor the disk budget changes the order or omits a row.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Collection, Generator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.data.cache.building.scheduler import BuildScheduler
from vorox.data.cache.files.chunk import Chunk
from vorox.data.cache.files.manifest import Manifest, chunk_path
from vorox.data.cache.pipeline.statistics import BuildStatistics
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.units.unit_builder import UnitBuilder
from vorox.data.cache.upkeep.disk_budget import DiskBudget, remove_chunks, resident_units
from vorox.data.recipe import read_recipe
from vorox.data.rows import RowBlock
from vorox.data.storage.stalls import track_stall
from vorox.data.streaming.leading_process import LeadingProcess
from vorox.data.streaming.prefetch_scheduler import SegmentRule
from vorox.data.streaming.read_windows import UnitRange
from vorox.data.streaming.stream_queue import StreamQueue
from vorox.data.streaming.unit_list import UnitList

_CLOSE_SECONDS = 10.0
_MAX_OPEN_CHUNKS = 1024
_LEADER_POLL_SECONDS = 0.05


class ChunkHolder(Protocol):
    """A reader that keeps chunk files open."""

    def drop(self, unit: int, /) -> None: ...

    def open_units(self) -> set[int]: ...


class Stream:
    """An open stream: the residency of a build scheduler, evictable by a disk budget. The first read starts the build.

    Args:
        directory: A directory created by ``open_directory``.
        builder: The builder of its units.
        units: The known units, which can be extended.
        rule: How units are grouped into segments.
        budget: The disk budget of the chunks.
        prefetch_segments: Number of segments that are built ahead of the one being read.
        leads: Whether this process builds ahead; false if another process of this machine does.

    Attributes:
        units_rebuilt: Number of units rebuilt after eviction.
        units_evicted: Number of evicted units.
    """

    damaged: Collection[int] = ()
    """Always empty: a damaged unit is discarded, so it is no longer resident."""

    def __init__(
        self,
        directory: Path,
        builder: UnitBuilder,
        units: UnitList,
        rule: SegmentRule,
        budget: DiskBudget,
        *,
        prefetch_segments: int = 1,
        leads: bool = True,
    ) -> None:
        self.directory, self.budget = directory, budget
        self.units_rebuilt = self.units_evicted = 0
        self._units = units
        self._queue = StreamQueue(directory, units, rule, budget, prefetch_segments)
        self._scheduler = BuildScheduler(directory, builder, units.units, self._queue, residency=self)
        self._readers: weakref.WeakSet[ChunkHolder] = weakref.WeakSet()
        self._is_started = False
        self._leader = None if leads else LeadingProcess(directory)
        budget.join(self)

    @property
    def manifest(self) -> Manifest:
        """The manifest as of the last refresh."""
        return self._queue.manifest

    @property
    def first_segment_units(self) -> int:
        return self._queue.schedule.segments[0][1]

    @property
    def units_built(self) -> int:
        """Number of units built for the first time."""
        return self._scheduler.units_built - self.units_rebuilt

    @property
    def stages(self) -> BuildStatistics | None:
        """Statistics of the build pipeline, once it has run."""
        return self._scheduler.tracker.progress.stages

    # Called by readers.

    def register(self, reader: ChunkHolder) -> None:
        """Register a reader, which is notified of evicted units."""
        with self.budget.changed:
            self._readers.add(reader)

    def touch(self, units: Sequence[int]) -> None:
        """Report that rows of these units are being read."""
        if self._queue.touch(units):
            if self._leader is None:
                self._start()
            else:
                self._publish_window()
            self._drop_evicted()

    def ensure(self, unit: int) -> None:
        """Wait until the chunks of a unit are on disk.

        Raises:
            DataError: The unit cannot be built, or its content differs from the record.
        """
        if self._queue.is_done(unit):
            return
        with track_stall(str(self.directory)) as stall:
            stall.report(f"unit {unit} is being built", failed=False)
            if not self._wait_for_leader(unit):
                self._start()
                self._queue.wait_for(unit)

    def _wait_for_leader(self, unit: int) -> bool:
        """Wait until the leading process has built a unit; return whether it has."""
        try:
            while self._leader is not None and not self._is_started and not self._queue.closed:
                self._queue.refresh()
                if self.is_resident(self.manifest, unit):
                    return True
                if not self._leader.is_expected():
                    return False
                self._publish_awaited((unit, unit + 1))
                self._queue.wait(_LEADER_POLL_SECONDS)
            return False
        finally:
            self._publish_awaited(None)

    def mark_lost(self, unit: int) -> None:
        """Report that the chunks of a unit are not on disk: another process evicted them."""
        self._queue.mark_lost(unit)

    def discard(self, unit: int, error: DataError) -> None:
        """Remove the damaged chunks of a unit, so that they are rebuilt.

        Raises:
            DataError: ``error`` itself, if the unit has no chunk on disk.
        """
        with self.budget.changed:
            files = resident_units(self.directory).get(unit)
            if not files:
                raise error
            remove_chunks(files)
            self._queue.mark_lost(unit)

    def refresh(self, *, awaited_units: int = 0) -> Manifest:
        """Return the current manifest.

        Args:
            awaited_units: The reader waits for all units below this one, so their segment is built first.

        Raises:
            DataError: One of these units cannot be built.
        """
        missing = self._queue.await_units(awaited_units)
        if self._leader is not None:
            self._publish_awaited(None if missing is None or self._is_started else (missing, missing + 1))
        if missing is not None and (self._leader is None or not self._leader.is_expected()):
            self._start()
        return self.manifest

    def stop(self) -> None:
        """Stop the build after the current unit, without waiting for it. Idempotent."""
        self._queue.close()

    def close(self) -> None:
        """Stop the build, and wait a few seconds for its thread. Idempotent."""
        self._scheduler.close(timeout_seconds=_CLOSE_SECONDS)
        self._units.close()
        self._queue.window.close()

    def _start(self) -> None:
        with self.budget.changed:
            if not self._is_started and not self._queue.closed:
                self._is_started = True
                self._scheduler.start()
            self._publish_window()

    def _publish_window(self) -> None:
        with self.budget.changed:
            if window := self._queue.schedule.window():
                self._queue.window.publish(window)

    def _publish_awaited(self, units: UnitRange | None) -> None:
        with self.budget.changed:
            self._queue.window.publish_awaited(units)

    def _drop_evicted(self) -> None:
        """Close the chunk files that other processes have evicted, which keep their disk space while they are open."""
        resident = resident_units(self.directory)
        for reader in list(self._readers):
            for unit in reader.open_units() - resident.keys():
                reader.drop(unit)

    # Called by the build scheduler: see ``build_queue.Residency``.

    def is_resident(self, manifest: Manifest, unit: int, /) -> bool:
        chunks = manifest.unit_chunks(unit) if manifest.has_unit(unit) else []
        whole = all(chunk_path(self.directory, unit, chunk.part).exists() for chunk in chunks)
        return manifest.has_unit(unit) and whole

    @contextlib.contextmanager
    def room(self, unit: int, size_bytes: int, /) -> Generator[bool]:
        gives_way = functools.partial(self._queue.gives_way, unit)
        is_recorded = self._scheduler.manifest.has_unit(unit)
        with self.budget.room(self, unit, size_bytes, gives_way=gives_way) as there_is_room:
            yield there_is_room
        self.units_rebuilt += there_is_room and is_recorded

    def mark_written(self, unit: int, /) -> None:
        del unit
        self._queue.refresh()

    # Called by the disk budget: see ``disk_budget.Evictable``.

    def poll_peers(self) -> bool:
        return self._queue.poll_peers()

    def eviction_priority(self, unit: int, /) -> int:
        return self._queue.eviction_priority(unit)

    def mark_evicted(self, unit: int, /) -> None:
        self._queue.mark_lost(unit)
        self.units_evicted += 1
        for reader in list(self._readers):
            reader.drop(unit)


class StreamReader(CacheReader):
    """A reader of a stream. A row whose chunk is not on disk waits until the stream has built it.

    Like every ``CacheReader`` it is a snapshot of the manifest; ``refreshed`` returns a newer one.
    """

    def __init__(self, stream: Stream, manifest: Manifest | None = None) -> None:
        directory = stream.directory
        super().__init__(directory, read_recipe(directory), manifest or stream.manifest, _MAX_OPEN_CHUNKS)
        self.stream = stream
        self.repair = stream.discard
        stream.register(self)

    @property
    def is_building(self) -> bool:
        return not self.stream.budget.closed

    def refreshed(self, *, awaited_units: int = 0) -> StreamReader:
        """Return a reader of the current manifest.

        Args:
            awaited_units: The caller waits for all units below this one.

        Raises:
            DataError: One of these units cannot be built.
        """
        manifest = self.stream.refresh(awaited_units=awaited_units)
        return self if manifest is self.manifest else StreamReader(self.stream, manifest)

    def read_rows(self, rows: npt.NDArray[np.int64], /) -> RowBlock:
        units = np.unique(np.searchsorted(self.unit_row_starts, rows, side="right") - 1)
        self.stream.touch(units.tolist())
        return super().read_rows(rows)

    def drop(self, unit: int, /) -> None:
        """Close the open chunk files of an evicted unit."""
        low, high = np.searchsorted(self.manifest.chunks["unit"], [unit, unit + 1])
        for index in range(int(low), int(high)):
            self._open_chunks.pop(index, None)

    def open_units(self) -> set[int]:
        """Return the units of the open chunk files."""
        return {int(self.manifest.chunks["unit"][index]) for index in list(self._open_chunks)}

    def _open(self, index: int) -> Chunk:
        unit = int(self.manifest.chunks["unit"][index])
        while True:
            self.stream.ensure(unit)
            try:
                return super()._open(index)
            except DataError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
                self.stream.mark_lost(unit)  # evicted after ensure returned
