"""The first pass over a source: which texts were there before, found once, in the order of the source.

Units and the transforms before the one that removes duplicates go in; one file per unit comes out (``duplicates.py``).
The first of equal texts stays. Invariants: a unit's file depends on the units up to it and on nothing else, so units
stay pure functions of the work and of these files; units that are added later are compared with all that came before,
without reading it again, and change nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vorox.core.atomic import make_directory, write_file
from vorox.core.errors import DataError
from vorox.core.lock import FileLock
from vorox.core.schema.data import PipelineConfig
from vorox.data.cache.inventory import source_set_digest
from vorox.data.documents import Unit
from vorox.data.pipeline.duplicates import (
    DIRECTORY_NAME,
    Place,
    UnitDuplicates,
    corpus_wide,
    duplicates_path,
    place_in_source,
    read_unit_duplicates,
)
from vorox.data.pipeline.pipeline import Pipeline, Stage, run_serial
from vorox.data.pipeline.stages import DocumentBatch, UnitStages
from vorox.data.transforms.registry import Transform
from vorox.data.transforms.signatures import Signature, index_for

LOCK_NAME = "LOCK"


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
    """Make the files that are missing, one transform after the other. Of several processes one does it.

    Args:
        directory: The cache.
        stages: How text is read and transformed.
        units: All units, in order; files of the first of them may be there.
        config: How the work is staged.
        on_compared: Told after every unit how many bytes of text have been looked at.
        stop: Asked before every unit; what was found stays.
        passes: What earlier calls with fewer units came to, by the number of the transform, so that it is not read
            again.

    Raises:
        DataError: A file is of another history, or the text cannot be read.
    """
    passes = {} if passes is None else passes
    for transform in corpus_wide(stages.applier.transforms):
        behind = units[passes[transform.number].known_units :] if transform.number in passes else units
        if all(duplicates_path(directory, transform, unit.unit_id).exists() for unit in behind):
            continue
        make_directory(directory / DIRECTORY_NAME / str(transform.number))
        with FileLock(directory / DIRECTORY_NAME / LOCK_NAME, purpose="looking for duplicates"):
            found = passes.setdefault(transform.number, FirstPass(directory, stages, transform, on_compared))
            found.run(units, config, stop)


class FirstPass:
    """One transform over all units, or over more and more of them.

    Attributes:
        known_units: Units, from the first on, that it has compared or taken from their files.
    """

    def __init__(
        self, directory: Path, stages: UnitStages, transform: Transform, on_compared: Callable[[int], None] | None
    ) -> None:
        self._directory, self._transform, self._on_compared = directory, transform, on_compared
        self._compared_bytes = 0
        self._stages = stages.before(transform.number)
        self._index = index_for(transform.name, transform.args)
        self._before = ""
        self.known_units = 0

    def run(self, units: Sequence[Unit], config: PipelineConfig, stop: Callable[[], bool] | None) -> None:
        while self.known_units < len(units) and self._path(units[self.known_units]).exists():
            self._take(units[self.known_units])
        filters = self._stages.filters(config)
        stages = (*self._stages.sources(config), *filters, Stage("sign", self._signed, config.filter_threads))
        left = units[self.known_units :]
        signed: Iterator[Any]
        if config.staged:
            pipeline = Pipeline(left, stages, queue_bytes=config.queue_bytes, consumer="compare", stop=stop)
            signed = iter(pipeline)
        else:
            signed = run_serial((unit for unit in left if stop is None or not stop()), stages)
        parts: list[_Signed] = []
        for part in signed:
            parts.append(part)
            if part.batch.is_last:
                self._write(part.batch.unit, parts)
                parts = []

    def _path(self, unit: Unit) -> Path:
        return duplicates_path(self._directory, self._transform, unit.unit_id)

    def _take(self, unit: Unit) -> None:
        """Go on behind a unit that was done before."""
        path = self._path(unit)
        found = read_unit_duplicates(path)
        if (found.before, found.source_set) != (self._before, source_set_digest(unit, self._stages.files).hex()):
            raise DataError(
                "the list of duplicates follows from other text than this cache's", where=str(path),
                hint=f"remove {path.parent} and run `vorox data fill`: it is found again, and what is built stays",
            )  # fmt: skip
        for signature in found.signatures_KW:
            self._index.add(signature)
        self._before = found.sha256
        self._compared_bytes += unit.size_bytes
        self.known_units += 1

    def _signed(self, batch: DocumentBatch) -> _Signed:
        function, args = self._transform.function, self._transform.args
        signatures = [function(document.text, **args) for document in batch.documents]
        return _Signed(batch, [place_in_source(document) for document in batch.documents], signatures)

    def _write(self, unit: Unit, parts: Sequence[_Signed]) -> None:
        removed: list[Place] = []
        kept: list[Signature] = []
        for part in parts:
            for place, signature in zip(part.places, part.signatures, strict=True):
                if self._index.is_duplicate(signature):
                    removed.append(place)
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
class _Signed:
    """The signatures of one batch."""

    batch: DocumentBatch
    places: Sequence[Place]
    signatures: Sequence[Signature]

    @property
    def size_bytes(self) -> int:
        return sum(signature.nbytes + 100 for signature in self.signatures)

    @property
    def place(self) -> str:
        return self.batch.place
