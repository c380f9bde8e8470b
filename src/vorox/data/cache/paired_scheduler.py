"""Build the caches of both splits of a source in one pass over its text.

Both caches consist of the same pieces of text, grouped into units of different sizes. The reader of the first split
holds the records of the other one; once the units that cover a unit of the second cache are committed, its scheduler,
the companion, builds that unit from the held records. Units that exist or that another builder holds are skipped.
Invariant: the second cache is identical to one built alone; a later build completes what it still lacks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from vorox.data.cache.build_queue import BuildQueue, Residency, never
from vorox.data.cache.leases import Leases
from vorox.data.cache.manifest import Manifest
from vorox.data.cache.scheduler import BuildScheduler, OnProgress
from vorox.data.cache.unit_builder import BuiltUnit, UnitBuilder
from vorox.data.documents import Record, Unit


class HeldRecords(Protocol):
    """Protocol of a reader that keeps the records of the other split, implemented by ``SplitPairReader``."""

    def hold(self, unit_id: int, /) -> None: ...
    def take(self, unit_id: int, /) -> Sequence[Record] | None: ...


class PairedScheduler(BuildScheduler):
    """A scheduler that also builds units of a second cache from the text that it reads.

    Args:
        companion: The scheduler of the second cache, which is planned and has units of the same pieces.
        held: Holds the companion's records; it is, or is part of, ``builder.read_unit``.

    Other arguments: see ``BuildScheduler``.
    """

    def __init__(
        self,
        directory: Path,
        builder: UnitBuilder,
        units: Sequence[Unit],
        queue: BuildQueue | None = None,
        *,
        companion: BuildScheduler,
        held: HeldRecords,
        residency: Residency | None = None,
        on_progress: OnProgress | None = None,
        stop: Callable[[], bool] = never,
    ) -> None:
        super().__init__(directory, builder, units, queue, residency=residency, on_progress=on_progress, stop=stop)
        self.companion, self.held = companion, held
        owner = {(span.file_index, span.start_byte): unit.unit_id for unit in companion.units for span in unit.spans}
        self._targets = [{owner[span.file_index, span.start_byte] for span in unit.spans} for unit in units]
        self._owner = owner
        self._parts: dict[int, dict[int, list[Record]]] = {}
        self._covering: defaultdict[int, set[int]] = defaultdict(set)
        for unit, targets in enumerate(self._targets):
            for target in targets:
                self._covering[target].add(unit)
        self._leases: Leases | None = None
        self._adopting = False

    def run(self) -> None:
        companion = self.companion
        with ExitStack() as stack:
            self._leases = stack.enter_context(Leases(companion.directory))
            stack.enter_context(companion.without_progress())
            companion.observe(Manifest.open(companion.directory))
            missing = set(Manifest.open(self.directory).missing_units().tolist())
            for target, covering in self._covering.items():
                if covering <= missing and companion._claim(target, self._leases):
                    self._parts[target] = {}
            super().run()
        self._leases = None

    def _adopt(self, batch: Sequence[int], leases: Leases) -> int:
        self._adopting = True  # adopting reads no records
        try:
            return super()._adopt(batch, leases)
        finally:
            self._adopting = False

    def _claim(self, unit: int, leases: Leases) -> bool:
        claimed = super()._claim(unit, leases)
        for target in self._targets[unit] & self._parts.keys():
            if claimed and not self._adopting:
                self.held.hold(unit)
            else:
                self._skip(target)
        return claimed

    def _commit(self, built: BuiltUnit) -> bool:
        if not super()._commit(built):
            return False
        unit = built.unit_id
        records, targets = self.held.take(unit), self._targets[unit] & self._parts.keys()
        for target in targets:
            if records is None:
                self._skip(target)
                continue
            self._parts[target][unit] = [record for record in records if self._find_target(unit, record) == target]
            if self._parts[target].keys() == self._covering[target]:
                self._build_companion(target)
        return True

    def _find_target(self, unit: int, record: Record) -> int:
        """Return the companion's unit that a record belongs to."""
        if len(self._targets[unit]) == 1:
            return next(iter(self._targets[unit]))
        starts = (
            span.start_byte
            for span in self.units[unit].spans
            if span.file_index == record.file_index and span.start_byte <= record.byte_offset
        )
        return self._owner[record.file_index, max(starts)]

    def _build_companion(self, target: int) -> None:
        assert self._leases is not None
        parts = self._parts.pop(target)
        records = [record for unit in sorted(parts) for record in parts[unit]]
        self.companion.build_from(self.companion.units[target], records)
        self._leases.release(target)

    def _skip(self, target: int) -> None:
        """Leave a unit to a later build."""
        assert self._leases is not None
        if self._parts.pop(target, None) is not None:
            self._leases.release(target)
