"""Restoring a mirrored run, a checkpoint or starting weights from an object store.

In: a folder in a store. Out: the same files on this machine, verified against their manifest and committed only when
complete: the run files first, the checkpoint last. A damaged checkpoint is skipped with a warning in favour of the
previous one; an unreachable store is an error, since falling back to an older state would lose work.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, cast

from vorox.core import atomic, staged_directory
from vorox.core.atomic import MANIFEST_NAME
from vorox.core.disk_errors import disk_error
from vorox.core.errors import CheckpointError, ConfigError, UnreadableCheckpointError
from vorox.core.json_lines import last_record
from vorox.core.log import Echo
from vorox.core.run_layout import RunLayout, lock_run
from vorox.core.run_lookup import is_run, refuse_links
from vorox.data.storage import StoredFile, list_objects, open_range
from vorox.training.checkpoints.store import Checkpoint, latest_valid, quarantine, verify
from vorox.training.mirror.contents import (
    SNAPSHOT_MANIFEST,
    Contents,
    MirroredCheckpoint,
    list_mirror,
    read_object,
    read_snapshot,
)

_PIECE_BYTES = 8 << 20


def restore_run(found: Contents, directory: Path, echo: Echo, *, step: int | None = None) -> Path | None:
    """Restore the newest complete checkpoint of a mirrored run, with the run files.

    Args:
        found: Contents of the mirror.
        directory: The run directory; created if missing.
        echo: Reports restored and skipped checkpoints.
        step: Restore this step instead of the newest; if the run exists locally, only its checkpoint.

    Returns:
        The checkpoint, or ``None`` if the local run is up to date.

    Raises:
        ConfigError: The local run has diverged from the mirror, or another process uses the directory.
        CheckpointError: No checkpoint of the mirror is valid, or the local disk is full, failing or read-only.
        DataError: The store refuses access or cannot be reached.
    """
    candidates = [entry for entry in found.lineage() if step is None or entry.step == step]
    if not candidates:
        if step is not None:
            raise CheckpointError(f"The mirror has no complete checkpoint of step {step:,}", where=found.uri)
        return None
    local = _newest_valid(directory) if step is None else None
    failures: list[str] = []
    for candidate in candidates:
        if local is not None and candidate.step <= local.step:
            _check_same_run(candidate, directory)
            return None
        try:
            path = _fetch(candidate, directory, local, whole_run=step is None or not is_run(directory))
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


def _newest_valid(directory: Path) -> Checkpoint | None:
    """Return the newest valid local checkpoint, if any."""
    try:
        return latest_valid(directory)
    except UnreadableCheckpointError:
        raise
    except CheckpointError:
        return None


def _diverged(directory: Path, step: int) -> ConfigError:
    return ConfigError(
        f"The local run and its mirror have diverged: they differ at step {step:,}",
        where=str(directory),
        hint=f"to keep the local run and overwrite the mirror, use --resume {directory}; to use the mirror, move that "
        "directory away",
    )


def _check_same_run(candidate: MirroredCheckpoint, directory: Path) -> None:
    """Check that a mirrored checkpoint is part of the local run's history."""
    recorded = last_record(RunLayout(directory).chain, candidate.step)
    if recorded is None or recorded["step"] != candidate.step:
        return  # the chain has no such step, so there is nothing to compare
    manifest = _json(read_object(candidate.files[MANIFEST_NAME]), candidate.files[MANIFEST_NAME].uri)
    if manifest.get("metadata", {}).get("chain") != recorded["chain"]:
        raise _diverged(directory, candidate.step)


def _fetch(candidate: MirroredCheckpoint, directory: Path, local: Checkpoint | None, *, whole_run: bool) -> Path:
    """Download a checkpoint and its run snapshot, verify them, then move them into place."""
    target = RunLayout(directory).checkpoint(candidate.step)
    if not whole_run:
        _check_same_run(candidate, directory)
        if _is_valid(target):
            return target
    refuse_links(directory)
    atomic.make_directory(target.parent)
    with lock_run(directory):
        staged, snapshot = atomic.temporary_name(target), atomic.temporary_name(directory / "record")
        try:
            names = _fetch_snapshot(candidate, snapshot) if whole_run else []
            if local is not None:
                link = last_record(RunLayout(snapshot).chain, local.step)
                if link is None or (link["step"], link["chain"]) != (local.step, local.metadata["chain"]):
                    raise _diverged(directory, local.step)
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
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise CheckpointError("The manifest is not valid", where=where)
    return cast("dict[str, Any]", value)
