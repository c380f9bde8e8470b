"""Validation between steps: the loss of validation sets, samples and tasks, on the weights that validate."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from vorox.core.batch import Progress
from vorox.core.engine import Engine, validated_weights
from vorox.core.schema import RunConfig
from vorox.runtime.heartbeat import Heartbeat
from vorox.training.inference.sampling import PromptSampler
from vorox.training.loop.observer import Observer
from vorox.training.loop.saving import Saving
from vorox.training.loop.scheduled_tasks import ScheduledTasks
from vorox.training.steps.evaluate import Evaluations
from vorox.training.steps.stop import Stop


@dataclass(frozen=True, slots=True)
class Validation:
    """If a validation or a sample fails, the state is saved first; several ranks save before they validate."""

    config: RunConfig
    engine: Engine
    evaluations: Evaluations
    sampler: PromptSampler
    tasks: ScheduledTasks
    saving: Saving
    observer: Observer
    heartbeat: Heartbeat
    stop: Stop

    def is_due(self, progress: Progress) -> bool:
        return self.evaluations.due(progress) or self.tasks.due(progress)

    def run_due(self, progress: Progress) -> Progress:
        """Do what is due after this step; return the progress with the best loss."""
        if self.evaluations.due(progress):
            progress = self._evaluate(progress)
        if self.tasks.due(progress):
            progress = self.saving.save_and_wait(progress)
            report = self.observer.evaluating_tasks(progress)
            with self.heartbeat.during("validation"), self.weights():
                self.tasks.run(progress, self.stop, report, self.heartbeat.progressed)
        return progress

    def weights(self) -> AbstractContextManager[None]:
        """Inside, the engine has the weights of ``eval.weights``."""
        return validated_weights(self.engine, self.config)

    def _evaluate(self, progress: Progress) -> Progress:
        progress = self.saving.records.settle(progress)
        if (
            not self.saving.checkpoints.saves_alone
        ):  # after a failure on one rank, the others cannot take part in a save
            progress = self.saving.save_and_wait(progress)
        report = self.observer.validating(progress)
        with self.heartbeat.during("validation"), self.saving.on_failure(progress), self.weights():
            found = self.evaluations.run(self.engine, progress, self.stop, self.heartbeat.progressed)
            if found is not None:
                report(found, self.sampler.complete(self.engine))
        return self.evaluations.best(progress)
