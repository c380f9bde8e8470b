"""What happens between two steps: results are handed on, and the state is saved.

In: a run that stands between two steps. Out: settled steps in the observer, the metadata and the records of non-finite
steps; its state in a checkpoint, which goes on to the mirror. Nothing but a step changes the state of the engine, so it
can be saved after a failure, and no copy is held for that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from dataclasses import replace

from vorox.core.batch import Progress
from vorox.core.errors import CheckpointError, Preempted
from vorox.core.schema import RunConfig
from vorox.data.growth import DataNotReady
from vorox.training.checkpoint_writer import SavedCheckpoint
from vorox.training.pending_steps import SettledStep
from vorox.training.run import Run


def record(run: Run, settled: SettledStep | None) -> None:
    """Hand a settled step to everything that records steps.

    Raises:
        NumericalError: It is one non-finite step too many.
    """
    if settled is None:
        return
    run.observer.settled(settled)
    if not settled.values.finite:
        run.provenance.skipped(settled.step.progress, "nonfinite_step", settled.skipped)
    if run.observer.is_logged(settled.number):
        run.observer.log(settled, _status(run))
    path = run.forensics.record(settled) if settled.is_nonfinite else ""
    if settled.ends_run:
        raise settled.error(path)


def _status(run: Run) -> dict[str, float]:
    """Return the metrics of loader, device, checkpoints and mirror at this moment."""
    streams, age = run.setup.workload.corpus.streams, run.checkpoints.seconds_since_save()
    return {
        "queue_depth": float(run.batches.queue_depth),
        **({} if age is None else {"seconds_since_save": age}),
        **run.engine.device_stats(),
        **({} if streams is None else streams.metrics()),
        **run.setup.mirror.metrics(),
    }


def settle(run: Run, progress: Progress) -> Progress:
    """Wait for the step in flight; return the progress with the head of the replay chain.

    Raises:
        NumericalError: Too many steps in a row were not finite.
    """
    record(run, run.pending.drain())
    return replace(progress, chain=run.pending.head)


def save(run: Run, progress: Progress, *, is_last: bool = False) -> Progress:
    """Settle what was started and take a checkpoint, if there is anything to save."""
    progress = settle(run, progress)
    with run.observer.saving():
        publish = functools.partial(_publish, run)
        run.checkpoints.save(run.engine, progress, run.pending, publish, is_last=is_last)
    return progress


def _publish(run: Run, saved: SavedCheckpoint) -> None:
    """Hand a committed checkpoint to the mirror, the metadata and the observer, in the thread that wrote it."""
    run.setup.mirror.committed(saved.path)
    for path in saved.removed:
        run.setup.mirror.removed(path)
    run.provenance.saved(saved.progress)
    run.observer.saved(saved.path, saved.progress, saved.seconds)


def wait_for_save(run: Run) -> None:
    """Wait until the checkpoint that is being written is committed."""
    if run.checkpoints.is_writing:
        with run.observer.waiting_for_save():
            run.checkpoints.wait()


def stopped(run: Run, progress: Progress, *, why: str = "", where: str = "", hint: str) -> Preempted:
    """Save this very state, and return the error that says that it is safe."""
    save(run, progress, is_last=True)
    wait_for_save(run)
    asked, because = run.sync.stop.requested, f": {why}" if why else ""
    what = f"{asked and asked + ': '}stopped after step {progress.step:,} of {run.schedule.total_steps:,}{because}"
    return Preempted(what, where=where, saved=run.checkpoints.safe(), hint=hint)


@contextlib.contextmanager
def saved_on_failure(run: Run, progress: Progress) -> Generator[None]:
    """Save the state of the last step if what is done inside, between two steps, fails.

    A run of several processes cannot: the others may wait for this one in the middle of a collective. It says which
    steps are lost.
    """
    try:
        yield
    except DataNotReady:
        raise
    except (Exception, KeyboardInterrupt):
        if run.checkpoints.is_unsaved(progress) and not run.checkpoints.saves_alone:
            run.checkpoints.log_failure(_lost(progress))
        elif run.checkpoints.is_unsaved(progress):
            try:
                save(run, progress, is_last=True)
                wait_for_save(run)
            except Exception as failure:  # the first failure is what ended the run
                run.checkpoints.log_failure(failure)
        raise


def _lost(progress: Progress) -> CheckpointError:
    return CheckpointError(
        f"the state after step {progress.step:,} is lost: when one process of several fails, the others cannot save",
        where=f"step {progress.step:,}",
        hint="run the same command again to resume from the last checkpoint",
    )


def validations_without_save(config: RunConfig) -> str:
    """Say that a run of several processes loses steps if one of its validations fails; empty if none can be lost."""
    saves, validations = config.checkpoint.every_steps, config.eval.every_steps
    if validations is None or (saves is not None and validations % saves == 0):
        return ""
    return (
        "A validation that fails loses the steps since the last checkpoint, because a run of several processes saves "
        "on schedule only; checkpoint.every_steps that divides eval.every_steps saves before every validation"
    )
