"""Folders of other libraries, written as their documentation lays them out: MDS, and ``datasets.save_to_disk``."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
import zstandard

Sample = Mapping[str, Any]


def _array(value: np.ndarray, encoding: str) -> bytes:
    """ndarray, ndarray:DTYPE or ndarray:DTYPE:SHAPE: type and shape stand in front where they are not fixed."""
    fixed = encoding.split(":")[1:]
    codes = {"uint8": 8, "uint16": 16, "int16": 17, "uint32": 32, "int32": 33, "uint64": 64, "int64": 65}
    head = b"" if fixed else bytes([codes[value.dtype.name]])
    if len(fixed) < 2:
        width = next(index for index, kind in enumerate("BHIQ") if max(value.shape) < 256 ** struct.calcsize(kind))
        head += bytes([value.ndim << 2 | width]) + struct.pack(f"<{value.ndim}{'BHIQ'[width]}", *value.shape)
    return head + value.tobytes()


def _encoded(value: Any, encoding: str) -> bytes:
    if encoding in {"str", "json"}:
        return value.encode("utf-8", "surrogateescape")
    if encoding == "int":
        return struct.pack("<q", value)
    return value if encoding == "bytes" else _array(value, encoding)


def _fixed_size(encoding: str) -> int | None:
    kind, *rest = encoding.split(":")
    if kind == "int":
        return 8
    return np.dtype(rest[0]).itemsize * int(np.prod([int(n) for n in rest[1].split(",")])) if len(rest) == 2 else None


def mds_shard(samples: Sequence[Sample], columns: Mapping[str, str], **described: Any) -> tuple[bytes, dict[str, Any]]:
    """The bytes of a shard, and its description without files."""
    names = sorted(columns)
    sizes = [_fixed_size(columns[name]) for name in names]
    description = {
        "version": 2, "format": "mds", "compression": None, "hashes": [], "size_limit": 1 << 26,
        "column_names": names, "column_encodings": [columns[name] for name in names], "column_sizes": sizes,
        **described,
    }  # fmt: skip
    encoded = []
    for sample in samples:
        values = [_encoded(sample[name], columns[name]) for name in names]
        head = b"".join(struct.pack("<I", len(v)) for v, size in zip(values, sizes, strict=True) if size is None)
        encoded.append(head + b"".join(values))
    text = json.dumps(description, sort_keys=True).encode()
    first = 4 + 4 * (len(samples) + 1) + len(text)
    offsets = [first, *(first + total for total in itertools.accumulate(map(len, encoded)))]
    return struct.pack(f"<{len(offsets) + 1}I", len(samples), *offsets) + text + b"".join(encoded), description


_HASHES: dict[str, Callable[[bytes], str]] = {
    "sha1": lambda data: hashlib.sha1(data, usedforsecurity=False).hexdigest(),
    "xxh64": lambda data: xxhash.xxh64(data).hexdigest(),
}


def write_mds(
    folder: Path, samples: Sequence[Sample], columns: Mapping[str, str], *, shard_samples: int = 50,
    compression: str | None = None, hashes: Sequence[str] = ("sha1", "xxh64"),
) -> None:  # fmt: skip
    """A folder of MDS: the shards and ``index.json``."""
    folder.mkdir(parents=True)
    shards = []
    for number, first in enumerate(range(0, len(samples), shard_samples)):
        part = samples[first : first + shard_samples]
        raw, description = mds_shard(part, columns, compression=compression, hashes=list(hashes))
        files: dict[str, Any] = {"raw_data": _file(f"shard.{number:05d}.mds", raw, hashes), "zip_data": None}
        stored = raw
        if compression is not None:
            stored = zstandard.compress(raw)
            files["zip_data"] = _file(f"shard.{number:05d}.mds.zstd", stored, hashes)
        (folder / (files["zip_data"] or files["raw_data"])["basename"]).write_bytes(stored)
        shards.append({**description, **files, "samples": len(part)})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}, sort_keys=True))


def _file(name: str, data: bytes, hashes: Sequence[str]) -> dict[str, Any]:
    return {"basename": name, "bytes": len(data), "hashes": {kind: _HASHES[kind](data) for kind in hashes}}


def arrow_stream(columns: Mapping[str, Any], *, batch_rows: int = 20) -> bytes:
    """A table as an Arrow stream of record batches."""
    table, sink = pa.table(dict(columns)), pa.BufferOutputStream()
    with pa.RecordBatchStreamWriter(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return sink.getvalue().to_pybytes()


def write_saved_dataset(folder: Path, columns: Mapping[str, Sequence[Any]], *, num_shards: int = 2) -> None:
    """What ``Dataset.save_to_disk`` leaves: streams, ``state.json`` and ``dataset_info.json``."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{num_shards:05d}.arrow" for number in range(num_shards)]
    rows = len(next(iter(columns.values())))
    for number, name in enumerate(names):
        part = slice(rows * number // num_shards, rows * (number + 1) // num_shards)
        (folder / name).write_bytes(arrow_stream({key: list(values[part]) for key, values in columns.items()}))
    state = {
        "_data_files": [{"filename": name} for name in names], "_fingerprint": "0" * 16, "_format_columns": None,
        "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": None,
    }  # fmt: skip
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    features = {key: {"dtype": "string", "_type": "Value"} for key in columns}
    (folder / "dataset_info.json").write_text(json.dumps({"citation": "", "features": features}, indent=2))
