"""Which checkpoints weights are of, wherever runs, averages and exports are moved to.

In: the directory of a checkpoint, of weights that were computed from some, or of an export. Out: the checkpoints, by
run id, step and fingerprint, for the record of what starts from these weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from vorox.core.errors import CheckpointError
from vorox.core.files.atomic import MANIFEST_NAME
from vorox.core.files.json_reader import mapping
from vorox.core.files.staged_directory import read_manifest
from vorox.core.run_layout import run_of_checkpoint
from vorox.models.stored.engine_state import MODEL_FILE
from vorox.records.run_lookup import run_id_of

CHECKPOINTS = "checkpoints"
"""Key of the metadata of derived weights: the checkpoints that they were computed from."""
RUN = "run"
"""Key of the metadata of derived weights and materialised states: the directory of their run."""
WEIGHTS_NOTE = "weights_of"
"""Note of an attempt that started from weights: the checkpoints that they are of; empty if they are of no run."""


@dataclass(frozen=True, slots=True)
class CheckpointOrigin:
    """A checkpoint that weights are of.

    Attributes:
        run: The id of its run; empty if it is not known.
        step: Its step.
        fingerprint: Of its state, or of its file of weights; empty if it is not known.
    """

    run: str
    step: int
    fingerprint: str

    def to_json(self) -> dict[str, str | int]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> CheckpointOrigin:
        found = mapping(value)
        run, step, fingerprint = found.get("run"), found.get("step"), found.get("fingerprint")
        return cls(
            run if isinstance(run, str) else "", step if type(step) is int else 0,
            fingerprint if isinstance(fingerprint, str) else "",
        )  # fmt: skip


def origins(directory: Path) -> list[CheckpointOrigin]:
    """Return the checkpoints that weights in a directory are of, by its manifest; empty if no run has written them."""
    try:
        manifest = read_manifest(directory) if (directory / MANIFEST_NAME).is_file() else {}
    except CheckpointError:
        return []
    return origins_of(directory, mapping(manifest.get("metadata")))


def origins_of(directory: Path, metadata: Mapping[str, Any]) -> list[CheckpointOrigin]:
    """Return the same, given the metadata of the manifest."""
    step = metadata.get("step")
    if type(step) is not int:
        return []
    recorded = metadata.get(CHECKPOINTS)
    if isinstance(recorded, list):
        return [CheckpointOrigin.from_json(value) for value in cast("list[object]", recorded)]
    if "sources" in metadata:  # an export
        return [CheckpointOrigin("", step, str(mapping(metadata["sources"]).get(MODEL_FILE) or ""))]
    if "fingerprint" in metadata:
        named = metadata.get(RUN)
        run = Path(named) if isinstance(named, str) else run_of_checkpoint(directory)
        return [CheckpointOrigin("" if run is None else run_id_of(run), step, str(metadata["fingerprint"]))]
    return []


def contents_of(checkpoint: Path) -> set[str]:
    """Return what a checkpoint's content is known by: its fingerprint, and the hash of its file of weights."""
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError:
        return set()
    weights = manifest["files"].get(MODEL_FILE, {}).get("xxh3_128")
    return {str(content) for content in (manifest["metadata"].get("fingerprint"), weights) if content}
