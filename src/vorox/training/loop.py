"""The training loop: next batch, step, save, validate, until the schedule ends or a stop request.

The loop waits for the device only to save and to validate: the numbers of a step settle while the next one runs. If a
validation, a sample or reading a batch fails, the state is saved first; several ranks save before they validate.
"""

from __future__ import annotations

from vorox.core.batch import Progress
from vorox.core.engine import validated_weights
from vorox.data.growth import DataNotReady
from vorox.training.pending_steps import InFlightStep
from vorox.training.rehearsal import rehearse
from vorox.training.session import Session


def train(session: Session, progress: Progress) -> Progress:
    """Train from ``progress`` to the end of the schedule.

    Raises:
        Preempted: A signal requested a stop, or the rows of the next step are not built yet; the state is saved.
        NumericalError: Too many steps in a row were not finite, or a step computed twice has other bits.
        RollbackRequested: A loss spike; the run continues from an earlier state.
        CheckpointError: A checkpoint cannot be written; earlier checkpoints are unchanged.
        DataError: The next batch cannot be read.
    """
    engine, schedule, stop = session.engine, session.schedule, session.sync.stop
    progress = _evaluate(session, progress)  # due if the process was killed between a checkpoint and its validation
    missing = session.next_batch.agree(session.batches) if progress.step < schedule.total_steps else None
    if missing is None and not stop.requested:
        rehearse(session, progress)
    while progress.step < schedule.total_steps and not stop.requested:
        if missing is not None:
            raise session.end_without_batch(progress, missing)
        if session.profiler is not None:
            session.profiler.begin(progress.step + 1)
        session.heartbeat.enter("data", progress.step + 1)
        try:
            with session.saving_on_failure(progress):
                batch = next(session.batches)
        except DataNotReady as error:
            raise session.save_and_preempt(progress, reason=error.what, where=error.where, hint=error.hint) from error
        lr, weight_decay = schedule.lr(progress.step), schedule.weight_decay(progress.step)
        max_loss = session.spikes.max_loss(progress.step + 1)
        session.heartbeat.compute(progress.step + 1, batch.tokens_ABT.shape)
        after = progress.advance(batch, engine.data_shard)
        exchange = session.sync.start(after, batch, session.batches if after.step < schedule.total_steps else None)
        result = session.recomputation.train_step(batch, lr=lr, weight_decay=weight_decay, max_loss=max_loss)
        progress, decision = after, session.sync.finish(exchange)
        missing = decision.missing
        session.provenance.attempt.record_started(progress.step)
        session.speed.count(progress.num_tokens, batch.row_tokens)
        step = InFlightStep(progress, decision.batch_digest, result, lr, weight_decay, batch, max_loss)
        session.heartbeat.enter("settle", progress.step)
        session.record(session.pending.submit(step))
        if session.profiler is not None:
            session.profiler.end(progress.step)
        if decision.save:
            progress = session.save(progress)
        if not stop.requested:
            progress = _evaluate(session, progress)
    progress = session.settle(progress)
    is_due = session.evaluations.due(progress) or session.tasks.due(progress)
    if stop.requested and (progress.step < schedule.total_steps or is_due):
        raise session.save_and_preempt(progress, hint="run the same command again to continue")
    session.wait_for_save()
    return progress


def _evaluate(session: Session, progress: Progress) -> Progress:
    if session.evaluations.due(progress):
        progress = _validate(session, progress)
    if session.tasks.due(progress):
        progress = session.save(progress)
        session.wait_for_save()
        report = session.observer.evaluating_tasks(progress)
        with (
            session.heartbeat.during("validation"),
            validated_weights(session.engine, session.setup.workload.config),
        ):
            session.tasks.run(progress, session.sync.stop, report)
    return progress


def _validate(session: Session, progress: Progress) -> Progress:
    progress = session.settle(progress)
    if not session.checkpoints.saves_alone:  # after a failure on one rank, the others cannot take part in a save
        progress = session.save(progress)
        session.wait_for_save()
    report = session.observer.validating(progress)
    with (
        session.heartbeat.during("validation"),
        session.saving_on_failure(progress),
        validated_weights(session.engine, session.setup.workload.config),
    ):
        found = session.evaluations.run(session.engine, progress, session.sync.stop)
        if found is not None:
            report(found, session.sampler.complete(session.engine))
    return session.evaluations.best(progress)
