"""The state of a plan: a pure fold over its events, and the row at each position.

``PlanState`` is immutable, so readers in other threads need no lock. ``initial`` and ``apply`` fold events, at a cost
that does not grow with the number of segments; ``encode`` returns the JSON that the hash chain covers. A position
resolves in four invertible steps: slot within its global batch (keyed permutation) -> draw (mixture stages) -> source
and epoch -> row (keyed permutation).
"""

from __future__ import annotations

import bisect
import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.batch_sizes import BatchSizes
from vorox.core.config.checks.sources import name_problems, refuse
from vorox.core.errors import ConfigError, DataError
from vorox.core.files.atomic import canonical_json
from vorox.data.order.mixture import NEVER, MixtureStage, MixtureStages
from vorox.data.order.plan_events import (
    CutEvent,
    HorizonEvent,
    MaskEvent,
    MixtureStageEvent,
    PlanEvent,
    PlanSource,
    PlanStart,
    RollbackEvent,
    Segment,
    SkipEvent,
    SourceEvent,
    encode_event,
)
from vorox.data.permutation import permutation_key, permute, unpermute
from vorox.data.rows import RowReader

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of rows in the caches of a plan's sources.

    Attributes:
        source_index: Source of each row, an index into the plan's sources.
        epoch: Epoch of the source, from 0.
        unit_start: First unit of the unit range that contains the row.
        row: Row number relative to the first row of ``unit_start``; it does not change when the cache grows.
    """

    source_index: npt.NDArray[np.int32]
    epoch: npt.NDArray[np.int64]
    unit_start: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]


_start_position = operator.attrgetter("start_position")


@dataclass(frozen=True)
class PlanState:
    """The state of a data plan after a prefix of its events.

    Attributes:
        start: The start event: settings that never change during a run.
        sources: Sources of the start event and those added later.
        requested_stages: Mixture stages as configured.
        stages: Mixture stages in force: as requested, without exhausted sources.
        segments: Segments of each source, in draw order.
        horizons: Lengths of the run, by position.
        digests: Head of the hash chain after each event.
        covered_positions: Number of positions covered after each event.
        effective_from: First existing position whose row each event changes, or ``NEVER``.
        skips: Steps whose update was not applied, by first position.
        rollbacks: Steps that are skipped after a return to an earlier state, in the order of the returns.
        masks: Events that mask documents, which ``document_masks.py`` applies to rows.
    """

    start: PlanStart
    sources: tuple[PlanSource, ...]
    requested_stages: tuple[MixtureStage, ...]
    stages: tuple[MixtureStage, ...]
    segments: tuple[tuple[Segment, ...], ...]
    horizons: tuple[HorizonEvent, ...]
    digests: tuple[str, ...]
    covered_positions: tuple[int, ...]
    effective_from: tuple[int, ...]
    skips: tuple[SkipEvent, ...] = ()
    rollbacks: tuple[RollbackEvent, ...] = ()
    masks: tuple[MaskEvent, ...] = ()

    @classmethod
    def initial(cls, start: PlanStart) -> PlanState:
        """Return the state after the start event.

        Raises:
            ConfigError: Two sources have the same name, or the batch size or a weight is invalid.
        """
        refuse(name_problems((f"data.sources.{index}", source.name) for index, source in enumerate(start.sources)))
        if (batch := start.global_batch_sequences) < 1:
            raise ConfigError(f"A global batch of {batch} rows is impossible", where="train.global_batch_sequences")
        weights = {index: source.weight for index, source in enumerate(start.sources) if source.weight != 0}
        stages, digest = (MixtureStage(0, weights),), hashlib.sha256(canonical_json(encode_event(start))).hexdigest()
        state = cls(start, start.sources, stages, stages, ((),) * len(start.sources), (), (digest,), (0,), (0,))
        assert state.mixture is not None  # building the mixture refuses invalid weights
        return state

    def apply(self, event: PlanEvent, where: str = "") -> PlanState:
        """Return the state after one more event.

        Args:
            event: The event.
            where: File and line, for errors.

        Raises:
            DataError: The event contradicts earlier events.
        """
        effective_from = NEVER
        match event:
            case PlanStart():
                raise DataError("The data plan has a second event of kind 'start'", where=where)
            case Segment():
                state = self._with_segment(event, where)
            case SourceEvent(source):
                state, effective_from = self._with_source(source, where), 0
            case MixtureStageEvent():
                state, effective_from = self._with_stage(event, where), event.start_position
            case CutEvent():
                state = self._with_cut(event, where)
            case HorizonEvent(position, total_steps, warmup_steps):
                _require(position >= 0 and total_steps > 0 and warmup_steps >= 0, event, where)
                state, effective_from = self._with_horizon(event, where), position
            case SkipEvent(position):
                _require(position >= 0 and self._sizes.is_start(position), event, where)
                index = bisect.bisect_left(self.skips, position, key=_start_position)
                known = index < len(self.skips) and self.skips[index].start_position == position
                added = (event,) if event.reason != "withdrawn" else ()
                state = replace(self, skips=(*self.skips[:index], *added, *self.skips[index + known :]))
            case RollbackEvent(start, end):
                _require(0 <= event.state_position <= start < end, event, where)
                _require(all(map(self._sizes.is_start, (event.state_position, start, end))), event, where)
                state = replace(self, rollbacks=(*self.rollbacks, event))
            case MaskEvent(position, documents):
                known = {source.configured_name for source in self.sources}
                are_known = all(one.source in known and one.ordinal >= 0 for one in documents)
                _require(bool(documents) and are_known, event, where)
                _require(position >= 0 and self._sizes.is_start(position), event, where)
                state, effective_from = replace(self, masks=(*self.masks, event)), position
        digest = hashlib.sha256(self.digests[-1].encode() + canonical_json(self.encode(event))).hexdigest()
        adds_no_rows = isinstance(event, SkipEvent | RollbackEvent | MaskEvent)
        covered = self.num_positions if adds_no_rows else self._sizes.floor(state.first_missing()[0])
        return replace(
            state,
            digests=(*self.digests, digest),
            covered_positions=(*self.covered_positions, covered),
            effective_from=(*self.effective_from, effective_from),
        )

    def is_skipped(self, position: int) -> bool:
        """Whether the update of the step that starts at a position is not applied."""
        index = bisect.bisect_left(self.skips, position, key=_start_position)
        return (index < len(self.skips) and self.skips[index].start_position == position) or any(
            one.start_position <= position < one.end_position for one in self.rollbacks
        )

    def apply_all(self, events: Sequence[PlanEvent]) -> PlanState:
        """Return the state after more events."""
        state = self
        for event in events:
            state = state.apply(event)
        return state

    def skipped_positions(self) -> Positions:
        """Return the first positions of the steps whose updates are not applied, ascending."""
        parts = [self._step_starts(one.start_position, one.end_position) for one in self.rollbacks]
        return np.unique(np.concatenate([np.array([one.start_position for one in self.skips], np.int64), *parts]))

    def encode(self, event: PlanEvent) -> dict[str, Any]:
        """Return the JSON of the next event; a stage event records the number of draws per source."""
        if isinstance(event, MixtureStageEvent) and event.draw_counts is None:
            event = replace(event, draw_counts=self._draw_counts(event.start_position))
        return encode_event(event)

    def skipped_steps(self) -> Positions:
        """Return the steps whose updates are not applied, from 0, ascending."""
        return np.array([self._sizes.step_at(int(position)) for position in self.skipped_positions()], np.int64)

    @cached_property
    def _sizes(self) -> BatchSizes:
        return self.start.batch_sizes

    def _step_starts(self, start: int, end: int) -> Positions:
        return np.concatenate([np.arange(*part, dtype=np.int64) for part in self._sizes.parts(start, end)])

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the sources."""
        return tuple(source.name for source in self.sources)

    @cached_property
    def mixture(self) -> MixtureStages:
        """The mixture as a function of the position."""
        return MixtureStages(self.stages, len(self.sources))

    @property
    def num_positions(self) -> int:
        """Number of positions that the plan covers; a multiple of the global batch."""
        return self.covered_positions[-1]

    @cached_property
    def _slot_key(self) -> bytes:
        return permutation_key(self.start.seed, "slots")

    @cached_property
    def _starts(self) -> tuple[npt.NDArray[np.int64], ...]:
        return tuple(np.array([segment.start_draw for segment in group], np.int64) for group in self.segments)

    def _segment_key(self, segment: Segment) -> bytes:
        """Return the permutation key of a segment. It depends on content alone, not on how the plan was extended."""
        units = [unit for part in segment.ranges for unit in (part.start, part.end)]
        return permutation_key(self.start.seed, "rows", segment.source, *units, segment.content_digest)

    def end_draw(self, source_index: int) -> int:
        """Return the first draw of a source that no segment covers."""
        group = self.segments[source_index]
        return group[-1].end_draw if group else 0

    def first_missing(self) -> tuple[int, int]:
        """Return the first draw that no segment covers, and its source."""
        sources = np.arange(len(self.sources), dtype=np.int32)
        ends = np.array([self.end_draw(source) for source in sources.tolist()], np.int64)
        draws = self.mixture.invert(sources, ends)
        source = int(draws.argmin())
        return int(draws[source]), source

    def events_covering(self, position: int) -> int:
        """Return the smallest number of events that determine every row before a position."""
        count = len(self.digests)
        while (
            count > 1 and self.covered_positions[count - 2] >= position and self.effective_from[count - 1] >= position
        ):
            count -= 1
        return count

    def locate(self, positions: Positions) -> Addresses:
        """Return the addresses of the rows at covered positions."""
        source_index, draw = self.mixture.locate(self._shuffle_slots(positions, permute))
        epoch, unit_start, row = np.empty_like(draw), np.empty_like(draw), np.empty_like(draw)
        for source, segments in enumerate(self.segments):
            chosen = np.flatnonzero(source_index == source)
            if not chosen.size:
                continue
            numbers = np.searchsorted(self._starts[source], draw[chosen], side="right") - 1
            for number in range(int(numbers.min()), int(numbers.max()) + 1):
                segment = segments[number]
                here = chosen[numbers == number]
                passes, offset = np.divmod(draw[here] - segment.start_draw, segment.num_rows)
                epoch[here] = passes + segment.epoch
                if self.start.shuffle:
                    offset = permute(offset, segment.num_rows, self._segment_key(segment), epoch[here])
                unit_start[here], row[here] = _in_ranges(segment, offset)
        return Addresses(source_index, epoch, unit_start, row)

    def positions_of(self, source_index: int, row: int, reader: RowReader) -> Positions:
        """Return every covered position of a row, ascending: the inverse of ``locate``."""
        found: list[Positions] = [np.empty(0, np.int64)]
        for segment in self.segments[source_index]:
            offset = _offset_in(segment, row, reader.unit_row_starts)
            if offset is None:
                continue
            passes = np.arange(segment.num_epochs)
            offsets = np.full(passes.shape, offset)
            if self.start.shuffle:
                offsets = unpermute(offsets, segment.num_rows, self._segment_key(segment), passes + segment.epoch)
            draws = segment.start_draw + passes * segment.num_rows + offsets
            sources = np.full(passes.shape, source_index, np.int32)
            draws = self.mixture.invert(sources, draws)
            found.append(self._shuffle_slots(draws[draws < NEVER], unpermute))
        positions = np.concatenate(found)
        return np.sort(positions[positions < self.num_positions])

    def _shuffle_slots(
        self, numbers: Positions, shuffle: Callable[[Positions, int, bytes, Positions], Positions]
    ) -> Positions:
        """Shuffle the slots of each global batch, so that the mixture's pattern does not align with ranks."""
        if not self.start.shuffle:
            return numbers
        if len(self._sizes.stages) == 1 or not numbers.size:
            return self._shuffle_within(numbers, self._sizes.largest, 0, 0, shuffle)
        found = numbers.copy()
        for first, end, rows in self._sizes.parts(int(numbers.min()), int(numbers.max()) + 1):
            here = (numbers >= first) & (numbers < end)
            start = self._sizes.floor(first)
            found[here] = self._shuffle_within(numbers[here], rows, start, self._sizes.step_at(first), shuffle)
        return found

    def _shuffle_within(
        self,
        numbers: Positions,
        rows: int,
        start: int,
        start_step: int,
        shuffle: Callable[[Positions, int, bytes, Positions], Positions],
    ) -> Positions:
        """Shuffle the slots of steps of equal size, the first of which is ``start_step`` at position ``start``."""
        step, slot = np.divmod(numbers - start, rows)
        return numbers - slot + shuffle(slot, rows, self._slot_key, step + start_step)

    def _draw_counts(self, position: int) -> dict[str, int]:
        return dict(zip(self.names, self.mixture.counts(position), strict=True))

    def _index_of(self, name: str, event: PlanEvent, where: str) -> int:
        _require(name in self.names, event, where)
        return self.names.index(name)

    def _with_segment(self, segment: Segment, where: str) -> PlanState:
        index, ends = self._index_of(segment.source, segment, where), [0, *(part.end for part in segment.ranges)]
        ascending = all(before <= part.start < part.end for before, part in zip(ends, segment.ranges, strict=False))
        has_rows = bool(segment.ranges) and all(part.num_rows > 0 for part in segment.ranges)
        _require(ascending and has_rows and segment.num_epochs > 0, segment, where)
        before = self.segments[index]
        end_draw, next_epoch = (before[-1].end_draw, before[-1].next_epoch) if before else (0, 0)
        follows = segment.start_draw == end_draw and segment.epoch == next_epoch
        if not follows and before and segment.num_epochs == before[-1].num_epochs == 1:  # more units of the same pass
            known = [part for old in before if old.next_epoch == next_epoch for part in old.ranges]
            overlap = any(a.start < b.end and b.start < a.end for a in known for b in segment.ranges)
            follows = (segment.start_draw, segment.epoch) == (end_draw, next_epoch - 1) and not overlap
        if not follows:
            raise DataError("The segment does not continue the previous one", where=where)
        return self._with_segments(index, (*before, segment))

    def _with_segments(self, source_index: int, segments: tuple[Segment, ...]) -> PlanState:
        groups = (*self.segments[:source_index], segments, *self.segments[source_index + 1 :])
        state = replace(self, segments=groups)
        if "mixture" in self.__dict__:  # segments do not change the mixture, which is expensive to build
            state.__dict__["mixture"] = self.mixture
        return state

    def _with_source(self, source: PlanSource, where: str) -> PlanState:
        if source.name not in self.names:
            return replace(self, sources=(*self.sources, source), segments=(*self.segments, ()))
        index = self.names.index(source.name)
        limits = replace(
            self.sources[index], weight=source.weight, max_epochs=source.max_epochs, on_exhausted=source.on_exhausted
        )
        if limits != source:
            raise DataError(f"Source {source.name!r} has changed", where=where)
        return replace(self, sources=(*self.sources[:index], source, *self.sources[index + 1 :]))

    def _with_stage(self, event: MixtureStageEvent, where: str) -> PlanState:
        is_sound = event.start_position >= 0 and event.row_pieces > 0 and min(event.weights.values(), default=0) > 0
        _require(is_sound, event, where)
        if not self._sizes.is_start(event.start_position):
            raise DataError("The stage starts in the middle of a step", where=where)
        weights = {self._index_of(name, event, where): weight for name, weight in event.weights.items()}
        draw_counts = self._draw_counts(event.start_position)
        if event.draw_counts is not None and dict(event.draw_counts) != draw_counts:
            raise DataError(
                f"The stage continues from draws {event.draw_counts}, the data plan has {draw_counts}", where=where
            )
        stage = MixtureStage(event.start_position, weights, event.row_pieces)

        def replaced(stages: Sequence[MixtureStage]) -> tuple[MixtureStage, ...]:
            return (*(known for known in stages if known.start_position < stage.start_position), stage)

        requested = self.requested_stages if event.reason == "exhausted" else replaced(self.requested_stages)
        return replace(self, requested_stages=requested, stages=replaced(self.stages))

    def _with_horizon(self, event: HorizonEvent, where: str) -> PlanState:
        if not self._sizes.is_start(event.start_position):
            raise DataError("The horizon starts in the middle of a step", where=where)
        kept = [known for known in self.horizons if known.start_position < event.start_position]
        return replace(self, horizons=(*kept, event))

    def _with_cut(self, cut: CutEvent, where: str) -> PlanState:
        if cut.source not in self.names:
            raise DataError(f"The data plan cuts source {cut.source!r}, which it does not have", where=where)
        index = self.names.index(cut.source)
        kept = [
            replace(segment, num_epochs=min(segment.num_epochs, cut.epoch - segment.epoch))
            for segment in self.segments[index]
            if segment.epoch < cut.epoch
        ]
        return self._with_segments(index, tuple(kept))


def _require(condition: bool, event: PlanEvent, where: str) -> None:
    if not condition:
        raise DataError(f"Invalid {event.kind} event: {encode_event(event)}", where=where)


def _in_ranges(segment: Segment, offset: Positions) -> tuple[Positions | int, Positions]:
    """Return the first unit of the range that contains each offset, and the row within the range."""
    if len(segment.ranges) == 1:
        return segment.ranges[0].start, offset
    starts = np.cumsum([0, *(part.num_rows for part in segment.ranges[:-1])])
    number = np.searchsorted(starts, offset, side="right") - 1
    return np.array([part.start for part in segment.ranges], np.int64)[number], offset - starts[number]


def _offset_in(segment: Segment, row: int, unit_row_starts: npt.NDArray[np.int64]) -> int | None:
    """Return the offset of a cache row in a segment; ``None`` if the segment does not contain it."""
    before = 0
    for part in segment.ranges:
        if part.start < len(unit_row_starts):
            offset = row - int(unit_row_starts[part.start])
            if 0 <= offset < part.num_rows:
                return before + offset
        before += part.num_rows
    return None
