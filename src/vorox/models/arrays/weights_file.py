"""Safetensors reader and writer that stream one tensor at a time.

The writer writes the header and then streams arrays, so a model is never in memory twice. The reader parses the header
itself, because the official library accepts duplicate names and has no bf16 in NumPy; it uses plain reads, so a failing
disk is an exception and not a signal. Every file that it accepts reads identically with the official library (tested).

Invariant: tensors cover the data section in file order without gaps or overlaps, and every tensor is aligned; anything
else is a ``CheckpointError`` that names the file and the tensor.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vorox.core.errors import CheckpointError
from vorox.core.files.json_reader import read_json

Array = npt.NDArray[Any]

HEADER_LIMIT_BYTES = 100_000_000
"""The limit of the official library."""
PIECE_BYTES = 1 << 26
_MAX_AXES = 32
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"
"""Names the file of each tensor of a Hugging Face directory."""

_NUMPY: Mapping[str, npt.DTypeLike] = {
    "F64": "<f8", "I64": "<i8", "U64": "<u8", "F32": "<f4", "I32": "<i4", "U32": "<u4",
    "F16": "<f2", "BF16": "<u2", "I16": "<i2", "U16": "<u2", "I8": "i1", "U8": "u1", "BOOL": "?",
}  # fmt: skip
_NAMES: Mapping[str, str] = {np.dtype(kind).str: name for name, kind in _NUMPY.items() if name != "BF16"}


class ByteSink(Protocol):
    """Destination of a file: ``core.files.staged_directory.HashingWriter`` or an open binary file."""

    def write(self, data: memoryview, /) -> int: ...


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file: name, safetensors dtype (F32, BF16, ...) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * np.dtype(_NUMPY[self.dtype]).itemsize


def entry_of(name: str, array: Array) -> TensorEntry:
    """Return the entry that stores an array in its own dtype."""
    return TensorEntry(name, _NAMES[array.dtype.newbyteorder("<").str], array.shape)


def bfloat16_bits(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Convert fp32 to bf16 bit patterns, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, dtype=np.float32).reshape(-1).view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)  # a NaN with payload only in the lower half must not become inf
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).reshape(array.shape)


def bfloat16_values(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Convert bf16 bit patterns to fp32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def write_weights(
    sink: ByteSink,
    entries: Sequence[TensorEntry],
    arrays: Iterable[tuple[str, Array]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file. Float arrays are converted to the declared dtype, rounded to nearest even.

    Args:
        sink: Receives the bytes in order.
        entries: Every tensor, in the order of ``arrays``; wider types first.
        arrays: The tensors; the producer may free each one when the next is requested.
        metadata: Metadata of the header; by default ``{"format": "pt"}``, as transformers expects.

    Raises:
        CheckpointError: A tensor is missing, unexpected, has another shape or dtype, or overflows fp16.
    """
    sink.write(memoryview(_header(entries, {"format": "pt"} if metadata is None else metadata)))
    expected = iter(entries)
    for name, array in arrays:
        entry = next(expected, None)
        if entry is None or entry.name != name:
            raise CheckpointError(f"Got tensor {name}, but {entry.name if entry else 'no further tensor'} was declared")
        if array.shape != entry.shape:
            raise CheckpointError(f"Tensor {name} has shape {array.shape}, but {entry.shape} was declared")
        data = stored_array(array, entry).reshape(-1).view(np.uint8).data
        for start in range(0, len(data), PIECE_BYTES):
            sink.write(data[start : start + PIECE_BYTES])
    missing = next(expected, None)
    if missing is not None:
        raise CheckpointError(f"Tensor {missing.name} was declared but not given")


def _header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for entry in entries:
        if entry.name in header:
            raise CheckpointError(f"Tensor {entry.name} is declared twice")
        if offset % np.dtype(_NUMPY[entry.dtype]).itemsize:
            raise CheckpointError(f"Tensor {entry.name} would be misaligned; declare wider dtypes first")
        end = offset + entry.size_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def stored_array(array: Array, entry: TensorEntry) -> Array:
    """Return the elements that an entry stores: an array of its dtype, bf16 as bit patterns.

    Raises:
        CheckpointError: The dtypes do not match, or a value overflows fp16.
    """
    if array.dtype.kind == "f" and entry.dtype == "BF16":
        return bfloat16_bits(array.astype(np.float32, copy=False))
    if array.dtype.kind == "f" and entry.dtype == "F16":
        with np.errstate(over="ignore"):
            half = np.ascontiguousarray(array, dtype="<f2")
        if not np.array_equal(np.isinf(half), np.isinf(array)):
            raise CheckpointError(
                f"Tensor {entry.name} has values above the maximum of fp16 (65,504)", hint="write fp32 or bf16 instead"
            )
        return half
    if array.dtype.newbyteorder("<") != np.dtype(_NUMPY[entry.dtype]):
        raise CheckpointError(f"Tensor {entry.name} has dtype {array.dtype}, but {entry.dtype} was declared")
    return np.ascontiguousarray(array, dtype=_NUMPY[entry.dtype])


