"""Training on caches that are still being built: the plan takes up units as they come, durably, before they are read.

``strict``: the segments of a source are ranges of units fixed in advance, each twice as long as the one before, taken
up when all their units are built; the order depends on the data alone, never on the builder's speed. ``elastic``:
whatever was built since is taken up when the rows run short, and recorded, so that it replays exactly. A pass over a
source ends when everything that is planned by then has been taken up. ``growth_policies`` decides; this module waits.

Invariant: one process decides; what is decided is durable before any reader locates a row by it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vorox.core.errors import DataError
from vorox.core.pluralize import pluralize
from vorox.data.growth_policies import GrowthPolicies
from vorox.data.plan import Plan
from vorox.data.plan_events import GrowthRule, PlanEvent, Segment, StageEvent
from vorox.data.plan_state import PlanState
from vorox.data.rows import GrowingReader

if TYPE_CHECKING:
    from vorox.core.schema.data import GrowthConfig

_POLL_SECONDS = 0.1

Tell = Callable[[str, str], None]
"""Receives (kind, text) of what happens, for people."""


class DataNotReady(DataError):
    """The rows of the next step are not built yet, and the run is not to wait for them any longer."""


class PlanGrower:
    """Covers positions of a plan as caches grow. Safe to call from any thread.

    Args:
        plan: The run's plan.
        readers: The caches of its sources, in its order; ``None`` for a source that is no longer drawn.
        growth: The section ``data.growth``.
        last_position: Positions of the whole run: nothing is taken up beyond them.
        tell: Called with everything that is taken up or changes the mixture.
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
        self._policies = GrowthPolicies(plan.path, plan.start.growth or GrowthRule("elastic"), growth, readers)
        self._last_position = last_position
        self._tell = tell
        self._lock = threading.Lock()

    @property
    def readers(self) -> tuple[GrowingReader | None, ...]:
        """Readers that see everything that is covered."""
        return tuple(self._policies.readers)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, if that is known."""
        if self._last_position is None:
            return None
        return self._last_position // self._plan.start.global_batch_sequences

    def cover(self, position: int, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until the plan covers all positions below ``position``, and look ahead as far as rows are there.

        Args:
            position: End of the step that is to be read.
            stop: Polled while waiting; true ends the wait.

        Raises:
            DataNotReady: Rows are missing, and ``on_starve`` or ``stop`` forbids waiting for them.
            DataError: A source is used up, or a cache cannot be read.
        """
        ahead = position + self._growth.horizon_steps * self._plan.start.global_batch_sequences
        if self._last_position is not None:
            ahead = max(position, min(ahead, self._last_position))
        while self._plan.num_positions < ahead:
            if self._lock.acquire(timeout=_POLL_SECONDS):
                try:
                    return self._cover(position, ahead, stop)
                finally:
                    self._lock.release()
            if self._plan.num_positions >= position:
                return None
            self._check_stop(stop)
        return None

    def _cover(self, position: int, ahead: int, stop: Callable[[], bool]) -> None:
        from vorox.data.storage.waiting import may_wait  # whoever has all rows waits for no store

        with may_wait(str(self._plan.path)) as wait:
            while self._plan.num_positions < ahead:
                is_required = self._plan.num_positions < position
                if self._extend(is_required):
                    continue
                if not is_required:
                    break
                if self._growth.on_starve == "stop":
                    raise self._not_ready()
                self._check_stop(stop)
                wait.because(self._reason(), failed=False)
                time.sleep(_POLL_SECONDS)

    def _extend(self, is_required: bool) -> bool:
        """Cover some more positions, if that is possible now; return whether it was."""
        if not self._decides:
            return self._plan.refresh(self._refresh_readers)
        state = self._plan.state
        events = self._policies.next_events(state, state.first_missing()[1], is_required=is_required)
        self._plan.add(events)
        if self._tell is not None:
            _report(events, self._tell)
        return bool(events)

    def _refresh_readers(self, state: PlanState) -> None:
        """See the units of what another process has decided."""
        readers = self._policies.readers
        for index, (reader, group) in enumerate(zip(readers, state.segments, strict=False)):
            if group and reader is not None:
                last = max(part.end for segment in group for part in segment.ranges)
                if len(reader.unit_row_starts) <= last or any(
                    len(reader.missing_units(part.start, part.end)) for segment in group for part in segment.ranges
                ):
                    readers[index] = reader.refreshed(awaited_units=last)

    def _check_stop(self, stop: Callable[[], bool]) -> None:
        if stop():
            raise self._not_ready()

    def _not_ready(self) -> DataNotReady:
        return DataNotReady(
            f"step {self._plan.num_positions // self._plan.start.global_batch_sequences + 1:,} has no rows yet: "
            f"{self._reason()}",
            where=str(self._plan.path),
            hint="build the caches (`vorox data build` with the same configuration) and run the same command again",
        )

    def _reason(self) -> str:
        """Return which source the next step lacks, and how far it is built."""
        index = self._plan.state.first_missing()[1]
        reader, name = self._policies.readers[index], self._plan.sources[index].name
        if not self._decides or reader is None:
            return f"the deciding process has not taken up more of source {name!r}"
        num_units = len(reader.unit_row_starts) - 1
        missing = reader.missing_units(0, num_units)
        known = f"{num_units:,}" if reader.units_final else f"the {num_units:,} first"
        first = "no unit is planned" if reader.units_final else "the text behind them is being cut into more"
        first = f"unit {missing[0]:,} is the first that is not" if len(missing) else first
        return f"source {name!r} has {num_units - len(missing):,} of {known} units built; {first}"


