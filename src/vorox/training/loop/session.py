"""Session: everything the training loop uses in one process.

In: a ``TrainingSetup``. Out: a ``Session``: what computes a step, and what records settled steps, saves and validates.
Only the main rank writes records; every rank takes the same steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from vorox.core.config import flat_values
from vorox.core.engine import Engine
from vorox.core.errors import set_saved
from vorox.core.files.disk_errors import translate_machine_errors
from vorox.core.pluralize import pluralize
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.redaction import redact_value
from vorox.core.run_layout import step_directories
from vorox.core.schema import RunConfig
from vorox.data.order.loader import BatchStream
from vorox.data.storage.stalls import observe_stalls, waiting_for_data
from vorox.experiments.tracking import Tracker
from vorox.experiments.webhook import end_notice, posting_events
from vorox.planning.disk_space import plan_disk
from vorox.records.log import RunLog
from vorox.records.replay_chain import ReplayChain, StateChain, examine_chain
from vorox.records.run_context import RunContext
from vorox.records.step_times import StepTimes
from vorox.runtime.heartbeat import Heartbeat
from vorox.training import user_functions
from vorox.training.checkpoints.writer import CheckpointWriter
from vorox.training.inference.sampling import PromptSampler
from vorox.training.loop.display import Display
from vorox.training.loop.nonfinite_recorder import NonfiniteRecorder
from vorox.training.loop.observer import Observer, SpeedMeter
from vorox.training.loop.provenance_recorder import open_provenance
from vorox.training.loop.rank_statistics import RankStatistics
from vorox.training.loop.recomputation import StepRecomputation
from vorox.training.loop.saving import Saving
from vorox.training.loop.scheduled_tasks import ScheduledTasks
from vorox.training.loop.startup import TrainingSetup, plan_reporter
from vorox.training.loop.step_profiler import StepProfiler
from vorox.training.loop.step_records import StepRecords
from vorox.training.loop.step_sync import NextBatch, StepSync
from vorox.training.loop.validation import Validation
from vorox.training.resume import resume
from vorox.training.steps.dataloading import (
    training_batches,
    validation_set,
    validation_sets_by_source,
)
from vorox.training.steps.evaluate import Evaluations
from vorox.training.steps.loss_spikes import LossSpikes, losses_before
from vorox.training.steps.pending_steps import PendingSteps
from vorox.training.steps.run_plan import plan_readers
from vorox.training.steps.schedule import Schedule
from vorox.training.steps.stop import StopRequest
from vorox.training.steps.workload import Workload

DETERMINISM = {
    "none": "no guarantee",
    "data": "same batches, bits may differ",
    "bitwise": "same bits on this machine",
    "bitwise-any-world": "same bits on any number of ranks",
}


@dataclass(frozen=True, slots=True)
class Session:
    """The parts of the training loop of one process: what computes a step, and what follows it."""

    setup: TrainingSetup
    engine: Engine
    batches: BatchStream
    schedule: Schedule
    sync: StepSync
    next_batch: NextBatch
    recomputation: StepRecomputation
    records: StepRecords
    saving: Saving
    validation: Validation
    speed: SpeedMeter
    heartbeat: Heartbeat
    profiler: StepProfiler | None

    @property
    def config(self) -> RunConfig:
        return self.setup.workload.config

    @property
    def log(self) -> RunLog:
        return self.setup.workload.log


@contextlib.contextmanager
def open_log(run: RunContext, display: Display, distributed: DistributedContext) -> Generator[RunLog]:
    """Open the log of this attempt; it also captures messages of libraries and the error that ends the run.

    Lines are written once the attempt begins. While the log is open, the display shows which data the run waits for.
    """
    log = RunLog(run.directory, distributed=distributed, attempt=run.attempt, is_held=True, echo=display.message)
    run.at_begin(log.release)
    try:
        with (
            posting_events(run, log),
            log.capture(),
            observe_stalls(lambda wait: display.waiting(None if wait is None else str(wait))),
        ):
            yield log
    except BaseException as error:
        run.begin_unless_refused(error)
        log.exception(error)
        raise
    finally:
        log.close()


@contextlib.contextmanager
def open_session(
    setup: TrainingSetup, display: Display, stop: StopRequest, tasks: Mapping[str, Any] | None = None
) -> Generator[Session]:
    """Open the parts of the loop; the loop starts from ``setup.state``. ``tasks`` come from ``open_tasks``."""
    workload, run, plan, state = setup.workload, setup.run, setup.plan, setup.state
    config, corpus, engine, log = workload.config, workload.corpus, workload.engine, workload.log
    progress, total_steps, is_main = state.progress, state.horizon.total_steps, workload.distributed.is_main
    if is_main:
        steps = step_directories(run.directory)
        plan_disk(
            config, workload.spec, run.directory, steps, total_steps=total_steps, done_steps=progress.step
        ).check()
    evaluations = Evaluations(
        run.directory, config.eval, total_steps, progress, batches=validation_set(config, corpus),
        token_byte_lengths=corpus.tokenizer.token_byte_lengths() if corpus.tokenizer.lossless else None,
        by_source=validation_sets_by_source(config, corpus), writes=is_main,
        custom=user_functions.open_evaluations(engine, corpus.tokenizer, config, workload.spec, log),
    )  # fmt: skip
    checkpoints = _checkpoint_writer(setup, evaluations)
    if is_main:
        corpus.tokenizer.save(run.layout.tokenizer)
    _report_engine(workload, total_steps)
    heartbeat = _heartbeat(setup)
    recomputation = StepRecomputation.open(config.runtime, engine, heartbeat)
    next_batch = NextBatch(workload.distributed, stop, heartbeat)
    tracker = Tracker.open(
        run.directory, config.log, attempt=run.attempt, resume_step=progress.step, distributed=workload.distributed,
        log=log, settings=redact_value(flat_values(config)),
    )  # fmt: skip
    with (
        heartbeat,
        contextlib.closing(tracker),
        setup.mirror.uploading(run.directory, progress.step, evaluations.losses, log, stop),
        open_provenance(run, config.log, progress, plan, plan_readers(plan, corpus), log) as attempt,
        training_batches(
            config, corpus, plan, engine.data_shard, progress.cursor, total_steps=total_steps,
            stop=next_batch.ends_wait, report=plan_reporter(log), decides=is_main,
        ) as batches,
    ):  # fmt: skip
        heartbeat.observe = lambda: (batches.queue_depth, waiting_for_data() is not None)
        sampler, speed = PromptSampler(config, corpus.tokenizer, workload.spec), SpeedMeter(workload, heartbeat)
        chain, spikes = ReplayChain(run.directory, progress, writes=is_main), _loss_spikes(setup)
        pending = PendingSteps(
            chain, max_nonfinite_steps=config.train.max_nonfinite_steps, nonfinite_in_a_row=state.nonfinite_in_a_row,
            spikes=spikes if spikes.is_active else None,
        )  # fmt: skip
        statistics = RankStatistics.of(workload, heartbeat, total_steps)
        sync = StepSync(workload.distributed, engine.data_shard, stop, checkpoints.due, chain, next_batch, statistics)
        profiler = _step_profiler(setup, heartbeat, lambda: bool(sync.stop.requested))
        alone = engine if workload.distributed.world_size == 1 else None
        profiling = contextlib.nullcontext() if profiler is None else contextlib.closing(profiler)
        observer = Observer(setup, tracker, display, speed, batches, checkpoints, statistics.metrics)
        nonfinite = NonfiniteRecorder(run.directory, alone, log, writes=is_main)
        records = StepRecords(setup, pending, observer, attempt, nonfinite, spikes, heartbeat)
        saving = Saving(setup, engine, records, checkpoints, tracker, heartbeat, sync.stop)
        session = Session(
            setup, engine, batches,
            Schedule.from_config(config.schedule, config.optimizer, state.horizon),
            sync, next_batch, recomputation, records, saving,
            Validation(
                config, engine, evaluations, sampler, ScheduledTasks.of(setup, tasks or {}), saving, observer,
                heartbeat, sync.stop,
            ),
            speed, heartbeat, profiler,
        )  # fmt: skip
        try:
            with translate_machine_errors(run.directory), checkpoints, profiling, sync:
                yield session
        except Exception as error:
            set_saved(error, checkpoints.safe())
            raise
        finally:
            heartbeat.enter("end")


def _heartbeat(setup: TrainingSetup) -> Heartbeat:
    run, dist, limits = setup.run, setup.workload.distributed, setup.workload.config.runtime
    timeout, long_timeout = limits.stall_timeout_seconds, limits.long_stall_timeout_seconds
    times = StepTimes(run.directory, run.attempt, setup.state.progress.step) if dist.is_main else None
    return Heartbeat(
        run.directory, rank=dist.rank, local_rank=dist.local_rank, attempt=run.attempt, timeout_seconds=timeout,
        long_timeout_seconds=long_timeout and max(long_timeout, timeout or 0.0), notice=end_notice(run),
        times=times,
    )  # fmt: skip


def _step_profiler(setup: TrainingSetup, heartbeat: Heartbeat, is_stopping: Callable[[], bool]) -> StepProfiler | None:
    """Return the profiler, which follows the phases of the heartbeat; ``None`` without steps to profile."""
    workload, total_steps = setup.workload, setup.state.horizon.total_steps
    steps, log = workload.config.runtime.profile_steps, workload.log
    if any(step > total_steps for step in steps):
        text = f"Profiler: steps after the last one, {total_steps:,}, are ignored"
        log.event("profile_steps", text, level="warning")
    scheduled = [step for step in steps if step <= total_steps]
    if not scheduled:
        return None
    profiler = StepProfiler(setup.run.directory, scheduled, workload.engine, workload.distributed, log, is_stopping)
    heartbeat.listen = profiler.enter
    return profiler


def _loss_spikes(setup: TrainingSetup) -> LossSpikes:
    """Return the limit of losses, from the replay chain and the plan up to the step that the run starts from."""
    config, progress = setup.workload.config.train, setup.state.progress
    rollbacks, sizes = setup.plan.state.rollbacks, setup.plan.start.batch_sizes
    if config.spike_policy == "off":
        return LossSpikes(config, {}, 0, rollbacks, sizes)

    def recorded() -> tuple[list[tuple[int, float]], int]:
        losses = losses_before(examine_chain(setup.run.directory).entries, progress.step, config)
        skips = setup.plan.state.skips
        return list(losses.items()), sum(skip.start_position < progress.cursor.position for skip in skips)

    losses, num_skipped = setup.workload.distributed.decide("loss spikes", recorded)
    return LossSpikes(config, {int(step): float(loss) for step, loss in losses}, num_skipped, rollbacks, sizes)


def _report_engine(workload: Workload, total_steps: int) -> None:
    facts, num_frozen = resume.environment(workload.engine), workload.spec.num_frozen_parameters
    determinism, frozen = str(facts["determinism"]), f" and {num_frozen:,} frozen ones" if num_frozen else ""
    kinds = (f"{kind}_parallel_size" for kind in ("tensor", "pipeline", "context", "expert"))
    layout = [f"{name} = {facts[name]}" for name in ("num_devices", "fsdp_size", *kinds) if int(facts.get(name, 1)) > 1]
    setting = ", ".join([workload.config.backend, workload.config.precision.dtype, *layout])
    device = f"{facts.get('device', workload.engine.name)} ({setting})"
    workload.log.event(
        "engine",
        f"Model: {workload.spec.num_parameters:,} parameters{frozen} on {device}, "
        f"{pluralize(total_steps, 'step')}; determinism {determinism}: {DETERMINISM[determinism]}",
        environment=facts,
    )


def _checkpoint_writer(setup: TrainingSetup, evaluations: Evaluations) -> CheckpointWriter:
    workload, run, step = setup.workload, setup.run, setup.state.progress.step
    return CheckpointWriter(
        run.directory, workload.config.checkpoint, setup.state.horizon, describe=resume.manifest_metadata(workload),
        companions=resume.companions(workload),
        eval_losses=evaluations.losses,
        saved_step=step if run.layout.checkpoint(step).exists() else None,
        log=workload.log, distributed=workload.distributed, states=StateChain(run.directory, step),
    )  # fmt: skip
