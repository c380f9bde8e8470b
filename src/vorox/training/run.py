"""A run in its loop: one value that the loop and what happens between its steps share."""

from __future__ import annotations

from dataclasses import dataclass

from vorox.core.engine import Engine
from vorox.data.loader import BatchStream
from vorox.training.checkpoint_writer import CheckpointWriter
from vorox.training.evaluate import Evaluations
from vorox.training.forensics import Forensics
from vorox.training.observer import Observer
from vorox.training.pending_steps import PendingSteps
from vorox.training.provenance_recorder import ProvenanceRecorder
from vorox.training.sampling import PromptSampler
from vorox.training.schedule import Schedule
from vorox.training.setup import TrainingSetup
from vorox.training.step_sync import StepSync


@dataclass(frozen=True, slots=True)
class Run:
    """What the loop works with."""

    setup: TrainingSetup
    engine: Engine
    batches: BatchStream
    schedule: Schedule
    sync: StepSync
    pending: PendingSteps
    checkpoints: CheckpointWriter
    evaluations: Evaluations
    sampler: PromptSampler
    observer: Observer
    provenance: ProvenanceRecorder
    forensics: Forensics
