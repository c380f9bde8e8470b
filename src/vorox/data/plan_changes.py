"""What is decided about a plan besides more rows: another mixture, a source that is used up, a cache that grew.

Pure functions from the state of a plan to the events that change it; ``Plan.add`` makes them durable. Each event says
what it means for people, so that no mixture ever changes in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from vorox.core.errors import ConfigError, DataError
from vorox.data.mixture_stages import Stage
from vorox.data.plan_events import Cut, HorizonEvent, PlanSource, Segment, StageEvent
from vorox.data.plan_tables import Event, PlanTables
from vorox.data.records import RowReader


@dataclass(frozen=True, slots=True)
class WantedStage:
    """A mixture that a configuration asks for from a position on.

    Attributes:
        start_position: A multiple of the global batch; the first stage's is 0.
        weights: Share of each source that is drawn, by name.
        row_pieces: Pieces that stored rows are cut into.
    """

    start_position: int
    weights: Mapping[str, Fraction]
    row_pieces: int = 1


def declare(
    tables: PlanTables, sources: Sequence[PlanSource], wanted: Sequence[WantedStage], position: int = 0
) -> list[Event]:
    """The events that make a plan what a configuration asks for from a position on; none if it is that already.

    Args:
        tables: The plan.
        sources: The configuration's sources; those of the plan that are not among them are no longer drawn.
        wanted: Its mixture.
        position: Where the run stands: nothing before it changes.

    Raises:
        ConfigError: A source is not the one of that name that the run began with.
    """
    events = _source_events(tables, sources, position)
    after = folded(tables, events)
    recorded, asked = _from(position, after.declared), _from(position, [_stage(after, stage) for stage in wanted])
    same = len(recorded) == len(asked) and all(
        old.start_position == new.start_position and old.is_like(new) for old, new in zip(recorded, asked, strict=True)
    )
    limits_changed = any(isinstance(event, PlanSource) and event.name in tables.names for event in events)
    if same and not (limits_changed and _from(position, after.stages) != _from(position, after.declared)):
        return events
    fresh = position == 0 and not any(after.segments)
    reason = "declared" if fresh else "changed"
    says = () if fresh else _consequences(after, asked[0], position)
    stages: list[Event] = [
        StageEvent(
            max(stage.start_position, position),
            {after.names[index]: weight for index, weight in stage.weights.items()},
            stage.row_pieces, reason, None, says if number == 0 else (),
        )
        for number, stage in enumerate(asked)
    ]  # fmt: skip
    return [*events, *stages]


def set_horizon(tables: PlanTables, position: int, total_steps: int, warmup_steps: int) -> list[Event]:
    """The event that makes a length the run's from a position on; none if it is that already."""
    wanted = HorizonEvent(position, total_steps, warmup_steps)
    before = [known for known in tables.horizons if known.start_position <= position]
    is_known = before and len(before) == len(tables.horizons) and replace(before[-1], start_position=position) == wanted
    return [] if is_known else [wanted]


def _stage(tables: PlanTables, wanted: WantedStage) -> Stage:
    weights = {tables.names.index(name): weight for name, weight in wanted.weights.items()}
    return Stage(wanted.start_position, weights, wanted.row_pieces)


def _from(position: int, stages: Sequence[Stage]) -> list[Stage]:
    """The stages that decide something from a position on; the first begins there."""
    last_before = max(number for number, stage in enumerate(stages) if stage.start_position <= position)
    kept = [replace(stages[last_before], start_position=position), *stages[last_before + 1 :]]
    distinct = kept[:1]
    for stage in kept[1:]:
        if not stage.is_like(distinct[-1]):
            distinct.append(stage)
    return distinct


def _source_events(tables: PlanTables, sources: Sequence[PlanSource], position: int) -> list[Event]:
    events: list[Event] = []
    known = dict(zip(tables.names, tables.sources, strict=True))
    for source in sources:
        before = known.get(source.name)
        if before is None:
            events.append(replace(source, weight=Fraction(0)))
            continue
        changed = replace(before, max_epochs=source.max_epochs, on_exhausted=source.on_exhausted)
        if replace(source, weight=before.weight) != changed:
            raise ConfigError(
                f"source {source.name!r} is not the one that the run began with: recipe {source.recipe_digest}, "
                f"{source.row_tokens} tokens a row, part {source.part} instead of recipe {before.recipe_digest}, "
                f"{before.row_tokens} tokens a row, part {before.part}",
                where="data.sources", hint="give the changed source another name",
            )  # fmt: skip
        if changed != before:
            events.append(changed)
            events += _cut_to_limit(tables, changed, position)
    return events


def _cut_to_limit(tables: PlanTables, source: PlanSource, position: int) -> list[Event]:
    """Passes that are planned and no longer allowed; the one that a step stands in is finished."""
    if source.max_epochs is None or source.on_exhausted == "repeat":
        return []
    index = tables.names.index(source.name)
    epoch = max(source.max_epochs, first_open_epoch(tables, index, position))
    segments = tables.segments[index]
    return [Cut(source.name, epoch)] if segments and segments[-1].next_epoch > epoch else []


