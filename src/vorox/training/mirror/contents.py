"""What lies in the mirror of a run, and which of it counts.

    gs://bucket/prefix/<run>/
      OWNER.json                             which process writes here (``owner``)
      checkpoints/step-00000100-c0003/       a checkpoint as it is on disk; MANIFEST.json was put last
      record/step-00000100-c0003-r1/         the files of the run at that moment; RECORD.json was put last

``c0003`` is the fencing token: how often a process has taken the mirror over. Every process writes under names of its
own, so none can damage what another one wrote. Invariants: a checkpoint counts only with its manifest and a record; of
two lines of work the one with the higher token is the run's; nothing here trusts a clock.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vorox.core import atomic
from vorox.core.atomic import MANIFEST_NAME
from vorox.core.errors import CheckpointError
from vorox.data.storage import StoredFile, canonical_uri, list_objects, open_range

OWNER_NAME = "OWNER.json"
RECORD_NAME = "RECORD.json"
RECORD_FORMAT = "vorox-mirror-record/1"
CHECKPOINTS, RECORDS = "checkpoints", "record"
CHECKPOINT_NAME = re.compile(r"step-(?P<step>\d{8,})-c(?P<claim>\d{4,})(?:-r(?P<number>\d+))?")


def checkpoint_name(step: int, fencing_token: int) -> str:
    """The name of a checkpoint in a mirror."""
    return f"step-{step:08d}-c{fencing_token:04d}"


@dataclass(slots=True)
class MirroredCheckpoint:
    """One checkpoint in a mirror.

    Attributes:
        step: Steps finished.
        fencing_token: Of the process that wrote it.
        files: Its objects by their name in the checkpoint.
        records: Objects of the run's files by the number of the record and by name.
    """

    step: int
    fencing_token: int
    files: dict[str, StoredFile] = field(default_factory=dict[str, StoredFile])
    records: dict[int, dict[str, StoredFile]] = field(default_factory=dict[int, dict[str, StoredFile]])

    @property
    def name(self) -> str:
        return checkpoint_name(self.step, self.fencing_token)

    @property
    def is_whole(self) -> bool:
        """Whether its upload came to the end."""
        return MANIFEST_NAME in self.files and self.record is not None

    @property
    def record(self) -> Mapping[str, StoredFile] | None:
        """The newest record that was put to its end."""
        whole = [number for number, files in self.records.items() if RECORD_NAME in files]
        return self.records[max(whole)] if whole else None

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.objects())

    @property
    def saved_at(self) -> float | None:
        """When the store took its manifest, seconds since the epoch; ``None`` if it never did."""
        manifest = self.files.get(MANIFEST_NAME)
        return None if manifest is None else manifest.modified_nanoseconds / 1e9

    def objects(self) -> Iterator[StoredFile]:
        """Everything of it, the manifest first: whoever removes in this order never leaves a torn one that counts."""
        yield from sorted(self.files.values(), key=lambda file: not file.uri.endswith(f"/{MANIFEST_NAME}"))
        for files in self.records.values():
            yield from files.values()


@dataclass(frozen=True, slots=True)
class Contents:
    """What one listing of a mirror found.

    Attributes:
        uri: The run's folder.
        checkpoints: Whole and torn ones, by step and fencing token.
        others: Every other object by its name in the folder, ``OWNER.json`` among them.
    """

    uri: str
    checkpoints: Sequence[MirroredCheckpoint]
    others: Mapping[str, StoredFile]

    @property
    def last_fencing_token(self) -> int:
        return max((checkpoint.fencing_token for checkpoint in self.checkpoints), default=0)

    def lineage(self) -> list[MirroredCheckpoint]:
        """The whole checkpoints of the run as it stands, in the order in which they are to be tried.

        A process that went on from step S made everything after S that earlier ones left another line of work.
        """
        found: list[MirroredCheckpoint] = []
        limit: int | None = None
        for token in sorted({checkpoint.fencing_token for checkpoint in self.checkpoints}, reverse=True):
            own = [entry for entry in self.checkpoints if entry.fencing_token == token and entry.is_whole]
            known = {checkpoint.step for checkpoint in found}
            found += sorted(
                (entry for entry in own if (limit is None or entry.step <= limit) and entry.step not in known),
                key=lambda entry: -entry.step,
            )
            bases = [base for entry in own if (base := _base_step(entry)) is not None]
            limit = min([*bases[:1], *([] if limit is None else [limit])], default=limit)
        return found


def list_mirror(uri: str) -> Contents:
    """What a mirror of a run holds; empty if there is none.

    Raises:
        DataError: There is no such bucket, or it cannot be read.
    """
    uri = canonical_uri(uri)
    found: dict[tuple[int, int], MirroredCheckpoint] = {}
    others: dict[str, StoredFile] = {}
    for file in list_objects(uri):
        name = file.uri[len(uri) + 1 :]
        room, _, rest = name.partition("/")
        folder, _, inner = rest.partition("/")
        match = CHECKPOINT_NAME.fullmatch(folder) if room in {CHECKPOINTS, RECORDS} and inner else None
        if match is None or (match["number"] is None) != (room == CHECKPOINTS):
            others[name] = file
            continue
        place = int(match["step"]), int(match["claim"])
        entry = found.setdefault(place, MirroredCheckpoint(*place))
        if match["number"] is None:
            entry.files[inner] = file
        else:
            entry.records.setdefault(int(match["number"]), {})[inner] = file
    return Contents(uri, [found[place] for place in sorted(found)], others)


def read_object(file: StoredFile) -> bytes:
    """All bytes of a small object."""
    with open_range(file) as reader:
        return reader.read()


def record_bytes(metadata: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> bytes:
    """``RECORD.json``: what the other files of a record are, and a hash over all that it says."""
    body = {"format": RECORD_FORMAT, "metadata": dict(metadata), "files": dict(files)}
    return atomic.pretty_json({**body, "sha256": hashlib.sha256(atomic.canonical_json(body)).hexdigest()})


def read_record(checkpoint: MirroredCheckpoint) -> dict[str, Any]:
    """The record of a whole checkpoint.

    Raises:
        CheckpointError: It is not what was written.
    """
    assert checkpoint.record is not None, "only whole checkpoints are asked"
    file = checkpoint.record[RECORD_NAME]
    body: dict[str, Any] = {}
    try:
        body = json.loads(read_object(file))
        digest = body.pop("sha256")
        intact = body["format"] == RECORD_FORMAT and digest == hashlib.sha256(atomic.canonical_json(body)).hexdigest()
    except (ValueError, KeyError, AttributeError, TypeError):
        intact = False
    if not intact:
        raise CheckpointError("the record does not match its own hash", where=file.uri)
    return body


def _base_step(checkpoint: MirroredCheckpoint) -> int | None:
    try:
        return int(read_record(checkpoint)["metadata"]["base_step"])
    except CheckpointError:
        return None  # whoever brings it back will say so
