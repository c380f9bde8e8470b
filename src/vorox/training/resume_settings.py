"""Settings at a resume: which may change, and which were in force at which step.

Settings that decide the architecture, the data or its order must equal the recorded ones; every other difference is
logged and recorded. Earlier configurations stay readable: ``configs/step-N.yaml`` was in force from step N on.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from vorox.core import atomic
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
from vorox.core.config.yaml_writer import write_scalar
from vorox.core.errors import ConfigError
from vorox.core.pluralize import pluralize
from vorox.core.redaction import MARK, redact_value
from vorox.core.run_layout import RunLayout
from vorox.core.run_lookup import run_argument
from vorox.core.schema import RunConfig
from vorox.training.checkpoints.store import (
    Checkpoint,
)

REFUSED = (
    "model", "adapter", "data", "tokenizer", "optimizer.name", "run.seed", "train.global_batch_sequences",
    "train.batch_stages", "train.distillation.teacher", "train.distillation.top_k", "train.distillation.logits",
)  # fmt: skip
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


def config_in_force(run_directory: Path, step: int, missing: RunConfig | None = None) -> tuple[RunConfig, int | None]:
    """Return the configuration of the step after ``step``, and the step from which the next one is in force.

    If ``config.yaml`` is missing, ``missing`` takes its place.
    """
    files = RunLayout(run_directory).configs_by_step()
    before = max((known for known in files if known <= step), default=None)
    path = RunLayout(run_directory).config if before is None else files[before]
    found = missing if missing is not None and not path.exists() else load_config(path)
    return found, min((known for known in files if known > step), default=None)
