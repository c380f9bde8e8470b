"""Contents of a mirror: checkpoints, run snapshots, and which of them are valid.

    gs://bucket/prefix/<run>/
      OWNER.json                             the process that writes here (``ownership``)
      checkpoints/step-00000100-c0003/       a checkpoint as on disk; MANIFEST.json is uploaded last
      record/step-00000100-c0003-r1/         a snapshot of the run files at that time; RECORD.json is uploaded last

``c0003`` is the fencing token, which increases with every owner. Every process writes under its own names, so it cannot
damage the work of another. Invariants: a mirrored checkpoint is valid only with its manifest and its run snapshot;
where two processes have diverged, the higher token wins; nothing here depends on a clock. A complete checkpoint outside
the run's current history is not removed: a ``REASON.txt`` marks it as abandoned, as on disk.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vorox.core.errors import CheckpointError
from vorox.core.files import atomic
from vorox.core.files.atomic import MANIFEST_NAME
from vorox.core.files.json_reader import parse_json
from vorox.data.storage import ObjectChanged, StoredFile, canonical_uri, list_objects, open_range
from vorox.training.checkpoints.store import REASON_NAME

OWNER_NAME = "OWNER.json"
SNAPSHOT_MANIFEST = "RECORD.json"
SNAPSHOT_FORMAT = "vorox-mirror-record/1"
CHECKPOINTS, SNAPSHOTS = "checkpoints", "record"
CHECKPOINT_NAME = re.compile(r"step-(?P<step>[0-9]{8,16})-c(?P<claim>[0-9]{4,16})(?:-r(?P<number>[0-9]{1,16}))?")


def checkpoint_name(step: int, fencing_token: int) -> str:
    """Return the name of a checkpoint in a mirror."""
    return f"step-{step:08d}-c{fencing_token:04d}"


@dataclass(slots=True)
class MirroredCheckpoint:
    """One checkpoint in a mirror.

    Attributes:
        step: Steps finished.
        fencing_token: Fencing token of the process that wrote it.
        files: Objects of the checkpoint, by file name.
        snapshots: Objects of its run snapshots, by number and file name.
    """

    step: int
    fencing_token: int
    files: dict[str, StoredFile] = field(default_factory=dict[str, StoredFile])
    snapshots: dict[int, dict[str, StoredFile]] = field(default_factory=dict[int, dict[str, StoredFile]])

    @property
    def name(self) -> str:
        return checkpoint_name(self.step, self.fencing_token)

    @property
    def is_complete(self) -> bool:
        """Whether the upload is complete."""
        return MANIFEST_NAME in self.files and self.snapshot is not None

    @property
    def is_abandoned(self) -> bool:
        """Whether it is outside the run's current history; only a command that names it restores it."""
        return REASON_NAME in self.files

    @property
    def snapshot(self) -> Mapping[str, StoredFile] | None:
        """The newest complete run snapshot."""
        complete = [number for number, files in self.snapshots.items() if SNAPSHOT_MANIFEST in files]
        return self.snapshots[max(complete)] if complete else None

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.objects())

    @property
    def saved_at(self) -> float | None:
        """When its manifest was uploaded, seconds since the epoch; ``None`` without a manifest."""
        manifest = self.files.get(MANIFEST_NAME)
        return None if manifest is None else manifest.modified_nanoseconds / 1e9

    def objects(self) -> Iterator[StoredFile]:
        """Yield all objects, the manifest first: removing them in this order never leaves a torn checkpoint."""
        yield from sorted(self.files.values(), key=lambda file: not file.uri.endswith(f"/{MANIFEST_NAME}"))
        for files in self.snapshots.values():
            yield from files.values()


