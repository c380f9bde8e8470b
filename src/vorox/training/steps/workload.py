"""The workload of a run: configuration, corpus, model and engine."""

from __future__ import annotations

from dataclasses import dataclass

from vorox.core.engine import Engine
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.data.corpus.corpus import Corpus
from vorox.models.spec import ModelSpec
from vorox.records.log import RunLog


@dataclass(frozen=True, slots=True)
class Workload:
    """What computes the steps of a run, besides the batches: the same for training and replay, on every rank."""

    config: RunConfig
    corpus: Corpus
    spec: ModelSpec
    engine: Engine
    log: RunLog
    distributed: DistributedContext

    def close(self) -> None:
        """Stop building caches in the background."""
        self.corpus.close()
