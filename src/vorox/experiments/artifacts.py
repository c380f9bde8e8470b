"""Listing, inspecting, verifying and removing runs and checkpoints on disk.

Reads need no lock; a removal acquires the run's lock first, so a running run is safe. Only files written by a run are
removed: a directory with other files is refused, a symbolic link is removed without its target, and a partial removal
never looks complete (checkpoints lose their manifest first, runs are first renamed to a hidden name).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vorox.core.config.yaml.reader import read_mapping
from vorox.core.errors import CheckpointError, ConfigError, UnreadableCheckpointError, VoroxError
from vorox.core.files import atomic, staged_directory
from vorox.core.files.file_holder import lock_holder
from vorox.core.files.json_lines import read_lines, valid_records
from vorox.core.files.json_reader import MalformedJson, is_step, read_json, read_regular
from vorox.core.run_layout import CheckpointName, RunLayout, checkpoint_directories, lock_run, step_directories
from vorox.experiments.tracking import last_values
from vorox.records.executed_steps import last_chain_step
from vorox.records.run_lookup import attempt_notes, read_run_record, refuse_links, run_directories
from vorox.records.run_pins import refuse_pinned, unpin

RunState = Literal["running", "finished", "stopped", "interrupted", "killed", "failed", "unknown", "unreadable"]
CheckpointState = Literal["unverified", "valid", "corrupt", "unreadable", "quarantined"]


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """One checkpoint directory.

    Attributes:
        name: Name of the directory.
        path: The directory.
        step: Steps finished.
        state: ``quarantined`` checkpoints were renamed because they were corrupt or replaced. ``unreadable``: the disk
            failed to deliver a file, whose content may be intact.
        size_bytes: By the manifest, or of the directory if there is none.
        saved_at: When the manifest was written, seconds since the epoch.
        eval_loss: Validation loss of this step, if it was validated.
        metadata: Metadata of the manifest: fingerprint, chain, evaluation and more; empty if it cannot be read.
        problem: What is wrong with the checkpoint.
    """

    name: str
    path: Path
    step: int
    state: CheckpointState
    size_bytes: int
    saved_at: float | None
    eval_loss: float | None
    metadata: dict[str, Any]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Summary of a run.

    Attributes:
        run_id: Name of the directory.
        directory: The run directory.
        state: ``running`` while a process holds the lock, otherwise how the last attempt ended.
        holder: The process that holds the lock.
        step: Steps finished, according to all files.
        total_steps: Length of the run, if known.
        loss: Newest training loss.
        eval_loss: Newest validation loss.
        checkpoint_step: Step of the newest checkpoint.
        num_checkpoints: Number of checkpoints, without quarantined ones.
        size_bytes: Size of the directory.
        attempts: Number of starts and resumes.
        created_at: Start of the first attempt, as an ISO time.
        changed_at: Last change of any file, seconds since the epoch.
        failure: Contents of ``failure.json``.
        problem: Why the state is ``unreadable``: ``run.json`` is damaged, or somebody wrote something else.
    """

    run_id: str
    directory: Path
    state: RunState
    holder: str | None
    step: int
    total_steps: int | None
    loss: float | None
    eval_loss: float | None
    checkpoint_step: int | None
    num_checkpoints: int
    size_bytes: int
    attempts: int
    created_at: str | None
    changed_at: float
    failure: dict[str, Any] | None
    problem: str = ""


def list_runs(root: Path) -> list[RunSummary]:
    """Return all runs below a root, by name; one that cannot be read is ``unreadable`` and hides no other."""
    return [inspect_any(directory) for directory in run_directories(root)]


def inspect_any(directory: Path) -> RunSummary:
    """Summarise a run; whatever prevents it is the ``problem`` of an ``unreadable`` run."""
    try:
        return inspect_run(directory)
    except Exception as error:  # others may have written the files: no list may end at one of them
        return unreadable_run(
            directory, error.what if isinstance(error, VoroxError) else f"{type(error).__name__}: {error}"
        )


def unreadable_run(directory: Path, problem: str) -> RunSummary:
    """Return the summary of a run of which nothing is known."""
    return RunSummary(
        directory.resolve().name, directory, "unreadable", None, 0, None, None, None, None, 0, 0, 0, None, 0.0, None,
        problem,
    )  # fmt: skip


def list_failed_runs(root: Path) -> list[RunSummary]:
    """Return the runs that ended without any checkpoint, by name."""
    ended = [run for run in list_runs(root) if run.state not in {"running", "finished", "unreadable"}]
    return [run for run in ended if not checkpoint_directories(run.directory)]


