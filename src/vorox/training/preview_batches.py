"""The first batches of a run without the run: the real data order, under a temporary plan.

The time budget and the comparison of two engines try a configuration with them before a run starts.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

from vorox.core.batch import DataShard
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.corpus import Corpus, plan_start
from vorox.data.difficulty_buckets import readers_of
from vorox.data.loader import BatchStream, first_cursor
from vorox.data.plan import Plan
from vorox.training.dataloading import training_batches


@contextlib.contextmanager
def preview_batches(config: RunConfig, corpus: Corpus, shard: DataShard, num_steps: int) -> Generator[BatchStream]:
    """Open the batches of the first ``num_steps`` steps, whatever number of epochs the sources allow."""
    start = plan_start(config, corpus)
    endless = replace(start, sources=tuple(replace(source, max_epochs=None) for source in start.sources))
    readers = readers_of(endless.sources, {source.name: source.train for source in corpus.sources})
    with tempfile.TemporaryDirectory(prefix="vorox-preview-") as directory:
        plan = Plan.create(RunLayout(Path(directory)).plan, endless, readers)
        if endless.growth is None:
            plan.extend_to(num_steps * config.train.global_batch_sequences, readers)
        cursor = first_cursor(plan, config.run.seed)
        with training_batches(config, corpus, plan, shard, cursor, total_steps=num_steps) as batches:
            yield batches
