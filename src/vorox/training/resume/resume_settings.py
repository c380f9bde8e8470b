"""Settings at a resume: which may change, and which were in force at which step.

Settings that decide the architecture, the data or its order must equal the recorded ones; every other difference is
logged and recorded. Earlier configurations stay readable: ``configs/step-N.yaml`` was in force from step N on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from vorox.core.config import (
    Difference,
    config_from_record,
    config_values,
    decides_bits,
    differences,
    dump_yaml,
    flat_values,
    load_config,
)
from vorox.core.config.locations import (
    LOCATIONS,
    MODEL_LOCATIONS,
    TOKENIZER_LOCATIONS,
    with_absolute_paths,
    with_locations_of,
)
from vorox.core.config.schema_fields import alternatives_of, facts_at
from vorox.core.config.yaml.writer import write_scalar
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files import atomic
from vorox.core.pluralize import pluralize
from vorox.core.redaction import MARK, redact_value
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.schema import RunConfig
from vorox.core.schema.section import Section
from vorox.data.tokenizers.store import configured_untrained, load_run_tokenizer
from vorox.records.log import RunLog
from vorox.records.run_context import read_config, recorded_config
from vorox.records.run_lookup import is_config_as_written, latest_run_of_name, run_argument
from vorox.training.checkpoints.store import Checkpoint

_LENGTHS = alternatives_of("train.num_steps")
"""Keys of the length, of which a run has one."""


def check_config(recorded: RunConfig, current: RunConfig, directory: Path) -> list[Difference]:
    """Return the differences that a resume allows.

    Args:
        recorded: The recorded configuration.
        current: The configuration of this process.
        directory: The run; a tokenizer at another place must be its own.

    Raises:
        ConfigError: Some differences are not allowed; the message lists them all.
    """
    found = differences(recorded, current)
    refused = [entry for entry in found if _is_refused(entry.key)]
    if (
        refused
        and all(entry.key in TOKENIZER_LOCATIONS for entry in refused)
        and _is_same_tokenizer(current, directory)
    ):
        refused = []
    refused += _refused_of_sources(recorded, current)
    if refused:
        raise ConfigError(
            f"Run cannot be resumed with another configuration ({pluralize(len(refused), 'difference')}):\n"
            + "\n".join(f"  {entry}" for entry in refused),
            where=refused[0].key,
            hint="resume with the recorded configuration, or start a new run with --resume never",
        )
    return found


def _is_same_tokenizer(config: RunConfig, directory: Path) -> bool:
    """Whether the tokenizer that a configuration names is the one that a run has recorded."""
    kept = load_run_tokenizer(RunLayout(directory).tokenizer, config.tokenizer)
    found = None if kept is None else configured_untrained(config.tokenizer)
    return kept is not None and found is not None and kept.fingerprint == found.fingerprint


def report_same_name(config: RunConfig, directory: Path, log: RunLog) -> None:
    """Log that a new run has the name of an earlier one with other settings, and the command that continues that one.

    Args:
        config: The configuration of the new run.
        directory: Its directory.
        log: Receives the event.
    """
    earlier = latest_run_of_name(directory)
    if earlier is None:
        return
    try:
        recorded = recorded_config(earlier)
    except ConfigError:
        return
    changed = [entry for entry in differences(recorded, config) if decides_bits(entry.key)]
    if not changed or not (config.run.name or all(decides_length(entry.key) for entry in changed)):
        return  # the same command, as a new run; or a name that many configurations get
    command = f"vorox train --resume {run_argument(earlier)}"
    try:
        check_config(recorded, config, earlier)
        if any(entry.key in MODEL_LOCATIONS for entry in changed):
            raise ConfigError("Starts from another model")
        named = [entry for entry in changed if not _follows_length(entry, changed)]
        follow = f"to continue that run with these settings: {command} {_overrides(named, 'after')}"
    except ConfigError:
        follow = f"that run cannot continue with these settings; with its own: {command}"
    listed = "; ".join(map(str, changed))
    text = f"New run from step 1: {earlier.name} has the same name, but other settings ({listed}); {follow}"
    log.event("same_name", text, level="warning", run=earlier.name)


def settings_for_manifest(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as a checkpoint records it, without secrets."""
    return redact_value(config_values(config))


