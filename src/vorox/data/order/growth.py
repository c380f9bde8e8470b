"""Training on caches that are still being built: the plan adds units as they are committed.

``strict``: the segments of a source are ranges of units fixed in advance, each twice as long as the one before, and
added when all their units are built; the order depends on the data alone, never on the speed of the builder.
``elastic``: when rows run short, the units built since are added and recorded, so that the order replays exactly. A
pass over a source ends when all units planned by then have been added. ``growth_policies`` decides what to add; this
module waits for it.

Invariant: one rank decides, and a decision is durable before a reader locates a row by it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vorox.core.errors import DataError
from vorox.core.pluralize import pluralize
from vorox.data.order.growth_policies import GrowthPolicies
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import GrowthRule, MixtureStageEvent, PlanEvent, Segment
from vorox.data.order.plan_state import PlanState
from vorox.data.rows import GrowingReader

if TYPE_CHECKING:
    from vorox.core.schema.data import GrowthConfig

_POLL_SECONDS = 0.1

PlanReporter = Callable[[str, str], None]
"""Callback for messages about the plan: (kind, text)."""


class DataNotReady(DataError):
    """The rows of the next step are not built yet, and the run may not wait for them."""


class PlanGrower:
    """Extends a plan as caches grow. Thread-safe.

    Args:
        plan: The run's plan.
        readers: The caches of its sources, in its order; ``None`` for a source that is no longer sampled.
        growth: The section ``data.growth``.
        last_position: Number of positions in the whole run; the plan is not extended beyond it.
        report: Called with every extension and every change of the mixture.
        decides: Whether this rank extends the plan. If false, it reads what the deciding rank appends.
        before_events: Called before an extension is recorded, such as to record the files that it adds.
    """

    def __init__(
        self,
        plan: DataPlan,
        readers: Sequence[GrowingReader | None],
        growth: GrowthConfig,
        *,
        last_position: int | None = None,
        report: PlanReporter | None = None,
        decides: bool = True,
        before_events: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan, self._growth, self._decides = plan, growth, decides
        self._before_events = before_events
        self._policies = GrowthPolicies(plan.path, plan.start.growth or GrowthRule("elastic"), growth, readers)
        self._last_position = last_position
        self._report = report
        self._lock = threading.Lock()

    @property
    def readers(self) -> tuple[GrowingReader | None, ...]:
        """Readers that see all units in the plan."""
        return tuple(self._policies.readers)

    @property
    def total_steps(self) -> int | None:
        """Number of steps of the whole run, if known."""
        if self._last_position is None:
            return None
        return self._plan.start.batch_sizes.step_at(self._last_position)

    def cover(self, position: int, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until the plan covers all positions below ``position``; look ahead as far as rows are built.

        Args:
            position: End position of the step to read.
            stop: Polled while waiting; true ends the wait.

        Raises:
            DataNotReady: Rows are missing, and ``on_starve`` or ``stop`` forbids waiting for them.
            DataError: A source is exhausted, or a cache cannot be read.
        """
        sizes = self._plan.start.batch_sizes
        ahead = sizes.position_of(sizes.step_at(position) + self._growth.horizon_steps)
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
        from vorox.data.storage.stalls import track_stall  # only needed while rows are missing

        with track_stall(str(self._plan.path)) as stall:
            while self._plan.num_positions < ahead:
                is_required = self._plan.num_positions < position
                if self._extend(is_required):
                    continue
                if not is_required:
                    break
                if self._growth.on_starve == "stop" and self._decides:
                    raise self._not_ready()
                self._check_stop(stop)
                stall.report(self._reason(), failed=False)
                time.sleep(_POLL_SECONDS)

    def _extend(self, is_required: bool) -> bool:
        """Extend the plan if that is possible now; return whether it was."""
        if not self._decides:
            return self._plan.refresh(self._refresh_readers)
        state = self._plan.state
        events = self._policies.next_events(state, state.first_missing()[1], is_required=is_required)
        if events:
            self._before_events()
        self._plan.add(events)
        if self._report is not None:
            _report_events(events, self._report)
        return bool(events)

    def _refresh_readers(self, state: PlanState) -> None:
        """Refresh readers that lack units which the deciding rank has added."""
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
            f"Step {self._plan.start.batch_sizes.step_at(self._plan.num_positions) + 1:,} has no rows yet: "
            f"{self._reason()}",
            where=str(self._plan.path),
            hint="build the caches with `vorox data build` and the same configuration, then run the same command again",
        )

    def _reason(self) -> str:
        """Return which source the next step lacks, and how far it is built."""
        index = self._plan.state.first_missing()[1]
        reader, name = self._policies.readers[index], self._plan.sources[index].name
        if not self._decides or reader is None:
            return f"rank 0 has not added more of source {name!r}"
        num_units = len(reader.unit_row_starts) - 1
        missing = reader.missing_units(0, num_units)
        known = f"{num_units:,}" if reader.units_final else f"the first {num_units:,}"
        first = "no unit is planned" if reader.units_final else "the rest of the text is being split into units"
        first = f"the first missing one is unit {missing[0]:,}" if len(missing) else first
        return f"source {name!r} has {num_units - len(missing):,} of {known} units built; {first}"


