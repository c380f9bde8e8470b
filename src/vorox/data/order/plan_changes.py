"""Which events change a plan: more rows, a new mixture or length, an exhausted source, a larger cache.

Pure functions from the state of a plan to events; ``PlanState.apply`` applies them, ``DataPlan.add`` makes them
durable. An event that changes the mixture carries messages for the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from vorox.core.errors import ConfigError, DataError
from vorox.data.order.mixture import MixtureStage
from vorox.data.order.plan_events import (
    CutEvent,
    HorizonEvent,
    MixtureStageEvent,
    PlanEvent,
    PlanSource,
    Segment,
    SourceEvent,
    UnitRange,
    combined_digest,
)
from vorox.data.order.plan_state import PlanState
from vorox.data.rows import RowReader

Readers = Sequence[RowReader | None]
"""The caches of a plan's sources, in its order; ``None`` for a source that is no longer sampled."""


@dataclass(frozen=True, slots=True)
class RequestedMixtureStage:
    """A configured mixture from a position onwards.

    Attributes:
        start_position: A multiple of the global batch; 0 for the first stage.
        weights: Weight of each sampled source, by name.
        row_pieces: Number of pieces that stored rows are split into.
    """

    start_position: int
    weights: Mapping[str, Fraction]
    row_pieces: int = 1


def mixture_update_events(
    state: PlanState, sources: Sequence[PlanSource], requested: Sequence[RequestedMixtureStage], position: int = 0
) -> list[PlanEvent]:
    """Return the events that give a plan the configured mixture from a position onwards; none if it already has it.

    Args:
        state: The plan.
        sources: The configured sources; other sources of the plan are no longer sampled.
        requested: The configured mixture.
        position: Current position of the run: nothing before it changes.

    Raises:
        ConfigError: A source of the run was redefined under the same name.
    """
    events = _source_events(state, sources, position)
    after = state.apply_all(events)
    recorded = _from_position(position, after.requested_stages)
    wanted = _from_position(position, [_stage(after, stage) for stage in requested])
    same = len(recorded) == len(wanted) and all(
        old.start_position == new.start_position and old.is_like(new) for old, new in zip(recorded, wanted, strict=True)
    )
    limits_changed = any(isinstance(event, SourceEvent) and event.source.name in state.names for event in events)
    restores_source = limits_changed and _from_position(position, after.stages) != recorded
    if same and not restores_source:
        return events
    is_fresh = position == 0 and not any(after.segments)
    messages = () if is_fresh else _consequences(after, wanted[0], position)
    stages = [
        MixtureStageEvent(
            max(stage.start_position, position),
            {after.names[index]: weight for index, weight in stage.weights.items()},
            stage.row_pieces,
            "declared" if is_fresh else "changed",
            messages=messages if number == 0 else (),
        )
        for number, stage in enumerate(wanted)
    ]
    return [*events, *stages]


def horizon_update_events(state: PlanState, position: int, total_steps: int, warmup_steps: int) -> list[HorizonEvent]:
    """Return the event that changes the length of a run from a position onwards; none if the length is the same."""
    wanted = HorizonEvent(position, total_steps, warmup_steps)
    before = [known for known in state.horizons if known.start_position <= position]
    is_known = before and len(before) == len(state.horizons) and replace(before[-1], start_position=position) == wanted
    return [] if is_known else [wanted]


def cache_growth_events(state: PlanState, readers: Readers, position: int) -> list[CutEvent]:
    """Return the cuts after which ``covering_events`` plans later passes over what complete caches have gained.

    Args:
        state: The plan.
        readers: The current caches.
        position: Current position of the run: the pass in progress does not change.
    """
    cuts: list[CutEvent] = []
    for index, (segments, reader) in enumerate(zip(state.segments, readers, strict=True)):
        if _has_grown(segments, reader):
            cuts += _cut_from(state, index, first_unread_epoch(state, index, position))
    return cuts


def grown_sources(state: PlanState, readers: Readers) -> list[str]:
    """Return the sources whose complete caches have units that the plan does not know."""
    found = zip(state.sources, state.segments, readers, strict=True)
    return [source.name for source, segments, reader in found if _has_grown(segments, reader)]


def _has_grown(segments: Sequence[Segment], reader: RowReader | None) -> bool:
    return reader is not None and bool(segments) and segments[-1].ranges[-1].end < len(reader.unit_row_starts) - 1


