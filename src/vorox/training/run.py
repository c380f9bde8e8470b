"""What a run is made of while it runs: one value that the loop and the saving between its steps share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vorox.core.engine import Engine
from vorox.core.records import Batch
from vorox.training.agreement import Agreement
from vorox.training.checkpointer import Checkpointer
from vorox.training.evaluate import Evaluations
from vorox.training.ledger import Ledger
from vorox.training.observer import Observer
from vorox.training.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Run:
    """What a run is made of while it runs."""

    engine: Engine
    batches: Iterator[Batch]
    schedule: Schedule
    ledger: Ledger
    checkpointer: Checkpointer
    evaluations: Evaluations
    observer: Observer
    agreement: Agreement
