"""Training on caches that are still being built: the plan takes up units as they come, durably, before they are read.

``strict``: the segments of a source are ranges of units fixed in advance, each twice as long as the one before, taken
up when all their units are built; the order depends on the data alone, never on the builder's speed. ``elastic``:
whatever was built since is taken up when the rows run short, and recorded, so that it replays exactly. A pass over a
source ends when everything that is planned by then has been taken up.

Invariant: one process decides; what is decided is durable before any reader locates a row by it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vorox.core.counted import counted
from vorox.core.errors import DataError
from vorox.data.plan import Plan, segment_of
from vorox.data.plan_changes import used_up, without_exhausted
from vorox.data.plan_events import GrowthRule, Segment, StageEvent
from vorox.data.plan_tables import Event, PlanTables
from vorox.data.records import GrowingReader

if TYPE_CHECKING:
    from vorox.core.schema.data import GrowthConfig

_POLL_SECONDS = 0.1

UnitRanges = list[tuple[int, int]]
Tell = Callable[[str, str], None]
"""Told (kind, text) of what happens, for people."""


class Starved(DataError):
    """The rows of the next step are not built yet, and the run is not to wait for them any longer."""


class PlanGrower:
    """Covers positions of a plan as caches grow. Safe to call from any thread.

    Args:
        plan: The run's plan.
        readers: The caches of its sources, in its order; ``None`` for a source that is not drawn from any more.
        growth: The section ``data.growth``.
        last_position: Positions of the whole run: nothing is taken up beyond them.
        tell: Told of everything that is taken up or changes the mixture.
        decides: Off: another process decides, and this one follows what it appends to the plan.
    """

    def __init__(
        self,
        plan: Plan,
        readers: Sequence[GrowingReader | None],
        growth: GrowthConfig,
        *,
        last_position: int | None = None,
        tell: Tell | None = None,
        decides: bool = True,
    ) -> None:
        self._plan, self._growth, self._decides = plan, growth, decides
        self._rule = plan.start.growth or GrowthRule("elastic")
        self._readers = list(readers)
        self._last_position = last_position
        self._tell: Tell = tell or _silent
        self._lock = threading.Lock()
        self._is_waiting = False
        """Whether what is looked for is waited for; looking ahead must not drive out what is needed before it."""

    @property
    def readers(self) -> tuple[GrowingReader | None, ...]:
        """Readers that see everything that is covered."""
        return tuple(self._readers)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, if that is known."""
        if self._last_position is None:
            return None
        return self._last_position // self._plan.start.global_batch_sequences

    def cover(self, position: int, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Return when the plan covers all positions below ``position``, having looked ahead as far as rows are there.

        Args:
            position: Where the step ends that is to be read.
            stop: Asked while waiting.

        Raises:
            Starved: Rows are missing, and ``on_starve`` or ``stop`` says not to wait for them.
            DataError: A source is used up, or a cache cannot be read.
        """
        ahead = position + self._growth.horizon_steps * self._plan.start.global_batch_sequences
        if self._last_position is not None:
            ahead = max(position, min(ahead, self._last_position))
        while self._plan.num_positions < ahead:
            if not self._lock.acquire(timeout=_POLL_SECONDS):
                if self._plan.num_positions >= position:
                    return
                self._ask(stop)
                continue
            try:
                self._cover(position, ahead, stop)
            finally:
                self._lock.release()
            return

    def _cover(self, position: int, ahead: int, stop: Callable[[], bool]) -> None:
        from vorox.data.storage.waiting import may_wait  # whoever has all rows waits for no store

        with may_wait(str(self._plan.path)) as wait:
            while self._plan.num_positions < ahead:
                required = self._plan.num_positions < position
                if self._step(required):
                    continue
                if not required:
                    break
                if self._growth.on_starve == "stop":
                    raise self._starved()
                self._ask(stop)
                wait.because(self._reason(), failed=False)
                time.sleep(_POLL_SECONDS)

    def _step(self, required: bool) -> bool:
        """Cover some more, if that is possible now."""
        if not self._decides:
            return self._plan.refresh(self._follow)
        tables, self._is_waiting = self._plan.tables, required
        index = tables.first_missing()[1]
        events = self._next(tables, index, required)
        self._plan.add(events)
        for event in events:
            if isinstance(event, Segment):
                self._tell("segment", _words(event, tables.names[index]))
            elif isinstance(event, StageEvent):
                for text in event.says:
                    self._tell("mixture", text)
        return bool(events)

    def _follow(self, tables: PlanTables) -> None:
        """See the units of what another process has decided."""
        for index, group in enumerate(tables.segments):
            reader = self._readers[index] if index < len(self._readers) else None
            if group and reader is not None:
                last = max(part.end for segment in group for part in segment.ranges)
                if len(reader.unit_row_starts) <= last or any(
                    len(reader.missing_units(part.start, part.end)) for segment in group for part in segment.ranges
                ):
                    self._readers[index] = reader.refreshed(awaited_units=last)

    def _next(self, tables: PlanTables, index: int, required: bool) -> list[Event]:
        """What gives the source with the first missing draw more rows; nothing if its units are not there."""
        reader, group = self._readers[index], tables.segments[index]
        if reader is None:
            raise DataError(f"the run needs source {tables.names[index]!r}, which is not there")
        epoch = group[-1].next_epoch - 1 if group else 0
        taken = [
            (part.start, part.end) for segment in group if segment.next_epoch == epoch + 1 for part in segment.ranges
        ]
        if not group or group[-1].num_epochs == 1:
            find = self._strict_units if self._rule.mode == "strict" else self._elastic_units
            units = find(index, taken)
            if units is None:
                return self._repeated(tables, index, required)
            segment = segment_of(self._readers[index] or reader, index, tables.end_draw(index), epoch, 1, units)
            if segment is not None:
                return [segment]
        return self._next_pass(tables, index, required)

    def _strict_units(self, index: int, taken: UnitRanges) -> UnitRanges | None:
        """The next range of units of this pass: empty at its end, ``None`` while it is not built."""
        first, group = max((end for _, end in taken), default=0), self._plan.segments[index]
        size = min(self._rule.first_segment_units << min(len(taken), 40), self._rule.max_segment_units)
        if group and group[-1].epoch > 0 and self._rule.later_passes == "whole":
            size = self._rule.max_segment_units  # a later pass begins with everything at once; this is what came since
        end = first + size
        while True:
            reader = self._seeing(index, first, end)
            num_units = len(reader.unit_row_starts) - 1
            last = min(end, num_units)
            if num_units == 0 or len(reader.missing_units(first, last)) or (last < end and not reader.units_final):
                return None
            if first == last:
                return []
            if reader.rows_in(first, last):
                return [(first, last)]
            if last == num_units and reader.units_final:
                return []
            end += size  # units without any row belong to the next that have some

    def _seeing(self, index: int, first: int, end: int) -> GrowingReader:
        """The reader of a source, looking again if it does not see some units yet."""
        reader = self._readers[index]
        assert reader is not None
        last = min(end, len(reader.unit_row_starts) - 1)
        follow = last < end and not reader.units_final
        if last <= first or follow or len(reader.missing_units(first, last)):  # it may have been given more units
            reader = self._readers[index] = reader.refreshed(awaited_units=end if self._is_waiting else 0)
        return reader

    def _elastic_units(self, index: int, taken: UnitRanges) -> UnitRanges | None:
        """Units that were built since: empty at the end of the pass, ``None`` while there are none."""
        reader = self._readers[index]
        assert reader is not None
        reader = self._readers[index] = reader.refreshed()
        num_units = len(reader.unit_row_starts) - 1
        fresh = np.ones(num_units, np.bool_)
        missing = reader.missing_units(0, num_units)
        fresh[missing] = False
        for start, end in taken:
            fresh[start:end] = False
        units = _ranges(fresh)
        if any(reader.rows_in(start, end) for start, end in units):
            return units
        return None if num_units == 0 or len(missing) or not reader.units_final else []

    def _next_pass(self, tables: PlanTables, index: int, required: bool) -> list[Event]:
        """Another pass over everything that is planned by now."""
        group, source = tables.segments[index], tables.sources[index]
        reader = self._seeing(index, 0, len(self._units_of(index)) - 1)
        num_units = len(reader.unit_row_starts) - 1
        if len(reader.missing_units(0, num_units)) or not reader.units_final:
            return []
        num_rows, epoch = reader.rows_in(0, num_units), group[-1].next_epoch if group else 0
        if not num_rows:
            raise DataError(f"source {source.name!r} has no rows", where=str(self._plan.path), hint="give it text")
        left = None if source.max_epochs is None or source.on_exhausted == "repeat" else source.max_epochs - epoch
        if left is not None and left <= 0:
            return self._used_up(tables, index, required, num_rows)
        if self._rule.later_passes == "segments":
            units = self._strict_units(index, []) or []
            segment = segment_of(reader, index, tables.end_draw(index), epoch, 1, units)
            return [] if segment is None else [segment]
        ahead = tables.num_positions + self._growth.horizon_steps * self._plan.start.global_batch_sequences
        wanted = tables.mixture.counts(ahead)[index] - tables.end_draw(index)  # by the plan alone, whoever asks
        num_epochs = max(1, -(-wanted // num_rows)) if group else 1
        num_epochs = num_epochs if left is None else min(left, num_epochs)
        segment = segment_of(reader, index, tables.end_draw(index), epoch, num_epochs, [(0, num_units)])
        return [] if segment is None else [segment]

    def _repeated(self, tables: PlanTables, index: int, required: bool) -> list[Event]:
        """Another pass over what is there, where the rest is not and the run is not to wait for it."""
        reader, group, source = self._readers[index], tables.segments[index], tables.sources[index]
        if reader is None or not required or self._growth.on_starve != "repeat" or not group:
            return []
        epoch = group[-1].next_epoch
        if source.max_epochs is not None and source.on_exhausted != "repeat" and epoch >= source.max_epochs:
            return self._used_up(tables, index, required, group[-1].num_rows)
        built = np.ones(len(reader.unit_row_starts) - 1, np.bool_)
        built[reader.missing_units(0, len(built))] = False
        segment = segment_of(reader, index, tables.end_draw(index), epoch, 1, _ranges(built))
        return [] if segment is None else [segment]

    def _used_up(self, tables: PlanTables, index: int, required: bool, num_rows: int) -> list[Event]:
        if not required:
            return []
        if tables.sources[index].on_exhausted == "error":
            raise used_up(tables, index, tables.end_draw(index), num_rows)
        return without_exhausted(tables, str(self._plan.path))

    def _units_of(self, index: int) -> np.ndarray:
        reader = self._readers[index]
        assert reader is not None
        return reader.unit_row_starts

    def _ask(self, stop: Callable[[], bool]) -> None:
        if stop():
            raise self._starved()

    def _starved(self) -> Starved:
        return Starved(
            f"step {self._plan.num_positions // self._plan.start.global_batch_sequences + 1:,} has no rows yet: "
            f"{self._reason()}",
            where=str(self._plan.path),
            hint="build the caches (`vorox data build` with the same configuration) and run the same command again",
        )

    def _reason(self) -> str:
        index = self._plan.tables.first_missing()[1]
        reader, name = self._readers[index], self._plan.sources[index].name
        if not self._decides or reader is None:
            return f"the deciding process has not taken up more of source {name!r}"
        num_units = len(reader.unit_row_starts) - 1
        missing = reader.missing_units(0, num_units)
        known = f"{num_units:,}" if reader.units_final else f"the {num_units:,} first"
        first = "no unit is planned" if reader.units_final else "the text behind them is being cut into more"
        first = f"unit {missing[0]:,} is the first that is not" if len(missing) else first
        return f"source {name!r} has {num_units - len(missing):,} of {known} units built; {first}"


def _silent(kind: str, text: str) -> None:
    del kind, text


def await_planned(
    plan: Plan,
    readers: Sequence[GrowingReader | None],
    *,
    stop: Callable[[], bool] = lambda: False,
    tell: Tell | None = None,
) -> list[GrowingReader | None]:
    """Readers that see every unit of the plan, waiting for those whose caches are being built again.

    A cache that was lost, or is read in another mode than before, is built anew from its beginning; whether it comes
    out as it was is for ``Plan.check`` to say. One that nobody builds stays as it is.

    Raises:
        Starved: ``stop`` says not to wait.
    """
    seen, told = list(readers), False
    for index, (reader, group) in enumerate(zip(readers, plan.segments, strict=True)):
        last = max((part.end for segment in group for part in segment.ranges), default=0)
        while reader is not None:
            is_building = reader.is_building  # asked before looking: what ends meanwhile has left all its units
            num_missing = _missing_before(reader, last)
            if not num_missing:
                break
            if is_building and not told and tell is not None:
                told = True
                tell(
                    "waiting_for_data",
                    f"The run has read {last:,} units of source {plan.sources[index].name!r}, {num_missing:,} of them "
                    "are not recorded here: building them again",
                )
            if is_building and stop():
                raise Starved("stopped while units that the run has read were built again", where=str(plan.path))
            reader = seen[index] = reader.refreshed(awaited_units=last)
            if not is_building:
                break
            time.sleep(_POLL_SECONDS)
    return seen


def _missing_before(reader: GrowingReader, unit: int) -> int:
    """How many units below ``unit`` a reader does not see."""
    num_units = len(reader.unit_row_starts) - 1
    missing = len(reader.missing_units(0, min(unit, num_units)))
    return missing if reader.units_final else missing + max(0, unit - num_units)


def _ranges(chosen: np.ndarray) -> UnitRanges:
    """Runs of true entries as pairs ``[start, end)``."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]).astype(np.int8))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _words(segment: Segment, name: str) -> str:
    units = sum(part.end - part.start for part in segment.ranges)
    passes = f"passes {segment.epoch + 1:,} to {segment.next_epoch:,}" if segment.num_epochs > 1 else ""
    return (
        f"Took up {counted(units, 'unit')} of source {name!r} "
        f"({segment.ranges[0].start:,} to {segment.ranges[-1].end:,}) for {passes or f'pass {segment.epoch + 1:,}'}: "
        f"{counted(segment.num_rows, 'row')}"
    )
