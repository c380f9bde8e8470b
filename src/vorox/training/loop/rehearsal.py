"""The rehearsal of a run: one step, validation, sample and save at full shape, before the first step.

In: an open session. Out: nothing, or the error that would otherwise end the run after hours. The step does not apply
its update, and the rest changes no state, so no bit of the run changes. The save is written and removed again. The next
batch is read ahead, not consumed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator

from vorox.core.batch import Progress
from vorox.core.files.staged_directory import StagedDirectory
from vorox.core.schema import RunConfig
from vorox.training.checkpoints.store import write_shards, write_state
from vorox.training.loop.session import Session
from vorox.training.steps.loss_spikes import SKIP_STEP

LONG_RUN_STEPS = 1000
"""With ``auto``, shorter runs have no rehearsal: it takes as long as a few steps and a save."""


def is_due(config: RunConfig, num_steps: int) -> bool:
    """Whether a run with so many steps ahead is rehearsed."""
    if config.runtime.rehearsal == "auto":
        return config.parallel.kind == "native" and num_steps >= LONG_RUN_STEPS
    return config.runtime.rehearsal and num_steps > 0


def rehearse(session: Session, progress: Progress) -> None:
    """Run every part of the loop once, if the run is to be rehearsed. All ranks take part.

    Raises:
        DoesNotFitError: A part needs more memory or disk than there is.
        VoroxError: Another part cannot run.
    """
    config, validation = session.config, session.validation
    if not is_due(config, session.schedule.total_steps - progress.step) or session.batches.next_error() is not None:
        return  # the loop reports a batch that cannot be read
    started = time.perf_counter()
    with _named(session, "step"):
        _step(session, progress)
    validates = False
    with _named(session, "validation"), validation.weights():
        validates = validation.evaluations.rehearse(session.engine)
    if validates:
        with _named(session, "sample"), validation.weights():
            validation.sampler.complete(session.engine)
    with _named(session, "save"):
        _save(session)
    parts = ["step", *(["validation"] * validates), *(["sample"] * (validates and bool(config.eval.prompts)))]
    text = f"Rehearsal: {', '.join(parts)} and save work, {time.perf_counter() - started:.1f} s"
    session.log.event("rehearsal", text)


@contextlib.contextmanager
def _named(session: Session, part: str) -> Generator[None]:
    """Log which part failed."""
    phase = "save" if part == "save" else "validation"
    try:
        with contextlib.nullcontext() if part == "step" else session.heartbeat.during(phase):
            yield
    except Exception:
        session.log.event("rehearsal_failed", f"Rehearsal failed in its {part}", level="error")
        raise


def _step(session: Session, progress: Progress) -> None:
    """Compute the next step without its update."""
    batch, schedule = session.batches.peek(), session.schedule
    lr, weight_decay = schedule.lr(progress.step), schedule.weight_decay(progress.step)
    session.heartbeat.compute(progress.step + 1, batch.tokens_ABT.shape)
    session.engine.train_step(batch, lr=lr, weight_decay=weight_decay, max_loss=SKIP_STEP).fetch()


def _save(session: Session) -> None:
    """Write the state as a checkpoint that is never committed; it is removed at the end."""
    setup, dist = session.setup, session.setup.workload.distributed
    snapshot = session.engine.snapshot(detached=session.config.checkpoint.asynchronous)
    if not dist.is_main:
        write_shards(snapshot, dist)
        return
    with StagedDirectory(setup.run.layout.checkpoints / "rehearsal") as directory:
        write_state(snapshot, directory, dist)