def first_open_epoch(tables: PlanTables, source_index: int, position: int) -> int:
    """The first pass over a source that nothing before a position has drawn from."""
    drawn = tables.mixture.counts(position)[source_index]
    epoch = 0
    for segment in tables.segments[source_index]:
        if drawn > segment.start_draw:
            epoch = segment.epoch + min(-(-(drawn - segment.start_draw) // segment.num_rows), segment.num_epochs)
    return epoch


def take_grown(tables: PlanTables, readers: Sequence[RowReader | None], position: int) -> list[Cut]:
    """The cuts that let later passes run over what caches have gained since; extending the plan fills them.

    Args:
        tables: The plan.
        readers: The caches by now.
        position: Where the run stands: the pass that it is in stays as it is.
    """
    cuts: list[Cut] = []
    for index, (segments, reader) in enumerate(zip(tables.segments, readers, strict=True)):
        if not segments or reader is None or segments[-1].ranges[-1].end >= len(reader.unit_row_starts) - 1:
            continue
        epoch = first_open_epoch(tables, index, position)
        if epoch < segments[-1].next_epoch:
            cuts.append(Cut(tables.names[index], epoch))
    return cuts


def used_up(tables: PlanTables, source_index: int, last_draw: int, num_rows: int) -> DataError:
    """What is said when a source may not be passed over once more."""
    source = tables.sources[source_index]
    draw = int(tables.mixture.invert(np.array([source_index], np.int32), np.array([last_draw]))[0])
    return DataError(
        f"source {source.name!r} is used up at step {draw // tables.start.global_batch_sequences:,}: max_epochs is "
        f"{source.max_epochs} and an epoch has {num_rows:,} rows",
        where=f"data.sources.{source_index}.max_epochs",
        hint="train for fewer steps, raise max_epochs, lower the source's weight, give it more text, or set "
        "on_exhausted to drop or repeat",
    )


def without_exhausted(tables: PlanTables, where: str) -> list[Event]:
    """The stages that go on without the source that is used up first, from the step that needs it.

    Raises:
        DataError: Nothing would be left to draw from.
    """
    draw, index = tables.first_missing()
    batch, name = tables.start.global_batch_sequences, tables.names[index]
    position = draw // batch * batch
    unread = tables.end_draw(index) - tables.mixture.counts(position)[index]
    says = (
        f"source {name!r} is used up after {_passes(tables.segments[index])} and no longer drawn from step "
        f"{position // batch:,} on; the {unread:,} rows left of it do not fill their share of that step and are "
        "skipped; the other sources share its weight in proportion to theirs",
    )
    events: list[Event] = []
    for number, stage in enumerate(_from(position, tables.stages)):
        weights = {tables.names[i]: weight for i, weight in stage.weights.items() if i != index}
        if not weights:
            raise DataError(
                f"all sources are used up at step {stage.start_position // batch:,}: {name!r} was the last",
                where=where, hint="train for fewer steps, raise max_epochs, or give the sources more text",
            )  # fmt: skip
        told = says if number == 0 else ()
        events.append(StageEvent(stage.start_position, weights, stage.row_pieces, "exhausted", None, told))
    return events


def folded(tables: PlanTables, events: Sequence[Event]) -> PlanTables:
    """The state that some events would lead to."""
    for event in events:
        tables = tables.after(event, tables.written(event), "")
    return tables


def _consequences(tables: PlanTables, stage: Stage, position: int) -> tuple[str, ...]:
    """What a change of the mixture repeats and skips, source by source."""
    before, drawn = tables.mixture.stage_at(position), tables.mixture.counts(position)
    says: list[str] = []
    for index, name in enumerate(tables.names):
        old, new = before.weights.get(index), stage.weights.get(index)
        was, will = (_share(weight, weights) for weight, weights in ((old, before.weights), (new, stage.weights)))
        if new is None and old is not None:
            says.append(f"{name}: {was} -> no longer drawn; {_left(tables, index, drawn[index])} are skipped")
        elif new is not None and old is None:
            first = "from its first row" if not drawn[index] else f"from where it stopped, after {drawn[index]:,} rows"
            says.append(f"{name}: not drawn before -> {will}, {first}")
        elif new is not None and (was != will or before.row_pieces != stage.row_pieces):
            says.append(f"{name}: {was} -> {will}; goes on after {drawn[index]:,} rows, nothing repeats or is skipped")
    if before.row_pieces != stage.row_pieces:
        says.append(f"rows are cut into {stage.row_pieces} instead of {before.row_pieces}")
    return tuple(says)


def _share(weight: Fraction | None, weights: Mapping[int, Fraction]) -> str:
    return "" if weight is None else f"{float(weight / sum(weights.values())):.1%}"


def _left(tables: PlanTables, index: int, drawn: int) -> str:
    """The rows of the pass that a source stands in which were not read, as far as they are known."""
    for segment in tables.segments[index]:
        if segment.start_draw <= drawn < segment.end_draw:
            left = -(drawn - segment.start_draw) % segment.num_rows
            return (
                f"{left:,} unread rows of pass {segment.epoch + (drawn - segment.start_draw) // segment.num_rows + 1}"
            )
    return "rows beyond what was planned"


def _passes(segments: Sequence[Segment]) -> str:
    number = segments[-1].next_epoch if segments else 0
    return f"{number:,} pass{'es' if number != 1 else ''}"
