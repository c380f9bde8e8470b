"""Where a run stands when a process begins: fresh, or exactly where it stopped, with the plan of its data.

Nothing of the run changes before configuration, environment and plan have been compared with what is recorded. Of
several processes, the main one decides and writes, and tells the others where to begin (``join``); each puts its own
engine there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from vorox.core.config import Difference, differences
from vorox.core.counted import counted
from vorox.core.errors import ConfigError
from vorox.core.log import RunLog
from vorox.core.records import Progress
from vorox.core.run_context import RunContext, recorded_config
from vorox.core.schema import RunConfig
from vorox.core.staged_directory import read_manifest
from vorox.data.dataset import Corpus
from vorox.data.loader import first_cursor
from vorox.data.plan import Plan
from vorox.data.plan_events import PlanEvent
from vorox.training import feed, resume
from vorox.training.chain import abandon_steps, check_chain, examine_chain
from vorox.training.checkpointing import Checkpoint, RunState, step_directories
from vorox.training.schedule import Horizon, horizon
from vorox.training.setting import Setting
from vorox.training.starting_weights import start_from_weights
from vorox.training.weights_source import check_tokenizer

_CHECKPOINT, _STATE = "checkpoint", "state"
"""Topics of what the main process tells the others."""
_LENGTH_KEYS = (
    "train.num_steps", "train.num_tokens", "train.num_epochs", "train.epoch_dataset_fraction", "schedule.warmup"
)  # fmt: skip


def begin(
    setting: Setting, run: RunContext, checkpoint: Path | None, named_keys: Collection[str] = ()
) -> tuple[RunState, Plan]:
    """Where the run stands, with the engine standing there too, and the plan of its data; in the main process.

    Args:
        setting: What the run is made from.
        run: The open run; its recorded configuration is replaced once everything agrees.
        checkpoint: Start from this one instead of the newest.
        named_keys: Settings and sections that were given with the command.

    Raises:
        ConfigError: The configuration asks for another run than the recorded one.
        CheckpointError: No checkpoint is valid, or it is of another model or plan.
        DataError: The caches are no longer what the plan was made for.
    """
    directory, config, corpus, log = run.directory, setting.config, setting.corpus, setting.log
    recorded = recorded_config(directory)
    found = resume.choose(directory, log, checkpoint)
    if found is not None:
        recorded = resume.check_unedited(directory, found, recorded, config, named_keys)
    changes = resume.check_config(recorded, config)
    setting.distributed.broadcast(_CHECKPOINT, None if found is None else str(found.path))
    state, length, position = None, _length(setting), 0
    if found is not None:
        state = resume.restore(setting.engine, found, spec=setting.spec.to_json(), log=log)
        position = state.progress.cursor.position
        if run.layout.plan.exists():  # nothing is appended to a plan that is another run's
            resume.check_plan(Plan.open(run.layout.plan), state.progress.cursor)
        if not _has_other_length(directory, config, state.progress.step):
            length = _as_begun(setting, state.horizon, length)  # fixed then, whatever the caches hold by now
        _check_length(directory, length.total_steps, state.progress.step)
    reached = _reached(directory, state, log) * config.train.global_batch_sequences
    plan, events = feed.open_plan(
        run.layout.plan, config, corpus, length, position=position, reached=reached, tell=tell_plan(log)
    )
    if state is None:
        check_tokenizer(config, corpus.tokenizer)
        started = start_from_weights(config, setting.spec, setting.engine)
        if started is not None:
            run.note(**started)
            log.event("started_from", f"Weights of {started['from_weights']}", **started)
    else:
        resume.check_plan(plan, state.progress.cursor)
        log.event("resumed", f"Resuming after step {state.progress.step:,}", step=state.progress.step)
    if state is None or not _is_finished(state, length):
        _commit(setting, run, plan, events, 0 if state is None else state.progress.step, recorded)
    elif changes:
        text = f"The run is finished: nothing is trained, and {_listed(changes)} is not recorded"
        log.event("config_kept", text, level="warning")
    _tell_notes(setting, run, length)
    if state is None:
        state = RunState(Progress(0, 0, first_cursor(plan, config.run.seed)), length)
    state = replace(state, horizon=length)
    setting.distributed.broadcast(_STATE, state.to_json())
    return state, plan


def check_resume(
    config: RunConfig, directory: Path, checkpoint: Path | None, named_keys: Collection[str], total_steps: int | None
) -> None:
    """Refuse what ``begin`` would refuse of a resume, as far as records tell; nothing is loaded or written.

    Raises:
        ConfigError: It asks for another run or for fewer steps than are done, or ``config.yaml`` was edited.
        CheckpointError: The newest checkpoint has no readable manifest.
    """
    recorded = recorded_config(directory)
    steps = step_directories(directory)
    path = checkpoint or (steps[max(steps)] if steps else None)
    if path is not None:
        found = Checkpoint(path, read_manifest(path)["metadata"])
        recorded = resume.check_unedited(directory, found, recorded, config, named_keys)
        if total_steps is not None:
            _check_length(directory, total_steps, found.step)
    resume.check_config(recorded, config)


def _commit(
    setting: Setting, run: RunContext, plan: Plan, events: Sequence[PlanEvent], step: int, recorded: RunConfig
) -> None:
    """Write down what this attempt changes about the run, once nothing can refuse it any more.

    What is recorded of later steps goes first, so that no kill leaves it beside a plan that it was not done under.
    """
    config, log = setting.config, setting.log
    resume.abandon_after(run.directory, step, log)
    abandon_steps(run.directory, step)
    plan.add(events)
    feed.tell_events(events, tell_plan(log))
    resume.record_config_change(run.directory, recorded, config, step)
    changes = differences(recorded, config)
    if changes:
        text = f"The configuration differs from the recorded one: {_listed(changes)}"
        log.event("config_changed", text, level="warning")
    if recorded_config(run.directory) != config:
        run.record_config()


def _tell_notes(setting: Setting, run: RunContext, length: Horizon) -> None:
    """What a person should know of the length and the sources before the first step."""
    cached = length.cache_warning(num_cached_rows(setting.corpus), setting.config.train.global_batch_sequences)
    for warning in filter(None, (length.warning, cached)):
        setting.log.event("long_warmup", warning, level="warning")
    tokens = feed.dataset_size(setting.config, setting.corpus).tokens
    for kind, text in (("large_step", length.step_warning(tokens)), ("repetition", length.repetition_warning(tokens))):
        if text is not None:
            setting.log.event(kind, text, level="warning")
    held_out = setting.corpus.held_out
    setting.log.event("held_out", f"Validates on {held_out}", held_out=held_out)
    notes = setting.corpus.notes
    for note in notes:
        setting.log.event(f"source_{note.kind}", note.text, level="warning")
    if notes:
        run.note(sources=[note.text for note in notes])


def _listed(changes: Sequence[Difference]) -> str:
    return "; ".join(map(str, changes))


def join(setting: Setting, run: RunContext) -> tuple[RunState, Plan]:
    """The same in every other process: what ``begin`` of the main one says.

    Raises:
        VoroxError: Whatever stopped the main process.
    """
    path = setting.distributed.broadcast(_CHECKPOINT)
    if path is None:
        start_from_weights(setting.config, setting.spec, setting.engine)
    else:
        manifest = read_manifest(Path(path))
        resume.load(setting.engine, Checkpoint(Path(path), manifest["metadata"]), setting.spec.to_json())
    state = RunState.from_json(setting.distributed.broadcast(_STATE))
    plan = Plan.open(run.layout.plan)
    resume.check_plan(plan, state.progress.cursor)
    return state, plan


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
    known = counted(now.dataset_tokens, "token") if now.dataset_tokens is not None else "another number of rows"
    text = (
        f"The caches are known to hold {known} by now: {counted(train.num_epochs, 'epoch')} of them: "
        f"{counted(now.total_steps, 'step')}; the run began with {begun.total_steps:,}"
    )
    follows = train.follow_growth and now.total_steps > begun.total_steps
    what = "and is extended to them" if follows else "and keeps them (train.follow_growth=true would extend it)"
    setting.log.event("dataset_grew", f"{text} {what}", total_steps=now.total_steps, level="warning")
    return replace(begun, total_steps=now.total_steps) if follows else begun


def _check_length(directory: Path, total_steps: int, step: int) -> None:
    """Refuse a length that the run has passed already."""
    if total_steps < step:
        raise ConfigError(
            f"the run has done {counted(step, 'step')}, and the configuration asks for {total_steps:,}",
            where="train.num_steps",
            saved="nothing was changed",
            hint=f"give at least {step:,} (vorox train --resume {directory.name} train.num_steps={2 * step}), or go on "
            f"from an earlier checkpoint (vorox checkpoints list {directory.name})",
        )


def _is_finished(state: RunState, length: Horizon) -> bool:
    """Whether the run has done all its steps, and is asked for no others."""
    return state.progress.step >= length.total_steps == state.horizon.total_steps


def _reached(directory: Path, state: RunState | None, log: RunLog) -> int:
    """The furthest step that is recorded; steps up to the checkpoint whose record is lost are said.

    Raises:
        DataError: The chain is of another history than the checkpoint.
    """
    if state is None:
        return examine_chain(directory).last_step
    chain = check_chain(directory, state.progress)
    damage = chain.damage(state.progress.step)
    if damage:
        log.event(
            "chain_damaged",
            f"{chain.path.name} is damaged: {damage}. The run goes on; a replay cannot verify these steps any more "
            "unless the file is restored from a copy",
            level="warning",
        )
    return chain.last_step


def tell_plan(log: RunLog) -> Callable[[str, str], None]:
    """What the plan says of itself, into the log; a changed mixture is never said quietly."""
    return lambda kind, text: log.event(kind, text, level="info" if kind == "segment" else "warning")


def num_cached_rows(corpus: Corpus) -> int:
    """Rows of all sources that are built."""
    return sum(reader.num_rows for reader in corpus.train)
