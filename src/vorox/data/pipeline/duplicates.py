"""What is known of the duplicates of a unit: the file that the first pass leaves, and how it decides about a text.

``duplicates/<number of the transform>/u<unit>.bin`` lies beside a cache. It says which texts of the unit are removed,
keeps the signatures of the others, and names the hash of the file of the unit before, so that one of another history is
refused. Invariant: a file is read as it was written or not at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.atomic import canonical_json
from vorox.core.errors import DataError
from vorox.data.cache.inventory import source_set_digest
from vorox.data.documents import SourceFile, Unit
from vorox.data.transforms.apply import AnyDocument, IsDuplicate
from vorox.data.transforms.registry import Transform
from vorox.data.transforms.signatures import Signature, index_for

DIRECTORY_NAME = "duplicates"
_FORMAT = "duplicates/1"
_SHA256_BYTES = 32

Place = tuple[int, int, int]
"""File, ordinal and copy of a text."""


@dataclass(frozen=True)
class UnitDuplicates:
    """What the first pass found in one unit.

    Attributes:
        unit_id: The unit.
        source_set: What the unit's text is.
        before: SHA-256 of the file of the unit before; empty for the first.
        removed_R3: Places of the texts that were there before.
        signatures_KW: Signatures of the texts that stay, in order.
        sha256: Of the file.
    """

    unit_id: int
    source_set: str
    before: str
    removed_R3: npt.NDArray[np.int64]
    signatures_KW: Signature
    sha256: str = ""

    def to_bytes(self) -> tuple[bytes, str]:
        """The file, and its hash."""
        header = {
            "format": _FORMAT,
            "unit": self.unit_id,
            "source_set": self.source_set,
            "before": self.before,
            "removed": len(self.removed_R3),
            "signatures": list(self.signatures_KW.shape),
            "dtype": self.signatures_KW.dtype.str,
        }
        parts = (canonical_json(header), b"\n", self.removed_R3.astype("<i8").tobytes(), self.signatures_KW.tobytes())
        body = b"".join(parts)
        digest = hashlib.sha256(body)
        return body + digest.digest(), digest.hexdigest()


def read_unit_duplicates(path: Path) -> UnitDuplicates:
    """The file of one unit.

    Raises:
        DataError: It is missing or not what was written.
    """
    try:
        raw = path.read_bytes()
        body, digest = raw[:-_SHA256_BYTES], raw[-_SHA256_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            raise ValueError("it does not match its hash")
        line, _, rest = body.partition(b"\n")
        header: dict[str, Any] = json.loads(line)
        removed = np.frombuffer(rest, "<i8", 3 * header["removed"]).reshape(-1, 3)
        signatures = np.frombuffer(rest, header["dtype"], offset=removed.nbytes).reshape(header["signatures"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the list of duplicates of a unit cannot be read: {error}", where=str(path),
            hint=f"remove {path.parent} and run `vorox data fill`: it is found again, and what is built stays",
        ) from error  # fmt: skip
    return UnitDuplicates(
        header["unit"], header["source_set"], header["before"], removed, signatures, digest.hex()
    )  # fmt: skip


def duplicates_path(directory: Path, transform: Transform, unit: int) -> Path:
    return directory / DIRECTORY_NAME / str(transform.number) / f"u{unit:09d}.bin"


def corpus_wide(transforms: Sequence[Transform]) -> list[Transform]:
    """The transforms that need a first pass."""
    return [transform for transform in transforms if transform.kind == "duplicates" and transform.scope == "corpus"]


def duplicates_of(
    directory: Path | None, files: Sequence[SourceFile], transforms: Sequence[Transform], unit: Unit
) -> Mapping[int, IsDuplicate]:
    """For each transform of duplicates, how it decides in one unit; texts must be asked about in order.

    Raises:
        DataError: The first pass has not come to the unit, or was over other text.
    """
    return {
        transform.number: _as_found(directory, files, transform, unit)
        if transform.scope == "corpus"
        else _inside_unit(transform)
        for transform in transforms
        if transform.kind == "duplicates"
    }


def _as_found(directory: Path | None, files: Sequence[SourceFile], transform: Transform, unit: Unit) -> IsDuplicate:
    if directory is None:
        raise AssertionError("a work with duplicates over the corpus needs a place for its first pass: UnitBuilder.at")
    path = duplicates_path(directory, transform, unit.unit_id)
    found = read_unit_duplicates(path)
    if (found.unit_id, found.source_set) != (unit.unit_id, source_set_digest(unit, files).hex()):
        raise DataError(
            "the list of duplicates is of another unit", where=str(path),
            hint=f"remove {path.parent} and run `vorox data fill`: it is found again, and what is built stays",
        )  # fmt: skip
    removed: set[Place] = {(row[0], row[1], row[2]) for row in found.removed_R3.tolist()}
    return lambda document: place_in_source(document) in removed


def _inside_unit(transform: Transform) -> IsDuplicate:
    index = index_for(transform.name, transform.args)

    def is_duplicate(document: AnyDocument) -> bool:
        signature = transform.function(document.text, **transform.args)
        if index.is_duplicate(signature):
            return True
        index.add(signature)
        return False

    return is_duplicate


def place_in_source(document: AnyDocument) -> Place:
    return document.file_index, document.ordinal, document.copy
