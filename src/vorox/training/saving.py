"""Save between two steps: on schedule, on a stop request, and after a failure.

In: a run that stands between two steps. Out: its state in a checkpoint. Nothing but a step changes the state of the
engine, so it can be saved after a failure, and no copy is held for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from vorox.core.errors import CheckpointError, Preempted
from vorox.core.records import Progress
from vorox.core.schema import RunConfig
from vorox.data.growth import DataNotReady
from vorox.training.run import Run


def stopped(run: Run, progress: Progress, *, why: str = "", where: str = "", hint: str) -> Preempted:
    """Save this very state, and say that it is safe."""
    save(run, progress, is_last=True)
    wait_for_save(run)
    asked, because = run.agreement.stop.requested, f": {why}" if why else ""
    what = f"{asked and asked + ': '}stopped after step {progress.step:,} of {run.schedule.total_steps:,}{because}"
    return Preempted(what, where=where, saved=run.checkpointer.safe(), hint=hint)


def save(run: Run, progress: Progress, *, is_last: bool = False) -> Progress:
    """Settle what was started and take a checkpoint, if there is anything to save."""
    progress = run.ledger.settle(progress)
    with run.observer.saving(progress) as report:
        run.checkpointer.save(run.engine, progress, run.ledger, report, is_last=is_last)
    return progress


def wait_for_save(run: Run) -> None:
    """Wait until the checkpoint that is being written is committed."""
    if run.checkpointer.is_writing:
        with run.observer.waiting_for_save():
            run.checkpointer.wait()


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
        if run.checkpointer.is_unsaved(progress) and not run.checkpointer.saves_alone:
            run.checkpointer.log_failure(_lost(progress))
        elif run.checkpointer.is_unsaved(progress):
            try:
                save(run, progress, is_last=True)
                wait_for_save(run)
            except Exception as failure:  # the first failure is what ended the run
                run.checkpointer.log_failure(failure)
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
