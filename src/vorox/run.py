"""Run training end to end: configuration, run directory, data, engine, resume, loop.

In: a configuration. Out: a run directory in which every step can be replayed. Each part is built here, in this order,
and passed on explicitly. The command line calls ``train`` and prints; nothing here prints.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vorox import backends
from vorox.core.batch import Progress
from vorox.core.config import check_recordable, config_values
from vorox.core.engine import Tap, attach_taps
from vorox.core.files.disk_errors import translate_machine_errors
from vorox.core.platform.telemetry import disable_telemetry
from vorox.core.pluralize import pluralize
from vorox.core.ranks.distributed_context import DistributedContext, membership
from vorox.core.ranks.rank_comparison import compare_ranks
from vorox.core.run_layout import ResumeFrom, RunLayout, run_of_checkpoint
from vorox.core.schema import RunConfig
from vorox.core.user_code import trusted_code
from vorox.data.cache.build import BuildOptions
from vorox.data.cache.building.report import PrepareProgress
from vorox.data.corpus.cache_location import cache_root
from vorox.data.corpus.corpus import prepare
from vorox.data.corpus.run_views import RunViews
from vorox.data.tokenizers.store import configured_untrained, load_run_tokenizer
from vorox.models.optimizer_groups import optimizer_groups
from vorox.planned_run import choose_micro_batch, is_fresh, resolve_model
from vorox.planning.auto_micro_batch import MicroBatch, with_micro_batch
from vorox.planning.memory_advice import check_memory_of_hosts
from vorox.planning.time_limit import check_minutes
from vorox.records.log import DATA_READY, RunLog
from vorox.records.run_context import RunContext
from vorox.records.run_lookup import find_run, split_step
from vorox.records.run_record import ENTERED_NOTE, LAUNCH_NOTE
from vorox.runtime.throughput import Reading
from vorox.training import time_budget
from vorox.training.checkpoints.materialized_cache import StateNotOnDiskError
from vorox.training.checkpoints.store import Checkpoint
from vorox.training.loop import loop
from vorox.training.loop.display import Display, NoDisplay
from vorox.training.loop.scheduled_tasks import open_tasks
from vorox.training.loop.session import open_log, open_session
from vorox.training.loop.startup import attach, compare_plans, initialize_or_resume
from vorox.training.materialize import ComputeStates, StateNotices, cost_line, states_after
from vorox.training.mirror import Mirror, open_mirror
from vorox.training.origin.model_origin import explaining_moved_model
from vorox.training.origin.origin_checks import check_origin
from vorox.training.origin.transformers_ids import warn_of_other_ids
from vorox.training.re_execution import ReExecution
from vorox.training.resume.resume_settings import check_unedited_before, report_same_name
from vorox.training.steps.loss_spikes import Rollback, RollbackRequested
from vorox.training.steps.schedule import Horizon
from vorox.training.steps.stop import StopRequest
from vorox.training.steps.workload import Workload
from vorox.training.user_functions import record_taps, report_changed_functions
from vorox.training.weights.adapter_base import load_base
from vorox.training.weights.teacher import find_stored_logits, find_teacher, load_teacher

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        run_directory: The run.
        start_step: Steps finished when this process started.
        progress: Progress at the end.
        horizon: Length of the run and its warm-up.
        eval_losses: Validation loss by step.
        fingerprint: Hash of the engine's final state.
        speed: Throughput and use of time of this process.
        is_main: Whether this is the main rank, which writes and prints.
    """

    run_directory: Path
    start_step: int
    progress: Progress
    horizon: Horizon
    eval_losses: dict[int, float]
    fingerprint: str
    speed: Reading
    is_main: bool


