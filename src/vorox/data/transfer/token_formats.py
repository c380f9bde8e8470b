"""Formats of token data for other trainers: .bin shards, MDS shards, flat numpy arrays.

Documents go in, the files of one split of one source come out, in a staged directory. Each format is a function of the
documents alone, so the same cache gives the same bytes. Invariant: no document is split or merged with another; where
the format has no document boundaries, the end-of-text token marks them.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.core.files.atomic import Buffer
from vorox.core.files.staged_directory import HashingWriter, StagedDirectory
from vorox.data.rows import TokenArray
from vorox.data.size_groups import batch_by_size
from vorox.data.text.shard_format import MAX_TOKENS, long_header

TokenFormat = Literal["bin", "mds", "npy"]

DEFAULT_SHARD_TOKENS = {"bin": 100_000_000, "mds": 32 << 20}
"""Tokens per shard by default: that of the fineweb shards, and the 64 MiB of mosaicml-streaming."""

_MDS_OFFSET_LIMIT_BYTES = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """An exported file.

    Attributes:
        name: Relative to the directory.
        size_bytes: Size.
        sha256: Hash of its content.
        documents: Number of documents.
        tokens: Number of tokens.
    """

    name: str
    size_bytes: int
    sha256: str
    documents: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Destination:
    """Destination of the files of one split of one source.

    Attributes:
        directory: The staged directory.
        source: Name of the source.
        split: ``train`` or ``val``, as other trainers name the splits.
        dtype: Type of the token ids: ``uint16`` or ``uint32``.
        num_tokens: Number of tokens of all documents.
        num_documents: Number of documents.
        shard_tokens: Maximum tokens per shard; a longer document gets a shard of its own.
    """

    directory: StagedDirectory
    source: str
    split: str
    dtype: str
    num_tokens: int
    num_documents: int
    shard_tokens: int

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype).newbyteorder("<")


class _Sha256Writer:
    def __init__(self, writer: HashingWriter) -> None:
        self._writer, self._digest = writer, hashlib.sha256()

    def write(self, data: Buffer) -> int:
        self._digest.update(data)
        return self._writer.write(data)

    def finish(self, name: str, documents: int, tokens: int) -> ExportedFile:
        return ExportedFile(name, self._writer.size_bytes, self._digest.hexdigest(), documents, tokens)


def _shards(documents: Iterable[TokenArray], shard_tokens: int) -> Iterator[list[TokenArray]]:
    """Yield consecutive documents in batches of at most ``shard_tokens``; a longer document is a batch of its own."""
    return batch_by_size(((document, len(document)) for document in documents), shard_tokens)


def write_bin(documents: Iterable[TokenArray], destination: Destination) -> list[ExportedFile]:
    """Write ``SOURCE_train_000000.bin`` and so on, in the format of llm.c."""
    files: list[ExportedFile] = []
    for number, shard in enumerate(_shards(documents, destination.shard_tokens)):
        name = f"{destination.source}_{destination.split}_{number:06d}.bin"
        num_tokens = sum(map(len, shard))
        if num_tokens > MAX_TOKENS:
            raise DataError(
                f"A document has {num_tokens:,} tokens, more than one shard can hold ({MAX_TOKENS:,})", where=name,
                hint="export as npy, or split the document in the source",
            )  # fmt: skip
        with destination.directory.open(name) as file:
            writer = _Sha256Writer(file)
            writer.write(long_header(destination.stored_dtype.itemsize, num_tokens))
            for document in shard:
                writer.write(document.astype(destination.stored_dtype, copy=False).tobytes())
            files.append(writer.finish(name, len(shard), num_tokens))
    return files


def write_npy(documents: Iterable[TokenArray], destination: Destination) -> list[ExportedFile]:
    """Write ``SOURCE_train.npy`` with all ids, and ``SOURCE_train.offsets.npy`` with the document borders."""
    name = f"{destination.source}_{destination.split}.npy"
    offsets = np.zeros(destination.num_documents + 1, "<i8")
    count = 0
    with destination.directory.open(name) as file:
        writer = _Sha256Writer(file)
        writer.write(_npy_header(destination.stored_dtype, destination.num_tokens))
        for document in documents:
            writer.write(document.astype(destination.stored_dtype, copy=False).tobytes())
            count += 1
            offsets[count] = offsets[count - 1] + len(document)
        tokens = writer.finish(name, count, int(offsets[count]))
    name = f"{destination.source}_{destination.split}.offsets.npy"
    with destination.directory.open(name) as file:
        writer = _Sha256Writer(file)
        writer.write(_npy_header(offsets.dtype, len(offsets)))
        writer.write(offsets.tobytes())
        return [tokens, writer.finish(name, 0, 0)]


def _npy_header(dtype: np.dtype[Any], length: int) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    )
    return buffer.getvalue()


def write_mds(documents: Iterable[TokenArray], destination: Destination) -> list[ExportedFile]:
    """Write a folder ``SOURCE/train`` with ``index.json`` and shards, one document per sample, for mosaicml-streaming.

    A shard contains the number of samples and their offsets as uint32, the columns as JSON, and the samples. A sample
    contains the size of its only column as uint32, then the array: a byte with the number of axes and the width of the
    shape, the shape, the ids.
    """
    files: list[ExportedFile] = []
    columns: dict[str, Any] = {
        "column_encodings": [f"ndarray:{destination.dtype}"],
        "column_names": ["tokens"],
        "column_sizes": [None],
        "compression": None,
        "format": "mds",
        "hashes": ["sha256"],
        "size_limit": destination.shard_tokens * destination.stored_dtype.itemsize,
        "version": 2,
    }
    listed: list[dict[str, Any]] = []
    folder = f"{destination.source}/{destination.split}"
    for number, shard in enumerate(_shards(documents, destination.shard_tokens)):
        basename = f"shard.{number:05d}.mds"
        name = f"{folder}/{basename}"
        heads = [_mds_header(len(document), destination.stored_dtype.itemsize) for document in shard]
        sizes = [len(head) + document.nbytes for head, document in zip(heads, shard, strict=True)]
        described = json.dumps(columns, sort_keys=True).encode()
        before = 4 + 4 * (len(shard) + 1) + len(described)
        offsets = np.cumsum([before, *sizes], dtype=np.int64)
        if int(offsets[-1]) > _MDS_OFFSET_LIMIT_BYTES:
            raise DataError(
                f"A shard has {int(offsets[-1]):,} bytes, more than MDS can address", where=name,
                hint="use a smaller --shard-tokens, or split the document in the source",
            )  # fmt: skip
        with destination.directory.open(name) as file:
            writer = _Sha256Writer(file)
            writer.write(np.array([len(shard)], "<u4").tobytes() + offsets.astype("<u4").tobytes() + described)
            for head, document in zip(heads, shard, strict=True):
                writer.write(head + document.astype(destination.stored_dtype, copy=False).tobytes())
            files.append(writer.finish(name, len(shard), sum(map(len, shard))))
        raw = {"basename": basename, "bytes": files[-1].size_bytes, "hashes": {"sha256": files[-1].sha256}}
        listed.append({**columns, "raw_data": raw, "samples": len(shard), "zip_data": None})
    with destination.directory.open(f"{folder}/index.json") as file:
        writer = _Sha256Writer(file)
        writer.write(json.dumps({"shards": listed, "version": 2}, sort_keys=True).encode())
        files.append(writer.finish(f"{folder}/index.json", 0, 0))
    return files


def _mds_header(length: int, item_bytes: int) -> bytes:
    """Return the bytes before the ids of a one-dimensional array: the size of the column, and the shape."""
    width = next(index for index in range(4) if length < 1 << (8 << index))
    shape = bytes([(1 << 2) | width]) + length.to_bytes(1 << width, "little")
    return (len(shape) + length * item_bytes).to_bytes(4, "little") + shape


Writer = Callable[[Iterable[npt.NDArray[Any]], Destination], list[ExportedFile]]
WRITERS: dict[TokenFormat, Writer] = {"bin": write_bin, "mds": write_mds, "npy": write_npy}
