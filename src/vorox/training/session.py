"""Everything that the loop needs, opened for one process and closed after it.

In: an open run directory, its configuration, the corpus and a fresh engine. Out: the state that the run stands in
(fresh, or exactly where it stopped) and the parts of the loop. Nothing of the run changes before configuration,
environment and plan have been compared with what is recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vorox.core.config import config_digest, differences, flat_values
from vorox.core.distributed_context import DistributedContext
from vorox.core.engine import Engine
from vorox.core.errors import VoroxError
from vorox.core.log import RunLog
from vorox.core.records import Progress
from vorox.core.redaction import redact_value
from vorox.core.run_context import RunContext, recorded_config
from vorox.core.schema import RunConfig
from vorox.data.dataset import Corpus
from vorox.data.loader import BatchStream, first_cursor
from vorox.data.plan import Plan
from vorox.data.plan_events import Extension
from vorox.experiments.tracking import Tracker
from vorox.models import flops, memory
from vorox.models.huggingface import huggingface_files
from vorox.models.spec import ModelSpec
from vorox.runtime.ceiling import measure_ceiling, peak_flops_per_second, training_shapes
from vorox.runtime.throughput import Limits, Throughput
from vorox.training import feed, resume, sampling
from vorox.training.chain import CHAIN_NAME, ReplayChain
from vorox.training.checkpointing import Checkpointer, RunState, checkpoint_path
from vorox.training.display import Display
from vorox.training.evaluate import Evaluations
from vorox.training.history import read_history
from vorox.training.ledger import Ledger
from vorox.training.loop import Run
from vorox.training.observer import Observer, Queue
from vorox.training.provenance import Provenance, open_provenance
from vorox.training.schedule import Horizon, Schedule, horizon
from vorox.training.starting_weights import start_from_weights
from vorox.training.stop import StopRequest

DETERMINISM = {
    "D0": "nothing is promised",
    "D1": "the same batches, not the same bits",
    "D2": "the same bits on this machine",
}
_LENGTH_KEYS = (
    "train.num_steps", "train.num_tokens", "train.num_epochs", "train.epoch_dataset_fraction", "schedule.warmup"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run is made from: the same for training and for replay."""

    config: RunConfig
    corpus: Corpus
    spec: ModelSpec
    engine: Engine
    log: RunLog

    def close(self) -> None:
        """End what is built in the background."""
        self.corpus.close()


def begin(setting: Setting, run: RunContext, checkpoint: Path | None) -> tuple[RunState, Plan]:
    """Where the run stands, with the engine standing there too, and the plan of its data.

    Args:
        setting: What the run is made from.
        run: The open run; its recorded configuration is replaced once everything agrees.
        checkpoint: Start from this one instead of the newest.

    Raises:
        ConfigError: The configuration asks for another run than the recorded one.
        CheckpointError: No checkpoint is valid, or it is of another model or plan.
        DataError: The caches are no longer what the plan was made for.
    """
    directory, config, corpus, log = run.directory, setting.config, setting.corpus, setting.log
    recorded = recorded_config(directory)
    changes = resume.check_config(recorded, config)
    state = resume.restore(directory, setting.engine, spec=setting.spec.to_json(), log=log, checkpoint=checkpoint)
    length, position = _length(setting), 0
    if state is not None:
        position = state.progress.cursor.position
        if run.plan_path.exists():  # nothing is appended to a plan that is another run's
            resume.check_plan(Plan.open(run.plan_path), state.progress.cursor)
        if not _has_other_length(directory, config, state.progress.step):
            length = _as_begun(setting, state.horizon, length)  # fixed then, whatever the caches hold by now
    plan = feed.open_plan(
        run.plan_path, config, corpus, length.total_steps, position=position, reached=_reached(directory, config),
        mixture_changed=state is None or resume.mixture_changed(recorded, config), tell=_tell(log),
    )  # fmt: skip
    _record_length(plan, position, state, length)
    if state is None:
        started = start_from_weights(config, setting.spec, setting.engine)
        if started is not None:
            run.note(**started)
            log.event("started_from", f"Weights of {started['from_weights']}", **started)
        state = RunState(Progress(0, 0, first_cursor(plan, config.run.seed)), length)
    else:
        resume.check_plan(plan, state.progress.cursor)
        log.event("resumed", f"Resuming after step {state.progress.step:,}", step=state.progress.step)
    cached = length.cache_warning(num_cached_rows(corpus), config.train.global_batch_sequences)
    for warning in filter(None, (length.warning, cached)):
        log.event("long_warmup", warning, level="warning")
    for note in corpus.notes:
        log.event(f"source_{note.kind}", note.text, level="warning")
    if corpus.notes:
        run.note(sources=[note.text for note in corpus.notes])
    if changes:
        listed = "; ".join(map(str, changes))
        log.event("config_changed", f"The configuration differs from the recorded one: {listed}", level="warning")
    resume.abandon_after(directory, state.progress.step, log)
    resume.record_config_change(directory, recorded, config, state.progress.step)
    if changes:
        run.record_config()
    return replace(state, horizon=length), plan


