"""Fork: a run of its own that goes on from a state of another run, with one difference on record.

In: a run, a checkpoint of one of its states, and a change. Out: a run directory with the records of all steps up to
that state, as if the run had been stopped there. It is an ordinary run: it resumes, replays, and tells where and when,
also of its parent's steps. Masked documents are an event of its plan, and other settings come with its first resume,
so a fork without a change computes what its parent did, bit for bit.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from vorox.core.batch import DataCursor
from vorox.core.config import config_digest, config_values, dump_yaml
from vorox.core.errors import ConfigError
from vorox.core.files import atomic
from vorox.core.files.chained_log import HashChainedLog
from vorox.core.files.disk_errors import disk_error
from vorox.core.files.json_lines import lines_up_to
from vorox.core.files.json_reader import mapping
from vorox.core.files.staged_directory import FileEntry, StagedDirectory, read_manifest
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.core.user_code import trusted_code
from vorox.data.order.document_masks import check_masks
from vorox.data.order.plan import DataPlan
from vorox.data.order.plan_events import MaskedDocument, MaskEvent
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.records.attempts import Attempt, AttemptRecord
from vorox.records.executed_steps import PLAN_NOTE, STEPS_NOTE, end_note, executed_attempts
from vorox.records.log import time_stamp
from vorox.records.replay_chain import StateChain, examine_chain, read_states
from vorox.records.run_context import fresh_directory
from vorox.records.run_lookup import CONFIG_NOTE, FORKED_FROM, INHERITED, read_run_record
from vorox.training.checkpoints.store import Checkpoint, read_state
from vorox.training.export.derived import ORIGIN_KEYS
from vorox.training.resume.resume_settings import check_config, config_in_force, record_config_change

_NOTHING = "nothing was written"
_DECIDED_LATER = {"skip", "rollback", "mask"}
"""Kinds of events that a step or a resume decided, and that no state before them knows."""


@dataclass(frozen=True, slots=True)
class ForkChange:
    """What a fork does otherwise than its parent.

    Attributes:
        documents: The documents that are masked in all of its own steps, by the name that was typed.
        sources: The sources that it samples no more rows of.
        overrides: Its settings, as ``section.key=value``.
    """

    documents: Mapping[str, tuple[MaskedDocument, ...]] = field(default_factory=dict[str, tuple[MaskedDocument, ...]])
    sources: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    @property
    def masked(self) -> tuple[MaskedDocument, ...]:
        return tuple(dict.fromkeys(itertools.chain.from_iterable(self.documents.values())))

    def to_json(self) -> dict[str, list[str]]:
        return {
            "without_documents": list(self.documents), "without_sources": list(self.sources),
            "overrides": list(self.overrides),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _State:
    """The state of the parent that a fork begins with.

    Attributes:
        parent: The run.
        step: Its finished steps.
        checkpoint: It; ``None`` before the first step.
        plan: The parent's plan.
        cursor: The state's position in the data; ``None`` before the first step.
    """

    parent: RunLayout
    step: int
    checkpoint: Checkpoint | None
    plan: DataPlan
    cursor: DataCursor | None

    @property
    def position(self) -> int:
        return 0 if self.cursor is None else self.cursor.position

    @property
    def num_plan_events(self) -> int:
        """The events of the plan that the state was computed by."""
        return 1 if self.cursor is None else self.cursor.plan_events


def fork(parent: Path, step: int, checkpoint: Checkpoint | None, change: ForkChange, name: str | None = None) -> Path:
    """Create a fork; ``vorox train --resume`` trains it.

    Args:
        parent: The run; it may be live, and is not changed.
        step: The state, in finished steps.
        checkpoint: It, verified; ``None`` for step 0.
        change: The difference, as ``check_change`` accepts it.
        name: Name of the fork. Default: that of the parent, and the step.

    Returns:
        Its directory, beside that of the parent.

    Raises:
        ConfigError: The run has not recorded the step, or the directory of the fork cannot be written.
        DataError: A record of the run is damaged.
        CheckpointError: The disk is full or failed.
    """
    known = examine_chain(parent, step).last_known_step
    if not 0 <= step <= known:
        raise ConfigError(
            f"The run has no step {step:,}; it recorded {pluralize(known, 'step')}", where=str(parent),
            hint=f"choose a step from 0 to {known}",
        )  # fmt: skip
    cursor = None if checkpoint is None else read_state(checkpoint.path).progress.cursor
    state = _State(RunLayout(parent), step, checkpoint, DataPlan.open(RunLayout(parent).plan), cursor)
    before, config = _configs(parent, step, change, name)
    target = parent.parent / fresh_directory(_in(config, parent.parent)).name
    staged = atomic.temporary_name(target)
    try:
        atomic.make_directory(staged)
        _write(state, RunLayout(staged), target.name, config, change)
        record_config_change(staged, before, config, step)
        atomic.rename(staged, target)
    except OSError as error:
        raise disk_error(error, str(target)) or ConfigError(
            f"The fork cannot be written: {error.strerror}", where=str(error.filename or target),
            saved="the run was not changed", hint="make the folder of the run writable",
        ) from error  # fmt: skip
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    trusted_code.trust(config_values(config), target)
    return target


def check_change(run_data: RunDataIndex, step: int, change: ForkChange) -> None:
    """Check that a run can go on from a step with a change.

    Raises:
        ConfigError: A resume refuses one of the settings, or documents cannot be masked.
    """
    plan, (before, config) = run_data.plan, _configs(run_data.directory, step, change, None)
    named = [text for text in change.overrides if text.partition("=")[0].lstrip("-") in ("run.name", "run.directory")]
    if named:
        raise ConfigError(
            "A fork lies beside its parent, and --name names it", where=named[0],
            hint="leave it out, or write --name NAME", saved=_NOTHING,
        )  # fmt: skip
    try:
        check_config(before, config, run_data.directory)
    except ConfigError as error:
        raise ConfigError(
            error.what.replace("Run cannot be resumed", "A run cannot be forked"), where=error.where,
            hint="a fork may change what a resume may: leave the others out, or train a run of its own", saved=_NOTHING,
        ) from error  # fmt: skip
    length = config.train.num_steps
    if length is not None and length != before.train.num_steps and length < step:
        raise ConfigError(
            f"The fork would end before it begins: it has {pluralize(step, 'step')} of its parent",
            where=f"train.num_steps={length}", hint=f"write {step + 1:,} or more", saved=_NOTHING,
        )  # fmt: skip
    if change.documents:
        event = MaskEvent(plan.start.batch_sizes.position_of(step), change.masked)
        check_masks(plan.state.apply(event), document_mask=config.data.document_mask, is_planned=False)


def _configs(parent: Path, step: int, change: ForkChange, name: str | None) -> tuple[RunConfig, RunConfig]:
    """Return the configuration of the parent at a step, and that of the fork from there on, both under its name."""
    before, _ = config_in_force(parent, step)
    own = name or f"{before.run.name or parent.name}-fork-{step}"
    overrides = [*_without_sources(before, change.sources), *change.overrides, f"run.name={json.dumps(own)}"]
    after, _ = config_in_force(parent, step, overrides=overrides)
    return before.model_copy(update={"run": before.run.model_copy(update={"name": own})}), after


def _without_sources(config: RunConfig, names: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides by which a run samples no more rows of some sources.

    Raises:
        ConfigError: The run has no such source, or no other one.
    """
    if not names:
        return ()
    known = [source.name for source in config.data.sources]
    unknown = [name for name in names if name not in known]
    if unknown or not set(known) - set(names):
        raise ConfigError(
            f"The run has no source {unknown[0]}" if unknown else "No source would be left", where="--without-source",
            hint=f"its sources are {', '.join(known)}",
        )  # fmt: skip
    sources = [
        one.model_dump(mode="json", exclude_defaults=True) for one in config.data.sources if one.name not in names
    ]
    stages = [stage.model_dump(mode="json", exclude_defaults=True) for stage in config.data.stages]
    for stage in stages:
        stage["weights"] = {
            key: weight for key, weight in stage.get("weights", {}).items() if key.partition(".")[0] not in names
        }
    found = {"data.sources": sources} | ({"data.stages": stages} if stages else {})
    return tuple(f"{key}={json.dumps(value)}" for key, value in found.items())


