"""Start-up: initialise a new run, or restore one from its newest valid checkpoint.

In: a run's workload and its open directory. Out: a ``TrainingSetup`` whose engine holds the state that the loop starts
from. Configuration, environment and plan are compared with the recorded ones before anything of the run changes. The
main rank decides and writes (``initialize_or_resume``); the other ranks follow (``attach``) and load their own engines.

A resume, in order: ``resume.choose_checkpoint`` verifies a checkpoint; ``resume_settings`` compares the configuration
with it; ``resume.restore`` loads the engine and compares plan, cursor and replay chain; ``run_plan`` compares the plan
with the configuration and adds events; ``session.open_session`` opens the loader at the cursor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from vorox.core.batch import Progress
from vorox.core.batch_sizes import batch_sizes_of
from vorox.core.config import Difference, differences
from vorox.core.config.locations import LOCATIONS, MODEL_LOCATIONS, with_locations_of
from vorox.core.errors import ConfigError
from vorox.core.pluralize import pluralize
from vorox.core.ranks.rank_comparison import compare_ranks
from vorox.core.run_layout import step_directories
from vorox.core.schema import RunConfig
from vorox.data.cache.upkeep.retention import register_run
from vorox.data.corpus.corpus import Corpus
from vorox.data.order.loader import first_cursor
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import PlanEvent, RollbackEvent
from vorox.experiments.tracking import check_sinks
from vorox.records.log import RunLog
from vorox.records.replay_chain import examine_chain, void_later_steps
from vorox.records.run_context import RunContext
from vorox.records.run_lookup import attempt_notes, run_argument
from vorox.records.run_pins import pin_checkpoint
from vorox.training import user_functions
from vorox.training.checkpoints.store import Checkpoint, RunState
from vorox.training.inference.sampling import PromptSampler
from vorox.training.loop.provenance_recorder import metadata_target
from vorox.training.loop.recomputation import check_recomputation
from vorox.training.mirror import Mirror
from vorox.training.origin.model_origin import find_origin
from vorox.training.origin.origin_checks import check_tokenizer
from vorox.training.resume import resume, resume_settings
from vorox.training.steps import run_plan
from vorox.training.steps.loss_spikes import Rollback
from vorox.training.steps.schedule import Horizon, Schedule, holding_overrides, horizon, learning_rate_warnings
from vorox.training.steps.workload import Workload
from vorox.training.weights.init_from import init_from_weights, initialize_again

_ENTRY_NAME = re.compile(r"\.\d+\.name$")
_CHECKPOINT, _STATE = "checkpoint", "state"
"""Topics that the main rank broadcasts."""

_JUMP = 1.1
"""Factor of the learning rate from one step to the next above which a resume warns."""


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
    found, recorded = _starting_point(workload, run, checkpoint, named_keys, rollback)
    changes = resume_settings.check_config(recorded, config, directory)
    is_moved = any(entry.key in MODEL_LOCATIONS for entry in changes)
    workload.distributed.broadcast(_CHECKPOINT, None if found is None else [str(found.path), is_moved])
    length = _length(workload)
    if found is None:
        state, plan, last_step = None, DataPlan.find(run.layout.plan), examine_chain(directory).last_step
    else:
        if is_moved:
            initialize_again(config, workload.spec, workload.engine, directory)
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
    step = 0 if state is None else state.progress.step
    is_chosen = checkpoint is not None or rollback is not None
    again = resume_settings.check_again(directory, config, step, last_step, is_chosen=is_chosen)
    run.begin()
    if state is not None:
        log.event("resumed", f"Resuming from step {state.progress.step:,}", step=state.progress.step)
        if run.attempt == 1:
            text = f"{run.layout.record.name} was missing: its record of earlier attempts is lost, and a new one starts"
            log.event("record_lost", text, level="warning")
        _report_jump(workload, recorded, state, length)
    elif run.attempt > 1 and rollback is None:
        _report_start_again(log, last_step)
    again = [entry for entry in again if entry.key not in {change.key for change in changes}]
    if again:
        text = f"Steps {step + 1:,} to {last_step:,} are computed again under other settings: {_listed(again)}"
        log.event("other_settings", text, level="warning", step=step)
    workload.corpus.view_recorder(directory).record()
    run.note(**workload.corpus.view_notes)
    if state is None or not _is_finished(state, length):
        _commit(workload, run, plan, events, 0 if state is None else state.progress.step, recorded)
    elif changes:
        _keep_locations(run, recorded, changes, log)
    _report_warnings(workload, run, length)
    if state is None:
        state = RunState(Progress(0, 0, first_cursor(plan, config.run.seed)), length)
    state = replace(state, horizon=length)
    workload.distributed.broadcast(_STATE, state.to_json())
    _record_attempt(workload, run, length)
    return TrainingSetup(workload, run, mirror, plan, state)


def _starting_point(
    workload: Workload,
    run: RunContext,
    checkpoint: Path | None,
    named_keys: Collection[str],
    rollback: Rollback | None,
) -> tuple[Checkpoint | None, RunConfig]:
    """Return the checkpoint to continue from, ``None`` at the start of a run, and the recorded configuration."""
    config, log = workload.config, workload.log
    recorded = resume_settings.config_as_recorded(run.directory) if run.layout.config.exists() else config
    if rollback is None:
        found = resume.choose_checkpoint(run, log, checkpoint)
    else:
        run.begin()  # the run itself has decided to return to an earlier state
        found = resume.choose_checkpoint_before(run.directory, log, rollback)
    if found is None:
        return None, recorded
    return found, resume_settings.check_unedited(run.directory, found, recorded, config, named_keys)


def attach(workload: Workload, run: RunContext, mirror: Mirror) -> TrainingSetup:
    """Load the state that the main rank starts from; on every other rank.

    Raises:
        VoroxError: The main rank failed, with the same error.
    """
    checkpoint = workload.distributed.broadcast(_CHECKPOINT)
    if checkpoint is None:
        init_from_weights(workload.config, workload.spec, workload.engine)
    else:
        path, is_moved = checkpoint
        if is_moved:
            initialize_again(workload.config, workload.spec, workload.engine, run.directory)
        resume.load_run(workload, Checkpoint.read(Path(path)))
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
    recorded = resume_settings.config_as_recorded(directory)
    steps = step_directories(directory)
    path, step = checkpoint or (steps[max(steps)] if steps else None), 0
    if path is not None:
        found = Checkpoint.read(path)
        step = found.step
        recorded = resume_settings.check_unedited(directory, found, recorded, config, named_keys)
        if total_steps is not None:
            _check_length(directory, total_steps, found.step)
    resume_settings.check_config(recorded, config, directory)
    last_step = examine_chain(directory).last_step
    resume_settings.check_again(directory, config, step, last_step, is_chosen=checkpoint is not None)


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
    if resume_settings.config_as_recorded(run.directory) != config:
        run.record_config()


def _keep_locations(run: RunContext, recorded: RunConfig, changes: Sequence[Difference], log: RunLog) -> None:
    """Record of a finished run where its model and tokenizer are now; report other changes, which are not recorded."""
    moved = [entry for entry in changes if entry.key in LOCATIONS]
    others = [entry for entry in changes if entry not in moved]
    if moved:
        run.record_config(with_locations_of(recorded, run.config))
        log.event("model_moved", f"Recorded the new place of the run's model: {_listed(moved)}")
    if others:
        text = f"Run is finished, nothing to train; not recorded: {_listed(others)}"
        log.event("config_kept", text, level="warning")


def _rollback_event(rollback: Rollback, found: Checkpoint | None, config: RunConfig, log: RunLog) -> RollbackEvent:
    """Return the plan event of a rollback to a checkpoint, and log it."""
    sizes, state = batch_sizes_of(config), 0 if found is None else found.step
    event = rollback.event(state, sizes)
    first = sizes.step_at(event.start_position) + 1
    steps = f"step {rollback.step:,}" if first == rollback.step else f"steps {first:,} to {rollback.step:,}"
    text = (
        f"Rollback {rollback.number} of {config.train.max_spike_rollbacks}: loss {rollback.loss:.4g} at step "
        f"{rollback.step:,} is above {rollback.max_loss:.4g}; back to the state after step {state:,}, skipping {steps} "
        f"(`vorox explain RUN --step {rollback.step}` finds the documents that caused it)"
    )
    log.event(
        "loss_spike_rollback", text, level="warning", step=rollback.step, first_skipped_step=first, state_step=state
    )
    return event


def _report_jump(workload: Workload, recorded: RunConfig, state: RunState, length: Horizon) -> None:
    """Log that another length makes the learning rate jump, and what avoids it."""
    config, step = workload.config, state.progress.step
    if length.total_steps == state.horizon.total_steps or step == 0:
        return
    before = Schedule.from_config(recorded.schedule, recorded.optimizer, state.horizon)
    last, following = before.lr(step - 1), Schedule.from_config(config.schedule, config.optimizer, length).lr(step)
    expected = max(last, before.lr(step)) if step < before.total_steps else last
    if recorded.optimizer.lr != config.optimizer.lr:
        return
    hold = holding_overrides(config.schedule, state.horizon)
    text = f"Learning rate jumps from {last:.2g} to {following:.2g} after step {step:,}: "
    if following > _JUMP * expected and hold:
        text += (
            f"the schedule now spans {length.total_steps:,} steps instead of {state.horizon.total_steps:,}, and the "
            f"loss rises before it falls. To train further without a jump, stop now and add {hold} to the command"
        )
    elif config.schedule.name == "hold" and not last / _JUMP <= following <= _JUMP * last:
        text += (
            "schedule.name=hold stays at schedule.min_lr_fraction of the peak, after a warm-up of "
            f"{pluralize(length.warmup_steps, 'step')}. To hold the rate that the run had, stop now and add "
            f"schedule.min_lr_fraction={last / config.optimizer.lr:.4g} schedule.warmup_steps=0 to the command"
        )
    else:
        return
    workload.log.event("learning_rate_jump", text, level="warning", step=step, before=last, after=following)


def _report_start_again(log: RunLog, last_step: int) -> None:
    """Log that an earlier attempt left no checkpoint, and what its steps were."""
    text = "No checkpoint yet: starts again from step 1"
    if last_step:
        text += f", and computes {pluralize(last_step, 'recorded step')} again"
    log.event("started_again", text, level="warning", lost_steps=last_step)


def _report_warnings(workload: Workload, run: RunContext, length: Horizon) -> None:
    """Log warnings about learning rates, length and sources before the first step."""
    for warning in learning_rate_warnings(workload.config.optimizer):
        workload.log.event("large_learning_rate", warning, level="warning")
    cached = length.cache_warning(num_cached_rows(workload.corpus), batch_sizes_of(workload.config))
    for warning in filter(None, (length.warning, cached)):
        workload.log.event("long_warmup", warning, level="warning")
    tokens = run_plan.dataset_size(workload.config, workload.corpus).tokens
    for kind, text in (("large_step", length.step_warning(tokens)), ("repetition", length.repetition_warning(tokens))):
        if text is not None:
            workload.log.event(kind, text, level="warning")
    held_out = workload.corpus.held_out
    workload.log.event("held_out", f"Validation set: {held_out}", held_out=held_out)
    if workload.corpus.trained_tokens:
        workload.log.event("trained_tokens", f"Tokens trained on: {workload.corpus.trained_tokens}")
    _report_changed_validation(workload, run)
    notes = workload.corpus.notes
    for note in notes:
        level = "info" if note.kind == "conversations" else "warning"
        workload.log.event(f"source_{note.kind}", note.text, level=level)
    if notes:
        run.note_later(sources=[note.text for note in notes])


def _report_changed_validation(workload: Workload, run: RunContext) -> None:
    """Record the content of the validation set, and report that it is not the one of an earlier attempt."""
    content = xxhash.xxh3_64_hexdigest("".join(reader.digest for reader in workload.corpus.validation).encode())
    recorded = next(iter(attempt_notes(run.directory, "validation_set")), content)
    if recorded != content:
        text = "The validation set has changed since the last attempt: earlier validation losses are not comparable"
        workload.log.event("validation_set_changed", text, level="warning")
    run.note_later(validation_set=content)


def _initialize_weights(workload: Workload, run: RunContext) -> None:
    """Load the weights of ``train.from_weights``, if set."""
    check_tokenizer(workload.config, workload.corpus.tokenizer)
    source = init_from_weights(workload.config, workload.spec, workload.engine, workload.corpus.tokenizer)
    origin = find_origin(workload.config)
    if origin is not None:
        run.note_later(model_origin=origin.to_json())
    if source is not None:
        run.note_later(**source)
        workload.log.event("started_from", f"Loaded initial weights from {source['from_weights']}", **source)
        if workload.config.adapter.kind != "none" or workload.config.loss.name == "dpo":
            pin_checkpoint(Path(source["from_weights"]), run.directory)


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
    """Record the environment and length of this attempt in ``run.json``, and the run at its caches."""
    run.note(environment=dict(workload.engine.environment()), total_steps=length.total_steps)
    for cache in workload.corpus.caches:
        register_run(cache.reader.directory, run.directory)


def _listed(changes: Sequence[Difference]) -> str:
    """Return changes as a text; a list entry that was added or removed is one change, not one per key."""
    names = [c.key for c in changes if _ENTRY_NAME.search(c.key) and None in (c.before, c.after)]
    return "; ".join(
        str(change)
        for change in changes
        if not any(change.key.startswith(name.removesuffix("name")) and change.key != name for name in names)
    )


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
        recorded, _ = resume_settings.config_in_force(directory, step - 1)
        known = recorded.train.num_steps or 0
        more = (
            f"continue it to its own length, {known:,} (vorox train --resume {run})"
            if known > step
            else f"set at least {step:,} (vorox train --resume {run} train.num_steps={2 * step})"
        )
        raise ConfigError(
            f"Run has finished {pluralize(step, 'step')}, more than the configured {total_steps:,}",
            where="train.num_steps",
            saved=f"the run's {pluralize(step, 'step')}; none was trained now",
            hint=f"{more}, or resume from an earlier checkpoint (vorox checkpoints list {run})",
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
