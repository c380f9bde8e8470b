"""Run training end to end: configuration, run directory, data, engine, resume, loop.

In: a configuration. Out: a run directory in which every step can be replayed. Each part is built here, in this order,
and passed on explicitly. The command line calls ``train`` and prints; nothing here prints.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from vorox import backends
from vorox.core.batch import Progress
from vorox.core.disk_errors import translate_machine_errors
from vorox.core.distributed_context import DistributedContext
from vorox.core.engine import Engine, Tap, attach_taps
from vorox.core.errors import ConfigError
from vorox.core.log import RunLog
from vorox.core.pluralize import pluralize
from vorox.core.rank_comparison import compare_ranks
from vorox.core.run_context import RunContext, expected_directory
from vorox.core.run_layout import run_of_checkpoint
from vorox.core.schema import RunConfig
from vorox.data.cache.build import BuildOptions
from vorox.data.cache.report import PrepareProgress
from vorox.data.corpus import prepare
from vorox.data.tokenizers.loading import planned_vocab_size
from vorox.data.tokenizers.store import configured_untrained, load_run_tokenizer
from vorox.models.memory_advice import check_host_memory
from vorox.models.optimizer_groups import optimizer_groups
from vorox.models.spec import ModelSpec
from vorox.runtime.throughput import Reading
from vorox.training import auto_micro_batch, loop, time_budget
from vorox.training.auto_micro_batch import MicroBatch, with_micro_batch
from vorox.training.checkpoints.adapter_base import identify_base, load_base
from vorox.training.checkpoints.store import step_directories
from vorox.training.checkpoints.weights_source import check_weights
from vorox.training.display import Display, NoDisplay
from vorox.training.evaluation.scheduled_tasks import open_tasks
from vorox.training.inference.model_source import find_model, recorded_model
from vorox.training.loss_spikes import Rollback, RollbackRequested
from vorox.training.mirror import Mirror, open_mirror
from vorox.training.run_plan import dataset_size
from vorox.training.session import open_log, open_session
from vorox.training.startup import attach, compare_plans, initialize_or_resume
from vorox.training.stop import StopRequest
from vorox.training.teacher import find_stored_logits, find_teacher, load_teacher
from vorox.training.user_functions import record_taps, report_changed_functions
from vorox.training.workload import Workload


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        run_directory: The run.
        start_step: Steps finished when this process started.
        progress: Progress at the end.
        eval_losses: Validation loss by step.
        fingerprint: Hash of the engine's final state.
        speed: Throughput and use of time of this process.
        is_main: Whether this is the main rank, which writes and prints.
    """

    run_directory: Path
    start_step: int
    progress: Progress
    eval_losses: dict[int, float]
    fingerprint: str
    speed: Reading
    is_main: bool