def await_planned(
    plan: Plan,
    readers: Sequence[GrowingReader | None],
    *,
    stop: Callable[[], bool] = lambda: False,
    tell: Tell | None = None,
) -> list[GrowingReader | None]:
    """Return readers that see every unit of the plan, waiting for those whose caches are being rebuilt.

    A cache that was lost, or is read in another mode than before, is rebuilt from its beginning; ``Plan.check``
    compares the result with the plan. A cache that nobody builds stays as it is.

    Raises:
        DataNotReady: ``stop`` forbids waiting.
    """
    seen, has_told = list(readers), False
    for index, (reader, group) in enumerate(zip(readers, plan.segments, strict=True)):
        last = max((part.end for segment in group for part in segment.ranges), default=0)
        while reader is not None:
            is_building = reader.is_building  # before looking: a build that ends meanwhile has left all its units
            num_missing = _num_missing(reader, last)
            if not num_missing:
                break
            if is_building and not has_told and tell is not None:
                has_told = True
                tell(
                    "waiting_for_data",
                    f"The run has read {last:,} units of source {plan.sources[index].name!r}, {num_missing:,} of them "
                    "are not recorded here: building them again",
                )
            if is_building and stop():
                raise DataNotReady("stopped while units that the run has read were built again", where=str(plan.path))
            reader = seen[index] = reader.refreshed(awaited_units=last)
            if not is_building:
                break
            time.sleep(_POLL_SECONDS)
    return seen


def _num_missing(reader: GrowingReader, unit: int) -> int:
    """Return how many units below ``unit`` a reader does not see."""
    num_units = len(reader.unit_row_starts) - 1
    missing = len(reader.missing_units(0, min(unit, num_units)))
    return missing if reader.units_final else missing + max(0, unit - num_units)


def _report(events: Sequence[PlanEvent], tell: Tell) -> None:
    for event in events:
        if isinstance(event, Segment):
            tell("segment", _describe(event))
        elif isinstance(event, StageEvent):
            for text in event.messages:
                tell("mixture", text)


def _describe(segment: Segment) -> str:
    units = sum(part.end - part.start for part in segment.ranges)
    passes = f"passes {segment.epoch + 1:,} to {segment.next_epoch:,}" if segment.num_epochs > 1 else ""
    return (
        f"Took up {pluralize(units, 'unit')} of source {segment.source!r} "
        f"({segment.ranges[0].start:,} to {segment.ranges[-1].end:,}) for {passes or f'pass {segment.epoch + 1:,}'}: "
        f"{pluralize(segment.num_rows, 'row')}"
    )
