"""From configuration and corpus to the batches of a run: the plan, the stream of training batches, the validation set.

In: what was asked for and the caches. Out: a plan that covers the whole run before its first step, or each step before
it is read where caches grow, and the iterators over it. ``train`` and ``replay`` come through here, so what is
replayed is what was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from vorox.core.chained_log import HashChainedLog
from vorox.core.config.checks import exact_weight
from vorox.core.records import Batch, DataCursor, DataShard
from vorox.core.schema import RunConfig
from vorox.data.cache.reader import CacheReader
from vorox.data.dataset import Corpus
from vorox.data.difficulty_buckets import BucketReader, SourceReader, readers_of
from vorox.data.estimate import DatasetEstimate, estimate
from vorox.data.growth import PlanGrower, Tell, await_planned
from vorox.data.loader import BatchStream, open_batches, validation_batches
from vorox.data.plan import Plan
from vorox.data.plan_changes import (
    WantedStage,
    apply_all,
    cache_growth_events,
    covering_events,
    horizon_update_events,
    mixture_update_events,
)
from vorox.data.plan_events import Cut, PlanEvent, PlanStart, SourceEvent, StageEvent
from vorox.data.plan_start import plan_start
from vorox.training.schedule import Horizon


def wanted_stages(config: RunConfig, start: PlanStart) -> list[WantedStage]:
    """The mixtures that a configuration asks for, by position."""
    batch, length = config.train.global_batch_sequences, config.data.sequence_length_tokens
    weights = {source.name: source.weight for source in start.sources}
    stages = [WantedStage(0, weights)]
    for stage in config.data.stages:
        position = -(-stage.start_tokens // (batch * length)) * batch
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
        stages.append(WantedStage(position, shares or weights, pieces))
    return stages


def dataset_size(config: RunConfig, corpus: Corpus) -> DatasetEstimate:
    """One pass over the full dataset: exact where it is built, else an estimate.

    In mode ``strict`` it is measured on the first segments alone, so that two runs get the same length and warm-up
    whatever is built by the time they begin.
    """
    growth = config.data.growth
    return estimate(corpus.train, growth.first_segment_units if growth.mode == "strict" else None)


def plan_readers(plan: Plan, corpus: Corpus) -> list[SourceReader | None]:
    """The caches of a plan's sources, in its order; ``None`` for one that the configuration no longer has."""
    return readers_of(plan.sources, {source.name: source.train for source in corpus.sources})


def open_plan(
    path: Path,
    config: RunConfig,
    corpus: Corpus,
    length: Horizon,
    *,
    position: int = 0,
    reached: int = 0,
    tell: Tell | None = None,
) -> tuple[Plan, list[PlanEvent]]:
    """Open the plan of a run, and compare all that it records with what the configuration asks for.

    Args:
        path: Its file, begun if there is none.
        config: The run.
        corpus: Its caches.
        length: Length of the run. Complete caches are covered so far; growing ones as the run comes to them.
        position: Where the run stands.
        reached: The furthest position that any attempt has trained on: what was planned up to there stays.
        tell: Told while units that the run has read are built again.

    Returns:
        The plan, and the events that it lacks: nothing of a plan that was begun has changed before they are added.

    Raises:
        ConfigError: The run was begun with other settings.
        DataError: A cache is no longer what the plan was made for, or a source is used up before the end.
    """
    recorded = Plan.open(path) if path.exists() and HashChainedLog(path).read()[0] else None
    start = plan_start(config, corpus, recorded)
    caches = {source.name: source.train for source in corpus.sources}
    if recorded is not None and recorded.start.growth is not None:
        for source, reader in zip(
            recorded.sources, await_planned(recorded, plan_readers(recorded, corpus), tell=tell), strict=True
        ):
            if isinstance(reader, CacheReader):
                caches[source.name] = reader
            elif isinstance(reader, BucketReader):
                caches[reader.bucket.source] = reader.base
    plan = Plan.open_or_create(path, start, readers_of(start.sources, caches))
    events = mixture_update_events(plan.state, start.sources, wanted_stages(config, start), position)
    events += horizon_update_events(apply_all(plan.state, events), position, length.total_steps, length.warmup_steps)
    if plan.start.growth is None:
        state = apply_all(plan.state, events)
        readers = readers_of(state.sources, caches)
        cuts = cache_growth_events(state, readers, max(position, reached)) if position or reached else []
        events += cuts
        end = length.total_steps * config.train.global_batch_sequences
        events += covering_events(apply_all(state, cuts), end, readers, str(path))
    return plan, events


def tell_events(events: Sequence[PlanEvent], tell: Tell) -> None:
    """Tell people what some events of a plan change."""
    for before, event in zip([None, *events], events, strict=False):
        if isinstance(event, Cut) and not isinstance(before, SourceEvent):  # after one it follows from a new limit
            text = f"Source {event.source!r} has grown: pass {event.epoch + 1:,} and later ones take it up"
            tell("cache_grown", text)
        for text in event.messages if isinstance(event, StageEvent) else ():
            tell("mixture", text)


def _never() -> bool:
    return False


def training_batches(
    config: RunConfig,
    corpus: Corpus,
    plan: Plan,
    shard: DataShard,
    cursor: DataCursor,
    *,
    total_steps: int | None = None,
    stop: Callable[[], bool] | None = None,
    tell: Tell | None = None,
    decides: bool = True,
) -> BatchStream:
    """The batches of a run from ``cursor`` on; over growing caches, for ``total_steps`` if that is given.

    Args:
        config: The run.
        corpus: Its caches.
        plan: Its plan.
        shard: The part of every batch that this process reads.
        cursor: Where to begin.
        total_steps: Length of the run, beyond which nothing is taken up; ``None`` reads what is planned, and no more.
        stop: Asked while a step waits for rows.
        tell: Told of everything that is taken up.
        decides: Whether this process decides what is taken up; the others of a run follow the plan that it writes.
    """
    loader, readers, batch = config.data.loader, plan_readers(plan, corpus), config.train.global_batch_sequences
    grower = None
    if plan.start.growth is not None:
        readers = await_planned(plan, readers, stop=stop or _never, tell=tell)
    if plan.start.growth is not None and total_steps is not None:
        grower = PlanGrower(
            plan, readers, config.data.growth, last_position=total_steps * batch, tell=tell, decides=decides
        )
    return open_batches(
        plan,
        readers,
        shard=shard,
        cursor=cursor,
        global_batch_sequences=batch,
        micro_batch_sequences=config.train.micro_batch_sequences,
        document_mask=config.data.document_mask,
        num_threads=loader.num_threads,
        prefetch_batches=loader.prefetch_batches,
        grower=grower,
        stop=stop,
    )


def validation_set(config: RunConfig, corpus: Corpus) -> Callable[[], Iterator[Batch]] | None:
    """Opens the fixed validation batches from the first; ``None`` if nothing is held out."""
    if not corpus.validation:
        return None
    num_rows = num_validation_rows(config, corpus)
    return lambda: validation_batches(
        corpus.validation,
        num_sequences=num_rows,
        micro_batch_sequences=config.train.micro_batch_sequences,
        document_mask=config.data.document_mask,
    )


def num_validation_rows(config: RunConfig, corpus: Corpus) -> int:
    """Rows of the validation set."""
    all_rows = sum(reader.num_rows for reader in corpus.validation)
    return all_rows if config.eval.num_sequences is None else min(config.eval.num_sequences, all_rows)