def train(
    config: RunConfig,
    *,
    resume_from: Literal["auto", "never"] | Path = "auto",
    minutes: float | None = None,
    display: Display | None = None,
    on_progress: PrepareProgress | None = None,
    argv: Sequence[str] | None = None,
    named_keys: Collection[str] = (),
    taps: Sequence[Tap] = (),
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

    Raises:
        VoroxError: The run stopped before its end; ``exit_code`` gives the kind of error.
    """
    resume_from = resume_from.absolute() if isinstance(resume_from, Path) else resume_from
    dist = backends.connect(config)
    display = display if display is not None and dist.is_main else NoDisplay()
    with dist.propagating_failure(), StopRequest() as stop:
        if dist.is_main and is_fresh(config, resume_from):
            check_weights(config)
            _check_groups(config)
        if dist.is_main:
            find_teacher(config)
            find_stored_logits(config)
        tasks = open_tasks(config)
        if minutes is not None:
            config = _fit_to_time(config, time_budget.check_minutes(minutes), dist, display, on_progress)
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
        )
        ended = process.run_attempt(resume_from)
        while isinstance(ended, _Returned):
            gc.collect()  # frees the engine of the attempt before the next one is created
            ended = process.run_attempt(ended.run_directory, ended.rollback)
        return ended


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

    def run_attempt(
        self, resume_from: Literal["auto", "never"] | Path, rollback: Rollback | None = None
    ) -> Outcome | _Returned:
        """Train from the state that ``resume_from`` and ``rollback`` name, to the end or to the next rollback."""
        with open_mirror(self.config, resume_from, self.dist, self.display.message) as mirror:
            chosen = choose_micro_batch(self.config, mirror.resume_from, self.dist)
            return self._train(with_micro_batch(self.config, chosen), chosen, mirror, resume_from, rollback)

    def _train(
        self,
        config: RunConfig,
        micro_batch: MicroBatch | None,
        mirror: Mirror,
        resume_from: Literal["auto", "never"] | Path,
        rollback: Rollback | None,
    ) -> Outcome | _Returned:
        dist, stop, display = self.dist, self.stop, self.display
        with (
            _open_run(config, mirror.resume_from, self.argv, dist, creates=not isinstance(resume_from, Path)) as run,
            run.removing_if_refused(),
            open_log(run, display, dist) as log,
            translate_machine_errors(run.directory),
            run.explaining_lost_ranks(),
            contextlib.closing(self._open_workload(config, micro_batch, run, log)) as workload,
        ):
            attach_taps(workload.engine, self.taps)
            if dist.is_main:
                checkpoint = _named_checkpoint(resume_from)
                setup = initialize_or_resume(workload, run, mirror, checkpoint, self.named_keys, rollback)
            else:
                setup = attach(workload, run, mirror)
            compare_plans(setup)
            record_taps(self.taps, run, log)
            report_changed_functions(run.directory, setup.state.progress.step, config, log)
            with stop.deferred(), open_session(setup, display, stop, self.tasks) as session:
                try:
                    progress = loop.train(session, session.evaluations.best(setup.state.progress))
                except RollbackRequested as request:
                    run.outcome = "rolled_back"
                    return _Returned(run.directory, request.rollback)
                speed = session.observer.finish(progress)
            text = f"Finished after {pluralize(progress.step, 'step')}"
            log.event("finished", text, step=progress.step, chain=progress.chain)
            return Outcome(
                run.directory, setup.state.progress.step, progress, session.evaluations.losses,
                workload.engine.fingerprint(), speed, dist.is_main,
            )  # fmt: skip

    def _open_workload(
        self, config: RunConfig, micro_batch: MicroBatch | None, run: RunContext, log: RunLog
    ) -> Workload:
        """Report the micro-batch, if the run has decided on it, and open the workload."""
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
) -> Workload:
    """Open the corpus and create model and engine of a configuration; a run reuses the tokenizer in its directory.

    Raises:
        DoesNotFitError: A step takes more memory than the machine has.
    """
    if not dist.is_main:  # the main rank builds shared caches first
        dist.barrier("corpus")
    kept = None if tokenizer_directory is None else load_run_tokenizer(tokenizer_directory, config.tokenizer)
    tokenizer = kept or configured_untrained(config.tokenizer)
    run_directory = None if tokenizer_directory is None else tokenizer_directory.parent
    # A model that does not fit its tokenizer is refused before the text is packed, if the tokenizer is known by then.
    spec = None if tokenizer is None else resolve_model(config, tokenizer.vocab_size, run_directory)
    options = BuildOptions(on_repair=log.warning, leads=dist.local_rank == 0)
    corpus = prepare(config, on_progress=on_progress, build=build, options=options, tokenizer=tokenizer)
    if dist.is_main:
        dist.barrier("corpus")
    if spec is None:
        spec = resolve_model(config, corpus.tokenizer.vocab_size, run_directory)
    compare_ranks(dist, "model", spec.to_json(), "all ranks need the same tokenizer and caches")
    engine = backends.load(config.backend).create(config, spec, dist)
    load_base(config, spec, engine)
    load_teacher(config, spec, corpus.tokenizer, engine)
    device_facts = {name: engine.environment().get(name) for name in ("device_kind", "dtype", "determinism")}
    compare_ranks(dist, "devices", device_facts, "all ranks need the same kind of device")
    _check_host_memory(config, spec, engine, dist)
    return Workload(config, corpus, spec, engine, log, dist)


def _check_host_memory(config: RunConfig, spec: ModelSpec, engine: Engine, dist: DistributedContext) -> None:
    """Check that the ranks of each host fit into its memory, if they train on the CPU. A collective."""
    facts, host = engine.environment(), socket.gethostname()
    if facts.get("device_kind") == "cpu":
        ranks_by_host = dist.agree("hosts", host, Counter)
        num_devices = int(facts.get("num_devices", 1))
        num_local_devices = num_devices * ranks_by_host[host] // dist.world_size
        check_host_memory(
            spec, config, psutil.virtual_memory().total, num_devices=num_devices, num_local_devices=num_local_devices
        )


def resolve_model(config: RunConfig, tokenizer_vocab_size: int, run_directory: Path | None = None) -> ModelSpec:
    """Return the model of a configuration; a run with checkpoints keeps its transformers model.

    Raises:
        ConfigError: The model contradicts the tokenizer or the data, or the engine does not support a setting with it.
        CheckpointError: The run's adapter belongs to another base.
    """
    if config.model.kind != "huggingface":
        return backends.model_spec(config, None, revision=None, tokenizer_vocab_size=tokenizer_vocab_size)
    kept = recorded_model(run_directory)
    values, revision = (kept.config, kept.revision) if kept else ((found := find_model(config)).values, found.commit)
    spec = backends.model_spec(config, values, revision=revision, tokenizer_vocab_size=tokenizer_vocab_size)
    return identify_base(config, spec, kept)


def planned_model(config: RunConfig) -> ModelSpec:
    """Return the model of a configuration, from its settings and the ``config.json`` that they name.

    Raises:
        ConfigError: Its size depends on the text, or its activations are not known in advance.
    """
    if auto_micro_batch.is_auto(config):
        backends.check_memory_estimate(config)
    values = revision = None
    if config.model.kind == "huggingface":
        found = find_model(config)
        values, revision = found.values, found.commit
    # The embedding of a transformers model has its own rows.
    vocab_size = 1 if config.model.kind == "huggingface" else planned_vocab_size(config.tokenizer, config.model)
    spec = backends.model_spec(config, values, revision=revision, tokenizer_vocab_size=vocab_size)
    return backends.measured_spec(config, spec)


def choose_micro_batch(
    config: RunConfig, resume_from: Literal["auto", "never"] | Path, dist: DistributedContext
) -> MicroBatch | None:
    """Return the micro-batch of a run under ``auto``: rank 0 reads it from the run, or decides it. A collective.

    Raises:
        ConfigError: The memory of a step cannot be estimated.
        DoesNotFitError: No micro-batch fits.
    """
    if not auto_micro_batch.is_auto(config):
        return None

    def decide(facts: list[Any]) -> dict[str, Any]:
        found = auto_micro_batch.recorded(config, resume_from)
        return asdict(found or _estimate_micro_batch(config, facts))

    facts = auto_micro_batch.facts_of(backends.training_devices(config, dist))
    return MicroBatch(**dist.agree("micro_batch", facts, decide))


def _estimate_micro_batch(config: RunConfig, facts: Sequence[Mapping[str, Any]]) -> MicroBatch:
    """Return the most rows that the memory estimate of a new run fits into the devices of all ranks."""
    auto_micro_batch.check_estimable(config)
    try:
        spec = planned_model(config)
    except ConfigError as error:
        raise auto_micro_batch.explained(error) from error
    return auto_micro_batch.decide(config, spec, auto_micro_batch.combined(facts))


def _check_groups(config: RunConfig) -> None:
    """Check the names in ``optimizer.groups`` before anything is built; a vocabulary does not change them."""
    if config.optimizer.groups and config.model.kind == "decoder":
        optimizer_groups(resolve_model(config, config.model.vocab_size or 1), config.optimizer)


def _open_run(
    config: RunConfig, resume_from: str | Path, argv: Sequence[str] | None, dist: DistributedContext, *, creates: bool
) -> RunContext:
    """Open the run on the main rank; join it on the others."""
    if not dist.is_main:
        opened = dist.broadcast("run")
        return RunContext.join(Path(opened["directory"]), config, opened["attempt"], dist)
    run = _open_as_main(config, resume_from, argv, dist, creates=creates)
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


def is_fresh(config: RunConfig, resume_from: str | Path) -> bool:
    """Whether the run starts at step 1: it has no checkpoint on this machine and no mirror."""
    directory, exists = expected_directory(config, resume_from)
    return config.checkpoint.mirror is None and not (exists and step_directories(directory))


def _named_checkpoint(resume_from: str | Path) -> Path | None:
    """Return the checkpoint that a path names; ``None`` if it names a run."""
    return resume_from if isinstance(resume_from, Path) and run_of_checkpoint(resume_from) is not None else None


def _fit_to_time(
    config: RunConfig, seconds: float, dist: DistributedContext, display: Display, on_progress: PrepareProgress | None
) -> RunConfig:
    """Set the number of steps to what fits into ``seconds`` from now, as measured with a throwaway engine.

    The main rank's clock decides.
    """
    started, log = time.perf_counter(), RunLog(None, echo=display.message)
    short = time_budget.with_num_steps(with_micro_batch(config, choose_micro_batch(config, "never", dist)), 1)
    with contextlib.closing(make_workload(short, dist, log, on_progress)) as workload:
        costs = time_budget.measure_run(workload.config, workload.corpus, workload.engine, dist)
        dataset_tokens = dataset_size(config, workload.corpus).tokens
    left_seconds = seconds - (time.perf_counter() - started)
    num_steps = dist.broadcast("minutes", time_budget.steps_within(left_seconds, costs, config))
    log.info(f"Fitting {pluralize(num_steps, 'step')} into {seconds / 60:g} min ({costs})")
    fitted, note = time_budget.fit_warmup(time_budget.with_num_steps(config, num_steps), dataset_tokens)
    if note is not None:
        log.info(note)
    return fitted
