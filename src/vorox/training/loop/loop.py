"""The training loop: next batch, step, save, validate, until the schedule ends or a stop request.

The loop waits for the device only to save and to validate: the numbers of a step settle while the next one runs. If
reading a batch fails, the state is saved first.
"""

from __future__ import annotations

from vorox.core.batch import Progress
from vorox.data.order.growth import DataNotReady
from vorox.training.loop.rehearsal import rehearse
from vorox.training.loop.session import Session
from vorox.training.steps.pending_steps import InFlightStep


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
    records, saving, validation = session.records, session.saving, session.validation
    progress = validation.run_due(progress)  # due if the process was killed between a checkpoint and its validation
    missing = session.next_batch.agree(session.batches) if progress.step < schedule.total_steps else None
    if missing is None and not stop.requested:
        rehearse(session, progress)
    while progress.step < schedule.total_steps and not stop.requested:
        if missing is not None:
            raise saving.end_without_batch(progress, missing)
        if session.profiler is not None:
            session.profiler.begin(progress.step + 1)
        session.heartbeat.begin_step(progress.step + 1)
        try:
            with saving.on_failure(progress):
                batch = next(session.batches)
        except DataNotReady as error:
            raise saving.preempt(progress, reason=error.what, where=error.where, hint=error.hint) from error
        lr, weight_decay = schedule.lr(progress.step), schedule.weight_decay(progress.step)
        max_loss = records.spikes.max_loss(progress.step + 1)
        session.heartbeat.compute(progress.step + 1, batch.tokens_ABT.shape)
        after = progress.advance(batch, engine.data_shard)
        exchange = session.sync.start(after, batch, session.batches if after.step < schedule.total_steps else None)
        result = session.recomputation.train_step(batch, lr=lr, weight_decay=weight_decay, max_loss=max_loss)
        progress, decision = after, session.sync.finish(exchange)
        missing = decision.missing
        records.attempt.record_started(progress.step)
        session.speed.count(progress.num_tokens, batch.row_tokens)
        step = InFlightStep(progress, decision.batch_digest, result, lr, weight_decay, batch, max_loss)
        records.submit(step)
        if session.profiler is not None:
            session.profiler.end(progress.step)
        if decision.save:
            progress = saving.save(progress)
        if not stop.requested:
            progress = validation.run_due(progress)
    progress = records.settle(progress)
    if stop.requested and (progress.step < schedule.total_steps or validation.is_due(progress)):
        raise saving.preempt(progress, hint="run the same command again to continue")
    saving.wait()
    return progress
