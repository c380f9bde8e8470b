"""What a running process leaves behind so that its data can be asked about later: which steps it did.

In: steps as they are started and checkpoints as they are committed. Out: the attempt's record in ``attempts.bin``,
from which ``vorox data when`` tells what is kept and what was rolled back. A step costs one store into memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass

from vorox.core.attempts import AttemptRecord
from vorox.core.records import Progress
from vorox.core.run_context import RunContext


@dataclass(frozen=True, slots=True)
class Provenance:
    """Told by the observer; decides nothing."""

    attempt: AttemptRecord

    def started(self, progress: Progress) -> None:
        """A step was started; the run stands after it."""
        self.attempt.reached(progress.step)

    def saved(self, progress: Progress) -> None:
        """A checkpoint of this state was committed."""
        self.attempt.saved(progress.step)


@contextlib.contextmanager
def open_provenance(run: RunContext, progress: Progress) -> Generator[Provenance]:
    """Begin the record of this attempt, which goes on from ``progress``."""
    with AttemptRecord(run.directory, run.attempt, progress.step, progress.cursor.position) as attempt:
        yield Provenance(attempt)
