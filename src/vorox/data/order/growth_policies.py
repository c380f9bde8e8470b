"""Policies of ``data.growth``: choose the units that a growing plan reads next.

``mode``: which units does the current pass read next? ``later_passes``: which units does the next pass start with?
``on_starve``: what is read while those units are not built? ``max_epochs`` and ``on_exhausted``: what follows the last
pass? Each answer is a list of events, empty while the run has to wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.data.order.plan_changes import exhausted_error, exhausted_events, make_segment
from vorox.data.order.plan_events import GrowthRule, PlanEvent
from vorox.data.order.plan_state import PlanState
from vorox.data.rows import GrowingReader

if TYPE_CHECKING:
    from vorox.core.schema.data import GrowthConfig

UnitRanges = list[tuple[int, int]]


class GrowthPolicies:
    """The policies of one plan, and the newest readers of its caches.

    Args:
        path: The plan's file, for errors.
        rule: The growth rule of the plan's start.
        growth: The section ``data.growth``.
        readers: The caches of the plan's sources, in its order; ``None`` for a source that is no longer sampled.

    Attributes:
        readers: The newest reader of each source; it sees every unit in the plan.
    """

    def __init__(
        self, path: Path, rule: GrowthRule, growth: GrowthConfig, readers: Sequence[GrowingReader | None]
    ) -> None:
        self._path, self._rule, self._growth = path, rule, growth
        self.readers = list(readers)

    def next_events(self, state: PlanState, index: int, *, is_required: bool) -> list[PlanEvent]:
        """Return the events that give a source more rows; none while the units that it needs are not built.

        Args:
            state: The plan.
            index: The source.
            is_required: Whether a step waits for the rows. Looking ahead must not evict units that are needed earlier.

        Raises:
            DataError: The source has no rows, or is exhausted and its policy is ``error``.
        """
        segments = state.segments[index]
        if self.readers[index] is None:
            raise DataError(
                f"The run needs source {state.names[index]!r}, which the configuration no longer has",
                where=str(self._path),
            )
        if not segments or segments[-1].num_epochs == 1:
            epoch = segments[-1].epoch if segments else 0
            units = self._units_of_this_pass(state, index, epoch, is_required)
            if units is None:
                return self._without_units(state, index) if is_required else []
            if events := self._segment(state, index, epoch, 1, units):
                return events
        return self._next_pass(state, index, is_required)

    def _units_of_this_pass(self, state: PlanState, index: int, epoch: int, is_required: bool) -> UnitRanges | None:
        """``mode``: return the units that a pass reads next; empty at the end, ``None`` while they are not built."""
        used = [(p.start, p.end) for s in state.segments[index] if s.next_epoch == epoch + 1 for p in s.ranges]
        if self._rule.mode == "elastic":
            return self._built_units(index, used)
        return self._fixed_units(
            index, used, is_required, begins_whole=epoch > 0 and self._rule.later_passes == "whole"
        )

    def _fixed_units(
        self, index: int, used: UnitRanges, is_required: bool, *, begins_whole: bool = False
    ) -> UnitRanges | None:
        """``strict``: return the next range of units, twice as long as the one before, whether or not it is built.

        Args:
            index: The source.
            used: The ranges that the pass has read.
            is_required: Whether a step waits for the rows.
            begins_whole: Whether the pass began with all units then planned; the range then covers later units.
        """
        first = max((end for _, end in used), default=0)
        size = min(self._rule.first_segment_units << min(len(used), 40), self._rule.max_segment_units)
        size = self._rule.max_segment_units if begins_whole else size
        end = first + size
        while True:
            reader = self._reader_seeing(index, first, end, is_required)
            num_units = len(reader.unit_row_starts) - 1
            last = min(end, num_units)
            if num_units == 0 or len(reader.missing_units(first, last)) or (last < end and not reader.units_final):
                return None
            if first < last and reader.rows_in(first, last):
                return [(first, last)]
            if last == num_units and reader.units_final:
                return []
            end += size  # units without rows join the next range that has rows

    def _built_units(self, index: int, used: UnitRanges) -> UnitRanges | None:
        """``elastic``: return the units that were built since the last call."""
        reader = self.readers[index] = self._reader(index).refreshed()
        num_units = len(reader.unit_row_starts) - 1
        missing = reader.missing_units(0, num_units)
        is_new = np.ones(num_units, np.bool_)
        is_new[missing] = False
        for start, end in used:
            is_new[start:end] = False
        units = _ranges(is_new)
        if any(reader.rows_in(start, end) for start, end in units):
            return units
        return None if num_units == 0 or len(missing) or not reader.units_final else []

    def _next_pass(self, state: PlanState, index: int, is_required: bool) -> list[PlanEvent]:
        """``later_passes``: return the events that start the next pass, over all units planned by now."""
        segments, source = state.segments[index], state.sources[index]
        reader = self._reader_seeing(index, 0, len(self._reader(index).unit_row_starts) - 1, is_required)
        num_units = len(reader.unit_row_starts) - 1
        if len(reader.missing_units(0, num_units)) or not reader.units_final:
            return []
        num_rows, epoch = reader.rows_in(0, num_units), segments[-1].next_epoch if segments else 0
        if not num_rows:
            raise DataError(f"Source {source.name!r} has no rows", where=str(self._path), hint="add text to it")
        limit = source.epoch_limit
        if limit is not None and epoch >= limit:
            return self._exhausted(state, index, num_rows) if is_required else []
        if self._rule.later_passes == "segments":
            return self._segment(state, index, epoch, 1, self._fixed_units(index, [], is_required) or [])
        sizes = state.start.batch_sizes
        ahead = sizes.position_of(sizes.step_at(state.num_positions) + self._growth.horizon_steps)
        wanted = state.mixture.counts(ahead)[index] - state.end_draw(index)  # equal on all ranks
        num_epochs = max(1, -(-wanted // num_rows)) if segments else 1
        num_epochs = num_epochs if limit is None else min(limit - epoch, num_epochs)
        return self._segment(state, index, epoch, num_epochs, [(0, num_units)])

    def _without_units(self, state: PlanState, index: int) -> list[PlanEvent]:
        """``on_starve``: return another pass over the built units (``repeat``), or nothing (``wait`` and ``stop``)."""
        segments, limit = state.segments[index], state.sources[index].epoch_limit
        if self._growth.on_starve != "repeat" or not segments:
            return []
        epoch = segments[-1].next_epoch
        if limit is not None and epoch >= limit:
            return self._exhausted(state, index, segments[-1].num_rows)
        reader = self._reader(index)
        is_built = np.ones(len(reader.unit_row_starts) - 1, np.bool_)
        is_built[reader.missing_units(0, len(is_built))] = False
        return self._segment(state, index, epoch, 1, _ranges(is_built))

    def _exhausted(self, state: PlanState, index: int, num_rows: int) -> list[PlanEvent]:
        """``on_exhausted``: return the stages without the source (``drop``), or refuse (``error``)."""
        if state.sources[index].on_exhausted == "error":
            raise exhausted_error(state, index, state.end_draw(index), num_rows)
        return [*exhausted_events(state, str(self._path))]

    def _segment(self, state: PlanState, index: int, epoch: int, num_epochs: int, units: UnitRanges) -> list[PlanEvent]:
        """Return the segment over some units; empty if they have no rows."""
        name, start_draw = state.names[index], state.end_draw(index)
        segment = make_segment(self._reader(index), name, start_draw, epoch, num_epochs, units)
        return [] if segment is None else [segment]

    def _reader(self, index: int) -> GrowingReader:
        reader = self.readers[index]
        assert reader is not None, "next_events refuses sources without a cache"
        return reader

    def _reader_seeing(self, index: int, first: int, end: int, is_required: bool) -> GrowingReader:
        """Return the reader of a source, refreshed if it lacks units in ``[first, end)``."""
        reader = self._reader(index)
        last = min(end, len(reader.unit_row_starts) - 1)
        if last <= first or (last < end and not reader.units_final) or len(reader.missing_units(first, last)):
            reader = self.readers[index] = reader.refreshed(awaited_units=end if is_required else 0)
        return reader


def _ranges(chosen: npt.NDArray[np.bool_]) -> UnitRanges:
    """Return the runs of true entries as half-open ranges."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]).astype(np.int8))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
