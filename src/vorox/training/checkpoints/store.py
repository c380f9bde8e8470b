"""Checkpoints on disk: commit, read, verify, choose and quarantine them.

``checkpoints/step-00001000`` holds the engine's files, ``state.json`` (progress, horizon) and, where transformers knows
the architecture, the files of a Hugging Face model, all with a hash of every byte. The latest checkpoint is the one of
the highest step that verifies; neither clocks nor pointer files decide. A corrupt checkpoint is renamed, never deleted,
and the next older one is used, with a warning. An I/O error is no evidence of corruption: it ends the command, and
nothing is renamed. A checkpoint may be a symbolic link; it is read, but nothing behind the link is written or removed.

A checkpoint is committed as one directory, complete or absent: every rank writes its shards (``write_shards``), and
rank 0 commits them (``commit_checkpoint``) only after every rank has written, hashed and fsynced its files. The ranks
exchange names and hashes through the host-side store, so a background thread can write while the devices train. A
single process takes the same steps without waiting.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vorox.core.batch import Progress
from vorox.core.engine import EngineSnapshot, PartReport
from vorox.core.errors import CheckpointError, UnreadableCheckpointError
from vorox.core.files import atomic, staged_directory
from vorox.core.files.json_reader import read_json
from vorox.core.files.staged_directory import FileEntry, StagedDirectory, StagedPart
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import (
    RunLayout,
    checkpoint_directories,
    lock_run,
    parse_checkpoint_name,
    step_directories,
)
from vorox.core.schema import CheckpointConfig
from vorox.core.user_code import trusted_code
from vorox.records.log import RunLog
from vorox.records.replay_chain import examine_chain
from vorox.records.run_lookup import refuse_links, run_argument
from vorox.training.steps.schedule import Horizon

STATE_NAME = "state.json"
STATE_FORMAT = "vorox-state/2"
REASON_NAME = "REASON.txt"
_STAGED, _WRITTEN = "checkpoint directory", "checkpoint parts"
"""Topics of the background threads of several ranks."""


class Checkpoint(NamedTuple):
    """A committed checkpoint and the metadata of its manifest."""

    path: Path
    metadata: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Return a checkpoint by its manifest alone; no other file is verified.

        Raises:
            CheckpointError: The manifest is missing or damaged.
        """
        return cls(path, staged_directory.read_manifest(path)["metadata"])

    @property
    def step(self) -> int:
        return int(self.metadata["step"])


@dataclass(frozen=True, slots=True)
class RunState:
    """What a checkpoint holds besides the engine's state.

    Attributes:
        progress: How far the run is.
        horizon: The length of the run, as in force at this step.
        nonfinite_in_a_row: Consecutive steps up to this one whose loss or gradient was not finite.
    """

    progress: Progress
    horizon: Horizon
    nonfinite_in_a_row: int = 0

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunState:
        progress, length = Progress.from_json(value["progress"]), Horizon.from_json(value["horizon"])
        return cls(progress, length, int(value["nonfinite_in_a_row"]))

    def manifest(self, eval_losses: Mapping[int, float]) -> dict[str, Any]:
        """Return what the manifest of the checkpoint repeats of it.

        Args:
            eval_losses: Validation losses by step; the last one up to this step is named.
        """
        progress = self.progress
        known = {step: loss for step, loss in eval_losses.items() if step <= progress.step and math.isfinite(loss)}
        last = max(known, default=None)
        return {
            "step": progress.step,
            "horizon": self.horizon.to_json(),
            "num_tokens": progress.num_tokens,
            "chain": progress.chain,
            "plan_digest": progress.cursor.plan_digest,
            "plan_events": progress.cursor.plan_events,
            "eval": None if last is None else {"step": last, "loss": known[last]},
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT,
            "progress": self.progress.to_json(),
            "horizon": self.horizon.to_json(),
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
        }


def commit_checkpoint(
    path: Path,
    snapshot: EngineSnapshot,
    files: Mapping[str, bytes],
    metadata: Mapping[str, Any],
    distributed: DistributedContext,
    record: Callable[[str], None] = lambda _: None,
) -> None:
    """Write a checkpoint on rank 0, which appears complete or not at all; the other ranks call ``write_shards``.

    Args:
        path: Its directory.
        snapshot: The state of the engine.
        files: The other files, by name.
        metadata: For its manifest, which also gets the fingerprint of the state.
        distributed: The ranks.
        record: Called with the fingerprint, before the checkpoint appears.

    Raises:
        CheckpointError: As ``write_state``.
        OSError: A file cannot be written.
    """
    with StagedDirectory(path) as directory:
        fingerprint = write_state(snapshot, directory, distributed)
        for name, data in files.items():
            directory.write(name, data)
        record(fingerprint)
        directory.commit({**metadata, "fingerprint": fingerprint})