def config_as_recorded(directory: Path) -> RunConfig:
    """Return what ``config.yaml`` says now, to compare it; its functions are neither trusted nor asked about."""
    return read_config(directory)


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
        CheckpointError: This version does not read the settings in the checkpoint's manifest.
    """
    made_with = _made_with(found)
    newest = max(RunLayout(run_directory).configs_by_step().items(), default=None)
    is_known_change = (  # by a resume that was killed before its first save
        newest is not None
        and newest[0] >= found.step
        and not _bit_affecting_differences(_redacted(load_config(newest[1])), recorded)
    )
    as_written = is_config_as_written(run_directory) is True
    edited = [
        entry
        for entry in differences(made_with, _redacted(recorded))
        if not (is_known_change if _decides_bits(entry.key) else as_written)
    ]
    if is_known_change and not edited:
        return recorded
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


def check_again(directory: Path, config: RunConfig, step: int, last_step: int, *, is_chosen: bool) -> list[Difference]:
    """Return the settings of steps that are computed again which these steps did not have; a length is none.

    Args:
        directory: The run, before this attempt changes its records.
        config: The configuration of this process.
        step: The finished steps of the state that the run continues from.
        last_step: The last step that is recorded.
        is_chosen: Whether that state was chosen, and is not simply the newest that is left.

    Raises:
        ConfigError: ``schedule.name=hold`` would hold its rate from steps on that had another schedule.
    """
    if last_step <= step:
        return []
    earlier, _ = config_in_force(directory, step, missing=config)
    found = differences(earlier, config)
    is_held = config.schedule.name == "hold" and earlier.schedule.name != "hold"
    if is_held and not is_chosen:
        entries = [entry for entry in differences(config_as_recorded(directory), earlier) if _decides_bits(entry.key)]
        command = f"vorox train --resume {run_argument(directory)} {_overrides(entries, 'after')}".rstrip()
        raise ConfigError(
            f"schedule.name=hold would hold its rate from step {step + 1:,} on, which ran under "
            f"schedule.name={earlier.schedule.name}: no checkpoint of steps {step + 1:,} to {last_step:,} is left",
            where="schedule.name", saved="nothing was changed",
            hint=f"compute the lost steps again first: {command}; then repeat this command",
        )  # fmt: skip
    return [entry for entry in found if _decides_bits(entry.key) and not decides_length(entry.key)]


def check_unedited_before(
    directory: Path, checkpoint: Path | None, current: RunConfig, named_keys: Collection[str]
) -> None:
    """Make the check of ``check_unedited`` from the records alone, before anything outside of the run is opened.

    Raises:
        ConfigError: As ``check_unedited``.
    """
    path = RunLayout(directory).config
    if not path.exists():
        return
    steps = step_directories(directory)
    for candidate in [checkpoint] if checkpoint is not None else [steps[step] for step in sorted(steps, reverse=True)]:
        with contextlib.suppress(CheckpointError, KeyError):  # a damaged one is named where the run chooses another
            found = Checkpoint.read(candidate)
            check_unedited(directory, found, read_config(directory), current, named_keys)
            return
    unnamed = [key for key in flat_values(current) if not _has_prefix(key, tuple(named_keys))]
    if not steps and unnamed and is_config_as_written(directory) is False:
        raise ConfigError(
            "config.yaml was edited after the run wrote it, and no checkpoint tells how", where=str(path),
            saved="nothing was changed",
            hint=f"name the configuration: vorox train CONFIG --resume {run_argument(directory)}",
        )  # fmt: skip


def is_made_with(checkpoint: Checkpoint, config: RunConfig) -> bool:
    """Whether a checkpoint was written under a configuration; settings that do not affect bits are ignored.

    Raises:
        CheckpointError: This version does not read the settings in its manifest.
    """
    return not _bit_affecting_differences(_made_with(checkpoint), config)


def _made_with(checkpoint: Checkpoint) -> RunConfig:
    """Return the configuration in a checkpoint's manifest."""
    try:
        return config_from_record(checkpoint.metadata["settings"])
    except (KeyError, ValidationError) as error:
        start = f"vorox train CONFIG --resume never --from-weights {shlex.quote(str(checkpoint.path))}"
        raise CheckpointError(
            "The checkpoint's manifest has no settings that this version reads", where=str(checkpoint.path),
            hint=f"start a new run from its weights: {start}",
        ) from error  # fmt: skip


def _decides_bits(key: str) -> bool:
    """Whether a setting decides the bits of a run; of a place, its content does."""
    return decides_bits(key) and key not in LOCATIONS


def _bit_affecting_differences(before: RunConfig, after: RunConfig) -> list[Difference]:
    """Return the changed settings that affect bits."""
    return [entry for entry in differences(before, _redacted(after)) if _decides_bits(entry.key)]


def _redacted(config: RunConfig) -> RunConfig:
    """Return a configuration without its secrets, as checkpoints record it."""
    return RunConfig.model_validate(settings_for_manifest(config))


