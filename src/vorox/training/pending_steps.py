"""Settle steps one step late: append to the replay chain and count non-finite steps.

In: submitted steps. Out: the same steps, settled, one step later: the numbers of step N are fetched while step N+1
runs, so the device never waits for the host. A save drains first, so the chain holds every step of the checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vorox.core.batch import Batch, Progress
from vorox.core.engine import StepResult, StepValues
from vorox.core.errors import NumericalError
from vorox.core.pluralize import pluralize
from vorox.training.replay_chain import ReplayChain


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that the device may still be computing.

    Attributes:
        progress: Progress after this step.
        batch_digest: Digest of its rows over all ranks.
        result: Its numbers, to be fetched.
        lr: Learning rate.
        weight_decay: Weight decay.
        row_tokens: Positions per row.
        batch: This rank's batch.
    """

    progress: Progress
    batch_digest: str
    result: StepResult
    lr: float
    weight_decay: float
    row_tokens: int
    batch: Batch | None = None


@dataclass(frozen=True, slots=True)
class SettledStep:
    """A step whose numbers are known and in the replay chain.

    Attributes:
        step: The step.
        values: Its numbers.
        nonfinite_in_a_row: Consecutive steps up to this one that were not finite.
        ends_run: Whether that is more than the run skips.
    """

    step: InFlightStep
    values: StepValues
    nonfinite_in_a_row: int
    ends_run: bool

    @property
    def number(self) -> int:
        """The step, from 1."""
        return self.step.progress.step

    @property
    def is_nonfinite(self) -> bool:
        """Whether it was skipped for another reason than an fp16 loss scale that can still be lowered."""
        return not self.values.finite and not _is_adapting(self.values)

    @property
    def skipped(self) -> str:
        """The log line of a step without an update."""
        return f"Skipped step {self.number:,}: loss {self.values.loss}, gradient norm {self.values.grad_norm}"

    def error(self, record: str) -> NumericalError:
        """Return the error that ends the run.

        Args:
            record: Path of the step's record; empty if there is none.
        """
        return NumericalError(
            f"Loss or gradient was not finite {pluralize(self.nonfinite_in_a_row, 'time')} in a row "
            f"(loss {self.values.loss}, gradient norm {self.values.grad_norm})",
            where=f"step {self.number:,}" + (f", recorded in {record}" if record else ""),
            hint="lower optimizer.lr or lengthen the warm-up; train.max_nonfinite_steps sets how many are skipped",
        )


class PendingSteps:
    """Holds the step in flight and settles it one step later.

    Args:
        chain: Records every step.
        max_nonfinite_steps: Consecutive non-finite steps that are skipped before the run stops.
        nonfinite_in_a_row: Consecutive non-finite steps at the end of the checkpoint.
    """

    def __init__(self, chain: ReplayChain, *, max_nonfinite_steps: int, nonfinite_in_a_row: int) -> None:
        self._chain, self._max_nonfinite_steps = chain, max_nonfinite_steps
        self._in_flight: InFlightStep | None = None
        self.nonfinite_in_a_row = nonfinite_in_a_row

    @property
    def head(self) -> str:
        """The head of the replay chain, after the last settled step."""
        return self._chain.head

    def submit(self, step: InFlightStep) -> SettledStep | None:
        """Add a started step; settle and return the previous one."""
        previous, self._in_flight = self._in_flight, step
        return None if previous is None else self._settle(previous)

    def drain(self) -> SettledStep | None:
        """Wait for the step in flight, settle and return it."""
        pending, self._in_flight = self._in_flight, None
        return None if pending is None else self._settle(pending)

    def make_durable(self) -> None:
        """Flush all settled steps to disk; raises ``OSError`` if the disk is full or failed."""
        self._chain.flush()

    def _settle(self, step: InFlightStep) -> SettledStep:
        values = step.result.fetch()
        self._chain.record(step.progress.step, step.batch_digest, values)
        if not _is_adapting(values):
            self.nonfinite_in_a_row = 0 if values.finite else self.nonfinite_in_a_row + 1
        ends_run = self.nonfinite_in_a_row > self._max_nonfinite_steps
        return SettledStep(step, values, self.nonfinite_in_a_row, ends_run)


def _is_adapting(values: StepValues) -> bool:
    """Whether only the fp16 loss scale is too large: the loss is finite, and the scale can still be lowered."""
    return not values.finite and math.isfinite(values.loss) and values.extra.get("loss_scale", 1.0) > 1.0
