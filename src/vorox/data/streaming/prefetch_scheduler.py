"""The prefetch scheduler of a stream: which units are needed, and how soon.

Reads and waits go in; units to build and eviction priorities come out. Pure bookkeeping: the stream's lock guards it.
Invariant: what is read or awaited now is never evicted before what is needed later.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from vorox.data.streaming.read_windows import UnitRange

_UNITS_PER_SPLIT = 8
"""Units that the source is split into before the first of them is built."""

_HELD_READS = 64
"""Reads for which a segment stays needed after its last one: reader threads leave a segment one by one."""


@dataclass(frozen=True, slots=True)
class SegmentRule:
    """How units are grouped into segments: each twice as long as the one before, up to a bound.

    Attributes:
        first_units: Units of the first segment.
        max_units: Units of a segment at most.
    """

    first_units: int
    max_units: int

    def ranges(self, num_units: int, *, is_all: bool, ahead: int = 1) -> list[UnitRange]:
        """Return the segments of a pass.

        Args:
            num_units: Units that are known.
            is_all: Whether they are all; the last segment ends with them.
            ahead: If they are not, how many segments past them to add.
        """
        ranges: list[UnitRange] = []
        first, size, left = 0, self.first_units, 0 if is_all else ahead
        while first < num_units or left:
            left -= first >= num_units
            last = first + min(size, self.max_units)
            ranges.append((first, min(last, num_units) if is_all else last))
            first, size = last, 2 * size
        return ranges


class PrefetchScheduler:
    """Where the readers of a stream are, and what they need next.

    Args:
        segments: Ranges of units that are read together, one after the other, without gaps.
        prefetch_segments: Segments that are needed ahead of the one being read.
    """

    def __init__(self, segments: Sequence[UnitRange], prefetch_segments: int) -> None:
        self.awaited: int | None = None
        """The segment that a reader waits for until all its units are recorded."""
        self._prefetch_segments = prefetch_segments
        self.set_segments(segments)
        self._latest: int | None = None
        self._touched: dict[int, int] = {}
        self._reads = 0

    def set_segments(self, segments: Sequence[UnitRange]) -> None:
        """Replace the segments: there are more than before, or the last ones end where the units do."""
        self.segments = segments
        self._starts = [start for start, _ in segments]
        if self.awaited is not None and self.awaited >= len(segments):
            self.awaited = None

    def segment_of(self, unit: int) -> int:
        return bisect.bisect_right(self._starts, unit) - 1

    def touch(self, units: Sequence[int]) -> bool:
        """Record that rows of these units are read, in the order of training; return whether needs have changed."""
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
        """The awaited segment is recorded: while others are read, it may be evicted until its turn comes."""
        if self._latest is not None:
            self.awaited = None

    def window(self) -> Sequence[UnitRange]:
        """Return the segment being read and those prefetched after it; nothing before the first read."""
        base = self._base
        return [] if base is None else self.segments[base : base + 1 + self._prefetch_segments]

    def build_order(self) -> list[UnitRange]:
        """Return the segments to build, the most urgent first."""
        return [*([] if self.awaited is None else [self.segments[self.awaited]]), *self.window()]

    def next_units(
        self, demanded: Iterable[int], done: Collection[int], settled: Collection[int], known_units: int | None
    ) -> tuple[list[int], int]:
        """Return the units to build, the most urgent first; or, if there is none, how many units must be known first.

        Args:
            demanded: Units that readers wait for, one by one.
            done: Units that were built before; those that were not come first.
            settled: Units that are on disk or are not to be tried now; the first unknown unit may be among them.
            known_units: How many units are known, if more follow.
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
        """Whether a reader waits for units that are not known yet."""
        if self.awaited is None or known_units is None:
            return False
        return self.segments[self.awaited][1] > known_units

    def eviction_priority(self, unit: int, peers: Sequence[UnitRange]) -> int:
        """Return 0: read now or awaited; 1: read by slower threads or in between; 2: prefetched; more: needed later.

        Args:
            unit: The unit.
            peers: What other processes read; it counts as prefetched.
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
