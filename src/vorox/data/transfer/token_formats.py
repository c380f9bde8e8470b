"""How token data is laid out for other trainers: .bin shards, MDS shards, flat numpy arrays.

Documents go in, the files of one split of one source come out, into a directory under construction. Each form is a
function of the documents alone, so the same cache gives the same bytes. Invariant: no document is cut or joined with
another; where the form has no place for boundaries, each document ends with the end of text.
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

from vorox.core.atomic import Buffer
from vorox.core.errors import DataError
from vorox.core.staged_directory import HashingWriter, StagedDirectory
from vorox.data.batching import batch_by_size
from vorox.data.rows import TokenArray
from vorox.data.shard_format import MOST_TOKENS, long_header

Form = Literal["bin", "mds", "npy"]

SHARD_TOKENS = {"bin": 100_000_000, "mds": 32 << 20}
"""Tokens of a shard where nobody says how many: what fineweb's shards have, and mosaicml-streaming's 64 MiB."""

_MDS_OFFSET_LIMIT_BYTES = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that was written.

    Attributes:
        name: Relative to the directory.
        size_bytes: Its length.
        sha256: Of its content.
        documents: Documents in it.
        tokens: Tokens in it.
    """

    name: str
    size_bytes: int
    sha256: str
    documents: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the files of one split of one source go.

    Attributes:
        directory: Under construction.
        source: Name of the source.
        part: ``train`` or ``val``, as others name the splits.
        dtype: Of the ids: ``uint16`` or ``uint32``.
        num_tokens: Of all documents together.
        num_documents: All of them.
        shard_tokens: The most tokens of a shard, except that a longer document has a shard of its own.
    """

    directory: StagedDirectory
    source: str
    part: str
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

    def written(self, name: str, documents: int, tokens: int) -> WrittenFile:
        return WrittenFile(name, self._writer.size_bytes, self._digest.hexdigest(), documents, tokens)


def _shards(documents: Iterable[TokenArray], shard_tokens: int) -> Iterator[list[TokenArray]]:
    """Runs of documents of so many tokens at most, in order; a longer document is a run of its own."""
    return batch_by_size(((document, len(document)) for document in documents), shard_tokens)


def write_bin(documents: Iterable[TokenArray], to: Destination) -> list[WrittenFile]:
    """``SOURCE_train_000000.bin`` and so on, as llm.c writes them."""
    files: list[WrittenFile] = []
    for number, shard in enumerate(_shards(documents, to.shard_tokens)):
        name = f"{to.source}_{to.part}_{number:06d}.bin"
        num_tokens = sum(map(len, shard))
        if num_tokens > MOST_TOKENS:
            raise DataError(
                f"a document of {num_tokens:,} tokens is more than one shard can count ({MOST_TOKENS:,})", where=name,
                hint="export as npy, or cut the document in the source",
            )  # fmt: skip
        with to.directory.open(name) as file:
            writer = _Sha256Writer(file)
            writer.write(long_header(to.stored_dtype.itemsize, num_tokens))
            for document in shard:
                writer.write(document.astype(to.stored_dtype, copy=False).tobytes())
            files.append(writer.written(name, len(shard), num_tokens))
    return files


def write_npy(documents: Iterable[TokenArray], to: Destination) -> list[WrittenFile]:
    """``SOURCE_train.npy`` with all ids, ``SOURCE_train.offsets.npy`` with where each document begins, and the end."""
    name = f"{to.source}_{to.part}.npy"
    offsets = np.zeros(to.num_documents + 1, "<i8")
    count = 0
    with to.directory.open(name) as file:
        writer = _Sha256Writer(file)
        writer.write(_npy_header(to.stored_dtype, to.num_tokens))
        for document in documents:
            writer.write(document.astype(to.stored_dtype, copy=False).tobytes())
            count += 1
            offsets[count] = offsets[count - 1] + len(document)
        tokens = writer.written(name, count, int(offsets[count]))
    name = f"{to.source}_{to.part}.offsets.npy"
    with to.directory.open(name) as file:
        writer = _Sha256Writer(file)
        writer.write(_npy_header(offsets.dtype, len(offsets)))
        writer.write(offsets.tobytes())
        return [tokens, writer.written(name, 0, 0)]


def _npy_header(dtype: np.dtype[Any], length: int) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    )
    return buffer.getvalue()


def write_mds(documents: Iterable[TokenArray], to: Destination) -> list[WrittenFile]:
    """A folder ``SOURCE/train`` with ``index.json`` and shards, a document a sample, for mosaicml-streaming.

    A shard: number of samples and their offsets as uint32, the columns as JSON, the samples. A sample: the size of its
    one column as uint32, then the array: a byte with the number of axes and the width of the shape, the shape, the ids.
    """
    files: list[WrittenFile] = []
    columns: dict[str, Any] = {
        "column_encodings": [f"ndarray:{to.dtype}"],
        "column_names": ["tokens"],
        "column_sizes": [None],
        "compression": None,
        "format": "mds",
        "hashes": ["sha256"],
        "size_limit": to.shard_tokens * to.stored_dtype.itemsize,
        "version": 2,
    }
    listed: list[dict[str, Any]] = []
    folder = f"{to.source}/{to.part}"
    for number, shard in enumerate(_shards(documents, to.shard_tokens)):
        basename = f"shard.{number:05d}.mds"
        name = f"{folder}/{basename}"
        heads = [_mds_head(len(document), to.stored_dtype.itemsize) for document in shard]
        sizes = [len(head) + document.nbytes for head, document in zip(heads, shard, strict=True)]
        described = json.dumps(columns, sort_keys=True).encode()
        before = 4 + 4 * (len(shard) + 1) + len(described)
        offsets = np.cumsum([before, *sizes], dtype=np.int64)
        if int(offsets[-1]) > _MDS_OFFSET_LIMIT_BYTES:
            raise DataError(
                f"a shard of {int(offsets[-1]):,} bytes is more than MDS can address", where=name,
                hint="give a smaller --shard-tokens, or cut the document in the source",
            )  # fmt: skip
        with to.directory.open(name) as file:
            writer = _Sha256Writer(file)
            writer.write(np.array([len(shard)], "<u4").tobytes() + offsets.astype("<u4").tobytes() + described)
            for head, document in zip(heads, shard, strict=True):
                writer.write(head + document.astype(to.stored_dtype, copy=False).tobytes())
            files.append(writer.written(name, len(shard), sum(map(len, shard))))
        raw = {"basename": basename, "bytes": files[-1].size_bytes, "hashes": {"sha256": files[-1].sha256}}
        listed.append({**columns, "raw_data": raw, "samples": len(shard), "zip_data": None})
    with to.directory.open(f"{folder}/index.json") as file:
        writer = _Sha256Writer(file)
        writer.write(json.dumps({"shards": listed, "version": 2}, sort_keys=True).encode())
        files.append(writer.written(f"{folder}/index.json", 0, 0))
    return files


def _mds_head(length: int, item_bytes: int) -> bytes:
    """What stands before the ids of a one-dimensional array: the size of the column, and the shape."""
    width = next(index for index in range(4) if length < 1 << (8 << index))
    shape = bytes([(1 << 2) | width]) + length.to_bytes(1 << width, "little")
    return (len(shape) + length * item_bytes).to_bytes(4, "little") + shape


Writer = Callable[[Iterable[npt.NDArray[Any]], Destination], list[WrittenFile]]
WRITERS: dict[Form, Writer] = {"bin": write_bin, "mds": write_mds, "npy": write_npy}
