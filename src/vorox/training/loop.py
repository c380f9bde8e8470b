"""The training loop: next batch, step, save, validate, until the schedule ends or a stop request.

In: a session and the progress to start from. Out: the progress at the end. The loop waits for the device only to save
and to validate: the numbers of a step settle while the next one runs. A checkpoint is taken before the validation of
the same step. If something between two steps fails (a validation, a sample, reading a batch), the state is saved first;
several ranks save before they validate instead.
"""

from __future__ import annotations

from vorox.core.batch import Progress
from vorox.data.growth import DataNotReady
from vorox.training.pending_steps import InFlightStep
from vorox.training.session import Session


def train(session: Session, progress: Progress) -> Progress:
    """Train from ``progress`` to the end of the schedule.

    Raises:
        Preempted: A signal requested a stop, or the rows of the next step are not built yet; the state is saved.
        NumericalError: Too many steps in a row were not finite.
        CheckpointError: A checkpoint cannot be written; earlier checkpoints are unchanged.
        DataError: The next batch cannot be read.
    """
    engine, schedule, stop = session.engine, session.schedule, session.sync.stop
    if session.evaluations.due(progress):  # the process was killed between a checkpoint and its validation
        progress = _validate(session, progress)
    missing = session.next_batch.agree(session.batches) if progress.step < schedule.total_steps else None
    while progress.step < schedule.total_steps and not stop.requested:
        if missing is not None:
            raise session.end_without_batch(progress, missing)
        try:
            with session.saving_on_failure(progress):
                batch = next(session.batches)
        except DataNotReady as error:
            raise session.save_and_preempt(progress, reason=error.what, where=error.where, hint=error.hint) from error
        lr, weight_decay = schedule.lr(progress.step), schedule.weight_decay(progress.step)
        result = engine.train_step(batch, lr=lr, weight_decay=weight_decay)
        progress = progress.advance(batch, engine.data_shard)
        following = session.batches if progress.step < schedule.total_steps else None
        decision = session.sync.after(progress, batch, following)
        missing = decision.missing
        session.provenance.started(progress)
        session.observer.started(progress, batch.row_tokens, session.batches.wait_seconds)
        step = InFlightStep(progress, decision.batch_digest, result, lr, weight_decay, batch.row_tokens, batch)
        session.record(session.pending.submit(step))
        if decision.save:
            progress = session.save(progress)
        if session.evaluations.due(progress) and not stop.requested:
            progress = _validate(session, progress)
    progress = session.settle(progress)
    if stop.requested and (progress.step < schedule.total_steps or session.evaluations.due(progress)):
        raise session.save_and_preempt(progress, hint="run the same command again to continue")
    session.wait_for_save()
    return progress


def _validate(session: Session, progress: Progress) -> Progress:
    progress = session.settle(progress)
    if not session.checkpoints.saves_alone:  # after a failure on one rank, the others cannot take part in a save
        progress = session.save(progress)
        session.wait_for_save()
    with session.saving_on_failure(progress), session.observer.validating(progress) as report:
        found = session.evaluations.run(session.engine, progress, session.sync.stop)
        if found is not None:
            report(found, session.sampler.complete(session.engine))
    return session.evaluations.best(progress)
