"""The arithmetic of a plan: everything that follows from its events, and where each position's row is.

``PlanTables`` is immutable; ``after`` folds one event in, so that readers in other threads need no lock and a plan
that grows by the thousandth segment costs no more than the first. Positions resolve in four invertible steps: slot
within its global batch (keyed permutation) -> draw (mixture stages) -> source and epoch -> row (keyed permutation).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.atomic import canonical_json
from vorox.core.errors import DataError
from vorox.data.mixture_stages import NEVER, MixtureStages, Stage
from vorox.data.order import permutation_key, permute, unpermute
from vorox.data.plan_events import Cut, Extension, HorizonEvent, PlanSource, PlanStart, Segment, StageEvent
from vorox.data.plan_format import Event, encode_event
from vorox.data.records import RowReader

Positions = npt.NDArray[np.int64]

__all__ = ["Addresses", "Event", "PlanTables", "Positions"]


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the rows of some positions are.

    Attributes:
        source_index: Source of each row, in the order of the plan's sources.
        epoch: Pass over the source, from 0.
        unit_start: First unit of the range of units that the row is drawn from.
        row: Row, counted from the first row of ``unit_start``: it does not change when the cache grows.
    """

    source_index: npt.NDArray[np.int32]
    epoch: npt.NDArray[np.int64]
    unit_start: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]