def write_state(
    snapshot: EngineSnapshot, directory: StagedDirectory, distributed: DistributedContext | None = None
) -> str:
    """Write a snapshot on rank 0, with the shards of all ranks; the caller commits the directory.

    Returns:
        The fingerprint of the whole state.

    Raises:
        CheckpointError: A file of another rank does not exist here, or arrays are incomplete.
    """
    context = distributed or DistributedContext()
    context.broadcast(_STAGED, str(directory.path))
    reports: list[dict[str, Any]] = []
    context.agree(_WRITTEN, {"files": {}, "part": snapshot.write_part(directory)}, reports.extend)
    parts: list[PartReport] = []
    for report in reports:
        for name, entry in report["files"].items():
            directory.add(name, FileEntry(**entry))
        parts.append(report["part"])
    snapshot.write_metadata(directory, parts)
    return snapshot.fingerprint(parts)


def write_shards(snapshot: EngineSnapshot, distributed: DistributedContext) -> None:
    """Write the shards of another rank into the directory of rank 0, and wait until all ranks have written theirs."""
    part = StagedPart(Path(distributed.broadcast(_STAGED)))
    report = snapshot.write_part(part)
    files = {name: asdict(entry) for name, entry in part.entries.items()}
    distributed.agree(_WRITTEN, {"files": files, "part": report}, lambda _: None)


@contextlib.contextmanager
def translate_read_errors(path: Path) -> Generator[None]:
    """Raise ``UnreadableCheckpointError`` instead of ``OSError``: an I/O error does not make a checkpoint corrupt."""
    try:
        yield
    except OSError as error:
        raise staged_directory.unreadable_error(error, path) from error


