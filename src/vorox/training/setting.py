"""What a run is made from before anything of it has happened: configuration, text, model and engine."""

from __future__ import annotations

from dataclasses import dataclass

from vorox.core.distributed_context import DistributedContext
from vorox.core.engine import Engine
from vorox.core.log import RunLog
from vorox.core.schema import RunConfig
from vorox.data.dataset import Corpus
from vorox.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run is made from: the same for training and for replay, and in every process."""

    config: RunConfig
    corpus: Corpus
    spec: ModelSpec
    engine: Engine
    log: RunLog
    distributed: DistributedContext

    def close(self) -> None:
        """End what is built in the background."""
        self.corpus.close()