def await_planned_units(
    plan: DataPlan,
    readers: Sequence[GrowingReader | None],
    *,
    stop: Callable[[], bool] = lambda: False,
    report: PlanReporter | None = None,
) -> list[GrowingReader | None]:
    """Return readers that see every unit of the plan; wait for units that are being rebuilt.

    A cache that was lost, or whose ``data.mode`` has changed, is rebuilt from its beginning; ``DataPlan.check``
    compares the result with the plan. A cache that this process does not build stays as it is.

    Raises:
        DataNotReady: ``stop`` forbids waiting.
    """
    seen, is_reported = list(readers), False
    for index, (reader, group) in enumerate(zip(readers, plan.segments, strict=True)):
        last = max((part.end for segment in group for part in segment.ranges), default=0)
        while reader is not None:
            is_building = reader.is_building  # read first: a build that ends in between has committed all its units
            num_missing = _num_missing(reader, last)
            if not num_missing:
                break
            if is_building and not is_reported and report is not None:
                is_reported = True
                report(
                    "waiting_for_data",
                    f"Rebuilding {num_missing:,} of the {last:,} units of source {plan.sources[index].name!r} that the "
                    "run has read: they are missing from its cache",
                )
            if is_building and stop():
                raise DataNotReady("Stopped while units that the run has read were rebuilt", where=str(plan.path))
            reader = seen[index] = reader.refreshed(awaited_units=last)
            if not is_building:
                break
            time.sleep(_POLL_SECONDS)
    return seen


def _num_missing(reader: GrowingReader, unit: int) -> int:
    """Return the number of units below ``unit`` that a reader does not see."""
    num_units = len(reader.unit_row_starts) - 1
    missing = len(reader.missing_units(0, min(unit, num_units)))
    return missing if reader.units_final else missing + max(0, unit - num_units)


def _report_events(events: Sequence[PlanEvent], report: PlanReporter) -> None:
    for event in events:
        if isinstance(event, Segment):
            report("segment", _describe(event))
        elif isinstance(event, MixtureStageEvent):
            for text in event.messages:
                report("mixture", text)


def _describe(segment: Segment) -> str:
    units = sum(part.end - part.start for part in segment.ranges)
    passes = f"passes {segment.epoch + 1:,} to {segment.next_epoch:,}" if segment.num_epochs > 1 else ""
    return (
        f"Added {pluralize(units, 'unit')} of source {segment.source!r} "
        f"({segment.ranges[0].start:,} to {segment.ranges[-1].end:,}) for {passes or f'pass {segment.epoch + 1:,}'}: "
        f"{pluralize(segment.num_rows, 'row')}"
    )
