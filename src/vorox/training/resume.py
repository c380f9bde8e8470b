"""Going on where a run stopped: what must be equal, what may differ, and putting the state back.

In: the run directory, today's configuration, engine and plan. Out: the ``RunState`` of the newest valid checkpoint
with the engine standing exactly there, or nothing if the run has no checkpoint yet. What decides the architecture,
the data or its order must be as recorded; every other difference is listed and recorded, never passed over. A
configuration that was changed on the way stays readable: ``configs/step-N.yaml`` is what was in force from step N on.
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
from vorox.core.redaction import MARK, redact_value
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.plan import Plan
from vorox.training.chain import check_chain
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
from vorox.training.workload import Workload

REFUSED = ("backend", "model", "data", "tokenizer", "optimizer.name", "run.seed", "train.global_batch_sequences")
"""Sections and keys that decide the architecture, the data or its order."""

ALLOWED = (
    "model.preset", "model.family", "data.cache.directory", "data.loader", "data.pipeline",
    "data.mode", "data.streaming",
    "data.growth.horizon_steps", "data.growth.on_starve", "data.growth.build",
)  # fmt: skip
"""Exceptions to the above that decide none of it."""

RECORDED = ("data.stages", "data.sources")
"""Exceptions to the above that change the mixture, which the plan records from the step on that the run resumes at."""

_MIXTURE_KEYS = ("weight", "max_epochs", "on_exhausted")
"""What may differ in a source that both configurations have."""


def check_config(recorded: RunConfig, current: RunConfig) -> list[Difference]:
    """Differences that a resumed run may have.

    Raises:
        ConfigError: Something differs that would make it another run; all such differences are named.
    """
    found = differences(recorded, current)
    refused = [entry for entry in found if _is_refused(entry.key)]
    refused += _refused_of_sources(recorded, current)
    if refused:
        raise ConfigError(
            f"this run cannot be resumed with another configuration ({len(refused)} "
            f"difference{'s' if len(refused) > 1 else ''}):\n" + "\n".join(f"  {entry}" for entry in refused),
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
    """Compare ``config.yaml`` with the configuration that a checkpoint was made with.

    Args:
        run_directory: The run.
        found: The checkpoint to go on from.
        recorded: What ``config.yaml`` says.
        current: What this process runs with.
        named_keys: Settings and sections that were given with the command, which may differ on purpose.

    Returns:
        The recorded configuration, as it was before anybody edited the file.

    Raises:
        ConfigError: The file was edited, and the command would take over what it says by now.
    """
    made_with = _made_with(found.metadata)
    if made_with is None:  # made by an earlier version, which recorded a digest alone
        return recorded
    newest = max(RunLayout(run_directory).configs_by_step().items(), default=None)
    if newest is not None and newest[0] >= found.step and not _changed(_hidden(load_config(newest[1])), recorded):
        return recorded  # changed by a resume that was killed before its first checkpoint
    edited = _changed(made_with, recorded)
    now = flat_values(_hidden(current))
    taken_over = [
        entry for entry in edited if now.get(entry.key) == entry.after and not _within(entry.key, tuple(named_keys))
    ]
    if taken_over:
        command = f"vorox train --resume {run_directory.name}"
        hint = f"to go on as before: {command} {_assigned(taken_over, 'before')}"
        if not any(_is_refused(entry.key) for entry in taken_over):
            hint += f"; to change it from here on: {command} {_assigned(taken_over, 'after')}"
        raise ConfigError(
            f"config.yaml was edited since the checkpoint of step {found.step:,} was made:\n"
            + "\n".join(f"  {entry}" for entry in taken_over),
            where=str(RunLayout(run_directory).config),
            saved="nothing was changed",
            hint=hint,
        )
    return made_with if edited and MARK not in str(config_values(made_with)) else recorded


def is_made_with(checkpoint: Checkpoint, config: RunConfig) -> bool:
    """Whether a checkpoint was made with a configuration, as far as it decides bits."""
    made_with = _made_with(checkpoint.metadata)
    if made_with is None:
        return checkpoint.metadata["config_digest"] == config_digest(config)
    return not _changed(made_with, config)


def _made_with(metadata: Mapping[str, Any]) -> RunConfig | None:
    """The configuration that a checkpoint was made with, if it says so in a form that this version reads."""
    try:
        return config_from_record(metadata["settings"])
    except (KeyError, ValidationError):
        return None


def _changed(before: RunConfig, after: RunConfig) -> list[Difference]:
    """What differs between a configuration of a checkpoint and another one, among the settings that decide bits."""
    return [entry for entry in differences(before, _hidden(after)) if in_digest(entry.key)]


def _hidden(config: RunConfig) -> RunConfig:
    """A configuration without its secrets, as checkpoints record it."""
    return RunConfig.model_validate(settings_for_manifest(config))


def _assigned(entries: Sequence[Difference], side: Literal["before", "after"]) -> str:
    """Overrides that give settings the values of one side."""
    values = {entry.key: getattr(entry, side) for entry in entries}
    return " ".join(
        f"{key}={json.dumps(value) if isinstance(value, list | dict) else write_scalar(value)}"
        for key, value in values.items()
    )


def _is_refused(key: str) -> bool:
    return _within(key, REFUSED) and not _within(key, ALLOWED + RECORDED)


def _refused_of_sources(recorded: RunConfig, current: RunConfig) -> list[Difference]:
    """What differs in sources of one name besides their place in the mixture: it would be other text."""
    before = {source.name: source for source in recorded.data.sources}
    return [
        Difference(f"data.sources.{index}.{key}", old[key], new[key])
        for index, source in enumerate(current.data.sources)
        if source.name in before
        for old, new in [(before[source.name].model_dump(mode="json"), source.model_dump(mode="json"))]
        for key in new
        if old[key] != new[key] and key not in _MIXTURE_KEYS
    ]


def _within(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def choose(run_directory: Path, log: RunLog, checkpoint: Path | None) -> Checkpoint | None:
    """The checkpoint to go on from: the one that is named, else the newest valid one, if there is any.

    Raises:
        CheckpointError: It is not valid, or there are some and none is.
    """
    return latest_valid(run_directory, on_corrupt=quarantine_corrupt(log)) if checkpoint is None else verify(checkpoint)


@dataclass(frozen=True, slots=True)
class RestoredRun:
    """A run as its checkpoint and records hold it, with the engine in that state.

    Attributes:
        state: Progress and length.
        plan: The data plan, which continues the one that the checkpoint was made under.
        last_recorded_step: The last step in the replay chain, which may be beyond the checkpoint.
    """

    state: RunState
    plan: Plan
    last_recorded_step: int


def restore(workload: Workload, run_directory: Path, found: Checkpoint) -> RestoredRun:
    """Restore engine, plan, cursor and replay chain from a verified checkpoint; nothing is written.

    Raises:
        CheckpointError: It is of another model or another data plan.
        DataError: The plan is damaged, or the replay chain is of another history than the checkpoint.
    """
    plan = Plan.find(RunLayout(run_directory).plan)
    load(workload.engine, found, workload.spec.to_json())
    changed = environment_differences(found.metadata["environment"], environment(workload.engine))
    if changed:
        workload.log.event(
            "environment_changed",
            f"bit-exactness is void from step {found.step:,} on, the environment changed: " + "; ".join(changed),
            level="warning",
            changes=changed,
        )
    state = read_state(found.path)
    plan = check_plan(plan, RunLayout(run_directory).plan, state.progress.cursor)
    return RestoredRun(state, plan, _check_chain(run_directory, state.progress, workload.log))


def _check_chain(run_directory: Path, progress: Progress, log: RunLog) -> int:
    """Return the last step in the replay chain; report steps up to the checkpoint whose record is lost.

    Raises:
        DataError: The chain is of another history than the checkpoint.
    """
    chain = check_chain(run_directory, progress)
    damage = chain.damage(progress.step)
    if damage:
        log.event(
            "chain_damaged",
            f"{chain.path.name} is damaged: {damage}. The run goes on; a replay cannot verify these steps any more "
            "unless the file is restored from a copy",
            level="warning",
        )
    return chain.last_step


def abandon_after(run_directory: Path, step: int, log: RunLog) -> None:
    """Put the checkpoints of later steps aside: the run goes on from this step, and comes by there again."""
    for later, path in step_directories(run_directory).items():
        if later > step:
            renamed = quarantine(path, "replaced", f"the run was resumed from step {step}")
            message = f"{path.name} is of an abandoned attempt and was renamed to {renamed.name}"
            log.event("checkpoint_replaced", message, level="warning")


def load(engine: Engine, checkpoint: Checkpoint, spec: Mapping[str, Any]) -> None:
    """Load a verified checkpoint and prove that the engine has exactly its bits.

    Raises:
        CheckpointError: It is of another model, or the loaded state is not the one that was saved.
    """
    recorded = checkpoint.metadata["spec"]
    if recorded != spec:
        keys = sorted(key for key in {*recorded, *spec} if recorded.get(key) != spec.get(key))
        raise CheckpointError(
            "the checkpoint is of another model: "
            + ", ".join(f"{key} is {recorded.get(key)} there and {spec.get(key)} here" for key in keys),
            where=str(checkpoint.path),
        )
    engine.load(checkpoint.path)
    fingerprint = engine.fingerprint()
    if fingerprint != checkpoint.metadata["fingerprint"]:
        raise CheckpointError(
            f"the state was saved with fingerprint {checkpoint.metadata['fingerprint']} and loads with {fingerprint}",
            where=str(checkpoint.path),
            hint="the files were changed after they were written; use another checkpoint",
        )


def environment(engine: Engine) -> dict[str, str | int | bool]:
    """What a manifest records of the engine's surroundings."""
    return dict(sorted(engine.environment().items()))


