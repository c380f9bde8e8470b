"""Resume: which settings may change, and restoring the state of a checkpoint.

``restore`` restores the engine, and reads progress, plan and replay chain; ``session.open_session`` positions the
loader at the cursor. In: the run directory, the current configuration and workload. Out: a ``RestoredRun`` with the
engine in the state of its checkpoint. Settings that decide the architecture, the data or its order must equal the
recorded ones; every other difference is logged and recorded. Earlier configurations stay readable:
``configs/step-N.yaml`` was in force from step N on.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from vorox.core import atomic
from vorox.core.batch import DataCursor, Progress
from vorox.core.config import (
    Difference,
    config_digest,
    config_from_record,
    config_values,
    differences,
    dump_yaml,
    flat_values,
    in_digest,
    load_config,
)
from vorox.core.config.synonyms import current_value
from vorox.core.config.yaml_writer import write_scalar
from vorox.core.engine import Engine
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.log import RunLog
from vorox.core.pluralize import pluralize
from vorox.core.redaction import MARK, redact_value
from vorox.core.run_layout import RunLayout
from vorox.core.run_lookup import run_argument
from vorox.core.schema import RunConfig
from vorox.data.plan import Plan
from vorox.training.checkpoint_store import (
    Checkpoint,
    RunState,
    latest_valid,
    quarantine,
    quarantine_corrupt,
    read_state,
    step_directories,
    verify,
)
from vorox.training.replay_chain import check_chain
from vorox.training.workload import Workload

REFUSED = ("model", "data", "tokenizer", "optimizer.name", "run.seed", "train.global_batch_sequences")
"""Sections and keys that decide the architecture, the data or its order: a resume refuses a change."""

ALLOWED = (
    "model.preset", "model.family", "data.cache.directory", "data.loader", "data.pipeline",
    "data.mode", "data.streaming",
    "data.growth.horizon_steps", "data.growth.on_starve", "data.growth.build",
)  # fmt: skip
"""Exceptions that decide none of these."""

RECORDED = ("data.stages", "data.sources")
"""Exceptions that change the mixture, which the plan records from the resumed step on."""

_LENGTH_KEYS = (
    "train.num_steps", "train.num_tokens", "train.num_epochs", "train.epoch_dataset_fraction", "schedule.warmup"
)  # fmt: skip
"""Starts of the keys that decide length and warm-up, which the plan records."""

_MIXTURE_KEYS = ("weight", "max_epochs", "on_exhausted")
"""Keys that may change in a source of the same name."""


def check_config(recorded: RunConfig, current: RunConfig) -> list[Difference]:
    """Return the differences that a resume allows.

    Raises:
        ConfigError: Some differences are not allowed; the message lists them all.
    """
    found = differences(recorded, current)
    refused = [entry for entry in found if _is_refused(entry.key)]
    refused += _refused_of_sources(recorded, current)
    if refused:
        raise ConfigError(
            f"Run cannot be resumed with another configuration ({pluralize(len(refused), 'difference')}):\n"
            + "\n".join(f"  {entry}" for entry in refused),
            where=refused[0].key,
            hint="resume with the recorded configuration, or start a new run with --resume never",
        )
    return found


def settings_for_manifest(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as a checkpoint records it, without secrets."""
    return redact_value(config_values(config))


def check_unedited(
    run_directory: Path, found: Checkpoint, recorded: RunConfig, current: RunConfig, named_keys: Collection[str]
) -> RunConfig:
    """Compare ``config.yaml`` with the configuration in a checkpoint.

    Args:
        run_directory: The run.
        found: The checkpoint to resume from.
        recorded: The configuration in ``config.yaml``.
        current: The configuration of this process.
        named_keys: Settings and sections given with the command, which may differ.

    Returns:
        The recorded configuration, as it was before any edit of the file.

    Raises:
        ConfigError: The file was edited, and the command would adopt the edited values.
    """
    made_with = _made_with(found.metadata)
    if made_with is None:  # earlier versions recorded only a digest
        return recorded
    newest = max(RunLayout(run_directory).configs_by_step().items(), default=None)
    if (
        newest is not None
        and newest[0] >= found.step
        and not _bit_affecting_differences(_redacted(load_config(newest[1])), recorded)
    ):
        return recorded  # changed by a resume that was killed before its first save
    edited = _bit_affecting_differences(made_with, recorded)
    now = flat_values(_redacted(current))
    adopted = [
        entry for entry in edited if now.get(entry.key) == entry.after and not _has_prefix(entry.key, tuple(named_keys))
    ]
    if adopted:
        command = f"vorox train --resume {run_argument(run_directory)}"
        hint = f"to keep the earlier values: {command} {_overrides(adopted, 'before')}"
        if not any(_is_refused(entry.key) for entry in adopted):
            hint += f"; to change them from this step on: {command} {_overrides(adopted, 'after')}"
        raise ConfigError(
            f"config.yaml was edited after the checkpoint of step {found.step:,} was written:\n"
            + "\n".join(f"  {entry}" for entry in adopted),
            where=str(RunLayout(run_directory).config),
            saved="nothing was changed",
            hint=hint,
        )
    return made_with if edited and MARK not in str(config_values(made_with)) else recorded


