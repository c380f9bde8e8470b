"""Duplicate texts: the check during the build, and the files of the first pass that it reads.

The first pass (``first_pass.py``) writes one file per unit, ``duplicates/<number of the transform>/u<unit>.bin`` in the
cache directory: which texts are removed, and the signatures of those that stay. Every file names the hash of the
previous unit's file, so a file with a different history is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.core.files.atomic import canonical_json
from vorox.core.files.json_reader import parse_json
from vorox.data.cache.files.format import source_set_digest
from vorox.data.documents import AnyDocument, SourceFile, Unit
from vorox.data.transforms.apply import IsDuplicate
from vorox.data.transforms.registry import Transform, index_for
from vorox.data.transforms.signatures import Signature

DIRECTORY_NAME = "duplicates"
_FORMAT = "duplicates/1"
_SHA256_BYTES = 32

DocumentKey = tuple[int, int, int]
"""File index, ordinal and copy number of a document."""


@dataclass(frozen=True)
class UnitDuplicates:
    """The first pass's result for one unit.

    Attributes:
        unit_id: The unit.
        source_set: Digest of the unit's text.
        before: SHA-256 of the previous unit's file; empty for the first.
        removed_R3: Keys of the texts that occurred before.
        signatures_KW: Signatures of the texts that stay, in order.
        sha256: Hash of the file.
    """

    unit_id: int
    source_set: str
    before: str
    removed_R3: npt.NDArray[np.int64]
    signatures_KW: Signature
    sha256: str = ""

    def to_bytes(self) -> tuple[bytes, str]:
        """Return the content of the file and its hash."""
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
    """Read the file of one unit.

    Raises:
        DataError: It is missing or damaged.
    """
    try:
        raw = path.read_bytes()
        body, digest = raw[:-_SHA256_BYTES], raw[-_SHA256_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            raise ValueError("the hash does not match")
        line, _, rest = body.partition(b"\n")
        header: dict[str, Any] = parse_json(line, path, dict)
        removed = np.frombuffer(rest, "<i8", 3 * header["removed"]).reshape(-1, 3)
        signatures = np.frombuffer(rest, header["dtype"], offset=removed.nbytes).reshape(header["signatures"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unusable(path, f"Cannot read the duplicates of a unit: {error}") from error
    return UnitDuplicates(
        header["unit"], header["source_set"], header["before"], removed, signatures, digest.hex()
    )  # fmt: skip


def duplicates_path(directory: Path, transform: Transform, unit: int) -> Path:
    return directory / DIRECTORY_NAME / str(transform.number) / f"u{unit:09d}.bin"


def unusable(path: Path, what: str) -> DataError:
    hint = f"remove {path.parent} and run `vorox data fill`: it repeats the search and keeps the units already built"
    return DataError(what, where=str(path), hint=hint)


def duplicate_check(
    directory: Path | None, files: Sequence[SourceFile], transform: Transform, unit: Unit
) -> IsDuplicate:
    """Return the check by which a transform finds the duplicates of a unit; to be called once per text, in order.

    Raises:
        DataError: The first pass has not reached the unit, or read a different text.
    """
    if transform.scope == "corpus":
        return _corpus_check(directory, files, transform, unit)
    return _unit_check(transform)


def _corpus_check(directory: Path | None, files: Sequence[SourceFile], transform: Transform, unit: Unit) -> IsDuplicate:
    if directory is None:
        raise AssertionError("corpus-wide duplicates need a cache directory: call UnitBuilder.with_directory first")
    path = duplicates_path(directory, transform, unit.unit_id)
    found = read_unit_duplicates(path)
    if (found.unit_id, found.source_set) != (unit.unit_id, source_set_digest(unit, files).hex()):
        raise unusable(path, "The list of duplicates belongs to a different unit")
    removed: set[DocumentKey] = {(row[0], row[1], row[2]) for row in found.removed_R3.tolist()}
    return lambda document: document_key(document) in removed


def removed_digest(directory: Path, transform: Transform, unit: Unit) -> str:
    """Return the SHA-256 of the places of the texts that a transform removes from a unit, among the unit's files.

    Raises:
        DataError: The first pass has not reached the unit.
    """
    found = read_unit_duplicates(duplicates_path(directory, transform, unit.unit_id))
    numbers = {index: number for number, index in enumerate(unit.file_indexes)}
    removed = [[numbers[file], ordinal, copy] for file, ordinal, copy in found.removed_R3.tolist()]
    return hashlib.sha256(canonical_json(removed)).hexdigest()


def _unit_check(transform: Transform) -> IsDuplicate:
    index = index_for(transform)

    def is_duplicate(document: AnyDocument) -> bool:
        signature = transform.function(document.text, **transform.args)
        if index.is_duplicate(signature):
            return True
        index.add(signature)
        return False

    return is_duplicate


def document_key(document: AnyDocument) -> DocumentKey:
    return document.file_index, document.ordinal, document.copy
