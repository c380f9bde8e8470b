"""Save the state of a run: when a checkpoint is due, when the run is stopped, and when something between steps fails.

Only a step changes the engine's state, so the state can be saved after a failure between two steps without keeping a
copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass

from vorox.core.batch import Progress
from vorox.core.engine import Engine
from vorox.core.errors import DataError, Preempted, VoroxError
from vorox.data.order.growth import DataNotReady
from vorox.experiments.tracking import Tracker
from vorox.runtime.heartbeat import Heartbeat
from vorox.training.checkpoints.writer import CheckpointWriter, SavedCheckpoint
from vorox.training.loop.startup import TrainingSetup
from vorox.training.loop.step_records import StepRecords
from vorox.training.loop.step_sync import MissingBatch
from vorox.training.steps.stop import Stop


@dataclass(frozen=True, slots=True)
class Saving:
    """Every rank calls the same methods; the main one writes."""

    setup: TrainingSetup
    engine: Engine
    records: StepRecords
    checkpoints: CheckpointWriter
    tracker: Tracker
    heartbeat: Heartbeat
    stop: Stop

    def save(self, progress: Progress, *, is_last: bool = False) -> Progress:
        """Settle the step in flight and take a checkpoint, if there is anything new to save."""
        progress = self.records.settle(progress)
        with self._timed():
            self.tracker.flush()
            self.checkpoints.save(self.engine, progress, self.records.pending, self._publish, is_last=is_last)
        return progress

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is committed."""
        if self.checkpoints.is_writing:
            with self._timed():
                self.checkpoints.wait()

    def save_and_wait(self, progress: Progress, *, is_last: bool = False) -> Progress:
        """Save, and wait until the checkpoint is committed."""
        progress = self.save(progress, is_last=is_last)
        self.wait()
        return progress

    def preempt(self, progress: Progress, *, reason: str = "", where: str = "", hint: str) -> Preempted:
        """Save the current state, unless a signal leaves no time; return the error that names the newest checkpoint."""
        progress = self.records.settle(progress)
        self.wait()  # the state in flight is the first to be safe
        notice = self.records.observer.notice
        skipped = "" if notice is None else notice.skip_save(self.stop, self.checkpoints, progress)
        if not skipped:
            self.save_and_wait(progress, is_last=True)
            if notice is not None:
                notice.stopped(self.stop)
        signal, because = self.stop.requested, "".join(f": {why}" for why in (reason, skipped) if why)
        stopped = f"{signal}: stopped" if signal else "Stopped"
        what = f"{stopped} after step {progress.step:,} of {self.setup.state.horizon.total_steps:,}{because}"
        return Preempted(what, where=where, saved=self.checkpoints.safe(), hint=hint)

    def end_without_batch(self, progress: Progress, missing: MissingBatch) -> BaseException:
        """Save the current state on all ranks; return the error that ends the run, because a rank has no batch."""
        error = missing.error
        if missing.is_awaited and isinstance(error, VoroxError):
            return self.preempt(progress, reason=error.what, where=error.where, hint=error.hint)
        try:
            self.save_and_wait(progress, is_last=True)
        except Exception as failure:  # the missing batch is what ended the run
            self.checkpoints.log_failure(failure)
        return error

    @contextlib.contextmanager
    def on_failure(self, progress: Progress) -> Generator[None]:
        """Save the state of the last step if the block, which runs between two steps, fails.

        With several ranks this is impossible, because the others may wait for this one inside a collective. The log
        then reports which steps are lost. A validation loses none: the state is saved before it.
        """
        try:
            yield
        except DataNotReady:
            raise
        except (Exception, KeyboardInterrupt):
            if self.checkpoints.is_unsaved(progress) and not self.checkpoints.saves_alone:
                self.checkpoints.log_lost(progress)
            elif self.checkpoints.is_unsaved(progress):
                try:
                    self.save_and_wait(progress, is_last=True)
                except Exception as failure:  # the first failure is what ended the run
                    self.checkpoints.log_failure(failure)
            raise

    @contextlib.contextmanager
    def _timed(self) -> Generator[None]:
        """Count the time inside as blocked by a checkpoint."""
        before = self.heartbeat.seconds["save"]
        with self.heartbeat.during("save"):
            yield
        self.tracker.observe({"checkpoint_seconds": self.heartbeat.seconds["save"] - before})

    def _publish(self, saved: SavedCheckpoint) -> None:
        """Pass a committed checkpoint to mirror, metadata and observer, in the thread that wrote it."""
        if self.setup.mirror.uploader is not None:
            self.setup.mirror.uploader.enqueue(saved.path)
            for path in saved.removed:
                self.setup.mirror.uploader.discard(path)
        self.records.attempt.record_saved(saved.progress.step)
        self.records.observer.saved(saved.path, saved.progress, saved.seconds)
        self._check_run_files()

    def _check_run_files(self) -> None:
        """Report a plan that was removed under the run; lock the run again if its lock was.

        Raises:
            ConfigError: Another process trains in the same directory.
        """
        log = self.setup.workload.log
        try:
            self.setup.plan.check_file()
        except (DataError, OSError):
            path = self.setup.plan.path
            text = f"{path.name} was removed or changed: the run cannot be resumed until {path} is restored from a copy"
            log.event("plan_lost", text, level="error")
        if self.setup.run.keep_lock():
            text = f"{self.setup.run.layout.lock.name} was removed and is locked again; remove it only after the run"
            log.event("lock_removed", text, level="warning")