class WeightsFile:
    """A validated safetensors file. Opening reads and checks the header only.

    Raises:
        CheckpointError: The file is missing, truncated, or its header is invalid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            self._data_start, header = self._read_header(file)
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        if not isinstance(self.metadata, dict) or not all(isinstance(text, str) for text in self.metadata.values()):
            raise self._broken("__metadata__ is not a table of strings")
        self._offsets: dict[str, int] = {}
        self.entries = self._check_tensors(header)

    @property
    def names(self) -> Collection[str]:
        return self.entries.keys()

    def _broken(self, what: str) -> CheckpointError:
        return CheckpointError(f"Not a valid safetensors file: {what}", where=str(self.path))

    def _read_header(self, file: FileIO) -> tuple[int, dict[str, Any]]:
        self._size_bytes = os.fstat(file.fileno()).st_size
        prefix = self._read_bytes(file, 8)
        if len(prefix) < 8:
            raise self._broken(f"only {len(prefix)} bytes long")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(HEADER_LIMIT_BYTES, self._size_bytes - 8):
            raise self._broken(f"the header claims {length:,} bytes of a file of {self._size_bytes:,}")
        raw = self._read_bytes(file, length)
        if not raw.startswith(b"{"):
            raise self._broken("the header does not begin with '{'")
        try:
            header = json.loads(raw.decode("utf-8"), object_pairs_hook=self._unique, parse_constant=self._constant)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"the header is not JSON ({error})") from error
        return 8 + length, header

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise self._broken(f"{name!r} appears twice")
        return table

    def _constant(self, text: str) -> None:
        raise self._broken(f"{text} in the header")

    def _check_tensors(self, header: dict[str, Any]) -> dict[str, TensorEntry]:
        located: list[tuple[int, int, TensorEntry]] = []
        for name, value in header.items():
            located.append(self._check_tensor(name, value))
        located.sort(key=lambda item: item[:2])
        expected_start = 0
        for start, end, entry in located:
            if start != expected_start:
                raise self._broken(
                    f"tensor {entry.name} starts at {start}, but the previous one ends at {expected_start}"
                )
            self._offsets[entry.name] = self._data_start + start
            expected_start = end
        if self._data_start + expected_start != self._size_bytes:
            raise self._broken(
                f"the tensors need {self._data_start + expected_start:,} bytes, but the file has {self._size_bytes:,}"
            )
        return {entry.name: entry for _, _, entry in located}

    def _check_tensor(self, name: str, value: Any) -> tuple[int, int, TensorEntry]:
        match value:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, end]} if len(value) == 3:
                pass
            case _:
                raise self._broken(f"tensor {name} is not described by dtype, shape and data_offsets")
        if not all(type(number) is int and 0 <= number < 2**63 for number in [*shape, start, end]):
            raise self._broken(f"tensor {name} has a size or offset that is not a non-negative integer")
        if dtype not in _NUMPY:
            raise self._broken(f"tensor {name} has dtype {dtype}; supported are {', '.join(_NUMPY)}")
        if len(shape) > _MAX_AXES or prod(max(1, size) for size in shape) >= 2**63 // 8:
            raise self._broken(f"tensor {name} has a shape that no array can have")
        entry = TensorEntry(name, dtype, tuple(shape))
        if end - start != entry.size_bytes:
            raise self._broken(f"tensor {name} has {end - start} bytes, but shape {shape} needs {entry.size_bytes}")
        return start, end, entry

    def check_entries(self, expected: Iterable[TensorEntry]) -> None:
        """Check names, shapes and dtypes of all tensors.

        Raises:
            CheckpointError: A tensor is missing, unknown or different; the message names the first one.
        """
        wanted = {entry.name: entry for entry in expected}
        for name in sorted(wanted.keys() | self.entries.keys()):
            if name not in self.entries:
                raise CheckpointError(f"Tensor {name} is missing", where=str(self.path))
            if name not in wanted:
                raise CheckpointError(f"Tensor {name} is not part of this model", where=str(self.path))
            if wanted[name] != self.entries[name]:
                raise CheckpointError(
                    f"Tensor {name} is {self.entries[name].dtype} {self.entries[name].shape}; "
                    f"expected {wanted[name].dtype} {wanted[name].shape}",
                    where=str(self.path),
                )

    def __iter__(self) -> Iterator[tuple[str, Array]]:
        """Yield all tensors in file order; fp16 and bf16 are converted to fp32, other dtypes are kept."""
        with self._open() as file:
            for name in self.entries:
                yield name, self._read(file, name)

    def read(self, name: str) -> Array:
        """Read a tensor by name."""
        if name not in self.entries:
            raise CheckpointError(f"Tensor {name} is missing", where=str(self.path))
        with self._open() as file:
            return self._read(file, name)

    def read_rows(self, name: str, first: int, end: int) -> Array:
        """Read some rows of a tensor by name, without the others."""
        entry = self.entries[name]
        rows = TensorEntry(name, entry.dtype, (end - first, *entry.shape[1:]))
        with self._open() as file:
            return self._read(file, name, rows, first * TensorEntry(name, entry.dtype, entry.shape[1:]).size_bytes)

    def _open(self) -> FileIO:
        try:
            # Without O_NONBLOCK, opening a FIFO waits for a writer.
            file = open(self.path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | _NO_WAIT))  # noqa: SIM115
        except OSError as error:
            raise CheckpointError(f"Cannot read the weights: {error.strerror}", where=str(self.path)) from error
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise self._broken("it is not a regular file")
        return file

    def _read_bytes(self, file: FileIO, count: int) -> bytes:
        """Read bytes from the position of the file; fewer at its end."""
        parts: list[bytes] = []
        try:
            while count and (part := file.read(count)):
                parts.append(part)
                count -= len(part)
        except OSError as error:
            raise CheckpointError(f"Cannot read the weights: {error.strerror}", where=str(self.path)) from error
        return b"".join(parts)

    def _read(self, file: FileIO, name: str, rows: TensorEntry | None = None, skipped_bytes: int = 0) -> Array:
        entry = self.entries[name] if rows is None else rows
        array = np.empty(entry.shape, dtype=_NUMPY[entry.dtype])
        view = array.reshape(-1).view(np.uint8).data
        try:
            file.seek(self._offsets[name] + skipped_bytes)
            filled = 0
            while filled < len(view):
                count = file.readinto(view[filled : filled + PIECE_BYTES])
                if not count:
                    raise CheckpointError(f"The file ends inside tensor {name}", where=str(self.path))
                filled += count
        except OSError as error:
            raise CheckpointError(f"Cannot read tensor {name}: {error.strerror}", where=str(self.path)) from error
        if entry.dtype == "BF16":
            return bfloat16_values(array)
        if entry.dtype == "F16":
            return array.astype(np.float32)
        if entry.dtype == "BOOL" and bool((array.view(np.uint8) > 1).any()):
            raise CheckpointError(f"Tensor {name} has bytes that are neither true nor false", where=str(self.path))
        return array


def weights_index(file_name: str, entries: Sequence[TensorEntry]) -> dict[str, Any]:
    """Return the content of ``WEIGHTS_INDEX_FILE`` for a directory whose weights are one file."""
    total_size_bytes = sum(entry.size_bytes for entry in entries)
    return {"metadata": {"total_size": total_size_bytes}, "weight_map": {entry.name: file_name for entry in entries}}


def open_directory(directory: Path) -> tuple[WeightsFile, ...]:
    """Open the weights of a Hugging Face directory: ``model.safetensors``, or the shards of its index.

    Raises:
        CheckpointError: There are no safetensors weights, a shard is missing, or index and shards disagree.
    """
    single, index = directory / "model.safetensors", directory / WEIGHTS_INDEX_FILE
    if single.exists():
        return (WeightsFile(single),)
    if not index.exists():
        pickled = sorted(path.name for path in directory.glob("*.bin"))
        hint = "convert the .bin file to safetensors first; pickles are never loaded" if pickled else ""
        raise CheckpointError("There is no model.safetensors and no index of shards", where=str(directory), hint=hint)
    try:
        shard_of = read_json(index, dict)["weight_map"]
        names = sorted({str(shard) for shard in shard_of.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("The index of shards is not valid", where=str(index)) from error
    if any(Path(name).name != name for name in names):
        raise CheckpointError("The index of shards points outside its directory", where=str(index))
    files = tuple(WeightsFile(directory / name) for name in names)
    found = {(tensor, file.path.name) for file in files for tensor in file.entries}
    if found != set(shard_of.items()):
        tensor, shard = min(found ^ set(shard_of.items()))
        raise CheckpointError(f"Index and shards disagree about tensor {tensor} in {shard}", where=str(index))
    return files
