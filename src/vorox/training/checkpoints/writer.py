"""The checkpoints of one running process: when to save, writing in the background, which ones to keep.

The loop waits while the engine copies its state (``Engine.snapshot``). A background thread then writes, hashes and
commits it (``store.commit_checkpoint``), verifies it and applies retention. With ``checkpoint.asynchronous`` off, the
loop waits for that too, and nothing is copied.

Invariants: everything in a checkpoint (steps, chain, validation losses) is of one job, and durable before the
checkpoint appears. At most one write is in flight: the next save, the end of the run and every error wait for it. A
failed write is raised once, after the next step. A state with non-finite numbers is never written; while non-finite
steps are skipped, a due checkpoint waits for the next finite step.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from vorox.core.batch import Progress
from vorox.core.engine import Engine, EngineSnapshot
from vorox.core.errors import CheckpointError, NumericalError
from vorox.core.files import atomic, staged_directory
from vorox.core.files.disk_errors import room_text
from vorox.core.pluralize import pluralize
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.schema import CheckpointConfig
from vorox.planning.disk_space import save_interval_seconds
from vorox.records.log import RunLog
from vorox.records.replay_chain import StateChain
from vorox.records.run_lookup import run_argument, saved_state
from vorox.records.run_pins import pinned_steps
from vorox.records.step_environments import StepEnvironments
from vorox.training.checkpoints.store import (
    STATE_NAME,
    RunState,
    commit_checkpoint,
    incomplete_checkpoints,
    quarantine,
    read_state,
    steps_to_keep,
    verify,
    write_shards,
)
from vorox.training.steps.pending_steps import PendingSteps
from vorox.training.steps.schedule import Horizon

_REPAIR = "check the disk or the network share, then run the same command again"


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that was committed.

    Attributes:
        path: Its directory.
        progress: Its progress.
        seconds: Time from the start of the save to the commit.
        removed: Older checkpoints that retention removed afterwards.
    """

    path: Path
    progress: Progress
    seconds: float
    removed: tuple[Path, ...]


Publish = Callable[[SavedCheckpoint], None]
"""Called with a committed checkpoint, in the thread that wrote it."""

Request = tuple[int, int]
"""One request for a checkpoint: inode and mtime of its file, which a later request replaces."""


@dataclass(frozen=True, slots=True)
class _SaveJob:
    """The content of a checkpoint, captured while the loop waits."""

    snapshot: EngineSnapshot
    state: RunState
    eval_losses: Mapping[int, float]
    request: Request | None
    started_at: float
    publish: Publish

    @property
    def step(self) -> int:
        return self.state.progress.step