def read_state(checkpoint: Path) -> RunState:
    """Return the state of a verified checkpoint.

    Raises:
        CheckpointError: It has another version's format, or cannot be read.
    """
    path = checkpoint / STATE_NAME
    with translate_read_errors(path):
        value = read_json(path, dict)
    if value.get("format") != STATE_FORMAT:
        raise CheckpointError(
            f"The state has format {value.get('format')!r}, but this version reads {STATE_FORMAT!r}", where=str(path),
            hint=f"train the run again: {RunLayout(checkpoint.parent.parent).training_command}",
        )  # fmt: skip
    try:
        return RunState.from_json(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError("The state is malformed", where=str(path), hint="restore it from a copy") from error


def incomplete_checkpoints(run_directory: Path) -> list[Path]:
    """Return the directories with a checkpoint's name that have no manifest."""
    found = checkpoint_directories(run_directory)
    return [path for name, path in found if not name.status and not staged_directory.has_manifest(path)]


def verify(path: Path) -> Checkpoint:
    """Check every byte of a checkpoint.

    Raises:
        CheckpointError: A file is missing or changed, or the directory has another step's name.
        UnreadableCheckpointError: A file cannot be read.
    """
    name = parse_checkpoint_name(path.name)
    with translate_read_errors(path):
        metadata = staged_directory.verify_directory(path, step=None if name is None else name.step)
    trusted_code.mark_recorded([metadata.get(key) for key in ("settings", "spec")], path)
    return Checkpoint(path, metadata)


def latest_valid(
    run_directory: Path,
    *,
    at_or_before: int | None = None,
    on_corrupt: Callable[[Path, CheckpointError], None] | None = None,
) -> Checkpoint | None:
    """Return the checkpoint of the highest step that verifies; ``None`` if the run has none yet.

    Args:
        run_directory: The run.
        at_or_before: Consider only steps up to this one; ``None`` then also means that none of them is valid.
        on_corrupt: Called with every corrupt checkpoint that is skipped. The owner of the run quarantines it
            (``quarantine_corrupt``).

    Raises:
        CheckpointError: The run has checkpoints but none is valid.
        UnreadableCheckpointError: A checkpoint cannot be read. An older one is not used in its place.
    """
    directories = step_directories(run_directory)
    failures: list[CheckpointError] = []
    for step in sorted(directories, reverse=True):
        if at_or_before is not None and step > at_or_before:
            continue
        try:
            return verify(directories[step])
        except UnreadableCheckpointError:
            raise
        except CheckpointError as error:
            failures.append(error)
            if on_corrupt is not None:
                on_corrupt(directories[step], error)
    if at_or_before is None and (failures or corrupt_checkpoints(run_directory)):
        raise none_valid_error(run_directory, "; ".join(map(str, failures)) or "all are quarantined")
    return None


def none_valid_error(run_directory: Path, why: str, whose: str = "this run") -> CheckpointError:
    """Return the error for a run (or one of its steps) whose checkpoints are all corrupt or quarantined."""
    return CheckpointError(
        f"No checkpoint of {whose} is valid: {why}",
        where=str(RunLayout(run_directory).checkpoints),
        hint=f"`vorox checkpoints verify {run_argument(run_directory)} --restore` restores those that verify; "
        "otherwise restore one from a copy, or start over with --resume never",
    )


def corrupt_checkpoints(run_directory: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints quarantined as corrupt, with their steps."""
    return [(name.step, path) for name, path in checkpoint_directories(run_directory) if name.status == "corrupt"]


def quarantine(path: Path, status: Literal["corrupt", "replaced", "incomplete"], reason: str) -> Path:
    """Rename a checkpoint so that no run resumes from it, and write the reason into it; return its new path.

    Of a symbolic link, only the link is renamed; nothing is written behind it.
    """
    number = 1
    while os.path.lexists(target := path.with_name(f"{path.name}.{status}-{number}")):
        number += 1
    atomic.rename(path, target)
    if not target.is_symlink():
        with contextlib.suppress(OSError):  # optional, and the disk may be the reason
            atomic.write_file(target / REASON_NAME, (reason + "\n").encode())
    return target


def quarantine_corrupt(log: RunLog) -> Callable[[Path, CheckpointError], None]:
    """Return an ``on_corrupt`` for ``latest_valid`` that quarantines and logs."""

    def on_corrupt(path: Path, error: CheckpointError) -> None:
        target = quarantine(path, "corrupt", str(error))
        step = parse_checkpoint_name(path.name)
        older = [known for known in step_directories(path.parent.parent) if step and known < step.step]
        following = f"trying step {max(older):,}" if older else "the run has no older one"
        log.event(
            "checkpoint_corrupt",
            f"Checkpoint {path.name} is corrupt and was quarantined as {target.name} ({error}); {following}",
            level="warning",
            renamed_to=str(target),
            reason=str(error),
        )

    return on_corrupt


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """The outcome of restoring one quarantined checkpoint.

    Attributes:
        name: Its directory's name.
        step: Finished steps.
        problem: Why it stays quarantined; empty if it is restored.
    """

    name: str
    step: int
    problem: str


def restore_quarantined(run_directory: Path) -> list[RestoreResult]:
    """Restore checkpoints that were quarantined as corrupt but verify.

    A checkpoint is restored only if every byte matches its manifest, its name is free, and the replay chain records
    exactly its state at that step.

    Raises:
        ConfigError: A process is training the run, or the directory is a link.
        UnreadableCheckpointError: A checkpoint still cannot be read.
    """
    refuse_links(run_directory)
    with lock_run(run_directory):
        chain = examine_chain(run_directory)
        heads: dict[int, str | None] = {
            step: entry.chain for step, entry in chain.entries.items() if step not in chain.changed
        }
        found: list[RestoreResult] = []
        for step, path in corrupt_checkpoints(run_directory):
            problem = _check_restorable(path, step, RunLayout(run_directory).checkpoint(step), heads)
            if not problem:
                atomic.rename(path, RunLayout(run_directory).checkpoint(step))
            found.append(RestoreResult(path.name, step, problem))
        return found


def _check_restorable(path: Path, step: int, target: Path, heads: dict[int, str | None]) -> str:
    """Return why a checkpoint cannot be restored; if it can, remove its reason file and return an empty string."""
    if path.is_symlink():
        return "it is a symbolic link"
    if target.exists() or target.is_symlink():
        return f"{target.name} was saved again since"
    try:
        metadata = staged_directory.verify_directory(path, step=step, extra_files=frozenset({REASON_NAME}))
    except UnreadableCheckpointError:
        raise
    except CheckpointError as error:
        return str(error)
    if heads and heads.get(step) != metadata.get("chain"):
        return "the run continued without it, from an earlier step"
    atomic.remove_file(path / REASON_NAME)
    return ""


def steps_to_keep(
    steps: list[int], config: CheckpointConfig, eval_losses: Mapping[int, float], changes: Collection[int] = ()
) -> set[int]:
    """Return the steps whose checkpoints the retention rules keep, of the ascending ``steps``.

    Args:
        steps: The steps of the checkpoints.
        config: The retention rules.
        eval_losses: Validation losses by step.
        changes: States at which the environment changed. A replay computes in one environment, so it starts from them.
    """
    keep = set(steps[-config.keep_last :]) | {step for step in steps if step in changes}
    best = sorted((eval_losses[step], step) for step in steps if math.isfinite(eval_losses.get(step, math.nan)))
    keep.update(step for _, step in best[: config.keep_best])
    if config.keep_every_steps is not None:
        keep.update(step for step in steps if step % config.keep_every_steps == 0)
    return keep


def request_save(run_directory: Path) -> None:
    """Request a checkpoint after the current step from the process that trains this run."""
    refuse_links(run_directory)
    path = RunLayout(run_directory).save_request
    atomic.make_directory(path.parent)
    atomic.write_file(path, b"")
