"""A stream: a cache whose chunks are built while it is read, evicted under a disk budget, and rebuilt when needed.

Readers report what they read; the build scheduler builds what the queue wants, within the budget. A unit that was built
once stays recorded in the cache's manifest; if its chunks are needed after they were evicted, it is rebuilt from its
text and must have the recorded content. Invariant: a reader gets the rows of a complete cache of the same recipe, or an
error at the row that needs it; neither the network nor the disk budget changes an order or leaves a row out.
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
from vorox.data.cache.chunk import Chunk
from vorox.data.cache.manifest import Manifest, chunk_path
from vorox.data.cache.reader import CacheReader
from vorox.data.cache.recipe import read_recipe
from vorox.data.cache.residency import DiskBudget, remove_chunks, resident_units
from vorox.data.cache.scheduler import BuildScheduler
from vorox.data.cache.unit_builder import UnitBuilder
from vorox.data.pipeline.pipeline import PipelineStatistics
from vorox.data.rows import RowBlock
from vorox.data.storage.waiting import track_stall
from vorox.data.streaming.prefetch_scheduler import SegmentRule
from vorox.data.streaming.read_windows import ReadWindow, UnitRange
from vorox.data.streaming.stream_queue import StreamQueue
from vorox.data.streaming.unit_list import UnitList

_CLOSE_SECONDS = 10.0
_MAX_OPEN_CHUNKS = 1024


class ChunkHolder(Protocol):
    """A reader that keeps chunk files open."""

    def drop(self, unit: int, /) -> None: ...


class Stream:
    """An open stream: the residency of its build scheduler, and evictable. Nothing is built before it is read.

    Args:
        directory: A directory that ``open_directory`` made.
        builder: What its units are a function of.
        units: The units that are known, and where more come from.
        rule: How units are grouped into segments.
        budget: The disk budget of its chunks.
        prefetch_segments: Segments that are built ahead of the one being read.

    Attributes:
        units_rebuilt: Units that were built again because their chunks had been removed.
        units_evicted: Units whose chunks were removed to make room.
    """

    damaged: Collection[int] = ()
    """A damaged unit is discarded and so becomes one that is not resident."""

    def __init__(
        self,
        directory: Path,
        builder: UnitBuilder,
        units: UnitList,
        rule: SegmentRule,
        budget: DiskBudget,
        *,
        prefetch_segments: int = 1,
    ) -> None:
        self.directory, self.budget = directory, budget
        self.units_rebuilt = self.units_evicted = 0
        self._units = units
        self._queue = StreamQueue(directory, units, rule, budget, prefetch_segments)
        self._scheduler = BuildScheduler(directory, builder, units.units, self._queue, residency=self)
        self._readers: weakref.WeakSet[ChunkHolder] = weakref.WeakSet()
        self._window, self._peers = ReadWindow(directory), list[UnitRange]()
        self._is_started = False
        budget.join(self)

    @property
    def manifest(self) -> Manifest:
        """What is recorded, as last seen."""
        return self._queue.manifest

    @property
    def first_segment_units(self) -> int:
        return self._queue.schedule.segments[0][1]

    @property
    def units_built(self) -> int:
        """Units that were built for the first time."""
        return self._scheduler.units_built - self.units_rebuilt

    @property
    def stages(self) -> PipelineStatistics | None:
        """Statistics of the build pipeline, once it has run."""
        return self._scheduler.progress.stages

    # What readers report and request.

    def register(self, reader: ChunkHolder) -> None:
        """Have a reader drop the files of units that are evicted."""
        with self.budget.changed:
            self._readers.add(reader)

    def touch(self, units: Sequence[int]) -> None:
        """Report that rows of these units are read, in the order of training."""
        if self._queue.touch(units):
            self._start()

    def ensure(self, unit: int) -> None:
        """Return when the chunks of a unit are on disk.

        Raises:
            DataError: It cannot be built, or has other content than was recorded.
        """
        if self._queue.is_settled(unit):
            return
        with track_stall(str(self.directory)) as stall:
            stall.report(f"unit {unit} is being built", failed=False)
            self._start()
            self._queue.wait_for(unit)

    def lost(self, unit: int) -> None:
        """Report that the chunks of a unit are not on disk: another process evicted them."""
        self._queue.mark_lost(unit)

    def discard(self, unit: int, error: DataError) -> None:
        """Remove the chunks of a unit that were found damaged, so that they are rebuilt.

        Raises:
            DataError: ``error`` itself, if there is no chunk that could be damaged.
        """
        with self.budget.changed:
            files = resident_units(self.directory).get(unit)
            if not files:
                raise error
            remove_chunks(files)
            self._queue.mark_lost(unit)

    def refresh(self, *, awaited_units: int = 0) -> Manifest:
        """Return what is recorded by now.

        Args:
            awaited_units: The reader waits until all units below this are recorded, so their segment is built first.

        Raises:
            DataError: One of them cannot be built.
        """
        if self._queue.await_units(awaited_units):
            self._start()
        return self.manifest

    def stop(self) -> None:
        """Have the build end after the unit in hand, without waiting for it. Repeatable."""
        self._queue.close()

    def close(self) -> None:
        """End the build, and wait for its thread a few seconds. Repeatable."""
        self._scheduler.close(timeout_seconds=_CLOSE_SECONDS)
        self._units.close()
        self._window.close()

    def _start(self) -> None:
        with self.budget.changed:
            if not self._is_started and not self._queue.closed:
                self._is_started = True
                self._scheduler.start()
            if window := self._queue.schedule.window():
                self._window.publish(window)

    # What the build scheduler asks: see ``cache.residency``.

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

    # What the disk budget asks: see ``cache.residency``.

    def poll_peers(self) -> None:
        self._peers = self._window.peers()

    def eviction_priority(self, unit: int, /) -> int:
        return self._queue.eviction_priority(unit, self._peers)

    def evicted(self, unit: int, /) -> None:
        self._queue.mark_lost(unit)
        self.units_evicted += 1
        for reader in list(self._readers):
            reader.drop(unit)


class StreamReader(CacheReader):
    """The rows of a stream, as far as they are recorded."""

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
        """Return a reader of what is recorded by now.

        Args:
            awaited_units: The caller waits until all units below this are recorded.

        Raises:
            DataError: One of them cannot be built.
        """
        manifest = self.stream.refresh(awaited_units=awaited_units)
        return self if manifest is self.manifest else StreamReader(self.stream, manifest)

    def read_rows(self, rows: npt.NDArray[np.int64], /) -> RowBlock:
        units = np.unique(np.searchsorted(self.unit_row_starts, rows, side="right") - 1)
        self.stream.touch(units.tolist())
        return super().read_rows(rows)

    def drop(self, unit: int, /) -> None:
        """Drop the open chunk files of a unit that has been evicted."""
        for index, chunk in list(self._open_chunks.items()):
            if chunk.header.unit == unit:
                self._open_chunks.pop(index, None)

    def _open(self, index: int) -> Chunk:
        unit = int(self.manifest.chunks["unit"][index])
        while True:
            self.stream.ensure(unit)
            try:
                return super()._open(index)
            except DataError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
                self.stream.lost(unit)  # evicted between the two lines above