def _has_other_length(directory: Path, config: RunConfig, step: int) -> bool:
    """Whether the configuration says another length than the one that the checkpoint of a step was made with."""
    before, _ = resume.config_in_force(directory, step - 1)
    return any(change.key.startswith(_LENGTH_KEYS) for change in differences(before, config))


def _length(setting: Setting) -> Horizon:
    """The length that the configuration asks for, by what is known of the full dataset now."""
    size = feed.dataset_size(setting.config, setting.corpus)
    length = horizon(setting.config, num_train_rows=size.rows, full_dataset_tokens=size.tokens)
    if size.is_exact:
        return replace(length, dataset_tokens=size.tokens)
    setting.log.event(
        "dataset_estimate", f"The full dataset has {size}", tokens=size.tokens, rows=size.rows,
        error_fraction=size.error_fraction,
    )  # fmt: skip
    return replace(length, dataset_tokens=size.tokens, dataset_error_fraction=size.error_fraction)


def _as_begun(setting: Setting, begun: Horizon, now: Horizon) -> Horizon:
    """The recorded length of a run; longer if its caches grew and it is to follow them."""
    train = setting.config.train
    if train.num_epochs is None or now.total_steps == begun.total_steps:
        return begun
    known = f"{now.dataset_tokens:,} tokens" if now.dataset_tokens is not None else "another number of rows"
    text = (
        f"The caches are known to hold {known} by now: {train.num_epochs:g} epochs of them are {now.total_steps:,} "
        f"steps; the run began with {begun.total_steps:,}"
    )
    follows = train.follow_growth and now.total_steps > begun.total_steps
    what = "and is extended to them" if follows else "and keeps them (train.follow_growth=true would extend it)"
    setting.log.event("dataset_grew", f"{text} {what}", total_steps=now.total_steps, level="warning")
    return replace(begun, total_steps=now.total_steps) if follows else begun


def _record_length(plan: Plan, position: int, state: RunState | None, length: Horizon) -> None:
    """Record in the plan that the length changed on the way, so that a replay knows every step's learning rate."""
    before = None if state is None else state.horizon.total_steps
    last = plan.extensions[-1].total_steps if plan.extensions else before
    if before is not None and length.total_steps not in (before, last):
        plan.add([Extension(position, before, length.total_steps)])


def _reached(directory: Path, config: RunConfig) -> int:
    """The furthest position that is recorded to have been trained on."""
    step = max(read_history(directory / CHAIN_NAME), default=0)
    return step * config.train.global_batch_sequences


def _tell(log: RunLog) -> Callable[[str, str], None]:
    """What the plan says of itself, into the log; a changed mixture is never said quietly."""
    return lambda kind, text: log.event(kind, text, level="info" if kind == "segment" else "warning")


def num_cached_rows(corpus: Corpus) -> int:
    """Rows of all sources that are built."""
    return sum(reader.num_rows for reader in corpus.train)


@contextlib.contextmanager
def open_log(run: RunContext, display: Display, distributed: DistributedContext) -> Generator[RunLog]:
    """The log of this attempt, which also takes what libraries say and the error that ends the run."""
    log = RunLog(run.directory, distributed=distributed, attempt=run.attempt, echo=display.message)
    try:
        with log.capture():
            yield log
    except BaseException as error:
        log.exception(error)
        raise
    finally:
        log.close()


@contextlib.contextmanager
def open_session(
    setting: Setting, run: RunContext, state: RunState, plan: Plan, display: Display, stop: StopRequest
) -> Generator[tuple[Run, Progress]]:
    """The parts of the loop, and where it starts."""
    config, corpus, engine = setting.config, setting.corpus, setting.engine
    progress, total_steps = state.progress, state.horizon.total_steps
    validation = feed.validation_set(config, corpus)
    byte_lengths = corpus.tokenizer.token_byte_lengths() if corpus.tokenizer.lossless else None
    evaluations = Evaluations(
        run.directory, config.eval, total_steps, progress, batches=validation, token_byte_lengths=byte_lengths
    )
    checkpointer = Checkpointer(
        run.directory,
        config.checkpoint,
        state.horizon,
        describe=_description(setting),
        companions={
            **huggingface_files(setting.spec, end_of_text_id=corpus.tokenizer.end_of_text_id),
            **corpus.tokenizer.files(),
        },
        eval_losses=evaluations.losses,
        saved_step=progress.step if checkpoint_path(run.directory, progress.step).exists() else None,
        log=setting.log,
    )
    corpus.tokenizer.save(run.tokenizer_directory)
    facts = resume.environment(engine)
    setting.log.event(
        "engine",
        f"{setting.spec.num_parameters:,} parameters on {facts.get('device', engine.name)}, "
        f"{total_steps:,} steps; determinism {facts['determinism']}: {DETERMINISM[str(facts['determinism'])]}",
        environment=facts,
    )
    tracker = Tracker.open(
        run.directory, config.log, attempt=run.attempt, resume_step=progress.step, log=setting.log,
        settings=redact_value(flat_values(config)),
    )  # fmt: skip
    with (
        contextlib.closing(tracker),
        open_provenance(run, config.log, progress, plan, feed.plan_readers(plan, corpus), setting.log) as provenance,
        feed.training_batches(
            config, corpus, plan, engine.data_shard, progress.cursor, total_steps=total_steps,
            stop=lambda: bool(stop.requested), tell=_tell(setting.log),
        ) as batches,
    ):  # fmt: skip
        observer = _observer(setting, tracker, display, state.horizon, batches, checkpointer, provenance)
        ledger = Ledger(
            ReplayChain(run.directory, progress),
            max_nonfinite_steps=config.train.max_nonfinite_steps,
            nonfinite_in_a_row=state.nonfinite_in_a_row,
            on_start=observer.started,
            on_step=observer.step,
        )
        schedule = Schedule.of(config.schedule, config.optimizer, state.horizon)
        parts = Run(engine, batches, schedule, ledger, checkpointer, evaluations, observer, stop)
        try:
            yield parts, evaluations.best(progress)
        except VoroxError as error:
            error.saved = error.saved or checkpointer.safe()
            raise


