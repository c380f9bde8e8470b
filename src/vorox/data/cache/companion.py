"""Two caches from one pass: while the units of one split are built, the other split's records build its companion.

Both caches are made of the same pieces of text, grouped into units of different sizes. The reader of the first split
holds back the records of the other one; once the units that cover a unit of the second cache are committed, the
companion builds it from the records held back. What another builder has in hand, or was built before, is left out.
Invariant: the second cache is what building it alone would give; what it still lacks afterwards, a build of its own
completes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from vorox.data.cache.build_queue import BuildQueue, never
from vorox.data.cache.leases import Leases
from vorox.data.cache.manifest import Manifest
from vorox.data.cache.residency import Residency
from vorox.data.cache.scheduler import BuildScheduler, OnProgress
from vorox.data.cache.unit_builder import BuiltUnit, UnitBuilder
from vorox.data.documents import Record, Unit


class HeldRecords(Protocol):
    """Holds back the records of the other split: ``text.unit_reader.SplitPairReader``."""

    def hold(self, unit_id: int, /) -> None: ...
    def take(self, unit_id: int, /) -> Sequence[Record] | None: ...


class PairedScheduler(BuildScheduler):
    """A scheduler that also builds what its companion lacks of the text that it reads itself.

    Args:
        companion: The scheduler of the second cache, planned, with units of the same pieces.
        held: Holds back the companion's records; it is, or belongs to, ``builder.read_unit``.

    The other arguments are those of ``BuildScheduler``.
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
            stack.enter_context(companion.silenced())
            companion.observe(Manifest.open(companion.directory))
            missing = set(Manifest.open(self.directory).missing_units().tolist())
            for target, covering in self._covering.items():
                if covering <= missing and companion._claim(target, self._leases):
                    self._parts[target] = {}
            super().run()
        self._leases = None

    def _adopt(self, batch: Sequence[int], leases: Leases) -> int:
        self._adopting = True  # nothing is read, so nothing is held back
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
                self._give_up(target)
        return claimed

    def _commit(self, built: BuiltUnit) -> bool:
        if not super()._commit(built):
            return False
        unit = built.unit_id
        records, targets = self.held.take(unit), self._targets[unit] & self._parts.keys()
        for target in targets:
            if records is None:
                self._give_up(target)
                continue
            self._parts[target][unit] = [record for record in records if self._target_of(unit, record) == target]
            if self._parts[target].keys() == self._covering[target]:
                self._build_companion(target)
        return True

    def _target_of(self, unit: int, record: Record) -> int:
        """The unit of the companion that a record of a unit belongs to."""
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

    def _give_up(self, target: int) -> None:
        """Leave a unit to a build of its own."""
        assert self._leases is not None
        if self._parts.pop(target, None) is not None:
            self._leases.release(target)
