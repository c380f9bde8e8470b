"""From a store to this machine: a mirrored run, a checkpoint, or the weights that another run starts from.

In: a folder in a store. Out: the same files here, each byte held against the manifest that was written with them, and
visible only when all of them are: the files of the run first, the checkpoint last. A damaged checkpoint is passed over
loudly for the one before; a store that does not answer ends the command, since an older state is no answer to that.
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
from vorox.core.log import Echo
from vorox.core.run_layout import RunLayout, lock_run
from vorox.core.run_lookup import is_run, refuse_links
from vorox.data.storage import StoredFile, list_objects, open_range
from vorox.training.checkpoint_store import Checkpoint, latest_valid, quarantine, verify
from vorox.training.mirror.contents import (
    RECORD_NAME,
    Contents,
    MirroredCheckpoint,
    list_mirror,
    read_object,
    read_record,
)
from vorox.training.step_history import last_record

_PIECE_BYTES = 8 << 20


def restore_run(found: Contents, directory: Path, tell: Echo, *, step: int | None = None) -> Path | None:
    """Bring the newest whole checkpoint of a mirrored run to this machine, with the files of the run.

    Args:
        found: What the mirror holds.
        directory: The run directory; made if there is none.
        tell: Told what was brought, and what was passed over.
        step: Bring this one instead of the newest; of a run that is here, only the checkpoint.

    Returns:
        The checkpoint, or ``None`` if what is here is as new as the mirror.

    Raises:
        ConfigError: What is here and what is there are two lines of work, or another process uses the directory.
        CheckpointError: No checkpoint of the mirror is valid, or the disk here is full, failing or read-only.
        DataError: The store refuses, or cannot be reached.
    """
    candidates = [entry for entry in found.lineage() if step is None or entry.step == step]
    if not candidates:
        if step is not None:
            raise CheckpointError(f"the mirror holds no whole checkpoint of step {step:,}", where=found.uri)
        return None
    here = _standing(directory) if step is None else None
    failures: list[str] = []
    for candidate in candidates:
        if here is not None and candidate.step <= here.step:
            _refuse_other_line(candidate, directory)
            return None
        try:
            path = _fetch(candidate, directory, here, whole_run=step is None or not is_run(directory))
        except UnreadableCheckpointError:
            raise
        except OSError as error:  # of the disk here: an older checkpoint would meet the same
            raise disk_error(error, str(directory)) or ConfigError(
                f"the mirrored checkpoint cannot be written here: {error.strerror or error}",
                where=str(error.filename or directory), hint="set run.directory to a folder that you may write to",
            ) from error  # fmt: skip
        except CheckpointError as error:
            failures.append(f"{candidate.name}: {error.what}")
            tell(f"The mirrored checkpoint {candidate.name} is damaged ({error}); taking the one before", "warning")
        else:
            tell(f"Brought step {candidate.step:,} back from the mirror {found.uri} to {directory}", "info")
            return path
    raise CheckpointError(
        "no checkpoint of the mirror is valid: " + "; ".join(failures), where=found.uri,
        hint="restore one from a copy, or start again with --resume never",
    )  # fmt: skip


def _standing(directory: Path) -> Checkpoint | None:
    """The newest checkpoint on this machine that is valid."""
    try:
        return latest_valid(directory)
    except UnreadableCheckpointError:
        raise
    except CheckpointError:
        return None


def _other_line(directory: Path, step: int) -> ConfigError:
    return ConfigError(
        f"the run on this machine and its mirror are not the same work: they differ at step {step:,}",
        where=str(directory),
        hint=f"--resume {directory} goes on with what is here and lets the mirror follow; to take what the mirror "
        "holds, move that directory away",
    )


def _refuse_other_line(candidate: MirroredCheckpoint, directory: Path) -> None:
    """The mirror is not ahead: what it holds must be a moment of the run that is here."""
    recorded = last_record(RunLayout(directory).chain, candidate.step)
    if recorded is None or recorded["step"] != candidate.step:
        return  # the chain was moved away; nothing can be compared
    manifest = _json(read_object(candidate.files[MANIFEST_NAME]), candidate.files[MANIFEST_NAME].uri)
    if manifest.get("metadata", {}).get("chain") != recorded["chain"]:
        raise _other_line(directory, candidate.step)


def _fetch(candidate: MirroredCheckpoint, directory: Path, here: Checkpoint | None, *, whole_run: bool) -> Path:
    """One checkpoint and its record, checked, then moved to their places."""
    target = RunLayout(directory).checkpoint(candidate.step)
    if not whole_run:
        _refuse_other_line(candidate, directory)
        if _is_valid(target):
            return target
    refuse_links(directory)
    atomic.make_directory(target.parent)
    with lock_run(directory):
        staged, record = atomic.temporary_name(target), atomic.temporary_name(directory / "record")
        try:
            names = _fetch_record(candidate, record) if whole_run else []
            if here is not None:
                seen = last_record(RunLayout(record).chain, here.step)
                if seen is None or (seen["step"], seen["chain"]) != (here.step, here.metadata["chain"]):
                    raise _other_line(directory, here.step)
            fetch_checkpoint(candidate.files, staged)
            if verify(staged).step != candidate.step:
                raise CheckpointError(f"this is no checkpoint of step {candidate.step:,}", where=candidate.name)
            for name in names:
                atomic.make_directory((directory / name).parent)
                atomic.rename(record / name, directory / name)
            if os.path.lexists(target):
                quarantine(target, "corrupt", "it did not verify when the mirror was asked")
            atomic.rename(staged, target)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
            shutil.rmtree(record, ignore_errors=True)
    return target


def _is_valid(checkpoint: Path) -> bool:
    try:
        return checkpoint.exists() and verify(checkpoint).step >= 0
    except UnreadableCheckpointError:
        raise
    except CheckpointError:
        return False


def _fetch_record(candidate: MirroredCheckpoint, folder: Path) -> list[str]:
    """The files of the run into a folder; their names."""
    files: Mapping[str, Mapping[str, Any]] = read_record(candidate)["files"]
    assert candidate.record is not None
    for name, entry in files.items():
        if name not in candidate.record:
            raise CheckpointError(f"{name} of its record is missing", where=candidate.record[RECORD_NAME].uri)
        _fetch_file(candidate.record[name], _inside(folder, name))
        found = staged_directory.hash_file(folder / name)
        if (found.size_bytes, found.xxh3_128) != (entry["size_bytes"], entry["xxh3_128"]):
            raise CheckpointError("it is not what its record says", where=candidate.record[name].uri)
    return sorted(files)


def fetch_checkpoint(files: Mapping[str, StoredFile], folder: Path) -> None:
    """The files of a checkpoint into a folder, which ``verify`` then holds against the manifest.

    Raises:
        CheckpointError: It has no valid manifest, or a file of it is missing.
    """
    _fetch_file(files[MANIFEST_NAME], folder / MANIFEST_NAME)
    for name in staged_directory.read_manifest(folder)["files"]:
        if name not in files:
            raise CheckpointError(f"{name} is missing", where=files[MANIFEST_NAME].uri)
        _fetch_file(files[name], _inside(folder, name))


def download(uri: str, folder: Path) -> None:
    """Every object below a folder of a store, or, of the folder of a mirrored run, its newest whole checkpoint.

    Raises:
        ConfigError: There is nothing.
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
            "no checkpoint of the mirror is valid: " + ("; ".join(failures) or "none is whole"), where=uri
        )
    objects = list_objects(uri)
    if not objects:
        raise ConfigError("there is nothing at this place of the store", where=uri, hint="check the uri")
    for file in objects:
        _fetch_file(file, _inside(folder, file.uri[len(found.uri) + 1 :]))


def _inside(folder: Path, name: str) -> Path:
    """The place of a name that came from outside; never one beside the folder."""
    parts = PurePosixPath(name).parts
    outward = ".." in parts or PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive
    if not parts or outward or "\\" in name or not name.isprintable():
        raise CheckpointError(f"{name!r} is no name of a file of a run", where=str(folder))
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
        raise CheckpointError("the manifest is not valid", where=where)
    return cast("dict[str, Any]", value)