@dataclass(frozen=True)
class PlanTables:
    """The state of a plan after some of its events.

    Attributes:
        start: What the run never changes.
        sources: Sources of the start and those added since.
        declared: Stages as the configuration asked for them.
        stages: Stages in force: as declared, without sources that are used up.
        segments: Segments of each source, in draw order.
        horizons: Lengths of the run that its schedule knew, by position.
        digests: Head of the hash chain after each event.
        covered: Positions covered after each event.
        decided: Position from which each event decides something besides what it covers, or ``NEVER``.
    """

    start: PlanStart
    sources: tuple[PlanSource, ...]
    declared: tuple[Stage, ...]
    stages: tuple[Stage, ...]
    segments: tuple[tuple[Segment, ...], ...]
    horizons: tuple[HorizonEvent, ...]
    digests: tuple[str, ...]
    covered: tuple[int, ...]
    decided: tuple[int, ...]

    @classmethod
    def of(cls, start: PlanStart, event: Mapping[str, Any]) -> PlanTables:
        """The state after the start."""
        weights = {index: source.weight for index, source in enumerate(start.sources) if source.weight != 0}
        stages, digest = (Stage(0, weights),), hashlib.sha256(canonical_json(event)).hexdigest()
        nothing: tuple[tuple[Segment, ...], ...] = ((),) * len(start.sources)
        return cls(start, start.sources, stages, stages, nothing, (), (digest,), (0,), (0,))

    def after(self, event: Event, written: Mapping[str, Any], where: str) -> PlanTables:
        """The state after one more event.

        Raises:
            DataError: The event does not fit what came before.
        """
        decided = NEVER
        match event:
            case Segment():
                tables = self._with_segment(event, where)
            case PlanSource():
                tables, decided = self._with_source(event, where), 0
            case StageEvent():
                tables, decided = self._with_stage(event, where), event.start_position
            case Cut():
                tables = self._with_cut(event, where)
            case HorizonEvent():
                tables, decided = self._with_horizon(event, where), event.start_position
            case Extension(position, before, total):
                first = self if self.horizons else self._with_horizon(HorizonEvent(0, before, None), where)
                tables, decided = first._with_horizon(HorizonEvent(position, total, None), where), position
        digest = hashlib.sha256(self.digests[-1].encode() + canonical_json(written)).hexdigest()
        return replace(
            tables,
            digests=(*self.digests, digest),
            covered=(*self.covered, tables.first_missing()[0] // self._batch * self._batch),
            decided=(*self.decided, decided),
        )

    def written(self, event: Event) -> dict[str, Any]:
        """An event as it is appended here; a stage says how often each source was drawn before it."""
        if isinstance(event, StageEvent) and event.drawn is None:
            counts = self.mixture.counts(event.start_position)
            event = replace(event, drawn=dict(zip(self.names, counts, strict=True)))
        return encode_event(event, [*self.names, event.name] if isinstance(event, PlanSource) else self.names)

    @property
    def _batch(self) -> int:
        return self.start.global_batch_sequences

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    @cached_property
    def mixture(self) -> MixtureStages:
        return MixtureStages(self.stages, len(self.sources))

    @property
    def num_positions(self) -> int:
        return self.covered[-1]

    @cached_property
    def _slot_key(self) -> bytes:
        return permutation_key(self.start.seed, "slots")

    @cached_property
    def _starts(self) -> tuple[npt.NDArray[np.int64], ...]:
        return tuple(np.array([segment.start_draw for segment in group], np.int64) for group in self.segments)

    def key_of(self, segment: Segment) -> bytes:
        """By content, not by place in the log: the order is the same however the plan was extended."""
        name = self.names[segment.source_index]
        units = [unit for part in segment.ranges for unit in (part.start, part.end)]
        return permutation_key(self.start.seed, "rows", name, *units, segment.content_digest)

    def end_draw(self, source_index: int) -> int:
        """The first draw of a source that no segment answers."""
        group = self.segments[source_index]
        return group[-1].end_draw if group else 0

    def first_missing(self) -> tuple[int, int]:
        """The first draw that no segment answers, and its source."""
        sources = np.arange(len(self.sources), dtype=np.int32)
        ends = np.array([self.end_draw(source) for source in sources.tolist()], np.int64)
        draws = self.mixture.invert(sources, ends)
        source = int(draws.argmin())
        return int(draws[source]), source

    def events_covering(self, position: int) -> int:
        """How many events it takes, at least, to know every row before a position."""
        count = len(self.covered)
        while count > 1 and self.covered[count - 2] >= position and self.decided[count - 1] >= position:
            count -= 1
        return count

    def locate(self, positions: Positions) -> Addresses:
        """The rows at some covered positions."""
        source_index, draw = self.mixture.locate(self._draws_of(positions))
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
                    offset = permute(offset, segment.num_rows, self.key_of(segment), epoch[here])
                unit_start[here], row[here] = _in_ranges(segment, offset)
        return Addresses(source_index, epoch, unit_start, row)

    def positions_of(self, source_index: int, row: int, reader: RowReader) -> Positions:
        """Every covered position at which a row of a source stands, ascending: the inverse of ``locate``."""
        found: list[Positions] = [np.empty(0, np.int64)]
        for segment in self.segments[source_index]:
            offset = _offset_in(segment, row, reader.unit_row_starts)
            if offset is None:
                continue
            passes = np.arange(segment.num_epochs)
            offsets = np.full(passes.shape, offset)
            if self.start.shuffle:
                offsets = unpermute(offsets, segment.num_rows, self.key_of(segment), passes + segment.epoch)
            draws = segment.start_draw + passes * segment.num_rows + offsets
            sources = np.full(passes.shape, source_index, np.int32)
            draws = self.mixture.invert(sources, draws)
            found.append(self._slots(draws[draws < NEVER], unpermute))
        positions = np.concatenate(found)
        return np.sort(positions[positions < self.num_positions])

    def _draws_of(self, positions: Positions) -> Positions:
        """Shuffle the slots of each global batch: no rank or micro-batch sees the mixture's rhythm."""
        return self._slots(positions, permute)

    def _slots(self, numbers: Positions, shuffle: Callable[[Positions, int, bytes, Positions], Positions]) -> Positions:
        if not self.start.shuffle:
            return numbers
        block, slot = np.divmod(numbers, self._batch)
        return numbers - slot + shuffle(slot, self._batch, self._slot_key, block)

    def _with_segment(self, segment: Segment, where: str) -> PlanTables:
        before = self.segments[segment.source_index]
        end_draw, next_epoch = (before[-1].end_draw, before[-1].next_epoch) if before else (0, 0)
        follows = segment.start_draw == end_draw and segment.epoch == next_epoch
        if not follows and before and segment.num_epochs == before[-1].num_epochs == 1:
            taken = [part for old in before if old.next_epoch == next_epoch for part in old.ranges]
            overlap = any(a.start < b.end and b.start < a.end for a in taken for b in segment.ranges)
            follows = (segment.start_draw, segment.epoch) == (end_draw, next_epoch - 1) and not overlap
        if not follows:
            raise DataError("the segment does not follow the one before it", where=where)
        return self._with_group(segment.source_index, (*before, segment))

    def _with_group(self, source_index: int, group: Sequence[Segment]) -> PlanTables:
        segments = list(self.segments)
        segments[source_index] = tuple(group)
        tables = replace(self, segments=tuple(segments))
        if "mixture" in self.__dict__:  # it is the same, and costs something to make
            tables.__dict__["mixture"] = self.mixture
        return tables

    def _with_source(self, source: PlanSource, where: str) -> PlanTables:
        if source.name not in self.names:
            return replace(self, sources=(*self.sources, source), segments=(*self.segments, ()))
        index = self.names.index(source.name)
        limits = replace(
            self.sources[index], weight=source.weight, max_epochs=source.max_epochs, on_exhausted=source.on_exhausted
        )
        if limits != source:
            raise DataError(f"source {source.name!r} is another one than before", where=where)
        return replace(self, sources=(*self.sources[:index], source, *self.sources[index + 1 :]))

    def _with_stage(self, event: StageEvent, where: str) -> PlanTables:
        if event.start_position % self._batch:
            raise DataError("the stage begins within a step", where=where)
        drawn = dict(zip(self.names, self.mixture.counts(event.start_position), strict=True))
        if event.drawn is not None and dict(event.drawn) != drawn:
            raise DataError(f"the stage goes on from {event.drawn}, the plan stands at {drawn}", where=where)
        weights = {self.names.index(name): weight for name, weight in event.weights.items()}
        stage = Stage(event.start_position, weights, event.row_pieces)

        def replaced(stages: Sequence[Stage]) -> tuple[Stage, ...]:
            return (*(known for known in stages if known.start_position < stage.start_position), stage)

        declared = self.declared if event.reason == "exhausted" else replaced(self.declared)
        return replace(self, declared=declared, stages=replaced(self.stages))

    def _with_horizon(self, event: HorizonEvent, where: str) -> PlanTables:
        if event.start_position % self._batch:
            raise DataError("the horizon begins within a step", where=where)
        kept = [known for known in self.horizons if known.start_position < event.start_position]
        return replace(self, horizons=(*kept, event))

    def _with_cut(self, cut: Cut, where: str) -> PlanTables:
        if cut.source not in self.names:
            raise DataError(f"the plan cuts a source {cut.source!r} that it does not have", where=where)
        index = self.names.index(cut.source)
        kept = [
            replace(segment, num_epochs=min(segment.num_epochs, cut.epoch - segment.epoch))
            for segment in self.segments[index]
            if segment.epoch < cut.epoch
        ]
        return self._with_group(index, kept)


def _in_ranges(segment: Segment, offset: Positions) -> tuple[Positions | int, Positions]:
    """First unit of the range that an offset falls into, and the row in it."""
    if len(segment.ranges) == 1:
        return segment.ranges[0].start, offset
    starts = np.cumsum([0, *(part.num_rows for part in segment.ranges[:-1])])
    number = np.searchsorted(starts, offset, side="right") - 1
    return np.array([part.start for part in segment.ranges], np.int64)[number], offset - starts[number]


def _offset_in(segment: Segment, row: int, unit_row_starts: npt.NDArray[np.int64]) -> int | None:
    """The offset in a segment of a row of today's cache; ``None`` if it is not of it."""
    before = 0
    for part in segment.ranges:
        if part.start < len(unit_row_starts):
            offset = row - int(unit_row_starts[part.start])
            if 0 <= offset < part.num_rows:
                return before + offset
        before += part.num_rows
    return None