def train(
    config: RunConfig,
    *,
    resume_from: ResumeFrom = "auto",
    minutes: float | None = None,
    display: Display | None = None,
    on_progress: PrepareProgress | None = None,
    argv: Sequence[str] | None = None,
    named_keys: Collection[str] = (),
    taps: Sequence[Tap] = (),
    launched_at: float | None = None,
) -> Outcome:
    """Train to the end of the schedule: start a run, or resume one.

    Args:
        config: The configuration.
        resume_from: ``auto`` resumes the latest run of this configuration or starts one; ``never`` starts one; a path
            resumes that run or checkpoint.
        minutes: Replaces the length of the run by the number of steps that fit into this time.
        display: Shows the run.
        on_progress: Receives the progress of preparing the data.
        argv: The command, recorded in ``run.json``.
        named_keys: Settings and sections given explicitly. A resumed run accepts them even if ``config.yaml`` was
            edited to the same values.
        taps: Functions attached to the engine for the whole run.
        launched_at: When the work for the first attempt began, in seconds since the epoch; default: now.

    Raises:
        VoroxError: The run stopped before its end; ``exit_code`` gives the kind of error.
    """
    entered_at = time.time()
    launched_at = entered_at if launched_at is None else launched_at
    disable_telemetry()
    resume_from = resume_from.absolute() if isinstance(resume_from, Path) else resume_from
    trusted_code.state(config_values(config), but_recorded=True)
    trusted_code.require_all_trusted(config_values(config))
    dist = backends.connect(config)
    display = display if display is not None and dist.is_main else NoDisplay()
    with dist.propagating_failure(), StopRequest() as stop:
        if dist.is_main and isinstance(resume_from, Path):
            directory = run_of_checkpoint(resume_from)
            checkpoint = None if directory is None else resume_from
            with translate_machine_errors(resume_from):
                check_unedited_before(directory or resume_from, checkpoint, config, named_keys)
        if dist.is_main and is_fresh(config, resume_from):
            check_recordable(config)
            check_origin(config)
            _check_groups(config)
        if dist.is_main:
            find_teacher(config)
            find_stored_logits(config)
        tasks = open_tasks(config)
        if minutes is not None:
            config = _fit_to_time(config, check_minutes(minutes), dist, display, on_progress)
        process = _TrainingProcess(
            config,
            dist,
            stop,
            display,
            on_progress,
            tuple(sys.argv if argv is None else argv),
            named_keys,
            taps,
            tasks,
            entered_at,
        )
        notices = _LoggedNotices(display.message)
        ended = with_states(functools.partial(process.run_attempt, resume_from, launched_at), notices)
        while isinstance(ended, _Returned):
            launched_at = time.time()
            gc.collect()  # frees the engine of the attempt before the next one is created
            again = functools.partial(process.run_attempt, ended.run_directory, launched_at, ended.rollback)
            ended = with_states(again, notices)
        return ended


class _LoggedNotices(StateNotices):
    """Prints what a run computes before it starts.

    Args:
        message: Prints a line.
    """

    def __init__(self, message: Callable[[str], None]) -> None:
        self._message = message

    def computes(self, execution: ReExecution, steps: Collection[int]) -> None:
        self._message(cost_line(execution, steps))


@dataclass(frozen=True, slots=True)
class _Returned:
    """An attempt that ended because the run returns to an earlier state."""

    run_directory: Path
    rollback: Rollback


