"""The streams of a corpus: one per source, under a shared disk budget.

Directories, unit builders and the sections ``data.growth`` and ``data.streaming`` go in; readers come out. Invariant:
segments follow the plan, so the disk holds the units that are read next.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from vorox.core.schema.data import DataConfig
from vorox.data.cache.units.unit_builder import UnitBuilder
from vorox.data.cache.upkeep.disk_budget import DiskBudget
from vorox.data.documents import Unit
from vorox.data.storage import StoredFile, cache_ranges
from vorox.data.streaming.prefetch_scheduler import SegmentRule
from vorox.data.streaming.stream import Stream, StreamReader
from vorox.data.streaming.unit_list import UnitList, open_directory

DIRECTORY_NAME = "streams"
"""Directory of streams below the cache root: chunks there are evicted and rebuilt."""

_POLL_SECONDS = 0.02


class StreamGroup:
    """The streams of a corpus. Closing it ends their threads.

    Args:
        data: The section ``data``.
        leads: Whether this process builds ahead; false if another process of this machine does.
    """

    def __init__(self, data: DataConfig, *, leads: bool = True) -> None:
        self._data, self._leads = data, leads
        self.budget = DiskBudget(data.streaming.retention_bytes)
        self.streams: list[Stream] = []
        self._cached_ranges = contextlib.ExitStack()

    def share_reads(self, files: Sequence[StoredFile]) -> None:
        """Share bytes read from these files in memory, so that splitting and building fetch each byte once."""
        self._cached_ranges.enter_context(cache_ranges(files))

    def open(self, directory: Path, builder: UnitBuilder, units: UnitList) -> StreamReader:
        """Open a stream over one split of a source.

        Raises:
            DataError: The directory has a different recipe or source, or a cache that is not evictable; or the text
                cannot be read.
        """
        growth = self._data.growth
        open_directory(directory, units, growth.first_segment_units)
        stream = Stream(
            directory, builder, units, SegmentRule(growth.first_segment_units, growth.max_segment_units), self.budget,
            prefetch_segments=self._data.streaming.prefetch_segments, leads=self._leads,
        )  # fmt: skip
        self.streams.append(stream)
        return StreamReader(stream)

    def wait_for_first_segments(
        self, readers: Sequence[StreamReader], on_progress: Callable[[StreamReader, int, int], None]
    ) -> list[StreamReader]:
        """Wait for the first segment of every source; return readers that see them.

        Args:
            readers: One per source.
            on_progress: Called with (reader, bytes of text built, bytes of the first segment).

        Raises:
            DataError: A unit of a first segment cannot be built.
        """
        seen = list(readers)
        while True:
            waiting = False
            for index, reader in enumerate(seen):
                last = reader.stream.first_segment_units
                if len(reader.missing_units(0, last)):
                    reader = seen[index] = reader.refreshed(awaited_units=last)
                missing: list[int] = reader.missing_units(0, last).tolist()
                if missing:
                    waiting = True
                    sizes = [_size_bytes(unit) for unit in reader.units[:last]]
                    on_progress(reader, sum(sizes) - sum(sizes[unit] for unit in missing), sum(sizes))
            if not waiting:
                return seen
            time.sleep(_POLL_SECONDS)

    def metrics(self) -> dict[str, float]:
        """Return the summed statistics of all build pipelines, by registered metric name."""
        total: dict[str, float] = {}
        for stages in (stream.stages for stream in self.streams):
            for name, value in (stages.metrics() if stages is not None else {}).items():
                total[name] = total.get(name, 0.0) + value
        return total

    def close(self) -> None:
        """Stop all builds. Idempotent."""
        self.budget.close()
        for stream in self.streams:
            stream.stop()
        for stream in self.streams:
            stream.close()
        self._cached_ranges.close()


def _size_bytes(unit: Unit) -> int:
    return sum(span.end_byte - span.start_byte for span in unit.spans)