def _description(setting: Setting) -> dict[str, Any]:
    """What every manifest says about the run."""
    return {
        "backend": setting.config.backend,
        "spec": setting.spec.to_json(),
        "config_digest": config_digest(setting.config),
        "tokenizer": setting.corpus.tokenizer.fingerprint,
        "environment": resume.environment(setting.engine),
    }


def _observer(
    setting: Setting,
    tracker: Tracker,
    display: Display,
    length: Horizon,
    batches: BatchStream,
    checkpointer: Checkpointer,
    provenance: Provenance,
) -> Observer:
    config, tokenizer = setting.config, setting.corpus.tokenizer
    settings = sampling.SamplingSettings(
        max_new_tokens=config.eval.sample_tokens,
        temperature=config.eval.sample_temperature,
        top_k=config.eval.sample_top_k,
        seed=config.run.seed,
        vocab_size=tokenizer.vocab_size,
        end_of_text_id=tokenizer.end_of_text_id,
        max_positions_tokens=setting.spec.max_positions_tokens,
    )
    for prompt, ids in zip(config.eval.prompts, sampling.encode_prompts(tokenizer, config.eval.prompts), strict=True):
        sampling.check_prompt(ids, settings, where=f"eval.prompts: {prompt!r}")
    return Observer(
        log=setting.log,
        tracker=tracker,
        display=display,
        throughput=Throughput(_limits(setting)),
        provenance=provenance,
        horizon=length,
        every_steps=config.log.every_steps,
        rows_per_epoch=max(
            1, round(feed.dataset_size(config, setting.corpus).rows * config.train.epoch_dataset_fraction)
        ),
        vocab_size=setting.spec.vocab_size,
        engine=setting.engine,
        queue=Queue(
            wait_seconds=lambda: batches.wait_seconds,
            depth=lambda: batches.queue_depth,
            capacity=config.data.loader.prefetch_batches if config.data.loader.num_threads else 0,
            building=setting.corpus.streams.metrics if setting.corpus.streams is not None else dict[str, float],
        ),
        complete=lambda engine: sampling.complete(engine, tokenizer, config.eval.prompts, settings),
        seconds_since_save=checkpointer.seconds_since_save,
        planned_memory_bytes=float(memory.planned_memory(setting.spec, config).total_bytes),
        measure_ceiling=(lambda: _matmul_ceiling(setting)) if config.log.matmul_ceiling else None,
    )


def _limits(setting: Setting) -> Limits:
    """What the speed is held against: the model's arithmetic and the data sheet of the device."""
    config, spec, length = setting.config, setting.spec, setting.config.data.sequence_length_tokens
    dtype = config.precision.dtype
    arithmetic = "tf32" if dtype == "fp32" and config.precision.matmul == "tf32" else dtype
    # Where documents are kept apart, most of the attention may be skipped; the matrices never.
    least = 6.0 * flops.num_matmul_weights(spec)
    return Limits(
        flops_per_token=flops.flops_per_token(spec, length),
        least_flops_per_token=least if config.data.document_mask else flops.causal_flops_per_token(spec, length),
        peak_flops_per_second=peak_flops_per_second(str(setting.engine.environment().get("device", "")), arithmetic),
        ceiling_flops_per_second=_matmul_ceiling(setting) if config.log.matmul_ceiling else None,
    )


def _matmul_ceiling(setting: Setting) -> float:
    """What this machine reaches on the matrices of this model, measured in a moment before step 1."""
    config, spec = setting.config, setting.spec
    weights = [row.shape for row in spec.parameters if row.kind == "matrix"] + [(spec.vocab_size, spec.hidden_size)]
    positions = config.train.micro_batch_sequences * config.data.sequence_length_tokens
    shapes = training_shapes([(shape[0], shape[1]) for shape in weights], positions)
    measured = measure_ceiling(shapes, setting.engine.matmul_seconds, warmup_seconds=0.0, repeats=3)
    setting.log.info(f"Matrix products of this model run at {measured.flops_per_second / 1e9:,.0f} GFLOP/s here")
    return measured.flops_per_second
