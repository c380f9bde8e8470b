"""Session: everything the training loop uses in one process, and the work between steps.

In: a ``TrainingSetup``. Out: a ``Session``: what the loop calls to record settled steps, save and stop. Only the main
rank writes records; every rank takes the same steps. Only a step changes the engine's state, so the state can be saved
after a failure between two steps without keeping a copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vorox.core.batch import Progress
from vorox.core.config import flat_values
from vorox.core.disk_errors import translate_machine_errors
from vorox.core.distributed_context import DistributedContext
from vorox.core.engine import Engine
from vorox.core.errors import Preempted, VoroxError, set_saved
from vorox.core.log import RunLog
from vorox.core.pluralize import pluralize
from vorox.core.redaction import redact_value
from vorox.core.run_context import RunContext
from vorox.data.growth import DataNotReady
from vorox.data.loader import BatchStream
from vorox.data.plan_events import SkipEvent
from vorox.data.storage.stalls import observe_stalls, waiting_for_data
from vorox.experiments.tracking import Tracker
from vorox.experiments.webhook import end_notice, posting_events
from vorox.models.huggingface_config import huggingface_files, image_processor_files
from vorox.runtime.heartbeat import Heartbeat
from vorox.training import resume, user_functions
from vorox.training.checkpoints.writer import CheckpointWriter, SavedCheckpoint
from vorox.training.dataloading import training_batches, validation_set, validation_sets_by_source
from vorox.training.disk_space import check_disk_space
from vorox.training.display import Display
from vorox.training.evaluation.evaluate import Evaluations
from vorox.training.evaluation.sampling import PromptSampler
from vorox.training.evaluation.scheduled_tasks import ScheduledTasks
from vorox.training.loss_spikes import LossSpikes, RollbackRequested, losses_before
from vorox.training.nonfinite_recorder import NonfiniteRecorder
from vorox.training.observer import Observer, SpeedMeter
from vorox.training.pending_steps import PendingSteps, SettledStep
from vorox.training.provenance_recorder import ProvenanceRecorder, open_provenance
from vorox.training.rank_statistics import RankStatistics
from vorox.training.recomputation import StepRecomputation
from vorox.training.replay_chain import ReplayChain, examine_chain
from vorox.training.run_plan import plan_readers
from vorox.training.schedule import Schedule
from vorox.training.startup import TrainingSetup, plan_reporter
from vorox.training.step_profiler import StepProfiler
from vorox.training.step_sync import MissingBatch, NextBatch, StepSync
from vorox.training.stop import StopRequest
from vorox.training.workload import Workload

DETERMINISM = {
    "none": "no guarantee",
    "data": "same batches, bits may differ",
    "bitwise": "same bits on this machine",
    "bitwise-any-world": "same bits on any number of ranks",
}


@dataclass(frozen=True, slots=True)
class Session:
    """The parts of the training loop of one process, and the work between two steps."""

    setup: TrainingSetup
    engine: Engine
    batches: BatchStream
    schedule: Schedule
    sync: StepSync
    next_batch: NextBatch
    pending: PendingSteps
    checkpoints: CheckpointWriter
    evaluations: Evaluations
    tasks: ScheduledTasks
    sampler: PromptSampler
    tracker: Tracker
    speed: SpeedMeter
    observer: Observer
    provenance: ProvenanceRecorder
    nonfinite: NonfiniteRecorder
    spikes: LossSpikes
    recomputation: StepRecomputation
    heartbeat: Heartbeat
    profiler: StepProfiler | None

    def record(self, settled: SettledStep | None) -> None:
        """Pass a settled step to everything that records steps.

        Raises:
            NumericalError: More consecutive steps were not finite than ``train.max_nonfinite_steps`` allows, or the
                policy of loss spikes ends the run.
            RollbackRequested: The policy of loss spikes returns to an earlier state.
        """
        if settled is None:
            return
        self.observer.settled(settled)
        if not settled.values.finite:
            self.provenance.skipped(settled.step.progress, "nonfinite_step", settled.skipped)
        if settled.is_spike or settled.is_planned_skip:
            self.provenance.skipped(settled.step.progress, "loss_spike", settled.skipped)
        if settled.is_spike or self.setup.plan.state.skips:
            self._plan_skip(settled)
        path = self.nonfinite.record(settled) if settled.is_nonfinite else ""
        if settled.ends_run:
            raise settled.numerical_error(path)
        if settled.rolls_back:
            assert settled.step.max_loss is not None
            raise RollbackRequested(self.spikes.rollback(settled.number, settled.values.loss, settled.step.max_loss))

    def _plan_skip(self, settled: SettledStep) -> None:
        """Record in the plan that a spike was skipped, or that a step skipped by an earlier attempt was not."""
        plan = self.setup.plan
        position = plan.start.batch_sizes.position_of(settled.number - 1)
        is_skipped = settled.is_spike and not settled.ends_run and not settled.rolls_back
        if (
            not settled.is_planned_skip
            and not settled.rolls_back
            and self.setup.workload.distributed.is_main
            and is_skipped != plan.is_skipped(position)
            and settled.values.finite
        ):
            reason, max_loss = "loss_spike" if is_skipped else "withdrawn", settled.step.max_loss
            plan.add([SkipEvent(position, reason, settled.values.loss, max_loss)])

    def settle(self, progress: Progress) -> Progress:
        """Wait for the step in flight; return the progress with the head of the replay chain.

        Raises:
            NumericalError: Too many steps in a row were not finite.
        """
        self.heartbeat.enter("settle")
        self.record(self.pending.drain())
        return replace(progress, chain=self.pending.chain.head)

    def save(self, progress: Progress, *, is_last: bool = False) -> Progress:
        """Settle the step in flight and take a checkpoint, if there is anything new to save."""
        progress = self.settle(progress)
        with self._saving():
            self.tracker.flush()
            self.checkpoints.save(self.engine, progress, self.pending, self._publish, is_last=is_last)
        return progress

    def _publish(self, saved: SavedCheckpoint) -> None:
        """Pass a committed checkpoint to mirror, metadata and observer, in the thread that wrote it."""
        if self.setup.mirror.uploader is not None:
            self.setup.mirror.uploader.enqueue(saved.path)
            for path in saved.removed:
                self.setup.mirror.uploader.discard(path)
        self.provenance.attempt.record_saved(saved.progress.step)
        self.observer.saved(saved.path, saved.progress, saved.seconds)

    def wait_for_save(self) -> None:
        """Wait until the checkpoint that is being written is committed."""
        if self.checkpoints.is_writing:
            with self._saving():
                self.checkpoints.wait()

    @contextlib.contextmanager
    def _saving(self) -> Generator[None]:
        """Count the time inside as blocked by a checkpoint."""
        before = self.heartbeat.seconds["save"]
        with self.heartbeat.during("save"):
            yield
        self.tracker.observe({"checkpoint_seconds": self.heartbeat.seconds["save"] - before})

    def save_and_preempt(self, progress: Progress, *, reason: str = "", where: str = "", hint: str) -> Preempted:
        """Save the current state, unless a signal leaves no time; return the error that names the newest checkpoint."""
        progress = self.settle(progress)
        self.wait_for_save()  # the state in flight is the first to be safe
        notice = self.observer.notice
        skipped = "" if notice is None else notice.skip_save(self.sync.stop, self.checkpoints, progress)
        if not skipped:
            self.save(progress, is_last=True)
            self.wait_for_save()
            if notice is not None:
                notice.stopped(self.sync.stop)
        signal, because = self.sync.stop.requested, "".join(f": {why}" for why in (reason, skipped) if why)
        stopped = f"{signal}: stopped" if signal else "Stopped"
        what = f"{stopped} after step {progress.step:,} of {self.schedule.total_steps:,}{because}"
        return Preempted(what, where=where, saved=self.checkpoints.safe(), hint=hint)

    def end_without_batch(self, progress: Progress, missing: MissingBatch) -> BaseException:
        """Save the current state on all ranks; return the error that ends the run, because a rank has no batch."""
        error = missing.error
        if missing.is_awaited and isinstance(error, VoroxError):
            return self.save_and_preempt(progress, reason=error.what, where=error.where, hint=error.hint)
        try:
            self.save(progress, is_last=True)
            self.wait_for_save()
        except Exception as failure:  # the missing batch is what ended the run
            self.checkpoints.log_failure(failure)
        return error

    @contextlib.contextmanager
    def saving_on_failure(self, progress: Progress) -> Generator[None]:
        """Save the state of the last step if the block, which runs between two steps, fails.

        With several ranks this is impossible, because the others may wait for this one inside a collective. The log
        then reports which steps are lost. A validation loses none: the state is saved before it.
        """
        try:
            yield
        except DataNotReady:
            raise
        except (Exception, KeyboardInterrupt):
            if self.checkpoints.is_unsaved(progress) and not self.checkpoints.saves_alone:
                self.checkpoints.log_lost(progress)
            elif self.checkpoints.is_unsaved(progress):
                try:
                    self.save(progress, is_last=True)
                    self.wait_for_save()
                except Exception as failure:  # the first failure is what ended the run
                    self.checkpoints.log_failure(failure)
            raise


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
        check_disk_space(run.directory, config, workload.spec, total_steps, progress.step)
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
        open_provenance(run, config.log, progress, plan, plan_readers(plan, corpus), log) as provenance,
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
        session = Session(
            setup, engine, batches,
            Schedule.from_config(config.schedule, config.optimizer, state.horizon),
            sync, next_batch, pending, checkpoints, evaluations, ScheduledTasks.of(setup, tasks or {}), sampler,
            tracker, speed, Observer(setup, tracker, display, speed, batches, checkpoints, statistics.metrics),
            provenance, NonfiniteRecorder(run.directory, alone, log, writes=is_main),
            spikes, recomputation, heartbeat, profiler,
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
    run, dist = setup.run, setup.workload.distributed
    return Heartbeat(
        run.directory, rank=dist.rank, local_rank=dist.local_rank, attempt=run.attempt,
        timeout_seconds=setup.workload.config.runtime.stall_timeout_seconds, notice=end_notice(run),
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
    tokenizer = workload.corpus.tokenizer
    return CheckpointWriter(
        run.directory, workload.config.checkpoint, setup.state.horizon, describe=resume.manifest_metadata(workload),
        companions={
            **huggingface_files(workload.spec, end_of_text_id=tokenizer.end_of_text_id),
            **image_processor_files(workload.config.model),
            **tokenizer.files(workload.spec.max_positions_tokens),
        },
        eval_losses=evaluations.losses,
        saved_step=step if run.layout.checkpoint(step).exists() else None,
        log=workload.log, distributed=workload.distributed,
    )  # fmt: skip