def covering_events(state: PlanState, position: int, readers: Readers, where: str) -> list[PlanEvent]:
    """Return the events that cover all positions below ``position`` with whole passes over complete caches.

    Args:
        state: The plan.
        position: End position, rounded up to whole steps.
        readers: The caches.
        where: The plan's file, for errors.

    Raises:
        DataError: A source has no rows, or is exhausted and its policy is ``error``.
    """
    sizes = state.start.batch_sizes
    target, events = sizes.position_of(sizes.num_steps(position)), list[PlanEvent]()
    while True:
        draw_counts = state.mixture.counts(target)
        segments = [
            _next_passes(state, index, reader, draw_counts[index], where) for index, reader in enumerate(readers)
        ]
        added: list[PlanEvent] = [segment for segment in segments if segment is not None]
        if not added and state.num_positions < target:
            added += exhausted_events(state, where)
        if not added:
            return events
        events += added
        state = state.apply_all(added)


def make_segment(
    reader: RowReader, source: str, start_draw: int, epoch: int, num_epochs: int, units: Sequence[tuple[int, int]]
) -> Segment | None:
    """Return a segment over ranges of built units; ``None`` if they have no rows."""
    ranges = tuple(UnitRange(a, b, rows) for a, b in units if (rows := reader.rows_in(a, b)))
    if not ranges:
        return None
    digest = combined_digest([reader.content_digest(part.start, part.end) for part in ranges])
    return Segment(source, start_draw, epoch, num_epochs, ranges, digest)