@dataclass(frozen=True, slots=True)
class _TrainingProcess:
    """What the attempts of one process share; every rollback starts another attempt, as a resume does."""

    config: RunConfig
    dist: DistributedContext
    stop: StopRequest
    display: Display
    on_progress: PrepareProgress | None
    argv: Sequence[str]
    named_keys: Collection[str]
    taps: Sequence[Tap]
    tasks: Mapping[str, Any]
    entered_at: float

    def run_attempt(
        self, resume_from: ResumeFrom, launched_at: float, rollback: Rollback | None = None
    ) -> Outcome | _Returned:
        """Train from the state that ``resume_from`` and ``rollback`` name, to the end or to the next rollback."""
        is_rollback = rollback is not None
        with open_mirror(self.config, resume_from, self.dist, self.display.message, is_rollback=is_rollback) as mirror:
            chosen = choose_micro_batch(self.config, mirror.resume_from, self.dist)
            return self._train(
                with_micro_batch(self.config, chosen), chosen, mirror, resume_from, launched_at, rollback
            )

    def _train(
        self,
        config: RunConfig,
        micro_batch: MicroBatch | None,
        mirror: Mirror,
        resume_from: ResumeFrom,
        launched_at: float,
        rollback: Rollback | None,
    ) -> Outcome | _Returned:
        dist, stop, display = self.dist, self.stop, self.display
        with (
            _open_run(
                config,
                mirror.resume_from,
                self.argv,
                dist,
                creates=not isinstance(resume_from, Path),
                notes={LAUNCH_NOTE: launched_at, ENTERED_NOTE: self.entered_at},
            ) as run,  # fmt: skip
            run.removing_if_refused(),
            open_log(run, display, dist) as log,
            translate_machine_errors(run.directory),
            run.explaining_lost_ranks(),
            run.explaining_moved_directory(),
            contextlib.closing(self._open_workload(config, micro_batch, run, log)) as workload,
        ):
            attach_taps(workload.engine, self.taps)
            if dist.is_main:
                checkpoint = _named_checkpoint(resume_from)
                setup = initialize_or_resume(workload, run, mirror, checkpoint, self.named_keys, rollback)
            else:
                setup = attach(workload, run, mirror)
            compare_plans(setup)
            trusted_code.trust(config_values(config), run.directory)
            record_taps(self.taps, run, log)
            report_changed_functions(run.directory, setup.state.progress.step, config, log)
            with stop.deferred(), open_session(setup, display, stop, self.tasks) as session:
                try:
                    progress = loop.train(session, session.validation.evaluations.best(setup.state.progress))
                except RollbackRequested as request:
                    run.outcome = "rolled_back"
                    return _Returned(run.directory, request.rollback)
                speed = session.records.observer.finish(progress)
            text = f"Finished after {pluralize(progress.step, 'step')}"
            log.event("finished", text, step=progress.step, chain=progress.chain)
            return Outcome(
                run.directory, setup.state.progress.step, progress, setup.state.horizon,
                session.validation.evaluations.losses, workload.engine.fingerprint(), speed, dist.is_main,
            )  # fmt: skip

    def _open_workload(
        self, config: RunConfig, micro_batch: MicroBatch | None, run: RunContext, log: RunLog
    ) -> Workload:
        """Report what was decided or noticed about a new run, and open its workload."""
        if run.is_new:
            report_same_name(config, run.directory, log)
            if (warning := warn_of_other_ids(config)) is not None:
                log.event("tokenizer_ids", warning, level="warning")
        if micro_batch is not None:
            run.note(micro_batch_sequences=micro_batch.rows)
            log.event("micro_batch", micro_batch.text, sequences=micro_batch.rows)
        return make_workload(config, self.dist, log, self.on_progress, tokenizer_directory=run.layout.tokenizer)


def make_workload(
    config: RunConfig,
    dist: DistributedContext,
    log: RunLog,
    on_progress: PrepareProgress | None,
    *,
    build: bool = True,
    tokenizer_directory: Path | None = None,
    only_cache_root: bool = False,
) -> Workload:
    """Open the corpus and create model and engine of a configuration; a run reuses the tokenizer in its directory.

    ``only_cache_root``: its caches are read below the root of the configuration, not where they were recorded.

    Raises:
        DoesNotFitError: A step takes more memory than the machine has.
    """
    if not dist.is_main:  # the main rank builds shared caches first
        dist.barrier("corpus")
    kept = None if tokenizer_directory is None else load_run_tokenizer(tokenizer_directory, config.tokenizer)
    tokenizer = kept or configured_untrained(config.tokenizer)
    run_directory = None if tokenizer_directory is None else tokenizer_directory.parent
    # A model that does not fit its tokenizer is refused before the text is packed, if the tokenizer is known by then.
    with explaining_moved_model(run_directory):
        spec = None if tokenizer is None else resolve_model(config, tokenizer.vocab_size, run_directory)
    options = BuildOptions(on_repair=log.warning, leads=dist.local_rank == 0)
    views = None
    if run_directory is not None:
        restore = build or config.data.mode == "streaming"  # its chunks are built when they are read
        root = cache_root(config.data)
        views = RunViews.of_run(run_directory, root, restore=restore, only_root=only_cache_root)
    if run_directory is not None and views is not None and not build:  # a new attempt registers itself
        views.register(run_directory)
    started = time.perf_counter()
    corpus = prepare(config, on_progress=on_progress, build=build, options=options, tokenizer=tokenizer, views=views)
    seconds = time.perf_counter() - started
    log.quiet_event(DATA_READY, f"Data is ready after {seconds:.1f} s", seconds=seconds)
    if dist.is_main:
        dist.barrier("corpus")
    if spec is None:
        spec = resolve_model(config, corpus.tokenizer.vocab_size, run_directory)
    compare_ranks(dist, "model", spec.to_json(), "all ranks need the same tokenizer and caches")
    engine = backends.load(config.backend).create(config, spec, dist)
    with explaining_moved_model(run_directory):
        load_base(config, spec, engine)
    load_teacher(config, spec, corpus.tokenizer, engine)
    device_facts = {name: engine.environment().get(name) for name in ("device_kind", "dtype", "determinism")}
    compare_ranks(dist, "devices", device_facts, "all ranks need the same kind of device")
    check_memory_of_hosts(config, spec, engine.environment(), dist)
    return Workload(config, corpus, spec, engine, log, dist)