def _in(config: RunConfig, directory: Path) -> RunConfig:
    return config.model_copy(update={"run": config.run.model_copy(update={"directory": str(directory)})})


def _write(state: _State, layout: RunLayout, run_id: str, config: RunConfig, change: ForkChange) -> None:
    """Write all records of a fork, the configuration last."""
    parent = state.parent
    plan, last_state = _write_plan(state, layout.plan, change.masked), _last_state(state)
    for source, target, last in (
        (parent.chain, layout.chain, state.step),
        (parent.states, layout.states, last_state),
        (parent.metrics, layout.metrics, state.step),
    ):
        if source.exists():
            atomic.write_file(target, lines_up_to(source, last))
    for folder in (RunLayout.tokenizer, RunLayout.views):
        for path in sorted(parent.directory.glob(folder.mirrored)):
            atomic.make_directory(layout.directory / folder.name)
            atomic.write_file(layout.directory / folder.name / path.name, path.read_bytes())
    for since, path in parent.configs_by_step().items():
        if since <= state.step:
            atomic.make_directory(layout.configs)
            atomic.write_file(layout.config_from(since), path.read_bytes())
    attempts = _attempts(state)
    for attempt in attempts:
        with AttemptRecord(layout.directory, attempt.number, attempt.start_step, attempt.first_position) as record:
            record.record_started(attempt.last_step)
            record.record_saved(attempt.saved_step)
    if state.checkpoint is not None:
        if last_state != state.step:  # the parent did not save it
            progress = read_state(state.checkpoint.path).progress
            StateChain(layout.directory, state.step).record(progress, str(state.checkpoint.metadata["fingerprint"]))
        _copy_checkpoint(state.checkpoint, layout.checkpoint(state.step))
    content = dump_yaml(config).encode()
    record = _record(state, run_id, config, change, attempts, plan)
    if record["attempts"]:
        record["attempts"][-1]["notes"][CONFIG_NOTE] = hashlib.sha256(content).hexdigest()
    atomic.make_directory(layout.control)
    atomic.write_file(layout.record, atomic.pretty_json(record))
    atomic.write_file(layout.config, content)