def is_made_with(checkpoint: Checkpoint, config: RunConfig) -> bool:
    """Whether a checkpoint was written under a configuration; settings that do not affect bits are ignored."""
    made_with = _made_with(checkpoint.metadata)
    if made_with is None:
        return checkpoint.metadata["config_digest"] == config_digest(config)
    return not _bit_affecting_differences(made_with, config)


def _made_with(metadata: Mapping[str, Any]) -> RunConfig | None:
    """Return the configuration in a checkpoint's manifest; ``None`` if it is absent or not readable by this version."""
    try:
        return config_from_record(metadata["settings"])
    except (KeyError, ValidationError):
        return None


def _bit_affecting_differences(before: RunConfig, after: RunConfig) -> list[Difference]:
    """Return the changed settings that affect bits."""
    return [entry for entry in differences(before, _redacted(after)) if in_digest(entry.key)]


def _redacted(config: RunConfig) -> RunConfig:
    """Return a configuration without its secrets, as checkpoints record it."""
    return RunConfig.model_validate(settings_for_manifest(config))


def _overrides(entries: Sequence[Difference], side: Literal["before", "after"]) -> str:
    """Return the overrides that set the values of one side."""
    values = {entry.key: getattr(entry, side) for entry in entries}
    return " ".join(
        f"{key}={json.dumps(value) if isinstance(value, list | dict) else write_scalar(value)}"
        for key, value in values.items()
    )


def _is_refused(key: str) -> bool:
    return _has_prefix(key, REFUSED) and not _has_prefix(key, ALLOWED + RECORDED)


def _refused_of_sources(recorded: RunConfig, current: RunConfig) -> list[Difference]:
    """Return differences that change the text of a source of the same name; its mixture settings may change."""
    before = {source.name: source for source in recorded.data.sources}
    return [
        Difference(f"data.sources.{index}.{key}", old[key], new[key])
        for index, source in enumerate(current.data.sources)
        if source.name in before
        for old, new in [(before[source.name].model_dump(mode="json"), source.model_dump(mode="json"))]
        for key in new
        if old[key] != new[key] and key not in _MIXTURE_KEYS
    ]


