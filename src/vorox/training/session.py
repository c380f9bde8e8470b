"""Everything that the loop needs, opened for one process and closed after it.

In: what the run is made of. Out: the parts of the loop. The main rank writes; the others take the same steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from vorox.core.config import config_digest, flat_values
from vorox.core.disk_errors import explained_machine_errors
from vorox.core.distributed_context import DistributedContext
from vorox.core.errors import VoroxError
from vorox.core.log import RunLog
from vorox.core.pluralize import pluralize
from vorox.core.redaction import redact_value
from vorox.core.run_context import RunContext
from vorox.data.storage.waiting import observe_stalls
from vorox.experiments.tracking import Tracker
from vorox.models.huggingface_config import huggingface_files
from vorox.training import resume, user_functions
from vorox.training.between_steps import validations_without_save
from vorox.training.chain import ReplayChain
from vorox.training.checkpoint_writer import CheckpointWriter
from vorox.training.dataloading import training_batches, validation_set
from vorox.training.disk_room import check_checkpoint_room
from vorox.training.display import Display
from vorox.training.evaluate import Evaluations
from vorox.training.forensics import Forensics
from vorox.training.observer import Observer
from vorox.training.pending_steps import PendingSteps
from vorox.training.provenance_recorder import open_provenance
from vorox.training.run import Run
from vorox.training.run_plan import plan_readers
from vorox.training.sampling import PromptSampler
from vorox.training.schedule import Schedule
from vorox.training.setup import TrainingSetup, Workload
from vorox.training.speed import SpeedMeter
from vorox.training.startup import plan_reporter
from vorox.training.step_sync import StepSync
from vorox.training.stop import StopRequest

DETERMINISM = {
    "none": "nothing is promised",
    "data": "the same batches, not the same bits",
    "bitwise": "the same bits on this machine",
}


@contextlib.contextmanager
def open_log(run: RunContext, display: Display, distributed: DistributedContext) -> Generator[RunLog]:
    """The log of this attempt, which also takes what libraries say and the error that ends the run.

    While it is open, the display shows what data is waited for.
    """
    log = RunLog(run.directory, distributed=distributed, attempt=run.attempt, echo=display.message)
    try:
        with log.capture(), observe_stalls(lambda wait: display.waiting(None if wait is None else str(wait))):
            yield log
    except BaseException as error:
        log.exception(error)
        raise
    finally:
        log.close()


@contextlib.contextmanager
def open_session(setup: TrainingSetup, display: Display, stop: StopRequest) -> Generator[Run]:
    """Open the parts of the loop; the loop starts from ``setup.state``."""
    workload, run, plan, state = setup.workload, setup.run, setup.plan, setup.state
    config, corpus, engine, log = workload.config, workload.corpus, workload.engine, workload.log
    progress, total_steps, is_main = state.progress, state.horizon.total_steps, workload.distributed.is_main
    if is_main:
        check_checkpoint_room(run.directory, config, workload.spec, total_steps, progress.step)
    validation = validation_set(config, corpus)
    evaluations = Evaluations(
        run.directory, config.eval, total_steps, progress, batches=validation,
        token_byte_lengths=corpus.tokenizer.token_byte_lengths() if corpus.tokenizer.lossless else None,
        writes=is_main,
        custom=user_functions.open_evaluations(engine, corpus.tokenizer, config, workload.spec, log),
    )  # fmt: skip
    if validation is not None and workload.distributed.process_count > 1 and (risk := validations_without_save(config)):
        log.event("validation_without_save", risk, level="warning")
    checkpoints = _checkpoint_writer(setup, evaluations)
    if is_main:
        corpus.tokenizer.save(run.layout.tokenizer)
    _report_engine(workload, total_steps)
    tracker = Tracker.open(
        run.directory, config.log, attempt=run.attempt, resume_step=progress.step, distributed=workload.distributed,
        log=log, settings=redact_value(flat_values(config)),
    )  # fmt: skip
    with (
        contextlib.closing(tracker),
        setup.mirror.following(run.directory, progress.step, evaluations.losses, log),
        open_provenance(run, config.log, progress, plan, plan_readers(plan, corpus), log) as provenance,
        training_batches(
            config, corpus, plan, engine.data_shard, progress.cursor, total_steps=total_steps,
            stop=lambda: bool(stop.requested), report=plan_reporter(log), decides=is_main,
        ) as batches,
    ):  # fmt: skip
        sampler = PromptSampler(config, corpus.tokenizer, workload.spec)
        chain = ReplayChain(run.directory, progress, writes=is_main)
        pending = PendingSteps(
            chain, max_nonfinite_steps=config.train.max_nonfinite_steps, nonfinite_in_a_row=state.nonfinite_in_a_row
        )
        alone = engine if workload.distributed.process_count == 1 else None
        parts = Run(
            setup, engine, batches,
            Schedule.of(config.schedule, config.optimizer, state.horizon),
            StepSync(workload.distributed, engine.data_shard, stop, checkpoints.due, chain),
            pending, checkpoints, evaluations, sampler,
            Observer(setup, tracker, display, SpeedMeter(workload)),
            provenance,
            Forensics(run.directory, alone, log, writes=is_main),
        )  # fmt: skip
        try:
            with explained_machine_errors(run.directory), checkpoints:
                yield parts
        except VoroxError as error:
            error.saved = error.saved or checkpoints.safe()
            raise


def _report_engine(workload: Workload, total_steps: int) -> None:
    facts = resume.environment(workload.engine)
    determinism = str(facts["determinism"])
    workload.log.event(
        "engine",
        f"{workload.spec.num_parameters:,} parameters on {facts.get('device', workload.engine.name)}, "
        f"{pluralize(total_steps, 'step')}; determinism {determinism}: {DETERMINISM[determinism]}",
        environment=facts,
    )


def _checkpoint_writer(setup: TrainingSetup, evaluations: Evaluations) -> CheckpointWriter:
    workload, run, step = setup.workload, setup.run, setup.state.progress.step
    tokenizer = workload.corpus.tokenizer
    return CheckpointWriter(
        run.directory,
        workload.config.checkpoint,
        setup.state.horizon,
        describe=_description(workload),
        companions={
            **huggingface_files(workload.spec, end_of_text_id=tokenizer.end_of_text_id),
            **tokenizer.files(workload.spec.max_positions_tokens),
        },
        eval_losses=evaluations.losses,
        saved_step=step if run.layout.checkpoint(step).exists() else None,
        log=workload.log,
        distributed=workload.distributed,
    )


def _description(workload: Workload) -> dict[str, Any]:
    """Return what every manifest records of the run."""
    return {
        "backend": workload.config.backend,
        "spec": workload.spec.to_json(),
        "config_digest": config_digest(workload.config),
        "settings": resume.settings_for_manifest(workload.config),
        "tokenizer": workload.corpus.tokenizer.fingerprint,
        "environment": resume.environment(workload.engine),
        user_functions.MANIFEST_KEY: user_functions.identities(workload.config),
    }
