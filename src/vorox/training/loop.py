"""The training loop: next batch, step, save, validate, until the end or until asked to stop.

In: everything that a run is made of, and where it stands. Out: where it ended. The loop waits for the device only to
save and to validate; the numbers of a step are settled while the next one runs. A checkpoint is taken before the
validation of the same step. Between two steps nothing changes the state of the engine, so whatever fails there, a
validation, a sample or the reading of a batch, the state is saved after the failure, and no copy is held for it.
"""

from __future__ import annotations

from vorox.core.records import Progress
from vorox.data.growth import DataNotReady
from vorox.training.ledger import StartedStep
from vorox.training.run import Run
from vorox.training.saving import save, saved_on_failure, stopped, wait_for_save


def train(run: Run, progress: Progress) -> Progress:
    """Train from ``progress`` to the end of the schedule.

    Raises:
        Preempted: A signal asked to stop, or the rows of the next step are not built yet; the state is saved.
        NumericalError: Too many steps in a row were not finite.
        CheckpointError: A checkpoint could not be written; older ones are as they were.
        DataError: The next batch could not be read.
    """
    engine, schedule, stop = run.engine, run.schedule, run.agreement.stop
    if run.evaluations.due(progress):  # a kill fell between a checkpoint and its validation
        progress = _validate(run, progress)
    while progress.step < schedule.total_steps and not stop.requested:
        try:
            with saved_on_failure(run, progress):
                batch = next(run.batches)
        except DataNotReady as starved:
            raise stopped(run, progress, why=starved.what, where=starved.where, hint=starved.hint) from starved
        lr, weight_decay = schedule.lr(progress.step), schedule.weight_decay(progress.step)
        result = engine.train_step(batch, lr=lr, weight_decay=weight_decay)
        progress = progress.after(batch, engine.data_shard)
        orders = run.agreement.after(progress, batch)
        run.ledger.follow(StartedStep(progress, orders.batch_digest, result, lr, weight_decay, batch.row_tokens, batch))
        if orders.save:
            progress = save(run, progress)
        if run.evaluations.due(progress) and not stop.requested:
            progress = _validate(run, progress)
    progress = run.ledger.settle(progress)
    if stop.requested and (progress.step < schedule.total_steps or run.evaluations.due(progress)):
        raise stopped(run, progress, hint="run the same command again to go on")
    wait_for_save(run)
    return progress


def _validate(run: Run, progress: Progress) -> Progress:
    progress = run.ledger.settle(progress)
    with saved_on_failure(run, progress), run.observer.validating(progress) as report:
        found = run.evaluations.run(run.engine, progress, run.agreement.stop)
        if found is not None:
            report(found)
    return run.evaluations.best(progress)
