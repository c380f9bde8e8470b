"""Open the batches of a run: training, validation, and a preview without a run.

In: a configuration, its corpus and the run's plan. Out: iterators over batches. Training and replay open their batches
with the same function, so a replay reads the rows that were trained on.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from vorox.core.batch import Batch, DataCursor, DataShard
from vorox.core.errors import ConfigError
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.core.schema.vision import IMAGE_TOKEN
from vorox.data.corpus.corpus import Corpus, plan_start
from vorox.data.images.decoding import ImageInput, PatchInput
from vorox.data.images.layout import image_layout
from vorox.data.order.difficulty_buckets import readers_of
from vorox.data.order.growth import PlanGrower, PlanReporter, await_planned_units
from vorox.data.order.loader import BatchStream, ReadTeacher, first_cursor, open_batches, validation_batches
from vorox.data.order.plan import DataPlan
from vorox.data.rows import RowReader
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.training.steps.run_plan import dataset_size, plan_readers, update_plan
from vorox.training.steps.schedule import horizon
from vorox.training.steps.teacher_logits import LogitsReader


def _never() -> bool:
    return False


def training_batches(
    config: RunConfig,
    corpus: Corpus,
    plan: DataPlan,
    shard: DataShard,
    cursor: DataCursor,
    *,
    total_steps: int | None = None,
    stop: Callable[[], bool] | None = None,
    report: PlanReporter | None = None,
    decides: bool = True,
) -> BatchStream:
    """Open the training batches of a run from ``cursor`` on.

    Args:
        config: The run.
        corpus: Its caches.
        plan: Its plan.
        shard: The part of every batch that this process reads.
        cursor: Where to start.
        total_steps: Length of the run, up to which a growing cache extends the plan; ``None`` reads the plan as it is.
        stop: Polled while a step waits for rows.
        report: Receives a message for every change that the plan takes up.
        decides: Whether this rank extends the plan; the others follow the plan that it writes.
    """
    loader, readers, batch = config.data.loader, plan_readers(plan, corpus), config.train.global_batch_sequences
    grower = None
    if plan.start.growth is not None:
        readers = await_planned_units(plan, readers, stop=stop or _never, report=report)
    if plan.start.growth is not None and total_steps is not None:
        grower = PlanGrower(
            plan,
            readers,
            config.data.growth,
            last_position=plan.start.batch_sizes.position_of(total_steps),
            report=report,
            decides=decides,
            before_events=corpus.view_recorder(plan.path.parent).record,
        )
    return open_batches(
        plan,
        readers,
        shard=shard,
        cursor=cursor,
        global_batch_sequences=batch,
        micro_batch_sequences=config.parallel.micro_batch_sequences(config.train.micro_batch_rows, batch, shard.count),
        document_mask=config.data.document_mask,
        num_threads=loader.num_threads,
        prefetch_batches=loader.prefetch_batches,
        grower=grower,
        stop=stop,
        image_input=image_input(config, corpus.tokenizer),
        read_teacher=_teacher_reader(config),
    )


def _teacher_reader(config: RunConfig) -> ReadTeacher | None:
    directory = config.train.distillation.logits
    return None if directory is None else LogitsReader(Path(directory)).read


def image_input(config: RunConfig, tokenizer: Tokenizer) -> ImageInput | PatchInput | None:
    """Return how the model reads images; ``None`` if it reads text only.

    Raises:
        ConfigError: The tokenizer has no image token.
    """
    layout = image_layout(config.model)
    if layout is None:
        return None
    if layout.grid is not None:
        return PatchInput(layout.grid, config.model.image_processor.image_token_id)
    token_id = tokenizer.special_id(IMAGE_TOKEN)
    if token_id is None:
        raise ConfigError(
            f"The tokenizer has no special token {IMAGE_TOKEN}, which a model with an image encoder needs",
            where="tokenizer.special_tokens", hint=f"add it: tokenizer.special_tokens=['{IMAGE_TOKEN}']",
        )  # fmt: skip
    return ImageInput(config.model.vision.image_size_pixels, token_id)


@contextlib.contextmanager
def preview_batches(config: RunConfig, corpus: Corpus, shard: DataShard, num_steps: int) -> Generator[BatchStream]:
    """Open the batches of the first ``num_steps`` steps, in the real data order, under a temporary plan.

    The plan ignores ``max_epochs``. ``vorox parity`` and ``--minutes`` use it before a run exists.
    """
    start = plan_start(config, corpus)
    endless = replace(start, sources=tuple(replace(source, max_epochs=None) for source in start.sources))
    readers = readers_of(endless.sources, {source.name: source.train for source in corpus.sources})
    with tempfile.TemporaryDirectory(prefix="vorox-preview-") as directory:
        plan = DataPlan.create(RunLayout(Path(directory)).plan, endless, readers)
        if endless.growth is None:
            plan.extend_to(plan.start.batch_sizes.position_of(num_steps), readers)
        cursor = first_cursor(plan, config.run.seed)
        with training_batches(config, corpus, plan, shard, cursor, total_steps=num_steps) as batches:
            yield batches


@contextlib.contextmanager
def planned_batches(config: RunConfig, corpus: Corpus) -> Generator[tuple[BatchStream, int]]:
    """Open the batches of all steps of a run, as a new run would read them, under a temporary plan.

    Yields:
        The batches, and the number of steps.

    Raises:
        DataError: A source is exhausted before the end of the run.
    """
    size = dataset_size(config, corpus)
    length = horizon(config, num_train_rows=size.rows, full_dataset_tokens=size.tokens)
    with tempfile.TemporaryDirectory(prefix="vorox-plan-") as directory:
        plan, events = update_plan(None, RunLayout(Path(directory)).plan, config, corpus, length)
        plan.add(events)
        cursor = first_cursor(plan, config.run.seed)
        with training_batches(config, corpus, plan, DataShard(), cursor, total_steps=length.total_steps) as batches:
            yield batches, length.total_steps


def validation_set(config: RunConfig, corpus: Corpus) -> Callable[[], Iterator[Batch]] | None:
    """Return a function that opens the fixed validation batches from the first; ``None`` without a validation set."""
    if not corpus.validation:
        return None
    images = image_input(config, corpus.tokenizer)
    return _batches_of(corpus.validation, num_validation_rows(config, corpus), config, images)


def validation_sets_by_source(config: RunConfig, corpus: Corpus) -> dict[str, Callable[[], Iterator[Batch]]]:
    """Return functions that open the validation batches of each source with ``eval.by_source``, else none."""
    sources = zip(corpus.validation_text, corpus.validation, strict=True) if config.eval.by_source else ()
    return {
        re.sub(r"[^\w.-]", "_", source.config.name): _batches_of(
            (reader,),
            reader.num_rows if config.eval.num_sequences is None else config.eval.num_sequences,
            config,
            image_input(config, corpus.tokenizer),
        )
        for source, reader in sources
        if reader.num_rows
    }


def _batches_of(
    readers: Sequence[RowReader], num_rows: int, config: RunConfig, images: ImageInput | PatchInput | None
) -> Callable[[], Iterator[Batch]]:
    return lambda: validation_batches(
        readers,
        num_sequences=num_rows,
        micro_batch_sequences=config.train.micro_batch_rows,
        document_mask=config.data.document_mask,
        image_input=images,
    )


def num_validation_rows(config: RunConfig, corpus: Corpus) -> int:
    """Return the number of rows of the validation set."""
    all_rows = sum(reader.num_rows for reader in corpus.validation)
    return all_rows if config.eval.num_sequences is None else min(config.eval.num_sequences, all_rows)
