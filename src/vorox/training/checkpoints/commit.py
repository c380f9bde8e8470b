"""Commit a checkpoint: every rank writes its shards, rank 0 commits them all as one directory.

A single process takes the same steps without waiting for others. Ranks exchange names and hashes of files through the
host-side store, so a background thread can write while the devices train.

Invariant: rank 0 commits only after every rank has written, hashed and fsynced its files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vorox.core.distributed_context import DistributedContext
from vorox.core.engine import EngineSnapshot, PartReport
from vorox.core.staged_directory import FileEntry, StagedDirectory, StagedPart

_STAGED, _WRITTEN = "checkpoint directory", "checkpoint parts"
"""Topics of the background threads of several ranks."""


def commit_checkpoint(
    path: Path,
    snapshot: EngineSnapshot,
    files: Mapping[str, bytes],
    metadata: Mapping[str, Any],
    distributed: DistributedContext,
) -> None:
    """Write a checkpoint on rank 0, which appears complete or not at all; the other ranks call ``write_shards``.

    Args:
        path: Its directory.
        snapshot: The state of the engine.
        files: The other files, by name.
        metadata: For its manifest, which also gets the fingerprint of the state.
        distributed: The ranks.

    Raises:
        CheckpointError: As ``write_state``.
        OSError: A file cannot be written.
    """
    with StagedDirectory(path) as directory:
        fingerprint = write_state(snapshot, directory, distributed)
        for name, data in files.items():
            directory.write(name, data)
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
