"""Restoring a mirrored run, a checkpoint or starting weights from an object store.

In: a folder in a store. Out: the same files on this machine, verified against their manifest and committed only when
complete: the run files first, the checkpoint last. A damaged checkpoint is skipped with a warning in favour of the
previous one; an unreachable store is an error, since falling back to an older state would lose work.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, cast

from vorox.core.errors import CheckpointError, ConfigError, UnreadableCheckpointError
from vorox.core.files import atomic, staged_directory
from vorox.core.files.atomic import MANIFEST_NAME
from vorox.core.files.disk_errors import disk_error
from vorox.core.files.json_lines import last_record
from vorox.core.files.json_reader import parse_json
from vorox.core.run_layout import RunLayout, lock_run, step_directories
from vorox.data.storage import StoredFile, list_objects, open_range
from vorox.records.log import Echo
from vorox.records.run_lookup import refuse_links, short_path
from vorox.training.checkpoints.store import Checkpoint, latest_valid, quarantine, verify
from vorox.training.mirror.contents import (
    CHECKPOINTS,
    SNAPSHOT_MANIFEST,
    Contents,
    MirroredCheckpoint,
    list_mirror,
    read_object,
    read_snapshot,
)

_PIECE_BYTES = 8 << 20


def restore_run(
    found: Contents, directory: Path, echo: Echo, *, only: MirroredCheckpoint | None = None, typed: str = ""
) -> Path | None:
    """Restore the newest complete checkpoint of a mirrored run, with the run files.

    Args:
        found: Contents of the mirror.
        directory: The run directory; created if missing.
        echo: Reports restored and skipped checkpoints.
        only: Restore this one instead of the newest; without the run files if the local run has recorded its step.
        typed: The settings that the command has changed, as they are typed, for the commands of an error.

    Returns:
        The checkpoint, or ``None`` if the local run is up to date.

    Raises:
        ConfigError: The local run has diverged from the mirror, or another process uses the directory.
        CheckpointError: No checkpoint of the mirror is valid, or the local disk is full, failing or read-only.
        DataError: The store refuses access or cannot be reached.
    """
    candidates = found.lineage() if only is None else [only]
    is_recorded = only is not None and _recorded_chain(directory, only.step) is not None
    if only is not None and is_recorded:
        _check_same_run(found, only, directory, typed)
        if _is_valid(target := RunLayout(directory).checkpoint(only.step)):
            return target
    if not candidates:
        return None
    local = None if is_recorded else _newest_valid(directory)
    failures: list[str] = []
    for candidate in candidates:
        if only is None and local is not None and candidate.step <= local.step:
            _check_same_run(found, candidate, directory, typed)
            return None
        try:
            path = _fetch(found, candidate, directory, local, whole_run=not is_recorded, typed=typed)
        except UnreadableCheckpointError:
            raise
        except OSError as error:  # of the local disk: an older checkpoint would fail alike
            raise disk_error(error, str(directory)) or ConfigError(
                f"The mirrored checkpoint cannot be written: {error.strerror or error}",
                where=str(error.filename or directory), hint="set run.directory to a writable folder",
            ) from error  # fmt: skip
        except CheckpointError as error:
            failures.append(f"{candidate.name}: {error.what}")
            echo(f"Mirrored checkpoint {candidate.name} is corrupt ({error}); skipping it", "warning")
        else:
            echo(f"Restored step {candidate.step:,} from the mirror {found.uri} to {directory}", "info")
            return path
    raise CheckpointError(
        "No checkpoint of the mirror is valid: " + "; ".join(failures), where=found.uri,
        hint="restore one from a backup, or start a new run with --resume never",
    )  # fmt: skip


def restore_checkpoint(found: Contents, directory: Path, echo: Echo, step: int) -> Path:
    """Restore one checkpoint of a mirrored run by its step, including an abandoned one; see ``restore_run``.

    Raises:
        CheckpointError: The mirror has no complete checkpoint of the step.
    """
    whole = [*reversed(found.lineage()), *(entry for entry in found.checkpoints if entry.is_abandoned)]
    chosen = next((entry for entry in whole if entry.step == step and entry.is_complete), None)
    if chosen is None:
        steps = ", ".join(f"{entry.step:,}" for entry in whole) or "none"
        raise CheckpointError(
            f"The mirror has no complete checkpoint of step {step:,}; it has: {steps}", where=found.uri,
            hint="name one of these with --step",
        )  # fmt: skip
    path = restore_run(found, directory, echo, only=chosen)
    assert path is not None, "a named checkpoint is restored, or the failure is raised"
    return path


def _newest_valid(directory: Path) -> Checkpoint | None:
    """Return the newest valid local checkpoint, if any."""
    try:
        return latest_valid(directory)
    except UnreadableCheckpointError:
        raise
    except CheckpointError:
        return None


def _diverged(
    found: Contents, candidate: MirroredCheckpoint, directory: Path, local: Path | None, step: int, typed: str
) -> ConfigError:
    """Return the error for two histories of a run, with the command for either choice."""
    uri = f"{found.uri}/{CHECKPOINTS}/{candidate.name}" if candidate.is_abandoned else found.uri
    steps = f"{uri} is at step {max([candidate.step, *(entry.step for entry in found.lineage())]):,}"
    other, number = directory.with_name(f"{directory.name}-local"), 1
    while os.path.lexists(other):
        number += 1
        other = directory.with_name(f"{directory.name}-local-{number}")
    moved = f"mv {shlex.quote(short_path(directory))} {shlex.quote(short_path(other))}"
    root = shlex.quote(f"run.directory={short_path(directory.parent)}")
    typed = typed and f" {typed}"
    hint = f"to use the mirror's, `{moved} && vorox train --resume {shlex.quote(uri)} {root}{typed}`"
    if local is not None:
        steps = f"{short_path(directory)} is at step {int(local.name.rpartition('-')[2]):,}, {steps}"
        command = f"vorox train --resume {shlex.quote(short_path(local))}{typed}"
        hint = f"to train the local run, `{command}`, which marks the mirror's as abandoned; {hint}"
    return ConfigError(
        f"The local run and its mirror have diverged: they differ at step {step:,}; {steps}", where=str(directory),
        hint=hint, saved="neither was changed",
    )  # fmt: skip


def _recorded_chain(directory: Path, step: int) -> str | None:
    """Return the head of the local replay chain at a step; ``None`` if it has no such step."""
    recorded = last_record(RunLayout(directory).chain, step)
    return recorded["chain"] if recorded is not None and recorded["step"] == step else None


def is_same_history(candidate: MirroredCheckpoint, directory: Path) -> bool:
    """Whether a mirrored checkpoint is of the local run's history, as far as the local replay chain has its step."""
    recorded = _recorded_chain(directory, candidate.step)
    if recorded is None:
        return True
    manifest = _json(read_object(candidate.files[MANIFEST_NAME]), candidate.files[MANIFEST_NAME].uri)
    return manifest.get("metadata", {}).get("chain") == recorded