def _has_prefix(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def choose(run_directory: Path, log: RunLog, checkpoint: Path | None) -> Checkpoint | None:
    """Return the verified checkpoint to resume from: the given one, else the newest valid one; ``None`` without any.

    Raises:
        CheckpointError: The given one is invalid, or there are checkpoints but none is valid.
    """
    return latest_valid(run_directory, on_corrupt=quarantine_corrupt(log)) if checkpoint is None else verify(checkpoint)


@dataclass(frozen=True, slots=True)
class RestoredRun:
    """A run restored from a checkpoint; the engine holds its state.

    Attributes:
        state: Progress and length.
        plan: The data plan; it extends the one in the checkpoint.
        last_recorded_step: The last step in the replay chain, which may be beyond the checkpoint.
    """

    state: RunState
    plan: Plan
    last_recorded_step: int


def restore(workload: Workload, run_directory: Path, found: Checkpoint) -> RestoredRun:
    """Restore engine, plan, cursor and replay chain from a verified checkpoint; nothing is written.

    Raises:
        CheckpointError: It belongs to a different model or data plan.
        DataError: The plan is missing or damaged, or the replay chain belongs to a different run history.
    """
    plan = Plan.open(RunLayout(run_directory).plan)
    load(workload.engine, found, workload.spec.to_json())
    changed = environment_differences(found.metadata["environment"], environment(workload.engine))
    if changed:
        workload.log.event(
            "environment_changed",
            f"Not bit-exact from step {found.step:,} on, environment changed: " + "; ".join(changed),
            level="warning",
            changes=changed,
        )
    state = read_state(found.path)
    check_plan(plan, state.progress.cursor)
    return RestoredRun(state, plan, _check_chain(run_directory, state.progress, workload.log))


def _check_chain(run_directory: Path, progress: Progress, log: RunLog) -> int:
    """Return the last step in the replay chain; report steps up to the checkpoint whose record is lost.

    Raises:
        DataError: The chain belongs to a different run history.
    """
    chain = check_chain(run_directory, progress)
    damage = chain.damage(progress.step)
    if damage:
        log.event(
            "chain_damaged",
            f"{chain.path.name} is damaged: {damage}; training continues, but replay cannot verify these steps "
            "unless the file is restored from a copy",
            level="warning",
        )
    return chain.last_step


def quarantine_later_checkpoints(run_directory: Path, step: int, log: RunLog) -> None:
    """Quarantine the checkpoints of later steps, which the resumed run will reach again."""
    for later, path in step_directories(run_directory).items():
        if later > step:
            renamed = quarantine(path, "replaced", f"the run was resumed from step {step}")
            text = f"Quarantined {path.name} of an abandoned attempt as {renamed.name}"
            log.event("checkpoint_replaced", text, level="warning")


def load(engine: Engine, checkpoint: Checkpoint, spec: Mapping[str, Any]) -> None:
    """Load a verified checkpoint and check the engine's fingerprint.

    Raises:
        CheckpointError: It belongs to a different model, or the loaded state differs from the saved one.
    """
    recorded = checkpoint.metadata["spec"]
    if recorded != spec:
        keys = sorted(key for key in {*recorded, *spec} if recorded.get(key) != spec.get(key))
        raise CheckpointError(
            "Checkpoint belongs to a different model: "
            + ", ".join(f"{key} = {recorded.get(key)}, configured is {spec.get(key)}" for key in keys),
            where=str(checkpoint.path),
        )
    engine.load(checkpoint.path)
    saved = checkpoint.metadata["fingerprint"]
    fingerprint = engine.fingerprint(saved)
    if fingerprint != saved:
        raise CheckpointError(
            f"Loaded state has fingerprint {fingerprint}, the saved one {saved}",
            where=str(checkpoint.path),
            hint="its files were changed after the save; use another checkpoint",
        )


def environment(engine: Engine) -> dict[str, str | int | bool]:
    """Return what a manifest records of the engine's environment."""
    return dict(sorted(engine.environment().items()))


def environment_differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return readable descriptions of what changed."""
    before = {key: current_value(f"runtime.{key}", value) for key, value in recorded.items()}
    return [
        f"{key} was {before.get(key, 'absent')}, is {current.get(key, 'absent')}"
        for key in sorted({*before, *current})
        if before.get(key) != current.get(key)
    ]


def check_plan(plan: Plan, cursor: DataCursor) -> None:
    """Check that a plan starts with the events that the checkpoint of a data cursor was written under.

    Raises:
        CheckpointError: The plan was changed, truncated or replaced.
    """
    if (plan.digest_at(cursor.plan_events), plan.start.seed) != (cursor.plan_digest, cursor.seed):
        raise CheckpointError(
            f"Checkpoint was written under another data plan ({cursor.plan_digest[:16]} "
            f"after {cursor.plan_events} events, seed {cursor.seed})",
            where=str(plan.path),
            hint="restore plan.jsonl from a copy; without it the order of the data is unknown",
        )


def record_config_change(run_directory: Path, recorded: RunConfig, current: RunConfig, step: int) -> None:
    """Record from which step the current configuration is in force, if a setting that affects bits changed.

    Args:
        run_directory: The run.
        recorded: The configuration in ``config.yaml``.
        current: The configuration of this process.
        step: The step that it starts from.
    """
    files = RunLayout(run_directory).configs_by_step()
    before = max((known for known in files if known < step), default=None)
    previous = recorded if before is None else load_config(files[before])
    for known, path in files.items():
        if known >= step:
            atomic.remove_file(path)  # of steps that were lost or abandoned
    if step == 0 or not any(in_digest(entry.key) for entry in differences(previous, current)):
        return
    layout = RunLayout(run_directory)
    atomic.make_directory(layout.configs)
    if before is None:
        atomic.write_file(layout.config_from(0), dump_yaml(previous).encode())
    atomic.write_file(layout.config_from(step), dump_yaml(current).encode())


def decides_length(key: str) -> bool:
    """Whether a setting decides only the length of the run or its warm-up."""
    return key.startswith(_LENGTH_KEYS)


def next_change(run_directory: Path, step: int) -> int | None:
    """Return the step from which other settings than those after ``step`` are in force; a new length is none.

    The plan records the length, so steps on both sides of such a change are a function of one configuration and the
    plan.
    """
    config, changed_at = config_in_force(run_directory, step)
    while changed_at is not None:
        following, next_at = config_in_force(run_directory, changed_at)
        if any(in_digest(entry.key) and not decides_length(entry.key) for entry in differences(config, following)):
            return changed_at
        changed_at = next_at
    return None


def config_in_force(run_directory: Path, step: int) -> tuple[RunConfig, int | None]:
    """Return the configuration of the step after ``step``, and the step from which the next one is in force."""
    files = RunLayout(run_directory).configs_by_step()
    before = max((known for known in files if known <= step), default=None)
    path = RunLayout(run_directory).config if before is None else files[before]
    return load_config(path), min((known for known in files if known > step), default=None)
