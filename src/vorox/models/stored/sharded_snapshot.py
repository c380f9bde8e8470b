"""Snapshots of a state that is sharded over ranks: each rank writes its rows, rank 0 the index.

In: the rows that this rank holds, in host memory or read from the device one at a time. Out: one file per shard
(``models/arrays/sharded_arrays.py``), and the sums from which rank 0 computes the fingerprint. No array is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vorox.core.engine import PartReport
from vorox.core.files.staged_directory import StagedDirectory, StagedPart
from vorox.models.arrays.array_reader import WEIGHTS, weight_entries
from vorox.models.arrays.fingerprint import StateHash
from vorox.models.arrays.sharded_arrays import INDEX_FILE, StoredArray, encode_index, shard_name
from vorox.models.arrays.weights_file import TensorEntry, write_weights
from vorox.models.spec import ModelSpec
from vorox.models.stored import engine_state


class ShardRows(NamedTuple):
    """Consecutive rows of an array on this rank.

    Attributes:
        name: ``<kind>.<canonical name>``.
        first_row: Index of the first one.
        shape: Shape of these rows.
        read: Returns them, fp32, in host memory.
    """

    name: str
    first_row: int
    shape: tuple[int, ...]
    read: Callable[[], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class ShardedSnapshot:
    """This rank's part of a training state that is sharded over ranks (``core.engine.EngineSnapshot``).

    Attributes:
        spec: The model.
        shard: Index of this rank's shard, and their number.
        rows: Rows that this rank writes; none if another rank holds and writes the same ones.
        moment_names: The parameters of each kind of moment, in table order.
        counters: Scalars of the optimizer.
    """

    spec: ModelSpec
    shard: tuple[int, int]
    rows: Sequence[ShardRows]
    moment_names: Mapping[str, tuple[str, ...]]
    counters: Mapping[str, float]

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays of all ranks: a lower bound of the disk space needed."""
        return sum(entry.size_bytes for entry in self._entries())

    def _entries(self) -> tuple[TensorEntry, ...]:
        return (*weight_entries(self.spec), *engine_state.moment_entries(self.spec, self.moment_names))

    def nonfinite_array(self) -> str:
        """Return the name of the first array with NaN or infinity in the rows of this rank, or an empty string."""
        named = ((rows.name.removeprefix(f"{WEIGHTS}."), rows.read()) for rows in self.rows)
        return engine_state.first_nonfinite(named)

    def write_part(self, directory: StagedPart) -> PartReport:
        """Write the rows of this rank into one file; return its slices and the sum over its blocks."""
        if not self.rows:
            return {}
        shapes = {entry.name: entry.shape for entry in self._entries()}
        total = StateHash()

        def arrays() -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
            for rows in self.rows:
                array = rows.read()
                total.add(rows.name, array, rows.first_row, shapes[rows.name])
                yield rows.name, array

        name = shard_name(*self.shard)
        with directory.open(name) as sink:
            write_weights(sink, [TensorEntry(rows.name, "F32", rows.shape) for rows in self.rows], arrays())
        slices = [[rows.name, rows.first_row, rows.first_row + rows.shape[0]] for rows in self.rows]
        return {"file": name, "slices": slices, "sum": total.report()}

    def write_metadata(self, directory: StagedDirectory, parts: Sequence[PartReport]) -> None:
        """Write the index of all shards, and ``engine.json``.

        Raises:
            CheckpointError: The shards lack rows of an array, or several have the same ones.
        """
        found: dict[str, list[tuple[str, int, int]]] = {}
        for part in parts:
            for name, first, end in part.get("slices", ()):
                found.setdefault(name, []).append((part["file"], first, end))
        arrays = {
            entry.name: StoredArray(entry.shape, tuple(sorted(found.get(entry.name, ()), key=lambda one: one[1])))
            for entry in self._entries()
        }
        directory.write(INDEX_FILE, encode_index(arrays, directory.path / INDEX_FILE))
        kinds = sorted(self.moment_names)
        engine_state.write_description(directory, self.spec, kinds, self.counters, arrays="shards")

    def fingerprint(self, parts: Sequence[PartReport] = ()) -> str:
        """Return the fingerprint of the whole state, from the sums of all ranks."""
        total = StateHash()
        for part in parts:
            if part:
                total.merge(StateHash.from_report(part["sum"]))
        return total.fingerprint(self.counters)
