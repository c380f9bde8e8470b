"""Sharded arrays of a checkpoint: safetensors files with rows of arrays, and an index.

    shard-00001-of-00004.safetensors     rows of arrays ``<kind>.<canonical name>``, fp32
    shards.json                          array to shape and slices: file, first row, end row

Each shard is an ordinary safetensors file, so the official library opens it. A reader opens the files that hold the
wanted rows, and reads only these rows.

Invariant: the slices of an array cover each of its rows exactly once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vorox.core.errors import CheckpointError
from vorox.core.files.atomic import pretty_json
from vorox.core.files.json_reader import read_json
from vorox.models.arrays.array_reader import Index
from vorox.models.arrays.weights_file import TensorEntry, WeightsFile

FORMAT = "vorox-shards/1"
INDEX_FILE = "shards.json"


_MAX_INDEX_BYTES = 1 << 28
"""An index names every shard of every array."""


class StoredArray(NamedTuple):
    """An array in the index: its shape, and its slices (file, first row, end row) by first row."""

    shape: tuple[int, ...]
    slices: tuple[tuple[str, int, int], ...]

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "slices": [list(one) for one in self.slices]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StoredArray:
        slices = tuple((str(file), int(first), int(end)) for file, first, end in value["slices"])
        if any(Path(file).name != file for file, _, _ in slices):
            raise ValueError("a file outside the checkpoint")
        return cls(tuple(int(size) for size in value["shape"]), slices)

    def check_coverage(self, name: str, where: Path) -> None:
        """Check that the slices cover each row exactly once."""
        expected = 0
        for file, first, end in self.slices:
            if first != expected or end <= first:
                raise CheckpointError(
                    f"Rows of {name} do not follow each other: {file} begins at row {first:,}, expected {expected:,}",
                    where=str(where),
                )
            expected = end
        if expected != self.shape[0]:
            raise CheckpointError(
                f"The shards hold {expected:,} of {self.shape[0]:,} rows of {name}", where=str(where)
            )  # fmt: skip


def shard_name(index: int, count: int) -> str:
    """Return the file name of a shard, given its index from 0."""
    return f"shard-{index + 1:05d}-of-{count:05d}.safetensors"


def encode_index(arrays: Mapping[str, StoredArray], where: Path) -> bytes:
    """Return the index file.

    Args:
        arrays: All arrays by name.
        where: The file, for errors.

    Raises:
        CheckpointError: The shards lack rows of an array, or several have the same ones.
    """
    for name, array in arrays.items():
        array.check_coverage(name, where)
    return pretty_json({"format": FORMAT, "arrays": {name: array.to_json() for name, array in arrays.items()}})


class ShardedArrays:
    """Reader of a sharded checkpoint (``models.array_reader.ArrayReader``). Opening reads the index only.

    Args:
        directory: A verified checkpoint.

    Raises:
        CheckpointError: The index is missing or not valid.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / INDEX_FILE
        self._files: dict[str, WeightsFile] = {}
        try:
            body = read_json(self.path, dict, max_bytes=_MAX_INDEX_BYTES)
            version = body["format"]
            if version == FORMAT:
                self.arrays = {name: StoredArray.from_json(value) for name, value in body["arrays"].items()}
        except OSError as error:
            raise CheckpointError(f"Cannot read the index of shards: {error.strerror}", where=str(self.path)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError("The index of shards is not valid", where=str(self.path)) from error
        if version != FORMAT:
            raise CheckpointError(f"Shards have format {version}; expected {FORMAT}", where=str(self.path))
        for name, array in self.arrays.items():
            array.check_coverage(name, self.path)

    @property
    def names(self) -> Collection[str]:
        return self.arrays.keys()

    def check_entries(self, expected: Iterable[TensorEntry]) -> None:
        for entry in expected:
            shape = self._find(entry.name).shape
            if shape != entry.shape:
                raise CheckpointError(f"Array {entry.name} is {shape}; expected {entry.shape}", where=str(self.path))

    def read(self, name: str, index: Index = ...) -> npt.NDArray[np.float32]:
        array = self._find(name)
        where = (slice(None),) if index is ... or not index else index
        first, end, stride = where[0].indices(array.shape[0])
        assert stride == 1, "rows are read without gaps"
        parts = [
            self._open(file, name, (stop - start, *array.shape[1:])).read_rows(
                name, max(first, start) - start, min(end, stop) - start
            )
            for file, start, stop in array.slices
            if start < end and first < stop
        ]
        rows = parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty((0, *array.shape[1:]), np.float32)])
        return rows[(slice(None), *where[1:])]

    def _find(self, name: str) -> StoredArray:
        if name not in self.arrays:
            raise CheckpointError(f"Array {name} is missing", where=str(self.path))
        return self.arrays[name]

    def _open(self, file: str, name: str, shape: tuple[int, ...]) -> WeightsFile:
        """Open a shard once, and check that it holds the rows of the index."""
        if file not in self._files:
            self._files[file] = WeightsFile(self.path.with_name(file))
        found = self._files[file]
        if found.entries.get(name) != TensorEntry(name, "F32", shape):
            raise CheckpointError(f"Shard does not hold the rows of {name} that the index lists", where=str(found.path))
        return found
