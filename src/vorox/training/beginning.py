"""Where a run stands when a process begins: fresh, or exactly where it stopped, with the plan of its data.

Nothing of the run changes before configuration, environment and plan have been compared with what is recorded. Of
several processes, the main one decides and writes, and tells the others where to begin (``join``); each puts its own
engine there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vorox.core.config import differences
from vorox.core.log import RunLog
from vorox.core.records import Progress
from vorox.core.run_context import RunContext, recorded_config
from vorox.core.schema import RunConfig
from vorox.core.staged_directory import read_manifest
from vorox.data.dataset import Corpus
from vorox.data.loader import first_cursor
from vorox.data.plan import Plan
from vorox.data.plan_events import Extension
from vorox.training import feed, resume
from vorox.training.chain import CHAIN_NAME
from vorox.training.checkpointing import Checkpoint, RunState
from vorox.training.history import read_history
from vorox.training.schedule import Horizon, horizon
from vorox.training.setting import Setting
from vorox.training.starting_weights import start_from_weights

_CHECKPOINT, _STATE = "checkpoint", "state"
"""Topics of what the main process tells the others."""
_LENGTH_KEYS = (
    "train.num_steps", "train.num_tokens", "train.num_epochs", "train.epoch_dataset_fraction", "schedule.warmup"
)  # fmt: skip


def begin(setting: Setting, run: RunContext, checkpoint: Path | None) -> tuple[RunState, Plan]:
    """Where the run stands, with the engine standing there too, and the plan of its data; in the main process.

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
    found = resume.choose(directory, log, checkpoint)
    setting.distributed.broadcast(_CHECKPOINT, None if found is None else str(found.path))
    state = None
    length, position = _length(setting), 0
    if found is not None:
        state = resume.restore(setting.engine, found, spec=setting.spec.to_json(), log=log)
        position = state.progress.cursor.position
        if run.plan_path.exists():  # nothing is appended to a plan that is another run's
            resume.check_plan(Plan.open(run.plan_path), state.progress.cursor)
        if not _has_other_length(directory, config, state.progress.step):
            length = _as_begun(setting, state.horizon, length)  # fixed then, whatever the caches hold by now
    plan = feed.open_plan(
        run.plan_path, config, corpus, length.total_steps, position=position, reached=_reached(directory, config),
        mixture_changed=state is None or resume.mixture_changed(recorded, config), tell=tell_plan(log),
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
    state = replace(state, horizon=length)
    setting.distributed.broadcast(_STATE, state.to_json())
    return state, plan


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
    plan = Plan.open(run.plan_path)
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


def tell_plan(log: RunLog) -> Callable[[str, str], None]:
    """What the plan says of itself, into the log; a changed mixture is never said quietly."""
    return lambda kind, text: log.event(kind, text, level="info" if kind == "segment" else "warning")


def num_cached_rows(corpus: Corpus) -> int:
    """Rows of all sources that are built."""
    return sum(reader.num_rows for reader in corpus.train)
