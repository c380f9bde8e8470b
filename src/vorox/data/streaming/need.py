"""Which units of a stream are needed, and how soon.

Reads and waits go in; ranks of units and segments to build come out. Pure bookkeeping: the stream's lock guards it.
Invariant: what is read or waited for now is never more dispensable than what is needed later.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Sequence

from vorox.data.streaming.windows import Range

_CUT_AT_ONCE = 8
"""Units that are cut before the first of them are built."""

_HELD_READS = 64
"""Reads for which a segment stays wanted after its last one: reader threads leave a segment one by one."""


class Need:
    """What the readers of a stream are at.

    Args:
        segments: Ranges of units that are read together, one after the other, without gaps; ``know`` gives more.
        prefetch_segments: Segments that are wanted ahead of the one being read.
    """

    def __init__(self, segments: Sequence[Range], prefetch_segments: int) -> None:
        self.awaited: int | None = None
        """The segment that somebody waits for until its units are recorded."""
        self._prefetch_segments = prefetch_segments
        self.know(segments)
        self._latest: int | None = None
        self._touched: dict[int, int] = {}
        self._reads = 0

    def know(self, segments: Sequence[Range]) -> None:
        """There are more segments than was known, or the last of them end where the units do."""
        self.segments = segments
        self._starts = [start for start, _ in segments]
        if self.awaited is not None and self.awaited >= len(segments):
            self.awaited = None

    def segment_of(self, unit: int) -> int:
        return bisect.bisect_right(self._starts, unit) - 1

    def touch(self, units: Sequence[int]) -> bool:
        """Rows of these units are read now, in the order of training. Whether that changes what is needed."""
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

    def was_recorded(self) -> None:
        """The awaited segment is recorded: where others are read, it may go like any until its turn comes."""
        if self._latest is not None:
            self.awaited = None

    def window(self) -> Sequence[Range]:
        """The segment that is read and those wanted ahead of it; nothing before the first read."""
        base = self._base
        return [] if base is None else self.segments[base : base + 1 + self._prefetch_segments]

    def to_build(self) -> list[Range]:
        """Segments to build, the most urgent ones first."""
        return [*([] if self.awaited is None else [self.segments[self.awaited]]), *self.window()]

    def wanted(
        self, demanded: Iterable[int], done: Collection[int], settled: Collection[int], known_units: int | None
    ) -> tuple[list[int], int]:
        """Units to build, the most urgent ones first; if there is none before, how many units are to be known.

        Args:
            demanded: Units that somebody waits for, one by one.
            done: Units that were built before; those that were not come first.
            settled: Units that are there, or are not to be tried now. The first that is not known may be among them.
            known_units: How many units are known, if more follow.
        """
        wanted = dict.fromkeys(unit for unit in sorted(demanded) if unit not in settled)
        for first, last in self.to_build():
            known = last if known_units is None else min(last, known_units)
            units = sorted(range(first, known), key=lambda unit: unit in done)
            wanted |= dict.fromkeys(unit for unit in units if unit not in settled)
            if known_units is not None and known_units < last and known_units not in settled:
                return list(wanted), 0 if wanted else min(last, known_units + _CUT_AT_ONCE)
        return list(wanted), 0

    def awaits_more(self, known_units: int | None) -> bool:
        """Whether somebody waits for units that are not known yet."""
        if self.awaited is None or known_units is None:
            return False
        return self.segments[self.awaited][1] > known_units

    def rank(self, unit: int, others: Sequence[Range]) -> int:
        """0: read now or waited for; 1: read by slower threads or in between; 2: of the next segments; more: later.

        Args:
            unit: The unit.
            others: What other processes read, which counts like the next segments.
        """
        segment = self.segment_of(unit)
        if segment in (self._latest, self.awaited):
            return 0
        base = self._base or 0
        if segment in self._touched or (self.awaited is not None and base < segment < self.awaited):
            return 1
        distance = segment - base
        if 0 < distance <= self._prefetch_segments or any(first <= unit < last for first, last in others):
            return 2
        return 3 + distance % len(self.segments)

    @property
    def _base(self) -> int | None:
        return self._latest if self._latest is not None else self.awaited
