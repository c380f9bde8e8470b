"""The first pass over a whole source, which finds duplicate texts before the build.

It reads the units in order, applies the transforms before the one that removes duplicates, and writes the file of each
unit (``duplicates.py``). The first of equal texts stays.

Invariants: the file of a unit depends only on the units up to it, so units stay pure functions of their inputs and
these files; units that are added later are compared with all earlier ones without reading those again, and change none
of their files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vorox.core.files.atomic import make_directory, write_file
from vorox.core.files.file_holder import FileLock
from vorox.data.cache.files.format import source_set_digest
from vorox.data.cache.pipeline.pipeline import BuildPipeline, BuildStage, run_serial
from vorox.data.cache.units.duplicates import (
    DIRECTORY_NAME,
    DocumentKey,
    UnitDuplicates,
    document_key,
    duplicates_path,
    read_unit_duplicates,
    unusable,
)
from vorox.data.cache.units.unit_builder import UnitBuilder
from vorox.data.documents import Unit
from vorox.data.text.unit_reader import DocumentBatch
from vorox.data.transforms.registry import Transform, index_for
from vorox.data.transforms.signatures import Signature

LOCK_NAME = "LOCK"


def find_duplicates(
    builder: UnitBuilder,
    units: Sequence[Unit],
    *,
    on_compared: Callable[[int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    passes: dict[int, FirstPass] | None = None,
) -> None:
    """Write the missing files, transform by transform. Processes that share the cache take a lock.

    Does nothing unless a transform removes duplicates across the whole source.

    Args:
        builder: The builder of the units, with the directory of the cache.
        units: All units, in order; the first of them may have their files.
        on_compared: Called after every unit with the bytes of text compared so far.
        stop: Called before every unit; true ends the pass, and finished files stay.
        passes: The passes of earlier calls with fewer units, by the number of the transform, so that files are not
            read again.

    Raises:
        DataError: A file has a different history, or the text cannot be read.
    """
    passes = {} if passes is None else passes
    for transform in builder.transforms:
        if transform.kind != "duplicates" or transform.scope != "corpus":
            continue
        directory = builder.cache_directory
        remaining = units[passes[transform.number].known_units :] if transform.number in passes else units
        if all(duplicates_path(directory, transform, unit.unit_id).exists() for unit in remaining):
            continue
        make_directory(directory / DIRECTORY_NAME / str(transform.number))
        with FileLock(directory / DIRECTORY_NAME / LOCK_NAME, purpose="looking for duplicates"):
            found = passes.setdefault(transform.number, FirstPass(builder, transform, on_compared))
            found.run(units, stop)


class FirstPass:
    """The first pass of one transform. It may be run again with more units.

    Attributes:
        known_units: Number of units, from the first, that were compared or read from their files.
    """

    def __init__(self, builder: UnitBuilder, transform: Transform, on_compared: Callable[[int], None] | None) -> None:
        self._directory, self._transform, self._on_compared = builder.cache_directory, transform, on_compared
        self._compared_bytes = 0
        before = tuple(other for other in builder.transforms if other.number < transform.number)
        self._builder = replace(builder, transforms=before)
        self._index = index_for(transform)
        self._before = ""
        self.known_units = 0

    def run(self, units: Sequence[Unit], stop: Callable[[], bool] | None) -> None:
        while self.known_units < len(units) and self._path(units[self.known_units]).exists():
            self._load(units[self.known_units])
        builder, config = self._builder, self._builder.pipeline
        stages = (*builder.sources(), *builder.filters(), BuildStage("sign", self._sign, config.filter_threads))
        remaining = units[self.known_units :]
        signed: Iterator[Any]
        if config.staged:
            pipeline = BuildPipeline(remaining, stages, queue_bytes=config.queue_bytes, consumer="compare", stop=stop)
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
        if (found.before, found.source_set) != (self._before, source_set_digest(unit, self._builder.files).hex()):
            raise unusable(path, "The list of duplicates was computed from a different text")
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
        source_set = source_set_digest(unit, self._builder.files).hex()
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