def _check_same_run(found: Contents, candidate: MirroredCheckpoint, directory: Path, typed: str) -> None:
    """Check that a mirrored checkpoint is part of the local run's history."""
    if not is_same_history(candidate, directory):
        steps = step_directories(directory)
        raise _diverged(found, candidate, directory, steps[max(steps)] if steps else None, candidate.step, typed)


def _fetch(
    found: Contents,
    candidate: MirroredCheckpoint,
    directory: Path,
    local: Checkpoint | None,
    *,
    whole_run: bool,
    typed: str,
) -> Path:
    """Download a checkpoint and its run snapshot, verify them, then move them into place."""
    target = RunLayout(directory).checkpoint(candidate.step)
    refuse_links(directory)
    atomic.make_directory(target.parent)
    with lock_run(directory):
        staged, snapshot = atomic.temporary_name(target), atomic.temporary_name(directory / "record")
        try:
            names = _fetch_snapshot(candidate, snapshot) if whole_run else []
            if local is not None:
                link = last_record(RunLayout(snapshot).chain, local.step)
                if link is None or (link["step"], link["chain"]) != (local.step, local.metadata["chain"]):
                    raise _diverged(found, candidate, directory, local.path, local.step, typed)
            fetch_checkpoint(candidate.files, staged)
            if verify(staged).step != candidate.step:
                raise CheckpointError(f"The checkpoint is not of step {candidate.step:,}", where=candidate.name)
            for name in names:
                atomic.make_directory((directory / name).parent)
                atomic.rename(snapshot / name, directory / name)
            if os.path.lexists(target):
                quarantine(target, "corrupt", "it did not verify, and was restored from the mirror")
            atomic.rename(staged, target)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
            shutil.rmtree(snapshot, ignore_errors=True)
    return target


