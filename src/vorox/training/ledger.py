"""What every finished step leaves behind: its link in the replay chain, and a count of steps that were not finite.

In: steps as they are started. Out: the same steps, settled, one step later: the numbers of step N are fetched when
step N+1 is under way, so the device never waits for the host. ``settle`` catches up; a checkpoint does it first, so
the state it saves is one whose every step is in the chain, durably.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from vorox.core.counted import counted
from vorox.core.errors import NumericalError
from vorox.core.records import Batch, Progress, StepResult, StepValues
from vorox.training.chain import ReplayChain


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A step that the device may still be busy with.

    Attributes:
        progress: The run after this step.
        batch_digest: Of the rows that it trains on.
        result: Its numbers, once fetched.
        lr: Its learning rate.
        weight_decay: Its weight decay.
        row_tokens: Positions of each of its rows.
        batch: What this process trained on.
    """

    progress: Progress
    batch_digest: str
    result: StepResult
    lr: float
    weight_decay: float
    row_tokens: int
    batch: Batch | None = None


def _no_record(step: StartedStep, values: StepValues, in_a_row: int, is_last: bool) -> str:
    del step, values, in_a_row, is_last
    return ""


class Ledger:
    """Settles steps one step late.

    Args:
        chain: Takes every step.
        max_nonfinite_steps: Non-finite steps in a row that are skipped before the run stops.
        nonfinite_in_a_row: Those that the checkpoint ended with.
        on_start: Told when a step has been started (and, on a device that does not run ahead, done).
        on_step: Told about every settled step.
        on_nonfinite: Records a step that counts as not finite: the step, its numbers, how many there were in a row and
            whether it ends the run; returns where the record is.
    """

    def __init__(
        self,
        chain: ReplayChain,
        *,
        max_nonfinite_steps: int,
        nonfinite_in_a_row: int,
        on_start: Callable[[StartedStep], None],
        on_step: Callable[[StartedStep, StepValues], None],
        on_nonfinite: Callable[[StartedStep, StepValues, int, bool], str] = _no_record,
    ) -> None:
        self._chain, self._on_start, self._on_step, self._on_nonfinite = chain, on_start, on_step, on_nonfinite
        self._max_nonfinite_steps = max_nonfinite_steps
        self._pending: StartedStep | None = None
        self.nonfinite_in_a_row = nonfinite_in_a_row

    def follow(self, step: StartedStep) -> None:
        """Take note of a step that was started, and settle the one before.

        Raises:
            NumericalError: Too many steps in a row were not finite.
        """
        self._on_start(step)
        before, self._pending = self._pending, step
        if before is not None:
            self._settle(before)

    def settle(self, progress: Progress) -> Progress:
        """Catch up with the device; returns the progress with the head of the chain.

        Raises:
            NumericalError: Too many steps in a row were not finite.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._settle(pending)
        return replace(progress, chain=self._chain.head)

    def make_durable(self) -> None:
        """Everything settled is on disk after this; raises ``OSError`` if the disk is full or gone."""
        self._chain.flush()

    def _settle(self, step: StartedStep) -> None:
        values = step.result.fetch()
        self._chain.record(step.progress.step, step.batch_digest, values)
        self._on_step(step, values)
        if not _is_adapting(values):
            self.nonfinite_in_a_row = 0 if values.finite else self.nonfinite_in_a_row + 1
        is_last, record = self.nonfinite_in_a_row > self._max_nonfinite_steps, ""
        if not values.finite and not _is_adapting(values):
            record = self._on_nonfinite(step, values, self.nonfinite_in_a_row, is_last)
        if is_last:
            raise NumericalError(
                f"loss or gradient was not finite {counted(self.nonfinite_in_a_row, 'time')} in a row "
                f"(loss {values.loss}, gradient norm {values.grad_norm})",
                where=f"step {step.progress.step:,}" + (f", recorded in {record}" if record else ""),
                hint="lower optimizer.lr or lengthen the warm-up; train.max_nonfinite_steps says how many are skipped",
            )


def _is_adapting(values: StepValues) -> bool:
    """Whether fp16 merely found its loss scale too large: the loss is finite, and the scale can still go down."""
    return not values.finite and math.isfinite(values.loss) and values.extra.get("loss_scale", 1.0) > 1.0