def inspect_run(directory: Path) -> RunSummary:
    """Summarise a run from its files. Works on damaged, unfinished and running runs."""
    attempts, problem = _attempts(directory)
    layout = RunLayout(directory)
    holder = lock_holder(layout.lock)
    values = last_values(directory, ("loss",))
    validations = eval_losses(directory)
    steps = step_directories(directory)
    size_bytes, changed_at = _measure(directory)
    return RunSummary(
        run_id=directory.resolve().name,
        directory=directory,
        state="unreadable" if problem and holder is None else _state(attempts, holder),
        holder=holder,
        step=max(last_chain_step(directory), *steps, *validations, *(step for step, _ in values.values()), 0),
        total_steps=recorded_length(directory),
        loss=values["loss"][1] if "loss" in values else None,
        eval_loss=validations[max(validations)] if validations else None,
        checkpoint_step=max(steps, default=None),
        num_checkpoints=len(steps),
        size_bytes=size_bytes,
        attempts=len(attempts),
        created_at=str(attempts[0].get("started_at")) if attempts else None,
        changed_at=changed_at,
        failure=_read_json(layout.failure),
        problem=problem,
    )


def _attempts(directory: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the recorded attempts, or none and why they cannot be read."""
    try:
        return read_run_record(directory)["attempts"], ""
    except FileNotFoundError:
        return [], ""
    except MalformedJson as error:
        return [], f"{Path(error.where).name}: {error.what}"
    except OSError as error:
        return [], f"{RunLayout.record.name}: {error.strerror}"


def _state(attempts: Sequence[dict[str, Any]], holder: str | None) -> RunState:
    if holder is not None:
        return "running"
    match attempts[-1].get("outcome") if attempts else None:
        case "finished" | "stopped" | "interrupted" | "failed" as outcome:
            return outcome
        case "running" | "killed" | "rolled_back":
            return "killed"  # recorded as running, but no process holds the lock
        case _:
            return "unknown"


def recorded_length(directory: Path) -> int | None:
    """Return the length of a run in steps by the newest attempt that recorded one, else by the configuration."""
    for total_steps in attempt_notes(directory, "total_steps"):
        if is_step(total_steps):
            return total_steps
    try:
        path = RunLayout(directory).config
        value: Any = read_mapping(read_regular(path).decode(), path.name).value
        num_steps = value["train"]["num_steps"]
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None
    return num_steps if is_step(num_steps) else None


def _measure(directory: Path) -> tuple[int, float]:
    """Return the size of a directory and the last change of any of its files but the lock, which a refusal rewrites."""
    lock, size_bytes, changed_at = str(RunLayout(directory).lock), 0, 0.0
    for parent, folders, files in os.walk(directory):  # skips folders that are removed meanwhile
        for number, name in enumerate((*folders, *files)):
            path = os.path.join(parent, name)  # noqa: PTH118 - a run may have a million files
            try:
                status = os.lstat(path)
            except OSError:
                continue  # removed meanwhile
            size_bytes += status.st_size if number >= len(folders) else 0
            changed_at = max(changed_at, 0.0 if path == lock else status.st_mtime)
    return size_bytes, changed_at


def list_checkpoints(run_directory: Path, *, verify: bool = False) -> list[CheckpointSummary]:
    """Return the checkpoints of a run by step, including quarantined ones.

    Args:
        run_directory: The run.
        verify: Read and check every byte.
    """
    losses = eval_losses(run_directory)
    summaries = [_summary(name, path, losses.get(name.step)) for name, path in checkpoint_directories(run_directory)]
    return [verify_checkpoint(summary) for summary in summaries] if verify else summaries


def eval_losses(run_directory: Path) -> dict[int, float]:
    """Return the validation loss by step, without steps that were rolled back by a resume."""
    records = valid_records(read_lines(RunLayout(run_directory).evaluations))
    return {record["step"]: record["loss"] for record in records if isinstance(record.get("loss"), float)}


def _summary(name: CheckpointName, path: Path, eval_loss: float | None) -> CheckpointSummary:
    step, aside = name
    state: CheckpointState = "quarantined" if aside else "unverified"
    problem = {"corrupt": "did not verify", "replaced": "was written again by a later attempt"}.get(aside, "")
    if aside == "incomplete" or not (aside or _has_manifest(path)):
        state, problem = "quarantined", "has no manifest: its copy or its removal was interrupted"
    try:
        manifest = staged_directory.read_manifest(path)
        size_bytes = sum(int(entry["size_bytes"]) for entry in manifest["files"].values())
        saved_at = (path / atomic.MANIFEST_NAME).stat().st_mtime
        metadata = manifest["metadata"]
        return CheckpointSummary(path.name, path, step, state, size_bytes, saved_at, eval_loss, metadata, problem)
    except (CheckpointError, OSError) as error:
        size_bytes, _ = _measure(path)
        state = state if state == "quarantined" else _judge(error)
        return CheckpointSummary(path.name, path, step, state, size_bytes, None, None, {}, problem or str(error))


def _has_manifest(path: Path) -> bool:
    try:
        return staged_directory.has_manifest(path)
    except UnreadableCheckpointError:
        return True  # reading it says why


def _judge(error: Exception) -> CheckpointState:
    return "unreadable" if isinstance(error, OSError | UnreadableCheckpointError) else "corrupt"


def verify_checkpoint(summary: CheckpointSummary) -> CheckpointSummary:
    """Read every byte of a checkpoint and return its summary with the resulting state; skip quarantined ones."""
    if summary.state == "quarantined":
        return summary
    try:
        staged_directory.verify_directory(summary.path, step=summary.step)
    except (CheckpointError, OSError) as error:
        return replace(summary, state=_judge(error), problem=str(error))
    return replace(summary, state="valid")


def find_checkpoints(run_directory: Path, names: Sequence[str]) -> list[CheckpointSummary]:
    """Return the checkpoints of a run with these steps or directory names, by step.

    Raises:
        ConfigError: One does not exist.
    """
    known = list_checkpoints(run_directory)
    chosen = {_find(known, name, run_directory).name for name in names}
    return [summary for summary in known if summary.name in chosen]


def remove_checkpoints(run_directory: Path, names: Sequence[str], *, force: bool = False) -> list[CheckpointSummary]:
    """Remove checkpoints of a run that no process trains.

    Args:
        run_directory: The run.
        names: Steps or directory names.
        force: Allow removing the last valid checkpoint.

    Returns:
        The removed checkpoints.

    Raises:
        ConfigError: The run is in use, or a checkpoint does not exist.
        CheckpointError: No valid checkpoint would remain.
    """
    refuse_links(run_directory)
    with lock_run(run_directory):
        known = list_checkpoints(run_directory)
        chosen = find_checkpoints(run_directory, names)
        chosen_names = {summary.name for summary in chosen}
        kept = [entry for entry in known if entry.name not in chosen_names and entry.state != "quarantined"]
        refuse_pinned(run_directory, {summary.step for summary in chosen if summary.state != "quarantined"})
        readable = any(summary.state == "unverified" for summary in chosen)
        if readable and not force and not any(verify_checkpoint(entry).state == "valid" for entry in reversed(kept)):
            raise CheckpointError(
                "No valid checkpoint would remain",
                where=str(RunLayout(run_directory).checkpoints),
                hint="add --force to remove the last state of the run",
                saved="nothing was removed",
            )
        for summary in chosen:
            atomic.remove_directory(staged_directory.hide(summary.path))
            if summary.state != "quarantined":  # a signature without its checkpoint means that one was taken away
                atomic.remove_file(RunLayout(run_directory).signature(summary.step))
    return chosen


def _find(known: Sequence[CheckpointSummary], name: str, run_directory: Path) -> CheckpointSummary:
    digits = name.replace(",", "").replace("_", "")
    for summary in known:
        is_step = digits.isdecimal() and summary.name == RunLayout(run_directory).checkpoint(int(digits)).name
        if summary.name == name or is_step:
            return summary
    available = ", ".join(summary.name for summary in known) or "none"
    raise ConfigError(f"Checkpoint {name} does not exist; available: {available}", where=str(run_directory))


def _bases_of(record: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the checkpoints that a run started from, by its record."""
    for attempt in record.get("attempts") or ():
        notes = attempt.get("notes") if isinstance(attempt, dict) else None
        name = notes.get("from_weights") if isinstance(notes, dict) else None
        if isinstance(name, str):
            yield Path(name)


def remove_run(directory: Path, *, first: Callable[[], None] | None = None) -> int:
    """Remove a run that no process trains, and return its size in bytes.

    Args:
        directory: The run.
        first: Called before the removal, after all checks; if it fails, the run is kept.

    Raises:
        ConfigError: It is not a run, is in use, or contains files that a run does not write.
    """
    if directory.is_symlink():
        raise ConfigError("This is a link, not a run", where=str(directory), hint="name the directory it points to")
    directory = directory.resolve()
    record = _read_json(RunLayout(directory).record) or {}
    if not str(record.get("format", "")).startswith("vorox-run/"):
        raise ConfigError("This directory has no run.json of a run", where=str(directory), hint="see `vorox runs list`")
    with lock_run(directory):
        foreign = RunLayout(directory).foreign_files()
        if foreign:
            raise ConfigError(
                f"The directory contains files that no run writes: {', '.join(foreign)}",
                where=str(directory),
                hint="move it elsewhere, then remove the run",
                saved="nothing was removed",
            )
        refuse_pinned(directory)
        if first is not None:
            first()
        for base in _bases_of(record):
            unpin(base, directory)
        size_bytes, _ = _measure(directory)
        atomic.sweep_temporary(directory.parent)  # leftovers of an interrupted removal
        hidden = atomic.temporary_name(directory)
        atomic.rename(directory, hidden)
        for path in (RunLayout(hidden).record, RunLayout(hidden).config):  # without them it is not recognised as a run
            atomic.remove_file(path)
        shutil.rmtree(hidden)
    return size_bytes


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
