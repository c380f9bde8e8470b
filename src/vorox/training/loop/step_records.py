"""What a settled step leaves behind: its line in the chain, metrics, provenance and plan, or the end of the run."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from vorox.core.batch import Progress
from vorox.data.order.plan_events import SkipEvent
from vorox.records.attempts import AttemptRecord
from vorox.runtime.heartbeat import Heartbeat
from vorox.training.loop.nonfinite_recorder import NonfiniteRecorder
from vorox.training.loop.observer import Observer
from vorox.training.loop.startup import TrainingSetup
from vorox.training.steps.loss_spikes import LossSpikes, RollbackRequested
from vorox.training.steps.pending_steps import InFlightStep, PendingSteps, SettledStep


@dataclass(frozen=True, slots=True)
class StepRecords:
    """Steps settle one step late, and pass everything that records steps. Only the main rank writes.

    ``submit`` and ``settle`` raise ``NumericalError`` if more consecutive steps were not finite than
    ``train.max_nonfinite_steps`` allows or the policy of loss spikes ends the run, and ``RollbackRequested`` if that
    policy returns to an earlier state.
    """

    setup: TrainingSetup
    pending: PendingSteps
    observer: Observer
    attempt: AttemptRecord
    nonfinite: NonfiniteRecorder
    spikes: LossSpikes
    heartbeat: Heartbeat

    def submit(self, step: InFlightStep) -> None:
        """Record the step before this one, which has settled."""
        self.heartbeat.enter("settle", step.progress.step)
        self.record(self.pending.submit(step))

    def settle(self, progress: Progress) -> Progress:
        """Wait for the step in flight and record it; return the progress with the head of the replay chain."""
        self.heartbeat.enter("settle")
        self.record(self.pending.drain())
        return replace(progress, chain=self.pending.chain.head)

    def record(self, settled: SettledStep | None) -> None:
        """Pass a settled step to everything that records steps."""
        if settled is None:
            return
        self.observer.settled(settled)
        if settled.is_spike or self.setup.plan.state.skips:
            self._plan_skip(settled)
        path = self.nonfinite.record(settled) if settled.is_nonfinite else ""
        if settled.ends_run:
            with contextlib.suppress(OSError):  # how the run ended matters more
                self.pending.chain.flush()  # no save will: these steps are the evidence, and can be explained
            raise settled.numerical_error(path)
        if settled.rolls_back:
            assert settled.step.max_loss is not None
            raise RollbackRequested(self.spikes.rollback(settled.number, settled.values.loss, settled.step.max_loss))

    def _plan_skip(self, settled: SettledStep) -> None:
        """Record in the plan that a spike was skipped, or that a step skipped by an earlier attempt was not."""
        plan = self.setup.plan
        position = plan.start.batch_sizes.position_of(settled.number - 1)
        is_skipped = settled.is_spike and not settled.ends_run and not settled.rolls_back
        if (
            not settled.is_planned_skip
            and not settled.rolls_back
            and self.setup.workload.distributed.is_main
            and is_skipped != plan.is_skipped(position)
            and settled.values.finite
        ):
            reason, max_loss = "loss_spike" if is_skipped else "withdrawn", settled.step.max_loss
            plan.add([SkipEvent(position, reason, settled.values.loss, max_loss)])
