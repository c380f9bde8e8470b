"""What a run is made of: its workload (configuration, corpus, model, engine), directory, mirror, plan and state."""

from __future__ import annotations

from dataclasses import dataclass

from vorox.core.distributed_context import DistributedContext
from vorox.core.engine import Engine
from vorox.core.log import RunLog
from vorox.core.run_context import RunContext
from vorox.core.schema import RunConfig
from vorox.data.corpus import Corpus
from vorox.data.plan import Plan
from vorox.models.spec import ModelSpec
from vorox.training.checkpoint_store import RunState
from vorox.training.mirror import Mirror


@dataclass(frozen=True, slots=True)
class Workload:
    """What every step is computed from, besides its batch: the same for training and for replay, on every rank."""

    config: RunConfig
    corpus: Corpus
    spec: ModelSpec
    engine: Engine
    log: RunLog
    distributed: DistributedContext

    def close(self) -> None:
        """Stop building caches in the background."""
        self.corpus.close()


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """Everything that a run is made of when its loop starts.

    Attributes:
        workload: Configuration, corpus, model and engine; the engine holds ``state``.
        run: The open run directory.
        mirror: The copy of the run in a store, if it has one.
        plan: The data plan.
        state: Progress and length at which the loop starts.
    """

    workload: Workload
    run: RunContext
    mirror: Mirror
    plan: Plan
    state: RunState