def _follows_length(entry: Difference, changed: Sequence[Difference]) -> bool:
    """Whether an entry is a warm-up that has kept its share of a changed length, as the default one does.

    A run that is continued keeps its own, which is over by then.
    """
    length = next((one for one in changed if one.key in _LENGTHS), None)
    if length is None or not entry.key.startswith("schedule.warmup_"):
        return False
    warmups: list[Any] = [entry.before, entry.after]
    lengths: list[Any] = [length.before, length.after]
    if not all(isinstance(value, int | float) and value > 0 for value in (*warmups, *lengths)):
        return False
    share = lengths[1] / lengths[0]
    expected = warmups[0] * share
    rounding = 1 if isinstance(warmups[1], int) else 1e-3 * expected
    return abs(warmups[1] - expected) <= max(1, share) * rounding


def _overrides(entries: Sequence[Difference], side: Literal["before", "after"]) -> str:
    """Return the overrides that set the values of one side."""
    values = {entry.key: getattr(entry, side) for entry in entries}
    return " ".join(
        f"{key}={json.dumps(value) if isinstance(value, list | dict) else write_scalar(value)}"
        for key, value in values.items()
    )


def _is_refused(key: str) -> bool:
    return facts_at(key).resume == "refused"


def _refused_of_sources(recorded: RunConfig, current: RunConfig) -> list[Difference]:
    """Return differences that change the text of a source of the same name; its other settings may change."""
    before = {source.name: source for source in recorded.data.sources}
    return [
        Difference(f"data.sources.{index}.{key}", old[key], new[key])
        for index, source in enumerate(current.data.sources)
        if source.name in before
        for old, new in [(before[source.name].model_dump(mode="json"), source.model_dump(mode="json"))]
        for key in new
        if old[key] != new[key] and facts_at(f"data.sources.*.{key}").resume not in ("mixture", "allowed")
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
    if step == 0 or not any(_decides_bits(entry.key) for entry in differences(previous, current)):
        return
    layout = RunLayout(run_directory)
    atomic.make_directory(layout.configs)
    if before is None:
        atomic.write_file(layout.config_from(0), dump_yaml(previous).encode())
    atomic.write_file(layout.config_from(step), dump_yaml(current).encode())


def decides_length(key: str) -> bool:
    """Whether a setting decides only the length of the run or its warm-up."""
    return facts_at(key).resume == "length"


def next_change(run_directory: Path, step: int) -> int | None:
    """Return the step from which other settings than those after ``step`` are in force; a new length is none.

    The plan records the length, so steps on both sides of such a change are a function of one configuration and the
    plan.
    """
    config, changed_at = config_in_force(run_directory, step)
    while changed_at is not None:
        following, next_at = config_in_force(run_directory, changed_at)
        if any(_decides_bits(entry.key) and not decides_length(entry.key) for entry in differences(config, following)):
            return changed_at
        changed_at = next_at
    return None


def changes_after(run_directory: Path, step: int) -> list[tuple[int, tuple[str, ...]]]:
    """Return the states from which a resume changed settings that affect bits, each with them as overrides."""
    config, changed_at = config_in_force(run_directory, step)
    found: list[tuple[int, tuple[str, ...]]] = []
    while changed_at is not None:
        following, next_at = config_in_force(run_directory, changed_at)
        entries = [entry for entry in differences(config, following) if _decides_bits(entry.key)]
        if entries:
            found.append((changed_at, tuple(dict.fromkeys(_override(following, entry) for entry in entries))))
        config, changed_at = following, next_at
    return found


def _override(config: RunConfig, entry: Difference) -> str:
    """Return the override that sets a setting to its later value; of a part of a list, the whole list."""
    names = list(itertools.takewhile(lambda name: not name.isdecimal(), entry.key.split(".")))
    key, value = ".".join(names), entry.after
    if key != entry.key:
        listed: Any = config
        for name in names:
            listed = getattr(listed, name)
        value = [
            one.model_dump(mode="json", exclude_defaults=True) if isinstance(one, Section) else one for one in listed
        ]
    return f"{key}={json.dumps(value)}"


def config_in_force(
    run_directory: Path, step: int, missing: RunConfig | None = None, *, overrides: Sequence[str] = ()
) -> tuple[RunConfig, int | None]:
    """Return the configuration of the step after ``step``, and the step from which the next one is in force.

    If ``config.yaml`` is missing, ``missing`` takes its place. Model and tokenizer are where the newest configuration
    has them. ``overrides`` replace settings of the step.
    """
    files = RunLayout(run_directory).configs_by_step()
    before = max((known for known in files if known <= step), default=None)
    newest = RunLayout(run_directory).config
    current = missing if missing is not None and not newest.exists() else read_config(run_directory, overrides)
    found = current if before is None else with_locations_of(load_config(files[before], overrides), current)
    return with_absolute_paths(found), min((known for known in files if known > step), default=None)
