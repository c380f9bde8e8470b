"""The streams of one corpus: one ring for all of its sources, and which units are read together.

In: directories, the work of their units, the sections ``data.growth`` and ``data.streaming``. Out: readers. Invariant:
the segments are those that the plan takes up, so that what is kept is what is read next.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vorox.core.schema.data import DataConfig, GrowthConfig
from vorox.data.cache.unit_work import UnitWork
from vorox.data.documents import Unit
from vorox.data.streaming.reader import StreamReader
from vorox.data.streaming.retention import Ring
from vorox.data.streaming.stream import Stream, open_directory
from vorox.data.streaming.windows import Range

DIRECTORY_NAME = "streams"
"""Below the root of the caches: chunks there come and go."""


def segment_ranges(num_units: int, growth: GrowthConfig) -> list[Range]:
    """The units of each segment of a pass."""
    ranges: list[Range] = []
    first, size = 0, growth.first_segment_units
    while first < num_units:
        last = min(first + min(size, growth.max_segment_units), num_units)
        ranges.append((first, last))
        first, size = last, 2 * size
    return ranges


class Streams:
    """The streams of a corpus. Close it to end their threads.

    Args:
        data: The section ``data``.
    """

    def __init__(self, data: DataConfig) -> None:
        self._data = data
        self.ring = Ring(data.streaming.retention_bytes)
        self.streams: list[Stream] = []

    def open(
        self, directory: Path, work: UnitWork, units: Sequence[Unit], *, bad_record_fraction: float
    ) -> StreamReader:
        """The rows of one split of a source, built while they are read.

        Raises:
            DataError: The directory is of another recipe or source, or holds a cache that is meant to stay.
        """
        open_directory(directory, work, units)
        stream = Stream(
            directory, work, units, segment_ranges(len(units), self._data.growth), self.ring,
            prefetch_segments=self._data.streaming.prefetch_segments, bad_record_fraction=bad_record_fraction,
        )  # fmt: skip
        self.streams.append(stream)
        return StreamReader(stream)

    def close(self) -> None:
        """End what is being built. Repeatable."""
        self.ring.close()
        for stream in self.streams:
            stream.close()