def environment_differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """What changed, for people; empty if nothing did."""
    before = {key: current_value(f"runtime.{key}", value) for key, value in recorded.items()}
    return [
        f"{key} was {before.get(key, 'absent')}, is {current.get(key, 'absent')}"
        for key in sorted({*before, *current})
        if before.get(key) != current.get(key)
    ]


def check_plan(plan: Plan | None, path: Path, cursor: DataCursor) -> Plan:
    """Check that the plan on disk begins with the very events that a checkpoint was made under.

    Args:
        plan: The plan; ``None`` if there is none.
        path: Its file.
        cursor: The checkpoint's.

    Returns:
        The plan.

    Raises:
        CheckpointError: The plan was changed, cut, replaced or removed.
    """
    if plan is None or (plan.digest_at(cursor.plan_events), plan.start.seed) != (cursor.plan_digest, cursor.seed):
        raise CheckpointError(
            f"the checkpoint was made under another data plan ({cursor.plan_digest[:16]} "
            f"after {cursor.plan_events} events, seed {cursor.seed})",
            where=str(path),
            hint="restore plan.jsonl from a copy; without it the order of the data is unknown",
        )
    return plan


def record_config_change(run_directory: Path, recorded: RunConfig, current: RunConfig, step: int) -> None:
    """Keep which configuration was in force from which step, if one that decides bits changed.

    Args:
        run_directory: The run.
        recorded: What ``config.yaml`` says.
        current: What this process runs with.
        step: State that it starts from.
    """
    files = RunLayout(run_directory).configs_by_step()
    before = max((known for known in files if known < step), default=None)
    previous = recorded if before is None else load_config(files[before])
    for known, path in files.items():
        if known >= step:
            atomic.remove_file(path)  # of work that was lost or abandoned
    if step == 0 or not any(in_digest(entry.key) for entry in differences(previous, current)):
        return
    layout = RunLayout(run_directory)
    atomic.make_directory(layout.configs)
    if before is None:
        atomic.write_file(layout.config_from(0), dump_yaml(previous).encode())
    atomic.write_file(layout.config_from(step), dump_yaml(current).encode())


def config_in_force(run_directory: Path, step: int) -> tuple[RunConfig, int | None]:
    """The configuration that the step after ``step`` was run with, and the state at which the next one took over."""
    files = RunLayout(run_directory).configs_by_step()
    before = max((known for known in files if known <= step), default=None)
    path = RunLayout(run_directory).config if before is None else files[before]
    return load_config(path), min((known for known in files if known > step), default=None)
