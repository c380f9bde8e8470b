"""From configuration and corpus to the batches of a run: the plan, the stream of training batches, the validation set.

In: what was asked for and the caches. Out: a plan that covers the whole run before its first step, and the iterators
over it. ``train`` and ``replay`` come through here, so what is replayed is what was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from vorox.core.errors import ConfigError
from vorox.core.records import Batch, DataCursor, DataShard
from vorox.core.schema import RunConfig
from vorox.data.dataset import Corpus
from vorox.data.loader import BatchStream, open_batches, validation_batches
from vorox.data.plan import Plan
from vorox.data.plan_events import PlanSource, PlanStart


def plan_start(config: RunConfig, corpus: Corpus) -> PlanStart:
    """What the data order of a run is a function of, besides the caches' content."""
    sources = [
        PlanSource(source.name, weight, source.train.recipe.digest, source.train.row_tokens, section.max_epochs)
        for source, weight, section in zip(corpus.sources, corpus.weights, config.data.sources, strict=True)
    ]
    return PlanStart(config.run.seed, config.data.shuffle, config.train.global_batch_sequences, tuple(sources))


def open_plan(path: Path, config: RunConfig, corpus: Corpus, total_steps: int) -> Plan:
    """The plan of a run, begun or continued, covering ``total_steps``.

    Raises:
        ConfigError: The run was begun with other settings.
        DataError: A cache is no longer what the plan was made for, or a source is used up before the end.
    """
    plan = Plan.open_or_create(path, plan_start(config, corpus), corpus.train)
    plan.extend_to(total_steps * config.train.global_batch_sequences, corpus.train)
    return plan


def training_batches(
    config: RunConfig, corpus: Corpus, plan: Plan, shard: DataShard, cursor: DataCursor
) -> BatchStream:
    """The batches of a run from ``cursor`` on."""
    loader = config.data.loader
    return open_batches(
        plan,
        corpus.train,
        shard=shard,
        cursor=cursor,
        global_batch_sequences=config.train.global_batch_sequences,
        micro_batch_sequences=config.train.micro_batch_sequences,
        document_mask=config.data.document_mask,
        num_threads=loader.num_threads,
        prefetch_batches=loader.prefetch_batches,
    )


def validation_set(config: RunConfig, corpus: Corpus) -> Callable[[], Iterator[Batch]] | None:
    """Opens the fixed validation batches from the first; ``None`` if nothing is held out.

    Raises:
        ConfigError: Validations or samples are asked for, and nothing is held out.
    """
    if not corpus.validation:
        asked = "eval.every_steps" if config.eval.every_steps is not None else "eval.prompts"
        if config.eval.every_steps is not None or config.eval.prompts:
            raise ConfigError(
                f"{asked} asks for validations, and data.validation.held_out_fraction=0 holds nothing out",
                where=asked,
                hint=f"hold something out, or unset {asked}",
            )
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