def _is_valid(checkpoint: Path) -> bool:
    try:
        return checkpoint.exists() and verify(checkpoint).step >= 0
    except UnreadableCheckpointError:
        raise
    except CheckpointError:
        return False


def _fetch_snapshot(candidate: MirroredCheckpoint, folder: Path) -> list[str]:
    """Download the files of a run snapshot into a folder and verify them; return their names."""
    files: Mapping[str, Mapping[str, Any]] = read_snapshot(candidate)["files"]
    assert candidate.snapshot is not None
    for name, entry in files.items():
        if name not in candidate.snapshot:
            raise CheckpointError(f"File {name} is missing", where=candidate.snapshot[SNAPSHOT_MANIFEST].uri)
        _fetch_file(candidate.snapshot[name], _inside(folder, name))
        found = staged_directory.hash_file(folder / name)
        if (found.size_bytes, found.xxh3_128) != (entry["size_bytes"], entry["xxh3_128"]):
            raise CheckpointError("File does not match its digest", where=candidate.snapshot[name].uri)
    return sorted(files)


def fetch_checkpoint(files: Mapping[str, StoredFile], folder: Path) -> None:
    """Download the files of a checkpoint into a folder, for ``verify`` to check.

    Raises:
        CheckpointError: Its manifest is invalid, or a file is missing.
    """
    _fetch_file(files[MANIFEST_NAME], folder / MANIFEST_NAME)
    for name in staged_directory.read_manifest(folder)["files"]:
        if name not in files:
            raise CheckpointError(f"File {name} is missing", where=files[MANIFEST_NAME].uri)
        _fetch_file(files[name], _inside(folder, name))


def download(uri: str, folder: Path) -> None:
    """Download a folder of a store, or the newest complete checkpoint of a mirrored run.

    Raises:
        ConfigError: The folder is empty or does not exist.
        CheckpointError: No checkpoint of the mirror is valid.
    """
    found = list_mirror(uri)
    if found.checkpoints:
        failures: list[str] = []
        for candidate in found.lineage():
            try:
                fetch_checkpoint(candidate.files, folder)
                verify(folder)
                return
            except CheckpointError as error:
                failures.append(str(error))
                shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(
            "No checkpoint of the mirror is valid: " + ("; ".join(failures) or "none is complete"), where=uri
        )
    objects = list_objects(uri)
    if not objects:
        raise ConfigError("There is nothing at this URI", where=uri, hint="check the URI")
    for file in objects:
        _fetch_file(file, _inside(folder, file.uri[len(found.uri) + 1 :]))


def fetch_preview(candidate: MirroredCheckpoint, directory: Path) -> Path:
    """Download what a dry run reads of a mirrored run into a new folder: the run files, and no arrays.

    Returns:
        The directory of the checkpoint, which is not complete.
    """
    _fetch_snapshot(candidate, directory)
    target = RunLayout(directory).checkpoint(candidate.step)
    for name, file in candidate.files.items():
        if name.endswith(".json"):
            _fetch_file(file, _inside(target, name))
    return target


def _inside(folder: Path, name: str) -> Path:
    """Return the path of an untrusted name inside a folder; refuse names that point outside it."""
    parts = PurePosixPath(name).parts
    outward = ".." in parts or PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive
    if not parts or outward or "\\" in name or not name.isprintable():
        raise CheckpointError(f"Invalid file name {name!r}", where=str(folder))
    return folder.joinpath(*parts)


def _fetch_file(file: StoredFile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as target:
        if file.size_bytes:
            with open_range(file) as source:
                while piece := source.read(_PIECE_BYTES):
                    target.write(piece)
        target.flush()
        os.fsync(target.fileno())


def _json(data: bytes, where: str) -> dict[str, Any]:
    try:
        value = parse_json(data, where)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise CheckpointError("The manifest is not valid", where=where)
    return cast("dict[str, Any]", value)