def workload_of_run(run_directory: Path, config: RunConfig, *, only_cache_root: bool = False) -> Workload:
    """Open what computes the steps of a run again: its tokenizer, caches that are there, and the engine."""
    kept, dist = RunLayout(run_directory).tokenizer, backends.connect(config)
    return make_workload(
        config, dist, RunLog(None), None, build=False, tokenizer_directory=kept, only_cache_root=only_cache_root
    )


def states_of_run(
    run_directory: Path, steps: Collection[int], notices: StateNotices, ranks: ComputeStates | None = None
) -> dict[int, Checkpoint]:
    """Return the states after steps of a run, computed again where they are not on disk (``states_after``)."""
    return states_after(run_directory, steps, functools.partial(workload_of_run, run_directory), notices, ranks)


def with_states(action: Callable[[], T], notices: StateNotices) -> T:
    """Return what ``action`` returns; if it needs states that are not on disk, compute them and call it again."""
    while True:
        try:
            return action()
        except StateNotOnDiskError as missing:
            if membership() is not None:  # the other ranks have failed too; the hint has the command
                raise
            states_of_run(missing.run_directory, [missing.step], notices)


def prepare_states(config: RunConfig, resume_from: ResumeFrom, notices: StateNotices) -> None:
    """Compute the states that ``RUN@STEP`` in a configuration names, for ranks, which cannot do it themselves."""
    needs_weights = is_fresh(config, resume_from) or config.loss.name == "dpo"
    for name in (config.train.from_weights if needs_weights else None, config.train.distillation.teacher):
        run, step = split_step(config.run.directory, name or "")
        if step is not None:
            states_of_run(find_run(config.run.directory, run), [step], notices)


def _check_groups(config: RunConfig) -> None:
    """Check the names in ``optimizer.groups`` before anything is built; a vocabulary does not change them."""
    if config.optimizer.groups and config.model.kind == "decoder":
        optimizer_groups(resolve_model(config, config.model.vocab_size or 1), config.optimizer)


def _open_run(
    config: RunConfig, resume_from: str | Path, argv: Sequence[str] | None, dist: DistributedContext, *, creates: bool,
    notes: Mapping[str, float],
) -> RunContext:  # fmt: skip
    """Open the run on the main rank; join it on the others."""
    if not dist.is_main:
        opened = dist.broadcast("run")
        return RunContext.join(Path(opened["directory"]), config, opened["attempt"], dist)
    run = _open_as_main(config, resume_from, argv, dist, creates=creates)
    run.note(**notes)
    directory = str(run.directory.absolute())
    dist.broadcast("run", {"directory": directory, "attempt": run.attempt})
    return run


def _open_as_main(
    config: RunConfig, resume_from: str | Path, argv: Sequence[str] | None, dist: DistributedContext, *, creates: bool
) -> RunContext:
    if isinstance(resume_from, Path):
        directory = run_of_checkpoint(resume_from) or resume_from
        return RunContext.open(directory, config, argv=argv, distributed=dist, creates=creates)
    enter = RunContext.create if resume_from == "never" else RunContext.open_or_create
    return enter(config, argv=argv, distributed=dist)


def _named_checkpoint(resume_from: str | Path) -> Path | None:
    """Return the checkpoint that a path names; ``None`` if it names a run."""
    return resume_from if isinstance(resume_from, Path) and run_of_checkpoint(resume_from) is not None else None


def _fit_to_time(
    config: RunConfig, seconds: float, dist: DistributedContext, display: Display, on_progress: PrepareProgress | None
) -> RunConfig:
    """Set the number of steps to what fits into ``seconds`` from now, measured with the run's own micro-batch."""
    log = RunLog(None, echo=display.message)

    def open_workload() -> Workload:
        decided = with_micro_batch(config, choose_micro_batch(config, "never", dist))
        return make_workload(time_budget.with_num_steps(decided, 1), dist, log, on_progress)

    return time_budget.fit_to_time(config, seconds, dist, log, open_workload)
