"""Settle steps one step late: append to the replay chain, count non-finite steps and loss spikes.

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
from vorox.records.replay_chain import ReplayChain
from vorox.training.steps.loss_spikes import SKIP_STEP, LossSpikes


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that the device may still be computing.

    Attributes:
        progress: Progress after this step.
        batch_digest: Digest of its rows over all ranks.
        result: Its numbers, to be fetched.
        lr: Learning rate.
        weight_decay: Weight decay.
        batch: This rank's batch.
        max_loss: The largest loss whose update is applied; ``None``: no limit.
    """

    progress: Progress
    batch_digest: str
    result: StepResult
    lr: float
    weight_decay: float
    batch: Batch | None = None
    max_loss: float | None = None


@dataclass(frozen=True, slots=True)
class SettledStep:
    """A step whose numbers are known and in the replay chain.

    Attributes:
        step: The step.
        values: Its numbers.
        nonfinite_in_a_row: Consecutive steps up to this one that were not finite.
        ends_run: Whether that, or the number of loss spikes, is more than the run skips.
        is_spike: Whether its loss is above the limit, so that its update was not applied.
        rolls_back: Whether the run returns to an earlier state because of it.
    """

    step: InFlightStep
    values: StepValues
    nonfinite_in_a_row: int
    ends_run: bool
    is_spike: bool = False
    rolls_back: bool = False

    @property
    def number(self) -> int:
        """The step, from 1."""
        return self.step.progress.step

    @property
    def is_nonfinite(self) -> bool:
        """Whether it was skipped for another reason than an fp16 loss scale that can still be lowered."""
        return not self.values.finite and not _is_adapting(self.values)

    @property
    def is_planned_skip(self) -> bool:
        """Whether the plan skips the step, which led to a loss spike before a rollback."""
        return self.values.finite and self.step.max_loss == SKIP_STEP

    @property
    def skipped(self) -> str:
        """The log line of a step without an update."""
        if self.is_planned_skip:
            return f"Skipped step {self.number:,}: it led to a loss spike before the rollback"
        if self.is_spike:
            what = f"Loss spike at step {self.number:,}" if self.rolls_back else f"Skipped step {self.number:,}"
            command = "" if self.rolls_back else f" (`vorox explain RUN --step {self.number}` finds its cause)"
            return f"{what}: loss {self.values.loss:.4g} is above {self.step.max_loss:.4g}{command}"
        return f"Skipped step {self.number:,}: loss {self.values.loss}, gradient norm {self.values.grad_norm}"

    def numerical_error(self, record: str) -> NumericalError:
        """Return the error that ends the run.

        Args:
            record: Path of the step's record; empty if there is none.
        """
        if self.is_spike:
            return NumericalError(
                f"Loss spike: {self.values.loss:.4g} is above {self.step.max_loss:.4g}, the limit of the last losses",
                where=f"step {self.number:,}",
                hint="lower optimizer.lr, or let train.spike_policy skip such steps (train.max_spike_steps) or roll "
                f"back (train.max_spike_rollbacks); {self._causes()}",
            )
        return NumericalError(
            f"Loss or gradient was not finite {pluralize(self.nonfinite_in_a_row, 'time')} in a row "
            f"(loss {self.values.loss}, gradient norm {self.values.grad_norm})",
            where=f"step {self.number:,}" + (f", recorded in {record}" if record else ""),
            hint="lower optimizer.lr or lengthen the warm-up; train.max_nonfinite_steps sets how many are skipped; "
            f"{self._causes()}",
        )

    def _causes(self) -> str:
        return (
            f"`vorox data where RUN --step {self.number}` shows its documents, and, with data.document_mask, "
            f"`vorox explain RUN --step {self.number}` which of them cause it"
        )


class PendingSteps:
    """Holds the step in flight and settles it one step later.

    Args:
        chain: Records every step.
        max_nonfinite_steps: Consecutive non-finite steps that are skipped before the run stops.
        nonfinite_in_a_row: Consecutive non-finite steps at the end of the checkpoint.
        spikes: Receives the losses; ``None`` without a limit (``train.spike_policy: off``).

    Attributes:
        chain: The replay chain, up to the last settled step.
    """

    def __init__(
        self, chain: ReplayChain, *, max_nonfinite_steps: int, nonfinite_in_a_row: int, spikes: LossSpikes | None = None
    ) -> None:
        self._spikes = spikes
        self.chain, self._max_nonfinite_steps = chain, max_nonfinite_steps
        self._in_flight: InFlightStep | None = None
        self.nonfinite_in_a_row = nonfinite_in_a_row

    def submit(self, step: InFlightStep) -> SettledStep | None:
        """Add a started step; settle and return the previous one."""
        previous, self._in_flight = self._in_flight, step
        return None if previous is None else self._settle(previous)

    def drain(self) -> SettledStep | None:
        """Wait for the step in flight, settle and return it."""
        pending, self._in_flight = self._in_flight, None
        return None if pending is None else self._settle(pending)

    def _settle(self, step: InFlightStep) -> SettledStep:
        values = step.result.fetch()
        self.chain.record(step.progress.step, step.batch_digest, values)
        self.nonfinite_in_a_row = count_nonfinite(self.nonfinite_in_a_row, values)
        ends_run = self.nonfinite_in_a_row > self._max_nonfinite_steps
        spikes = self._spikes
        is_spike = spikes is not None and spikes.record(step.progress.step, values, step.max_loss)
        ends_run = ends_run or (spikes is not None and is_spike and spikes.ends_run)
        rolls_back = spikes is not None and is_spike and spikes.rolls_back
        return SettledStep(step, values, self.nonfinite_in_a_row, ends_run, is_spike, rolls_back)


def count_nonfinite(before: int, values: StepValues) -> int:
    """Return the consecutive non-finite steps up to one, from those up to the step before it."""
    if _is_adapting(values):
        return before
    return 0 if values.finite else before + 1


def _is_adapting(values: StepValues) -> bool:
    """Whether only the fp16 loss scale is too large: the loss is finite, and the scale can still be lowered."""
    return not values.finite and math.isfinite(values.loss) and values.extra.get("loss_scale", 1.0) > 1.0
