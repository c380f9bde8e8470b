"""The training loop: next batch, step, save, validate, until the end or until asked to stop.

In: a run and its progress. Out: where it ended. The loop waits for the device only to save and to validate; the numbers
of a step are settled while the next one runs, and handed on by ``between_steps``. A checkpoint is taken before the
validation of the same step. Between two steps nothing changes the state of the engine, so after a failure there (a
validation, a sample, the reading of a batch) the state is saved, and no copy is held for it.
"""

from __future__ import annotations

from vorox.core.batch import Progress
from vorox.data.growth import DataNotReady
from vorox.training.between_steps import record, save, saved_on_failure, settle, stopped, wait_for_save
from vorox.training.pending_steps import InFlightStep
from vorox.training.run import Run


def train(run: Run, progress: Progress) -> Progress:
    """Train from ``progress`` to the end of the schedule.

    Raises:
        Preempted: A signal asked to stop, or the rows of the next step are not built yet; the state is saved.
        NumericalError: Too many steps in a row were not finite.
        CheckpointError: A checkpoint could not be written; older ones are as they were.
        DataError: The next batch could not be read.
    """
    engine, schedule, stop = run.engine, run.schedule, run.sync.stop
    if run.evaluations.due(progress):  # a kill fell between a checkpoint and its validation
        progress = _validate(run, progress)
    while progress.step < schedule.total_steps and not stop.requested:
        try:
            with saved_on_failure(run, progress):
                batch = next(run.batches)
        except DataNotReady as reason:
            raise stopped(run, progress, why=reason.what, where=reason.where, hint=reason.hint) from reason
        lr, weight_decay = schedule.lr(progress.step), schedule.weight_decay(progress.step)
        result = engine.train_step(batch, lr=lr, weight_decay=weight_decay)
        progress = progress.after(batch, engine.data_shard)
        decision = run.sync.after(progress, batch)
        run.provenance.started(progress)
        run.observer.started(progress, batch.row_tokens, run.batches.wait_seconds)
        step = InFlightStep(progress, decision.batch_digest, result, lr, weight_decay, batch.row_tokens, batch)
        record(run, run.pending.submit(step))
        if decision.save:
            progress = save(run, progress)
        if run.evaluations.due(progress) and not stop.requested:
            progress = _validate(run, progress)
    progress = settle(run, progress)
    if stop.requested and (progress.step < schedule.total_steps or run.evaluations.due(progress)):
        raise stopped(run, progress, hint="run the same command again to go on")
    wait_for_save(run)
    return progress


def _validate(run: Run, progress: Progress) -> Progress:
    progress = settle(run, progress)
    with saved_on_failure(run, progress), run.observer.validating(progress) as report:
        found = run.evaluations.run(run.engine, progress, run.sync.stop)
        if found is not None:
            report(found, run.sampler.complete(run.engine))
    return run.evaluations.best(progress)
