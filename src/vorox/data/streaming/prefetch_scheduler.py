"""The prefetch scheduler of a stream: which units are needed, and how soon.

Reads and waits go in; units to build and eviction priorities come out. The scheduler does no I/O and is guarded by the
stream's lock. Invariant: units that are read or awaited now are evicted after units that are needed later.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from vorox.data.streaming.read_windows import UnitRange

_UNITS_PER_SPLIT = 8
"""Number of units that are split from the source before the first of them is built."""

_HELD_READS = 64
"""Number of reads for which a segment stays needed after its last read: reader threads leave it one at a time."""


@dataclass(frozen=True, slots=True)
class SegmentRule:
    """How units are grouped into segments: each twice as long as the one before, up to a bound.

    Attributes:
        first_units: Units of the first segment.
        max_units: Units of a segment at most.
    """

    first_units: int
    max_units: int

    def ranges(self, num_units: int, *, is_complete: bool, ahead: int = 1) -> list[UnitRange]:
        """Return the segments of a pass.

        Args:
            num_units: Number of known units.
            is_complete: Whether these are all units; the last segment then ends with them.
            ahead: Number of segments to add beyond the known units, unless ``is_complete``.
        """
        ranges: list[UnitRange] = []
        first, size, left = 0, self.first_units, 0 if is_complete else ahead
        while first < num_units or left:
            left -= first >= num_units
            last = first + min(size, self.max_units)
            ranges.append((first, min(last, num_units) if is_complete else last))
            first, size = last, 2 * size
        return ranges


class PrefetchScheduler:
    """Tracks the segments that the readers of a stream read, and decides which units they need next.

    Args:
        segments: Consecutive ranges of units that are read together, without gaps.
        prefetch_segments: Number of segments needed ahead of the one being read.
    """

    def __init__(self, segments: Sequence[UnitRange], prefetch_segments: int) -> None:
        self.awaited: int | None = None
        """The segment that a reader waits for, until all its units are recorded."""
        self._prefetch_segments = prefetch_segments
        self.set_segments(segments)
        self._latest: int | None = None
        self._touched: dict[int, int] = {}
        self._reads = 0

    def set_segments(self, segments: Sequence[UnitRange]) -> None:
        """Replace the segments by a longer list, or by one that ends with the last unit."""
        self.segments = segments
        self._starts = [start for start, _ in segments]
        if self.awaited is not None and self.awaited >= len(segments):
            self.awaited = None

    def segment_of(self, unit: int) -> int:
        return bisect.bisect_right(self._starts, unit) - 1

    def touch(self, units: Sequence[int]) -> bool:
        """Record a read of these units; return whether the needed units have changed."""
        self._reads += 1
        segments = sorted({self.segment_of(unit) for unit in units})
        fresh = [segment for segment in segments if segment not in self._touched]
        expired = [segment for segment, read in self._touched.items() if read < self._reads - _HELD_READS]
        for segment in expired:
            del self._touched[segment]
        self._touched.update(dict.fromkeys(segments, self._reads))
        if fresh:
            base = self._latest if self._latest is not None else fresh[0]
            self._latest = max(fresh, key=lambda segment: (segment - base) % len(self.segments))
        elif self._latest not in self._touched:
            self._latest = segments[-1]
        if self.awaited in self._touched:
            self.awaited = None
        return bool(fresh or expired)

    def clear_awaited(self) -> None:
        """Clear the awaited segment once it is recorded; it may be evicted while other segments are read."""
        if self._latest is not None:
            self.awaited = None

    def window(self) -> Sequence[UnitRange]:
        """Return the segment being read and the prefetched ones after it; empty before the first read."""
        base = self._base
        return [] if base is None else self.segments[base : base + 1 + self._prefetch_segments]

    def build_order(self) -> list[UnitRange]:
        """Return the segments to build, most urgent first."""
        return [*([] if self.awaited is None else [self.segments[self.awaited]]), *self.window()]

    def next_units(
        self, demanded: Iterable[int], done: Collection[int], settled: Collection[int], known_units: int | None
    ) -> tuple[list[int], int]:
        """Return the units to build, most urgent first; or, if there are none, how many units must be split first.

        Args:
            demanded: Individual units that readers wait for.
            done: Units that were built before; others come first.
            settled: Units that are on disk or must not be tried now; may include the first unknown unit.
            known_units: Number of known units; ``None`` if all units are known.
        """
        wanted = dict.fromkeys(unit for unit in sorted(demanded) if unit not in settled)
        for first, last in self.build_order():
            known = last if known_units is None else min(last, known_units)
            units = sorted(range(first, known), key=lambda unit: unit in done)
            wanted |= dict.fromkeys(unit for unit in units if unit not in settled)
            if known_units is not None and known_units < last and known_units not in settled:
                return list(wanted), 0 if wanted else min(last, known_units + _UNITS_PER_SPLIT)
        return list(wanted), 0

    def awaits_more(self, known_units: int | None) -> bool:
        """Return whether a reader waits for units that are not known yet."""
        if self.awaited is None or known_units is None:
            return False
        return self.segments[self.awaited][1] > known_units

    def eviction_priority(self, unit: int, peers: Sequence[UnitRange]) -> int:
        """Return the eviction priority of a unit; units with the highest value are evicted first.

        0: being read or awaited; 1: read by slower threads, or between the current and the awaited segment; 2:
        prefetched; higher: needed later.

        Args:
            unit: The unit.
            peers: Units that other processes read; they count as prefetched.
        """
        segment = self.segment_of(unit)
        if segment in (self._latest, self.awaited):
            return 0
        base = self._base or 0
        if segment in self._touched or (self.awaited is not None and base < segment < self.awaited):
            return 1
        distance = segment - base
        if 0 < distance <= self._prefetch_segments or any(first <= unit < last for first, last in peers):
            return 2
        return 3 + distance % len(self.segments)

    @property
    def _base(self) -> int | None:
        return self._latest if self._latest is not None else self.awaited