@dataclass(frozen=True, slots=True)
class Contents:
    """A listing of a mirror.

    Attributes:
        uri: The run's folder.
        checkpoints: Complete and incomplete ones, by step and fencing token.
        others: All other objects by name, including ``OWNER.json``.
    """

    uri: str
    checkpoints: Sequence[MirroredCheckpoint]
    others: Mapping[str, StoredFile]

    @property
    def last_fencing_token(self) -> int:
        return max((checkpoint.fencing_token for checkpoint in self.checkpoints), default=0)

    def lineage(self) -> list[MirroredCheckpoint]:
        """Return the complete checkpoints of the run's current history, newest first.

        A process that resumed from step S supersedes all checkpoints after S of earlier processes, until it marks them
        as abandoned.
        """
        found: list[MirroredCheckpoint] = []
        limit: int | None = None
        for token in sorted({checkpoint.fencing_token for checkpoint in self.checkpoints}, reverse=True):
            own = [
                entry for entry in self.checkpoints
                if entry.fencing_token == token and entry.is_complete and not entry.is_abandoned
            ]  # fmt: skip
            known = {checkpoint.step for checkpoint in found}
            found += sorted(
                (entry for entry in own if (limit is None or entry.step <= limit) and entry.step not in known),
                key=lambda entry: -entry.step,
            )
            bases = [base for entry in own if (base := _base_step(entry)) is not None]
            limit = min([*bases[:1], *([] if limit is None else [limit])], default=limit)
        return found


def list_mirror(uri: str) -> Contents:
    """List the mirror of a run; empty if it does not exist.

    Raises:
        DataError: The bucket does not exist or cannot be read.
    """
    uri = canonical_uri(uri)
    found: dict[tuple[int, int], MirroredCheckpoint] = {}
    others: dict[str, StoredFile] = {}
    for file in list_objects(uri):
        name = file.uri[len(uri) + 1 :]
        kind, _, rest = name.partition("/")
        folder, _, inner = rest.partition("/")
        match = CHECKPOINT_NAME.fullmatch(folder) if kind in {CHECKPOINTS, SNAPSHOTS} and inner else None
        if match is None or (match["number"] is None) != (kind == CHECKPOINTS):
            others[name] = file
            continue
        key = int(match["step"]), int(match["claim"])
        entry = found.setdefault(key, MirroredCheckpoint(*key))
        if match["number"] is None:
            entry.files[inner] = file
        else:
            entry.snapshots.setdefault(int(match["number"]), {})[inner] = file
    return Contents(uri, [found[key] for key in sorted(found)], others)


def read_object(file: StoredFile) -> bytes:
    """Return all bytes of a small object."""
    with open_range(file) as reader:
        return reader.read()


def encode_snapshot(metadata: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Encode ``RECORD.json``: metadata and file digests of a run snapshot, with a hash over all of it."""
    body = {"format": SNAPSHOT_FORMAT, "metadata": dict(metadata), "files": dict(files)}
    return atomic.pretty_json({**body, "sha256": hashlib.sha256(atomic.canonical_json(body)).hexdigest()})


def read_snapshot(checkpoint: MirroredCheckpoint) -> dict[str, Any]:
    """Read the run snapshot's ``RECORD.json`` of a complete checkpoint.

    Raises:
        CheckpointError: It does not match its own hash.
    """
    assert checkpoint.snapshot is not None, "the checkpoint must be complete"
    file = checkpoint.snapshot[SNAPSHOT_MANIFEST]
    body: dict[str, Any] = {}
    try:
        body = parse_json(read_object(file), SNAPSHOT_MANIFEST)
        digest = body.pop("sha256")
        intact = body["format"] == SNAPSHOT_FORMAT and digest == hashlib.sha256(atomic.canonical_json(body)).hexdigest()
    except (ValueError, KeyError, AttributeError, TypeError):
        intact = False
    if not intact:
        raise CheckpointError("The run snapshot does not match its own hash", where=file.uri)
    return body


def _base_step(checkpoint: MirroredCheckpoint) -> int | None:
    try:
        return int(read_snapshot(checkpoint)["metadata"]["base_step"])
    except (CheckpointError, ObjectChanged):
        return None  # damaged, which a restore reports; or removed by its owner since the listing
