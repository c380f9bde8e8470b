"""Start-up: initialise a new run, or restore one from its newest valid checkpoint.

In: a run's workload and its open directory. Out: a ``TrainingSetup`` whose engine holds the state that the loop starts
from. Configuration, environment and plan are compared with the recorded ones before anything of the run changes. The
main rank decides and writes (``initialize_or_resume``); the other ranks follow (``attach``) and load their own engines.

A resume, in order: ``resume.choose_checkpoint`` verifies a checkpoint; ``resume_settings`` compares the configuration
with it; ``resume.restore`` loads the engine and compares plan, cursor and replay chain; ``run_plan`` compares the plan
with the configuration and adds events; ``session.open_session`` opens the loader at the cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from vorox.core.batch import Progress
from vorox.core.batch_sizes import batch_sizes_of
from vorox.core.config import Difference, differences
from vorox.core.errors import ConfigError
from vorox.core.log import RunLog
from vorox.core.pluralize import pluralize
from vorox.core.rank_comparison import compare_ranks
from vorox.core.run_context import RunContext, recorded_config
from vorox.core.run_lookup import run_argument, run_attempts
from vorox.core.schema import RunConfig
from vorox.core.staged_directory import read_manifest
from vorox.data.corpus import Corpus
from vorox.data.loader import first_cursor
from vorox.data.plan import DataPlan
from vorox.data.plan_events import PlanEvent, RollbackEvent
from vorox.experiments.tracking import check_sinks
from vorox.training import resume, resume_settings, run_plan, user_functions
from vorox.training.checkpoints.init_from import init_from_weights
from vorox.training.checkpoints.store import Checkpoint, RunState, step_directories
from vorox.training.checkpoints.weights_source import check_tokenizer
from vorox.training.evaluation.sampling import PromptSampler
from vorox.training.loss_spikes import Rollback
from vorox.training.mirror import Mirror
from vorox.training.provenance_recorder import metadata_target
from vorox.training.recomputation import check_recomputation
from vorox.training.replay_chain import examine_chain, void_later_steps
from vorox.training.schedule import Horizon, Schedule, horizon
from vorox.training.workload import Workload

_CHECKPOINT, _STATE = "checkpoint", "state"
"""Topics that the main rank broadcasts."""


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """Everything that the training loop starts from.

    Attributes:
        workload: Configuration, corpus, model and engine; the engine holds ``state``.
        run: The open run directory.
        mirror: The copy of the run in a store, if any.
        plan: The data plan.
        state: Progress and length.
    """

    workload: Workload
    run: RunContext
    mirror: Mirror
    plan: DataPlan
    state: RunState


def initialize_or_resume(
    workload: Workload,
    run: RunContext,
    mirror: Mirror,
    checkpoint: Path | None,
    named_keys: Collection[str] = (),
    rollback: Rollback | None = None,
) -> TrainingSetup:
    """Initialise or restore the engine, and update plan and records; on the main rank.

    Args:
        workload: Configuration, corpus, model and engine.
        run: The open run; its recorded configuration is replaced once all checks pass.
        mirror: Its copy in a store.
        checkpoint: Resume from this one instead of the newest.
        named_keys: Settings and sections given with the command.
        rollback: Resume from a checkpoint before a loss spike, and skip the steps that led to it.

    Raises:
        ConfigError: The configuration differs from the recorded one in a way that a resume does not allow.
        CheckpointError: No checkpoint is valid, or it belongs to a different model or plan.
        DataError: The caches differ from those in the plan.
    """
    directory, config, log = run.directory, workload.config, workload.log
    recorded = recorded_config(directory) if run.layout.config.exists() else config
    if rollback is None:
        found = resume.choose_checkpoint(run, log, checkpoint)
    else:
        run.begin()  # the run itself has decided to return to an earlier state
        found = resume.choose_checkpoint_before(directory, log, rollback)
    if found is not None:
        recorded = resume_settings.check_unedited(directory, found, recorded, config, named_keys)
    changes = resume_settings.check_config(recorded, config)
    workload.distributed.broadcast(_CHECKPOINT, None if found is None else str(found.path))
    length = _length(workload)
    if found is None:
        state, plan, last_step = None, DataPlan.find(run.layout.plan), examine_chain(directory).last_step
    else:
        restored = resume.restore(workload, directory, found)
        state, plan, last_step = restored.state, restored.plan, restored.last_recorded_step
        if not _is_length_changed(directory, config, state.progress.step):
            length = _recorded_length(workload, state.horizon, length)  # fixed at the start of the run
        _check_length(directory, length.total_steps, state.progress.step)
    plan, events = run_plan.update_plan(
        plan, run.layout.plan, config, workload.corpus, length,
        position=0 if state is None else state.progress.cursor.position,
        reached=batch_sizes_of(config).position_of(last_step),
        report=plan_reporter(log),
    )  # fmt: skip
    if rollback is not None:
        events.append(_rollback_event(rollback, found, config, log))
    if state is None:
        _initialize_weights(workload, run)
    _check_parts(workload, directory, length)
    run.begin()
    if state is not None:
        log.event("resumed", f"Resuming from step {state.progress.step:,}", step=state.progress.step)
    if state is None or not _is_finished(state, length):
        _commit(workload, run, plan, events, 0 if state is None else state.progress.step, recorded)
    elif changes:
        text = f"Run is finished, nothing to train; not recorded: {_listed(changes)}"
        log.event("config_kept", text, level="warning")
    _report_warnings(workload, run, length)
    if state is None:
        state = RunState(Progress(0, 0, first_cursor(plan, config.run.seed)), length)
    state = replace(state, horizon=length)
    workload.distributed.broadcast(_STATE, state.to_json())
    _record_attempt(workload, run, length)
    return TrainingSetup(workload, run, mirror, plan, state)


def attach(workload: Workload, run: RunContext, mirror: Mirror) -> TrainingSetup:
    """Load the state that the main rank starts from; on every other rank.

    Raises:
        VoroxError: The main rank failed, with the same error.
    """
    path = workload.distributed.broadcast(_CHECKPOINT)
    if path is None:
        init_from_weights(workload.config, workload.spec, workload.engine)
    else:
        manifest = read_manifest(Path(path))
        resume.load_run(workload, Checkpoint(Path(path), manifest["metadata"]))
    state = RunState.from_json(workload.distributed.broadcast(_STATE))
    run.begin()
    plan = DataPlan.open(run.layout.plan)
    resume.check_plan(plan, state.progress.cursor)
    return TrainingSetup(workload, run, mirror, plan, state)


def compare_plans(setup: TrainingSetup) -> None:
    """Check that all ranks have the same plan, and compute the same rows for the first batch from it. A collective.

    Raises:
        ConfigError: A rank differs from rank 0.
    """
    dist, plan, cursor = setup.workload.distributed, setup.plan, setup.state.progress.cursor
    if dist.world_size == 1:
        return
    end = min(plan.start.batch_sizes.position_of(cursor.step + 1), plan.num_positions)
    rows = plan.locate(np.arange(cursor.position, end, dtype=np.int64))
    columns = (rows.source_index, rows.epoch, rows.unit_start, rows.row)
    digest = xxhash.xxh3_128_hexdigest(b"".join(column.astype("<i8").tobytes() for column in columns))
    facts = {"plan": plan.digest, "step": setup.state.progress.step, "first batch": digest}
    hint = "all ranks need the same run directory and caches"
    compare_ranks(dist, "plan", facts, hint)


def check_resume(
    config: RunConfig, directory: Path, checkpoint: Path | None, named_keys: Collection[str], total_steps: int | None
) -> None:
    """Check from the records alone whether ``initialize_or_resume`` would refuse; nothing is loaded or written.

    Raises:
        ConfigError: The change is not allowed, the length is below the finished steps, or ``config.yaml`` was edited.
        CheckpointError: The newest checkpoint has no readable manifest.
    """
    recorded = recorded_config(directory)
    steps = step_directories(directory)
    path = checkpoint or (steps[max(steps)] if steps else None)
    if path is not None:
        found = Checkpoint(path, read_manifest(path)["metadata"])
        recorded = resume_settings.check_unedited(directory, found, recorded, config, named_keys)
        if total_steps is not None:
            _check_length(directory, total_steps, found.step)
    resume_settings.check_config(recorded, config)


def _commit(
    workload: Workload, run: RunContext, plan: DataPlan, events: Sequence[PlanEvent], step: int, recorded: RunConfig
) -> None:
    """Record what this attempt changes about the run, after all checks.

    Records of later steps are voided first, so that a kill never leaves them next to a plan that they do not follow.
    """
    config, log = workload.config, workload.log
    resume.quarantine_later_checkpoints(run.directory, step, log)
    void_later_steps(run.directory, step)
    plan.add(events)
    run_plan.report_events(events, plan_reporter(log))
    resume_settings.record_config_change(run.directory, recorded, config, step)
    changes = differences(recorded, config)
    if changes:
        text = f"Configuration changed: {_listed(changes)}"
        log.event("config_changed", text, level="warning")
    if recorded_config(run.directory) != config:
        run.record_config()


def _rollback_event(rollback: Rollback, found: Checkpoint | None, config: RunConfig, log: RunLog) -> RollbackEvent:
    """Return the plan event of a rollback to a checkpoint, and log it."""
    sizes, state = batch_sizes_of(config), 0 if found is None else found.step
    event = rollback.event(state, sizes)
    first = sizes.step_at(event.start_position) + 1
    steps = f"step {rollback.step:,}" if first == rollback.step else f"steps {first:,} to {rollback.step:,}"
    text = (
        f"Rollback {rollback.number} of {config.train.max_spike_rollbacks}: loss {rollback.loss:.4g} at step "
        f"{rollback.step:,} is above {rollback.max_loss:.4g}; back to the state after step {state:,}, skipping {steps} "
        f"(`vorox data where --step {rollback.step}` shows documents)"
    )
    log.event(
        "loss_spike_rollback", text, level="warning", step=rollback.step, first_skipped_step=first, state_step=state
    )
    return event


def _report_warnings(workload: Workload, run: RunContext, length: Horizon) -> None:
    """Log warnings about length and sources before the first step."""
    cached = length.cache_warning(num_cached_rows(workload.corpus), batch_sizes_of(workload.config))
    for warning in filter(None, (length.warning, cached)):
        workload.log.event("long_warmup", warning, level="warning")
    tokens = run_plan.dataset_size(workload.config, workload.corpus).tokens
    for kind, text in (("large_step", length.step_warning(tokens)), ("repetition", length.repetition_warning(tokens))):
        if text is not None:
            workload.log.event(kind, text, level="warning")
    held_out = workload.corpus.held_out
    workload.log.event("held_out", f"Validation set: {held_out}", held_out=held_out)
    _report_changed_validation(workload, run)
    notes = workload.corpus.notes
    for note in notes:
        level = "info" if note.kind == "conversations" else "warning"
        workload.log.event(f"source_{note.kind}", note.text, level=level)
    if notes:
        run.note(sources=[note.text for note in notes])


def _report_changed_validation(workload: Workload, run: RunContext) -> None:
    """Record the content of the validation set, and report that it is not the one of an earlier attempt."""
    content = xxhash.xxh3_64_hexdigest("".join(reader.digest for reader in workload.corpus.validation).encode())
    earlier = [attempt.get("notes", {}).get("validation_set") for attempt in run_attempts(run.directory)]
    recorded = next((one for one in reversed(earlier) if one is not None), content)
    if recorded != content:
        text = "The validation set has changed since the last attempt: earlier validation losses are not comparable"
        workload.log.event("validation_set_changed", text, level="warning")
    run.note(validation_set=content)


def _initialize_weights(workload: Workload, run: RunContext) -> None:
    """Load the weights of ``train.from_weights``, if set."""
    check_tokenizer(workload.config, workload.corpus.tokenizer)
    source = init_from_weights(workload.config, workload.spec, workload.engine)
    if source is not None:
        run.note(**source)
        workload.log.event("started_from", f"Loaded initial weights from {source['from_weights']}", **source)


def _check_parts(workload: Workload, run_directory: Path, length: Horizon) -> None:
    """Check what ``session.open_session`` would refuse, before anything of the run changes.

    Raises:
        ConfigError: A package or a user function is missing, or a setting cannot be used with this engine or text.
    """
    config, engine, tokenizer, spec = workload.config, workload.engine, workload.corpus.tokenizer, workload.spec
    user_functions.identities(config)
    user_functions.open_evaluations(engine, tokenizer, config, spec, workload.log)
    PromptSampler(config, tokenizer, spec)
    Schedule.from_config(config.schedule, config.optimizer, length)
    check_recomputation(config.runtime, engine)
    check_sinks(config.log)
    metadata_target(run_directory, config.log)


def _record_attempt(workload: Workload, run: RunContext, length: Horizon) -> None:
    """Record the environment, length and caches of this attempt in ``run.json``."""
    run.note(
        environment=dict(workload.engine.environment()), total_steps=length.total_steps,
        caches={source.name: str(source.train.directory) for source in workload.corpus.sources},
        validation_caches=[str(cache.reader.directory) for cache in workload.corpus.validation_caches],
    )  # fmt: skip


def _listed(changes: Sequence[Difference]) -> str:
    return "; ".join(map(str, changes))


def _is_length_changed(directory: Path, config: RunConfig, step: int) -> bool:
    """Whether the configured length has changed since the checkpoint of a step."""
    before, _ = resume_settings.config_in_force(directory, step - 1, missing=config)
    return any(resume_settings.decides_length(change.key) for change in differences(before, config))


def _length(workload: Workload) -> Horizon:
    """Return the configured length, given the current size of the full dataset or an estimate of it."""
    size = run_plan.dataset_size(workload.config, workload.corpus)
    length = horizon(workload.config, num_train_rows=size.rows, full_dataset_tokens=size.tokens)
    if size.is_exact:
        return replace(length, dataset_tokens=size.tokens)
    workload.log.event(
        "dataset_estimate", f"Full dataset: {size}", tokens=size.tokens, rows=size.rows,
        error_fraction=size.error_fraction,
    )  # fmt: skip
    return replace(length, dataset_tokens=size.tokens, dataset_error_fraction=size.error_fraction)


def _recorded_length(workload: Workload, recorded: Horizon, now: Horizon) -> Horizon:
    """Return the recorded length; extend it if the caches grew and ``train.follow_growth`` is set."""
    train = workload.config.train
    if train.num_epochs is None or now.total_steps == recorded.total_steps:
        return recorded
    known = pluralize(now.dataset_tokens, "token") if now.dataset_tokens is not None else "another number of rows"
    text = (
        f"Dataset grew to {known}: {pluralize(train.num_epochs, 'epoch')} would be "
        f"{pluralize(now.total_steps, 'step')}; the run started with {recorded.total_steps:,}"
    )
    follows = train.follow_growth and now.total_steps > recorded.total_steps
    what = "and is extended" if follows else "and keeps that length (train.follow_growth=true extends it)"
    workload.log.event("dataset_grew", f"{text} {what}", total_steps=now.total_steps, level="warning")
    return replace(recorded, total_steps=now.total_steps) if follows else recorded


def _check_length(directory: Path, total_steps: int, step: int) -> None:
    """Refuse a length below the number of finished steps."""
    if total_steps < step:
        run = run_argument(directory)
        raise ConfigError(
            f"Run has finished {pluralize(step, 'step')}, more than the configured {total_steps:,}",
            where="train.num_steps",
            saved="nothing was changed",
            hint=f"set at least {step:,} (vorox train --resume {run} train.num_steps={2 * step}), or resume from an "
            f"earlier checkpoint (vorox checkpoints list {run})",
        )


def _is_finished(state: RunState, length: Horizon) -> bool:
    """Whether all steps are finished and the length is unchanged."""
    return state.progress.step >= length.total_steps == state.horizon.total_steps


def plan_reporter(log: RunLog) -> Callable[[str, str], None]:
    """Return a function that logs plan changes: new segments as information, all others as warnings."""
    return lambda kind, text: log.event(kind, text, level="info" if kind == "segment" else "warning")


def num_cached_rows(corpus: Corpus) -> int:
    """Return the number of built rows over all sources."""
    return sum(reader.num_rows for reader in corpus.train)