class CheckpointWriter:
    """Writes and retains the checkpoints of one process. Leaving the context waits for the last write.

    Args:
        run_directory: The run; this process holds its lock.
        config: When and how to save, and what to keep.
        horizon: Length of the run, part of every state.
        describe: Metadata for the manifest (spec, config digest, environment, ...).
        companions: Files copied into every checkpoint (``config.json``, tokenizer).
        eval_losses: Validation losses by step, filled by the loop; they decide which checkpoints are best.
        saved_step: Step of the checkpoint that the process started from.
        log: Receives every event.
        distributed: The main rank decides and commits; the others write their own parts.
        states: Records the fingerprint of every checkpoint.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        run_directory: Path,
        config: CheckpointConfig,
        horizon: Horizon,
        *,
        describe: Mapping[str, Any],
        companions: Mapping[str, bytes],
        eval_losses: Mapping[int, float],
        saved_step: int | None,
        log: RunLog,
        distributed: DistributedContext | None = None,
        states: StateChain | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_directory, self._config, self._horizon = run_directory, config, horizon
        self._describe, self._companions, self._eval_losses = describe, companions, eval_losses
        self._log, self._clock = log, clock
        self._control = RunLayout(run_directory).save_request
        self._captured_step = self._saved_step = saved_step
        self._hidden: list[Path] = []
        self._committed_at, self._interval_seconds = clock(), save_interval_seconds(config)
        self._serving: Request | None = None
        self._is_postponed = False
        self._writer = ThreadPoolExecutor(1, "vorox-checkpoint") if config.asynchronous else None
        self._in_flight: Future[None] | None = None
        self._distributed = distributed or DistributedContext()
        self._states = states or StateChain(run_directory, saved_step or 0)
        if not self._distributed.is_main:
            return
        atomic.make_directory(RunLayout(run_directory).checkpoints)
        for left in atomic.sweep_temporary(RunLayout(run_directory).checkpoints):
            log.event("checkpoint_swept", f"Removed {left.name} of an interrupted save or removal")
        for path in incomplete_checkpoints(run_directory):
            renamed = quarantine(path, "incomplete", "it has no manifest: its copy or its removal was interrupted")
            text = (
                f"Quarantined {path.name} as {renamed.name}: it has no manifest, so its copy or removal was interrupted"
            )
            log.event("checkpoint_incomplete", text, level="warning")

    def due(self, progress: Progress) -> bool:
        """Whether to save now: by step, time since the last save, end of the run, or request.

        Raises:
            CheckpointError: The write in flight failed.
        """
        if self._in_flight is not None and self._in_flight.done():
            self.wait()
        config, request = self._config, self._request()
        return (
            self._is_postponed
            or (config.every_steps is not None and progress.step % config.every_steps == 0)
            or (
                self._interval_seconds is not None
                and self._in_flight is None
                and self._clock() - self._committed_at >= self._interval_seconds
            )
            or (config.at_end and progress.step >= self._horizon.total_steps)
            or (request is not None and request != self._serving)
        )

    def save(
        self, engine: Engine, progress: Progress, pending: PendingSteps, publish: Publish, *, is_last: bool = False
    ) -> None:
        """Save the current state, in the background if so configured, and apply retention.

        After a non-finite step, the save waits for the next finite one. If all steps since the last checkpoint were
        skipped, nothing is saved.

        Args:
            engine: The engine, in the state after step ``progress.step``.
            progress: Progress of the run, with the head of the replay chain.
            pending: Drained up to this step; its chain is made durable first.
            publish: Called after the commit; not called if nothing is saved.
            is_last: Whether the run ends here.

        Raises:
            CheckpointError: This checkpoint or the one in flight cannot be written; older ones are unchanged.
        """
        self.wait()
        if progress.step == self._captured_step or self._postpones(progress, pending, is_last):
            return
        started_at = self._clock()
        snapshot = engine.snapshot(detached=self._writer is not None)
        try:
            pending.chain.flush()
        except OSError as error:
            raise self._failure(snapshot, progress.step, error) from error
        state = RunState(progress, self._horizon, pending.nonfinite_in_a_row)
        job = _SaveJob(snapshot, state, dict(self._eval_losses), self._request(), started_at, publish)
        self._captured_step, self._serving = progress.step, job.request
        if self._writer is None:
            self._write(job)
        else:
            self._in_flight = self._writer.submit(self._write, job)

    def _postpones(self, progress: Progress, pending: PendingSteps, is_last: bool) -> bool:
        skipped, done = pending.nonfinite_in_a_row, progress.step - (self._captured_step or 0)
        is_last = is_last or progress.step >= self._horizon.total_steps
        postpones = skipped > 0 and (not is_last or done <= skipped)
        if postpones and not self._is_postponed:
            text = (
                f"No checkpoint at step {progress.step:,}: {pluralize(min(skipped, done), 'non-finite step')} in a row"
            )
            self._log.event("checkpoint_postponed", text, step=progress.step, level="warning")
        self._is_postponed = postpones
        return postpones

    def is_unsaved(self, progress: Progress) -> bool:
        """Whether this state is in no checkpoint, committed or in flight."""
        return progress.step not in (0, self._captured_step)

    @property
    def saves_alone(self) -> bool:
        """Whether this process writes whole checkpoints without other ranks."""
        return self._distributed.world_size == 1

    def log_failure(self, failure: Exception) -> None:
        """Log a failed checkpoint when another error ends the run."""
        self._log.event("checkpoint_failed", str(failure), level="error")

    def log_lost(self, progress: Progress) -> None:
        """Log that the state of the last step is lost, because another rank has failed."""
        self.log_failure(
            CheckpointError(
                f"State after step {progress.step:,} is lost: the other ranks cannot save after one has failed",
                where=f"step {progress.step:,}",
                hint="run the same command again to resume from the last checkpoint",
            )
        )

    @property
    def is_writing(self) -> bool:
        """Whether a write is in flight, or has ended without a ``wait``."""
        return self._in_flight is not None

    def wait(self) -> None:
        """Wait for the write in flight.

        Raises:
            CheckpointError: It failed; older checkpoints are unchanged.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            self.log_failure(failure)
        finally:
            if self._writer is not None:
                self._writer.shutdown()

    @property
    def has_saved(self) -> bool:
        """Whether the run has a checkpoint that a kill would go back to."""
        return self._saved_step is not None

    def safe(self) -> str:
        """Describe what is safe on disk."""
        if self._saved_step is not None and not self._run_directory.exists():
            name = RunLayout(self._run_directory).checkpoint(self._saved_step).name
            return f"training state up to step {self._saved_step:,} in {name} of the run directory, which is not there"
        return saved_state(RunLayout(self._run_directory)) or "nothing yet"

    # -- what the background thread does ------------------------------------------------------------------------------

    def _write(self, job: _SaveJob) -> None:
        with self._distributed.propagating_failure():
            try:
                self._check_finite(job)
                if self._distributed.is_main:
                    self._write_as_main(job)
                else:
                    write_shards(job.snapshot, self._distributed)
                    self._saved_step = job.step
            except OSError as error:
                self._captured_step = self._saved_step
                raise self._failure(job.snapshot, job.step, error) from error
            except BaseException:
                self._captured_step = self._saved_step
                raise

    def _write_as_main(self, job: _SaveJob) -> None:
        path = RunLayout(self._run_directory).checkpoint(job.step)
        self._commit(job, path)
        self._saved_step, self._committed_at = job.step, self._clock()
        self._clear_request(job.request)
        removed = self._retain(path, job)
        job.publish(SavedCheckpoint(path, job.state.progress, self._clock() - job.started_at, removed))

    def _check_finite(self, job: _SaveJob) -> None:
        """Refuse to write a state that cannot be trained further.

        Raises:
            NumericalError: A value is NaN or infinite.
        """
        name = job.snapshot.nonfinite_array()
        if name:
            raise NumericalError(
                f"State after step {job.step:,} is not saved: {name} holds NaN or infinity",
                where=f"step {job.step:,}, {name}",
                hint="resume from the last checkpoint with a lower learning rate: "
                f"vorox train --resume {run_argument(self._run_directory)} optimizer.lr=...",
            )

    def _commit(self, job: _SaveJob, path: Path) -> None:
        if os.path.lexists(path):
            renamed = quarantine(path, "replaced", "the run resumed from an earlier step and reached this one again")
            text = f"Quarantined the older {path.name} as {renamed.name}"
            self._log.event("checkpoint_replaced", text, level="warning")
        files = dict(sorted(self._companions.items())) | {STATE_NAME: atomic.pretty_json(job.state.to_json())}
        record = functools.partial(self._states.record, job.state.progress)
        metadata = {**self._describe, **job.state.manifest(job.eval_losses)}
        commit_checkpoint(path, job.snapshot, files, metadata, self._distributed, record)

    def _request(self) -> Request | None:
        try:
            found = self._control.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _clear_request(self, request: Request | None) -> None:
        """Remove a served request, unless a newer one has replaced it."""
        if request is not None and request == self._request():
            self._control.unlink(missing_ok=True)

    def _retain(self, newest: Path, job: _SaveJob) -> tuple[Path, ...]:
        """Verify the newest checkpoint, then remove those that retention does not keep; return the removed ones."""
        directories = step_directories(self._run_directory)
        changes = StepEnvironments.of_run(self._run_directory).changes
        keep = steps_to_keep(sorted(directories), self._config, job.eval_losses, changes)
        keep.update(pinned_steps(self._run_directory).keys() & directories.keys())
        if job.state.nonfinite_in_a_row:  # keep the last one after a finite step
            finite = (step for step in sorted(directories, reverse=True) if not _nonfinite_in_a_row(directories[step]))
            keep.update([step for step in [next(finite, None)] if step is not None])
        expired = [path for step, path in directories.items() if step not in keep]
        if expired:
            verify(newest)
        removed: list[Path] = []
        for path in expired:
            with self._logging_kept(path):
                self._hidden.append(staged_directory.hide(path))
                removed.append(path)
        for path in self._hidden.copy():  # also of earlier saves, if the disk failed then
            with self._logging_kept(path):
                atomic.remove_directory(path)
                self._hidden.remove(path)
        return tuple(removed)

    @contextlib.contextmanager
    def _logging_kept(self, path: Path) -> Generator[None]:
        try:
            yield
        except OSError as error:
            text = f"Cannot remove expired {path.name}: {error.strerror}"
            self._log.event("checkpoint_kept", text, level="warning")

    def _failure(self, snapshot: EngineSnapshot, step: int, error: OSError) -> CheckpointError:
        path = RunLayout(self._run_directory).checkpoint(step)
        saved = self.safe()
        if not atomic.is_disk_full(error):
            what = f"Checkpoint of step {step:,} cannot be written: {error.strerror}"
            return CheckpointError(what, where=str(error.filename or path), hint=_REPAIR, saved=saved)
        needed_bytes = snapshot.size_bytes + sum(map(len, self._companions.values()))
        return CheckpointError(
            f"No room for the checkpoint of step {step:,}: {room_text(needed_bytes, path, error)}",
            where=str(path),
            hint=f"free some space (vorox checkpoints remove {run_argument(self._run_directory)} STEP) or keep fewer "
            "(checkpoint.keep_last), then run the same command again",
            saved=saved,
        )


def _nonfinite_in_a_row(checkpoint: Path) -> int:
    try:
        return read_state(checkpoint).nonfinite_in_a_row
    except (CheckpointError, ValueError, KeyError):  # a resume from it reports the error
        return 1