def _last_state(state: _State) -> int:
    """Return the last recorded state that the fork has; after a run goes back, later ones stand until it saves again.

    Raises:
        DataError: The record of the parent is damaged.
    """
    entries = examine_chain(state.parent.directory).entries
    recorded = read_states(state.parent.directory, state.step)
    return max(
        (step for step, one in recorded.items() if step in entries and one.chain == entries[step].chain), default=0
    )


def _write_plan(state: _State, path: Path, documents: Sequence[MaskedDocument]) -> DataPlan:
    """Write the parent's plan as it was in force at the state, and mask documents from there on."""
    events = HashChainedLog(state.parent.plan).read()[0][: state.plan.num_events]
    kept = [
        event for index, event in enumerate(events)
        if index < state.num_plan_events
        or event["kind"] not in _DECIDED_LATER or event["start_position"] <= state.position
    ]  # fmt: skip
    HashChainedLog(path).append(kept)
    plan = DataPlan.open(path)
    if documents:
        plan.add([MaskEvent(state.position, tuple(documents))])
    return plan


def _attempts(state: _State) -> list[Attempt]:
    """Return the parent's attempts as they were when it had the state."""
    return [
        replace(one, last_step=min(one.last_step, state.step), saved_step=min(one.saved_step, state.step))
        for one in executed_attempts(state.parent.directory)
        if one.start_step < state.step
    ]


def _record(
    state: _State,
    run_id: str,
    config: RunConfig,
    change: ForkChange,
    attempts: Sequence[Attempt],
    plan: DataPlan,
) -> dict[str, Any]:
    """Return ``run.json``: that of the parent as far as the state, and where it is from."""
    before = read_run_record(state.parent.directory)
    by_number = {attempt.number: attempt for attempt in attempts}
    kept: list[dict[str, Any]] = []
    for entry in cast("list[dict[str, Any]]", before["attempts"]):
        attempt = by_number.get(cast("int", mapping(mapping(entry.get("notes")).get(STEPS_NOTE)).get("number")))
        if attempt is None:
            continue
        events = mapping(entry["notes"].get(PLAN_NOTE)).get("events")
        number = min(events if isinstance(events, int) else 1, state.num_plan_events)
        notes = {
            **copy.deepcopy(entry["notes"]), STEPS_NOTE: end_note(attempt),
            PLAN_NOTE: {"events": number, "digest": plan.digest_at(number)},
        }  # fmt: skip
        kept.append({**entry, "outcome": "stopped", "failure": None, "notes": notes, INHERITED: True})
    chain = "" if state.checkpoint is None else str(state.checkpoint.metadata["chain"])
    origin = {
        "run_id": before.get("run_id", state.parent.directory.name), "run": str(state.parent.directory.absolute()),
        "step": state.step, "chain": chain, "change": change.to_json(),
    }  # fmt: skip
    return {
        **before, "run_id": run_id, "config_digest": config_digest(config), "created_at": time_stamp(),
        "attempts": kept, FORKED_FROM: origin,
    }  # fmt: skip


def _copy_checkpoint(checkpoint: Checkpoint, target: Path) -> None:
    """Copy a checkpoint, with hard links where the disk has them; a materialised one becomes one of the run."""
    manifest = read_manifest(checkpoint.path)
    atomic.make_directory(target.parent)
    with StagedDirectory(target) as directory:
        for name, entry in cast("Mapping[str, Any]", manifest["files"]).items():
            place = directory.path / name
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(checkpoint.path / name, place)
            except OSError:  # another disk, or a file system without links
                shutil.copyfile(checkpoint.path / name, place)
                atomic.sync_path(place)
            directory.add(name, FileEntry(**entry))
        metadata = {key: value for key, value in manifest["metadata"].items() if key not in ORIGIN_KEYS}
        directory.commit(metadata)
