"""Compare the plan of a run with its configuration, and compute the missing events.

In: a configuration, its corpus and the plan on disk. Out: a plan, and the events to append. Complete caches are planned
to the end of the run before its first step, growing caches as the run reaches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from vorox.core.config.checks.sources import exact_weight
from vorox.core.errors import ConfigError, DataError
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.cache.reader import CacheReader
from vorox.data.corpus.corpus import Corpus, plan_start
from vorox.data.order.difficulty_buckets import BucketReader, SourceReader, readers_of
from vorox.data.order.growth import PlanReporter, await_planned_units
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_changes import (
    RequestedMixtureStage,
    cache_growth_events,
    covering_events,
    grown_sources,
    horizon_update_events,
    mixture_update_events,
)
from vorox.data.order.plan_events import CutEvent, MixtureStageEvent, PlanEvent, PlanStart, SourceEvent
from vorox.data.order.size_estimate import DatasetEstimate, estimate
from vorox.records.run_lookup import saved_state
from vorox.training.steps.schedule import Horizon


def requested_stages(config: RunConfig, start: PlanStart) -> list[RequestedMixtureStage]:
    """Return the mixtures of a configuration, by position."""
    sizes, length = start.batch_sizes, config.data.sequence_length_tokens
    weights = {source.name: source.weight for source in start.sources}
    stages = [RequestedMixtureStage(0, weights)]
    for stage in config.data.stages:
        position = sizes.position_of(sizes.num_steps(-(-stage.start_tokens // length)))
        shares: dict[str, Fraction] = {}
        for name, weight in stage.weights.items():
            buckets = [source for source in start.sources if source.bucket is not None and source.bucket.source == name]
            whole = sum(source.weight for source in buckets)
            for one in buckets:
                shares[one.name] = shares.get(one.name, Fraction(0)) + exact_weight(weight) * one.weight / whole
            if not buckets:
                shares[name] = shares.get(name, Fraction(0)) + exact_weight(weight)
        pieces = length // (stage.sequence_length_tokens or length)
        stages = [known for known in stages if known.start_position < position]
        stages.append(RequestedMixtureStage(position, shares or weights, pieces))
    return stages


def dataset_size(config: RunConfig, corpus: Corpus) -> DatasetEstimate:
    """Return the size of one pass over the full dataset: exact if it is built, else an estimate.

    With growth mode ``strict``, the estimate uses the first segments only, so that two runs get the same length and
    warm-up, independent of how much is built when they start.
    """
    growth = config.data.growth
    return estimate(corpus.train, growth.first_segment_units if growth.mode == "strict" else None)


def plan_readers(plan: DataPlan, corpus: Corpus) -> list[SourceReader | None]:
    """Return the caches of a plan's sources, in its order; ``None`` for one that the configuration no longer has."""
    return readers_of(plan.sources, {source.name: source.train for source in corpus.sources})


def update_plan(
    plan: DataPlan | None,
    path: Path,
    config: RunConfig,
    corpus: Corpus,
    length: Horizon,
    *,
    position: int = 0,
    reached: int = 0,
    report: PlanReporter | None = None,
) -> tuple[DataPlan, list[PlanEvent]]:
    """Compare the plan of a run with its configuration; create a plan if there is none.

    Args:
        plan: The plan on disk; ``None`` if the run has none yet.
        path: Its file.
        config: The run.
        corpus: Its caches.
        length: Length of the run. Complete caches are planned to its end; growing ones as the run reaches them.
        position: Position in the data of the current state.
        reached: The largest position that any attempt has trained on; the plan up to it is kept.
        report: Receives a report while units that the run has read are rebuilt.

    Returns:
        The plan and the events to append. A plan on disk is unchanged until the caller adds them.

    Raises:
        ConfigError: The settings differ from those of the plan.
        DataError: A cache differs from the one in the plan, a source has new files without ``data.cache.grow``, or a
            source is exhausted before the end.
    """
    start = plan_start(config, corpus, plan)
    caches = {source.name: source.train for source in corpus.sources}
    if plan is not None and plan.start.growth is not None:
        for source, reader in zip(
            plan.sources, await_planned_units(plan, plan_readers(plan, corpus), report=report), strict=True
        ):
            if isinstance(reader, CacheReader):
                caches[source.name] = reader
            elif isinstance(reader, BucketReader):
                caches[reader.bucket.source] = reader.base
    readers = readers_of(start.sources, caches)
    if plan is None:
        plan = DataPlan.create(path, start, readers)
    else:
        plan.check_start(start, readers)
        if plan.state.rollbacks and config.parallel.kind == "deepspeed":
            raise ConfigError(
                "The plan skips steps because of a loss spike, which DeepSpeed does not support", where="parallel.kind",
                hint="resume with parallel.kind=native",
            )  # fmt: skip
    events = mixture_update_events(plan.state, start.sources, requested_stages(config, start), position)
    events += horizon_update_events(plan.state.apply_all(events), position, length.total_steps, length.warmup_steps)
    if plan.start.growth is None:
        state = plan.state.apply_all(events)
        readers = readers_of(state.sources, caches)
        enlarged = grown_sources(state, readers)
        if enlarged and not config.data.cache.grow:
            raise added_files_error(enlarged[0], str(path), path.parent)
        cuts = cache_growth_events(state, readers, max(position, reached)) if position or reached else []
        events += cuts
        end = start.batch_sizes.position_of(length.total_steps)
        covering = covering_events(state.apply_all(cuts), end, readers, str(path))
        events += covering
        unread = grown_sources(state.apply_all([*cuts, *covering]), readers)
        for name in unread:
            text = f"Source {name!r} grew, but the run ends before a pass that would read the new files"
            if report is not None:
                report("cache_grown", f"{text}; a larger train.num_steps or train.num_epochs reaches them")
    elif report is not None and position:
        state = plan.state
        for name in grown_sources(state, readers_of(state.sources, caches)):
            last = state.segments[state.names.index(name)][-1]
            if last.num_epochs > 1:  # passes that are planned together; else this pass reads on
                text = f"Source {name!r} grew: its new files are read from pass {last.next_epoch + 1:,} on"
                report("cache_grown", f"{text}, after the passes that are planned already")
    return plan, events


def added_files_error(source: str, where: str, run_directory: Path) -> DataError:
    """Return the error of a run without ``data.cache.grow`` whose growing view has new files."""
    return DataError(
        f"Files have joined source {source!r} since the run read it", where=where,
        hint="the run grew before, so its files are not fixed any more; to train on them, add data.cache.grow=true to "
        "the command", saved=saved_state(RunLayout(run_directory)),
    )  # fmt: skip


def report_events(events: Sequence[PlanEvent], report: PlanReporter) -> None:
    """Report plan events as text."""
    for before, event in zip([None, *events], events, strict=False):
        # A cut directly after a source event follows from a new limit, not from growth.
        if isinstance(event, CutEvent) and not isinstance(before, SourceEvent):
            text = f"Source {event.source!r} grew: used from pass {event.epoch + 1:,} on"
            report("cache_grown", text)
        for text in event.messages if isinstance(event, MixtureStageEvent) else ():
            report("mixture", text)