def first_unread_epoch(state: PlanState, source_index: int, position: int) -> int:
    """Return the first pass over a source of which no row is before a position."""
    num_draws = state.mixture.counts(position)[source_index]
    epoch = 0
    for segment in state.segments[source_index]:
        if num_draws > segment.start_draw:
            epoch = segment.epoch + min(-(-(num_draws - segment.start_draw) // segment.num_rows), segment.num_epochs)
    return epoch


def exhausted_error(state: PlanState, source_index: int, last_draw: int, num_rows: int) -> DataError:
    """Return the error for a source that needs more than its ``max_epochs``."""
    source = state.sources[source_index]
    draw = int(state.mixture.invert(np.array([source_index], np.int32), np.array([last_draw]))[0])
    return DataError(
        f"Source {source.name!r} is exhausted at step {state.start.batch_sizes.step_at(draw) + 1:,}: max_epochs is "
        f"{source.max_epochs} and an epoch has {num_rows:,} rows",
        where=f"data.sources.{source_index}.max_epochs",
        hint="train for fewer steps, raise max_epochs, lower the source's weight, add text, or set on_exhausted to "
        "drop or repeat",
    )


def exhausted_events(state: PlanState, where: str) -> list[MixtureStageEvent]:
    """Return the stages that continue without the source that runs out first, from the step that needs it.

    Raises:
        DataError: No source remains.
    """
    draw, index = state.first_missing()
    sizes, name = state.start.batch_sizes, state.names[index]
    position = sizes.floor(draw)
    unread = state.end_draw(index) - state.mixture.counts(position)[index]
    message = (
        f"source {name!r} is used up after {_num_passes(state.segments[index])} and no longer drawn "
        f"from step {sizes.step_at(position) + 1:,} on; the {unread:,} rows left of it do not fill their share of that "
        "step and are skipped; the other sources share its weight in proportion to theirs"
    )  # recorded in plan.jsonl: the wording is part of the format
    events: list[MixtureStageEvent] = []
    for number, stage in enumerate(_from_position(position, state.stages)):
        weights = {state.names[i]: weight for i, weight in stage.weights.items() if i != index}
        if not weights:
            raise DataError(
                f"All sources are exhausted at step {sizes.step_at(stage.start_position) + 1:,}: {name!r} was the last",
                where=where, hint="train for fewer steps, raise max_epochs, or add text to the sources",
            )  # fmt: skip
        messages = (message,) if number == 0 else ()
        events.append(
            MixtureStageEvent(stage.start_position, weights, stage.row_pieces, "exhausted", messages=messages)
        )
    return events


def _next_passes(
    state: PlanState, source_index: int, reader: RowReader | None, num_draws: int, where: str
) -> Segment | None:
    """Return the passes that a source needs for ``num_draws`` draws, up to its limit; ``None`` for none."""
    source, start_draw = state.sources[source_index], state.end_draw(source_index)
    if num_draws <= start_draw:
        return None
    if reader is None:
        raise DataError(f"The run needs source {source.name!r}, which the configuration no longer has", where=where)
    segments = state.segments[source_index]
    epoch, num_units = segments[-1].next_epoch if segments else 0, len(reader.unit_row_starts) - 1
    num_rows = reader.rows_in(0, num_units)
    if num_rows == 0:
        raise DataError(f"Source {source.name!r} has no rows", where=where, hint="add text to it")
    num_epochs = -(-(num_draws - start_draw) // num_rows)
    limit = source.epoch_limit
    if limit is not None and epoch + num_epochs > limit:
        num_epochs = max(0, limit - epoch)
        if source.on_exhausted == "error":
            raise exhausted_error(state, source_index, start_draw + num_epochs * num_rows, num_rows)
    if num_epochs == 0:
        return None
    return make_segment(reader, source.name, start_draw, epoch, num_epochs, [(0, num_units)])


def _stage(state: PlanState, requested: RequestedMixtureStage) -> MixtureStage:
    weights = {state.names.index(name): weight for name, weight in requested.weights.items()}
    return MixtureStage(requested.start_position, weights, requested.row_pieces)


def _from_position(position: int, stages: Sequence[MixtureStage]) -> list[MixtureStage]:
    """Return the distinct stages in force from a position onwards; the first starts there."""
    last_before = max(number for number, stage in enumerate(stages) if stage.start_position <= position)
    kept = [replace(stages[last_before], start_position=position), *stages[last_before + 1 :]]
    distinct = kept[:1]
    for stage in kept[1:]:
        if not stage.is_like(distinct[-1]):
            distinct.append(stage)
    return distinct


def _source_events(state: PlanState, sources: Sequence[PlanSource], position: int) -> list[PlanEvent]:
    """Return the events for new sources and changed limits; passes beyond a lower limit are cut."""
    events: list[PlanEvent] = []
    known = dict(zip(state.names, state.sources, strict=True))
    for source in sources:
        before = known.get(source.name)
        if before is None:
            events.append(SourceEvent(replace(source, weight=Fraction(0))))
            continue
        changed = replace(before, max_epochs=source.max_epochs, on_exhausted=source.on_exhausted)
        if replace(source, weight=before.weight) != changed:
            raise ConfigError(
                f"Source {source.name!r} has changed since the run started: recipe {source.recipe_digest}, "
                f"{source.row_tokens} tokens per row, bucket {source.bucket} instead of recipe {before.recipe_digest}, "
                f"{before.row_tokens} tokens per row, bucket {before.bucket}",
                where="data.sources", hint="give the changed source a new name",
            )  # fmt: skip
        if changed != before:
            events.append(SourceEvent(changed))
            if changed.epoch_limit is not None:
                index = state.names.index(source.name)
                epoch = max(changed.epoch_limit, first_unread_epoch(state, index, position))
                events += _cut_from(state, index, epoch)
    return events


def _cut_from(state: PlanState, source_index: int, epoch: int) -> list[CutEvent]:
    """Return the cut of a source's passes from ``epoch`` on; none if no such pass is planned."""
    segments = state.segments[source_index]
    return [CutEvent(state.names[source_index], epoch)] if segments and segments[-1].next_epoch > epoch else []


def _consequences(state: PlanState, stage: MixtureStage, position: int) -> tuple[str, ...]:
    """Return what a change of the mixture repeats and skips, one message per source.

    The messages are recorded in ``plan.jsonl``: their wording is part of the format.
    """
    before, counts = state.mixture.stage_at(position), state.mixture.counts(position)
    messages: list[str] = []
    for index, name in enumerate(state.names):
        old, new = before.weights.get(index), stage.weights.get(index)
        was, will = (_share(weight, weights) for weight, weights in ((old, before.weights), (new, stage.weights)))
        if new is None and old is not None:
            messages.append(
                f"{name}: {was} -> no longer drawn; {_unread_rows(state, index, counts[index])} are skipped"
            )
        elif new is not None and old is None:
            first = (
                "from its first row" if not counts[index] else f"from where it stopped, after {counts[index]:,} rows"
            )
            messages.append(f"{name}: not drawn before -> {will}, {first}")
        elif new is not None and (was != will or before.row_pieces != stage.row_pieces):
            messages.append(
                f"{name}: {was} -> {will}; goes on after {counts[index]:,} rows, nothing repeats or is skipped"
            )
    if before.row_pieces != stage.row_pieces:
        messages.append(f"rows are split into {stage.row_pieces} pieces instead of {before.row_pieces}")
    return tuple(messages)


def _share(weight: Fraction | None, weights: Mapping[int, Fraction]) -> str:
    return "" if weight is None else f"{float(weight / sum(weights.values())):.1%}"


def _unread_rows(state: PlanState, index: int, draw: int) -> str:
    """Return a text with the number of unread rows in the pass at a draw."""
    for segment in state.segments[index]:
        if segment.start_draw <= draw < segment.end_draw:
            passes, row = divmod(draw - segment.start_draw, segment.num_rows)
            return f"{-row % segment.num_rows:,} unread rows of pass {segment.epoch + passes + 1}"
    return "rows beyond what was planned"


def _num_passes(segments: Sequence[Segment]) -> str:
    number = segments[-1].next_epoch if segments else 0
    return f"{number:,} pass{'es' if number != 1 else ''}"
