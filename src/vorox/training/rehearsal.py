"""The first batches of a run without the run: the real data order under a plan that is thrown away afterwards.

For whoever wants to try a configuration before it begins: the time budget, and the comparison of two engines.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

from vorox.core.records import DataShard
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.dataset import Corpus
from vorox.data.difficulty_buckets import readers_of
from vorox.data.loader import BatchStream, first_cursor
from vorox.data.plan import Plan
from vorox.data.plan_start import plan_start
from vorox.training import feed


@contextlib.contextmanager
def first_batches(config: RunConfig, corpus: Corpus, shard: DataShard, num_steps: int) -> Generator[BatchStream]:
    """The batches of the first ``num_steps`` steps, whatever a run may pass over its sources."""
    start = plan_start(config, corpus)
    endless = replace(start, sources=tuple(replace(source, max_epochs=None) for source in start.sources))
    readers = readers_of(endless.sources, {source.name: source.train for source in corpus.sources})
    with tempfile.TemporaryDirectory(prefix="vorox-rehearsal-") as directory:
        plan = Plan.create(RunLayout(Path(directory)).plan, endless, readers)
        if endless.growth is None:
            plan.extend_to(num_steps * config.train.global_batch_sequences, readers)
        cursor = first_cursor(plan, config.run.seed)
        with feed.training_batches(config, corpus, plan, shard, cursor, total_steps=num_steps) as batches:
            yield batches
