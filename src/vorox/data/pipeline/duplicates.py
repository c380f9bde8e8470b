"""Duplicate texts: a first pass over the whole source, its files, and the check during the build.

The first pass reads the units in order, applies the transforms before the one that removes duplicates, and writes one
file per unit, ``duplicates/<number of the transform>/u<unit>.bin`` in the cache directory: which texts are removed, and
the signatures of those that stay. The first of equal texts stays. Every file names the hash of the previous unit's
file, so a file with a different history is refused.

Invariants: the file of a unit depends only on the units up to it, so units stay pure functions of their inputs and
these files; units that are added later are compared with all earlier ones without reading those again, and change none
of their files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.atomic import canonical_json, make_directory, write_file
from vorox.core.errors import DataError
from vorox.core.lock import FileLock
from vorox.core.schema.data import PipelineConfig
from vorox.data.cache.recipe import source_set_digest
from vorox.data.documents import AnyDocument, SourceFile, Unit
from vorox.data.pipeline.pipeline import Pipeline, Stage, run_serial
from vorox.data.pipeline.stages import DocumentBatch, UnitStages
from vorox.data.transforms.apply import IsDuplicate
from vorox.data.transforms.registry import Transform
from vorox.data.transforms.signatures import Signature, index_for

DIRECTORY_NAME = "duplicates"
LOCK_NAME = "LOCK"
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
        header: dict[str, Any] = json.loads(line)
        removed = np.frombuffer(rest, "<i8", 3 * header["removed"]).reshape(-1, 3)
        signatures = np.frombuffer(rest, header["dtype"], offset=removed.nbytes).reshape(header["signatures"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unusable(path, f"Cannot read the duplicates of a unit: {error}") from error
    return UnitDuplicates(
        header["unit"], header["source_set"], header["before"], removed, signatures, digest.hex()
    )  # fmt: skip


def duplicates_path(directory: Path, transform: Transform, unit: int) -> Path:
    return directory / DIRECTORY_NAME / str(transform.number) / f"u{unit:09d}.bin"


def _unusable(path: Path, what: str) -> DataError:
    hint = f"remove {path.parent} and run `vorox data fill`: it repeats the search and keeps the units already built"
    return DataError(what, where=str(path), hint=hint)


def corpus_wide(transforms: Sequence[Transform]) -> list[Transform]:
    """Return the transforms that need a first pass."""
    return [transform for transform in transforms if transform.kind == "duplicates" and transform.scope == "corpus"]


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
        raise _unusable(path, "The list of duplicates belongs to a different unit")
    removed: set[DocumentKey] = {(row[0], row[1], row[2]) for row in found.removed_R3.tolist()}
    return lambda document: document_key(document) in removed


def _unit_check(transform: Transform) -> IsDuplicate:
    index = index_for(transform.name, transform.args)

    def is_duplicate(document: AnyDocument) -> bool:
        signature = transform.function(document.text, **transform.args)
        if index.is_duplicate(signature):
            return True
        index.add(signature)
        return False

    return is_duplicate


def document_key(document: AnyDocument) -> DocumentKey:
    return document.file_index, document.ordinal, document.copy


def find_duplicates(
    directory: Path,
    stages: UnitStages,
    units: Sequence[Unit],
    config: PipelineConfig,
    *,
    on_compared: Callable[[int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    passes: dict[int, FirstPass] | None = None,
) -> None:
    """Write the missing files, transform by transform. Processes that share the cache take a lock.

    Args:
        directory: The cache.
        stages: How text is read and transformed.
        units: All units, in order; the first of them may have their files.
        config: How the work is staged.
        on_compared: Called after every unit with the bytes of text compared so far.
        stop: Called before every unit; true ends the pass, and finished files stay.
        passes: The passes of earlier calls with fewer units, by the number of the transform, so that files are not
            read again.

    Raises:
        DataError: A file has a different history, or the text cannot be read.
    """
    passes = {} if passes is None else passes
    for transform in corpus_wide(stages.applier.transforms):
        remaining = units[passes[transform.number].known_units :] if transform.number in passes else units
        if all(duplicates_path(directory, transform, unit.unit_id).exists() for unit in remaining):
            continue
        make_directory(directory / DIRECTORY_NAME / str(transform.number))
        with FileLock(directory / DIRECTORY_NAME / LOCK_NAME, purpose="looking for duplicates"):
            found = passes.setdefault(transform.number, FirstPass(directory, stages, transform, on_compared))
            found.run(units, config, stop)


class FirstPass:
    """The first pass of one transform. It may be run again with more units.

    Attributes:
        known_units: Number of units, from the first, that were compared or read from their files.
    """

    def __init__(
        self, directory: Path, stages: UnitStages, transform: Transform, on_compared: Callable[[int], None] | None
    ) -> None:
        self._directory, self._transform, self._on_compared = directory, transform, on_compared
        self._compared_bytes = 0
        self._stages = stages.only_before(transform.number)
        self._index = index_for(transform.name, transform.args)
        self._before = ""
        self.known_units = 0

    def run(self, units: Sequence[Unit], config: PipelineConfig, stop: Callable[[], bool] | None) -> None:
        while self.known_units < len(units) and self._path(units[self.known_units]).exists():
            self._load(units[self.known_units])
        filters = self._stages.filters(config)
        stages = (*self._stages.sources(config), *filters, Stage("sign", self._sign, config.filter_threads))
        remaining = units[self.known_units :]
        signed: Iterator[Any]
        if config.staged:
            pipeline = Pipeline(remaining, stages, queue_bytes=config.queue_bytes, consumer="compare", stop=stop)
            signed = iter(pipeline)
        else:
            signed = run_serial((unit for unit in remaining if stop is None or not stop()), stages)
        parts: list[_SignedBatch] = []
        for part in signed:
            parts.append(part)
            if part.batch.is_last:
                self._write(part.batch.unit, parts)
                parts = []

    def _path(self, unit: Unit) -> Path:
        return duplicates_path(self._directory, self._transform, unit.unit_id)

    def _load(self, unit: Unit) -> None:
        """Continue after a unit whose file exists."""
        path = self._path(unit)
        found = read_unit_duplicates(path)
        if (found.before, found.source_set) != (self._before, source_set_digest(unit, self._stages.files).hex()):
            raise _unusable(path, "The list of duplicates was computed from a different text")
        for signature in found.signatures_KW:
            self._index.add(signature)
        self._before = found.sha256
        self._compared_bytes += unit.size_bytes
        self.known_units += 1

    def _sign(self, batch: DocumentBatch) -> _SignedBatch:
        function, args = self._transform.function, self._transform.args
        signatures = [function(document.text, **args) for document in batch.documents]
        return _SignedBatch(batch, [document_key(document) for document in batch.documents], signatures)

    def _write(self, unit: Unit, parts: Sequence[_SignedBatch]) -> None:
        removed: list[DocumentKey] = []
        kept: list[Signature] = []
        for part in parts:
            for key, signature in zip(part.keys, part.signatures, strict=True):
                if self._index.is_duplicate(signature):
                    removed.append(key)
                else:
                    self._index.add(signature)
                    kept.append(signature)
        source_set = source_set_digest(unit, self._stages.files).hex()
        signatures = np.stack(kept) if kept else np.zeros((0, 0), np.uint32)
        removed_R3 = np.array(removed, np.int64).reshape(-1, 3)
        raw, self._before = UnitDuplicates(
            unit.unit_id, source_set, self._before, removed_R3, signatures
        ).to_bytes()  # fmt: skip
        write_file(self._path(unit), raw)
        self._compared_bytes += unit.size_bytes
        self.known_units += 1
        if self._on_compared is not None:
            self._on_compared(self._compared_bytes)


@dataclass(frozen=True)
class _SignedBatch:
    """A batch of documents with their signatures."""

    batch: DocumentBatch
    keys: Sequence[DocumentKey]
    signatures: Sequence[Signature]

    @property
    def size_bytes(self) -> int:
        return sum(signature.nbytes + 100 for signature in self.signatures)

    @property
    def place(self) -> str:
        return self.batch.place
