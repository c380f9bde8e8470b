"""MDS shards of mosaicml-streaming: each sample is a record, one column is text or token ids.

A shard holds the number of samples, their offsets and the end of the last one (uint32), the columns as JSON, and the
samples. A sample holds the sizes of its variable-size columns (uint32) and the values. Invariants: a shard is split
only after its bytes match the hashes of ``index.json``; a value that contradicts its encoding is a bad record; nothing
is ever unpickled.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from vorox.core.errors import DataError
from vorox.core.files.json_reader import parse_json
from vorox.core.schema.data import SourceConfig
from vorox.data.chat.column_meaning import ReadColumns, missing_in_file, named_columns
from vorox.data.chat.conversations import plain_text, read_messages
from vorox.data.documents import BadRecord, Document, Record, TokenDocument, UnitSpan, UnreadableRecord
from vorox.data.storage import StoredFile, open_range
from vorox.data.text.decompression import Limits
from vorox.data.text.file_content import length_bytes, limits_of, open_content
from vorox.data.text.formats.record_blocks import RecordBlock, blocks_from_ends, too_large
from vorox.data.text.formats.token_shards import end_of_text

_CHUNK_BYTES = 1 << 20

_ID_DTYPES = frozenset({"uint8", "uint16", "int16", "uint32", "int32", "uint64", "int64"})
"""Dtypes of token ids."""

_TEXT_ENCODINGS = frozenset({"str", "bytes", "json", "str_int", "str_float", "str_decimal"})
_NUMBER_ENCODINGS = _ID_DTYPES | {"int8", "float16", "float32", "float64"}
_DTYPE_OF_CODE = {8: "uint8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}


@dataclass(frozen=True, slots=True)
class MdsHeader:
    """The header of a shard.

    Attributes:
        offsets: First byte of each sample in the content, and the end of the last one.
        encodings: Encoding of each column by name, in the order of the values.
        sizes: Bytes of each column; ``None`` where it varies by sample.
    """

    offsets: npt.NDArray[np.int64]
    encodings: dict[str, str]
    sizes: tuple[int | None, ...]


@functools.lru_cache(maxsize=64)
def read_header(file: StoredFile, limits: Limits) -> MdsHeader:
    """Read the header of a shard.

    Raises:
        DataError: The file is not a shard, or its header contradicts its length.
    """
    size_bytes = length_bytes(file, limits)
    with open_content(file, 0, None, limits) as content:
        num_samples = int.from_bytes(content.read(4), "little")
        head = 4 + 4 * (num_samples + 1)
        if head > size_bytes:
            raise _corrupt_shard(file, f"{num_samples:,} samples cannot be in {size_bytes:,} bytes")
        offsets = np.frombuffer(content.read(head - 4), "<u4").astype(np.int64)
        if offsets[0] < head or offsets[-1] != size_bytes or not (np.diff(offsets) > 0).all():
            raise _corrupt_shard(file, "the offsets of its samples contradict its length")
        described = content.read(int(offsets[0]) - head)
    try:
        columns = parse_json(described, file.uri, dict)
        encodings = dict(zip(columns["column_names"], columns["column_encodings"], strict=True))
        sizes = tuple(size or None for size in columns["column_sizes"])
        is_known = (columns["format"], columns["version"]) == ("mds", 2) and len(sizes) == len(encodings)
    except (ValueError, KeyError, TypeError) as error:
        raise _corrupt_shard(file, "the description of its columns cannot be read") from error
    is_known &= all(isinstance(encoding, str) for encoding in encodings.values())
    if not is_known or not all(size is None or (type(size) is int and size > 0) for size in sizes):
        raise _corrupt_shard(file, "its columns are not described as in version 2 of the format")
    return MdsHeader(offsets, encodings, sizes)


def _corrupt_shard(file: StoredFile, reason: str) -> DataError:
    return DataError(
        f"The MDS shard cannot be read: {reason}", where=file.uri, hint="it is corrupt: download or write it again"
    )


@functools.lru_cache(maxsize=1 << 12)
def _check_hashes(file: StoredFile) -> None:
    for name, expected in file.hashes:
        digest: Any = None
        if name in hashlib.algorithms_available and not name.startswith("shake"):
            digest = hashlib.new(name, usedforsecurity=False)
        elif name.startswith("xxh"):
            digest = getattr(xxhash, name, bytes)()
        if not hasattr(digest, "hexdigest"):
            raise DataError(
                f"index.json has a hash of unknown type {name}", where=file.uri,
                hint="write the folder with hashes=['sha256']",
            )  # fmt: skip
        with open_range(file) as content:
            while chunk := content.read(_CHUNK_BYTES):
                digest.update(chunk)
        if digest.hexdigest() != expected:
            raise _corrupt_shard(file, f"its {name} is {digest.hexdigest()}, but index.json has {expected}")


def _open_shard(source: SourceConfig, file: StoredFile) -> MdsHeader:
    """Return the header of a shard that has the columns of the source."""
    found = read_header(file, limits_of(source))
    name = source.text_field if source.tokens_field is None else source.tokens_field
    for column, setting in named_columns(source):
        if column not in found.encodings:
            raise DataError(
                f"The shard has no column {column!r}; it has {', '.join(map(repr, found.encodings)) or 'none'}",
                where=file.uri, hint=missing_in_file(source, column, setting, tuple(found.encodings)),
            )  # fmt: skip
    if source.chat_fields:
        return found
    encoding = found.encodings[name]
    if source.tokens_field is None and encoding not in {"str", "bytes"}:
        raise DataError(
            f"Column {name!r} holds {encoding}, not text", where=file.uri,
            hint=f"set the source's text_field to a column of text, or tokens_field={name} if it is token ids",
        )  # fmt: skip
    if source.tokens_field is not None and _ids_dtype(encoding, source.ids_dtype) not in {*_ID_DTYPES, ""}:
        raise DataError(
            f"Column {name!r} holds {encoding}, which does not name the dtype of its ids",
            where=file.uri,
            hint="set the source's ids_dtype to the dtype they were written with"
            if encoding == "bytes"
            else "set the source's tokens_field to a column of integers",
        )
    return found


def check_fields(source: SourceConfig, file: StoredFile) -> None:
    """Refuse a shard without a column that the source names."""
    _open_shard(source, file)


def measure(source: SourceConfig, file: StoredFile, end: int | None) -> int:
    """Return the bytes of samples before ``end``."""
    limits = limits_of(source)
    return max(0, (length_bytes(file, limits) if end is None else end) - int(read_header(file, limits).offsets[0]))


def split_blocks(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int
) -> Iterator[RecordBlock]:
    """Yield blocks of whole samples."""
    _check_hashes(file)
    offsets = _open_shard(source, file).offsets
    begin, stop = max(start, int(offsets[0])), int(offsets[-1]) if end is None else end
    ends = offsets[(offsets > begin) & (offsets <= stop)]
    yield from blocks_from_ends([(stop, ends)], begin, block_bytes, first_ordinal)


def count(source: SourceConfig, file: StoredFile, start: int, end: int) -> int:
    """Count the samples that begin in a range."""
    begins = read_header(file, limits_of(source)).offsets[:-1]
    return int(((begins >= start) & (begins < end)).sum())


def read_records(
    source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[Record]:
    """Yield the samples in a span for whose first byte ``accept`` is true."""
    header, limits = _open_shard(source, file), limits_of(source)
    columns = ReadColumns.of(source)
    read = columns.among(header.encodings)
    first, last = np.searchsorted(header.offsets, (span.start_byte, span.end_byte)).tolist()
    offsets = header.offsets[first : last + 1].tolist()
    if len(offsets) < 2:
        return
    ordinal = span.first_ordinal
    with open_content(file, offsets[0], offsets[-1], limits) as content:
        for offset, end in itertools.pairwise(offsets):
            position = (span.file_index, ordinal, offset, end - offset)
            ordinal += 1
            if end - offset > source.max_record_bytes:
                _skip(content, end - offset)
                if accept(offset):
                    yield BadRecord(*position, None, too_large(end - offset, source.max_record_bytes))
                continue
            sample = content.read(end - offset)
            if not accept(offset):
                continue
            try:
                record = _record(columns, read, header, sample, position)
            except UnreadableRecord as error:
                yield BadRecord(*position, None, str(error))
            else:
                if record is not None:
                    yield record


def _skip(content: Any, size_bytes: int) -> None:
    while size_bytes > 0:
        size_bytes -= len(content.read(min(size_bytes, _CHUNK_BYTES)))


def _record(
    columns: ReadColumns,
    read: Sequence[str],
    header: MdsHeader,
    sample: bytes,
    position: tuple[int, int, int, int],
) -> Record | None:
    """Return the document of a sample; ``None`` if it has no tokens, in which case it keeps its ordinal."""
    source = columns.source
    values = _split_columns(header.encodings, header.sizes, sample)
    if source.chat_fields:
        found = {name: _value(name, header.encodings[name], values[name]) for name in read}
        chat = read_messages(columns, found, tuple(header.encodings))
        if chat is None:
            return None
        further = {name: _as_text(name, header.encodings[name], values[name]) for name in source.metadata_fields}
        text = plain_text(chat.messages)
        return Document(*position, text, further or None, messages=chat.messages, tools=chat.tools)
    if source.tokens_field is None:
        text = _decode_text(source.text_field, values[source.text_field])
        columns.check_guarded({name: _value(name, header.encodings[name], values[name]) for name in read[1:]}, text)
        metadata = {name: _as_text(name, header.encodings[name], values[name]) for name in source.metadata_fields}
        return Document(*position, text, metadata or None)
    name = source.tokens_field
    tokens = _decode_ids(name, header.encodings[name], values[name], source.ids_dtype)
    if len(tokens) and tokens[-1] == end_of_text(source):
        tokens = tokens[:-1]
    return TokenDocument(*position, tokens) if len(tokens) else None


def token_columns(file: StoredFile) -> Sequence[str]:
    """Return the names of the columns that can hold token ids."""
    encodings = read_header(file, Limits()).encodings
    return [name for name, encoding in encodings.items() if _ids_dtype(encoding, None) in {*_ID_DTYPES, ""}]


def first_rows(
    source: SourceConfig, file: StoredFile, span: UnitSpan
) -> Generator[Mapping[str, object] | BadRecord]:  # fmt: skip
    """Yield the first samples with the values of all columns; arrays and other binary values are bytes."""
    limits = limits_of(source)
    header = read_header(file, limits)
    with open_content(file, int(header.offsets[0]), None, limits) as content:
        for ordinal, (offset, end) in enumerate(itertools.pairwise(header.offsets.tolist())):
            position = (span.file_index, ordinal, offset, end - offset)
            try:
                if end - offset > source.max_record_bytes:
                    raise UnreadableRecord(too_large(end - offset, source.max_record_bytes))
                values = _split_columns(header.encodings, header.sizes, content.read(end - offset))
                yield {name: _value(name, header.encodings[name], value) for name, value in values.items()}
            except UnreadableRecord as error:
                yield BadRecord(*position, None, str(error))


def _value(name: str, encoding: str, value: bytes) -> object:
    """Return a value as JSON would hold it: a text, a number, or what its JSON text says; others stay bytes."""
    if encoding == "str":
        return _decode_text(name, value)
    if encoding == "json":
        try:
            return parse_json(value, name)
        except ValueError as error:
            raise UnreadableRecord(f"column {name!r} is not JSON") from error
    kind = "int64" if encoding == "int" else encoding
    return np.frombuffer(value, kind)[0].item() if kind in _NUMBER_ENCODINGS else value


def _ids_dtype(encoding: str, ids_dtype: str | None) -> str:
    """Return the dtype of the ids in a column; empty where every value names its own."""
    if encoding == "bytes":
        return ids_dtype or "unknown"
    kind, _, rest = encoding.partition(":")
    return rest.partition(":")[0] if kind == "ndarray" else "unknown"


def _split_columns(encodings: Mapping[str, str], fixed_sizes: Sequence[int | None], sample: bytes) -> dict[str, bytes]:
    """Split a sample into its encoded columns.

    Raises:
        UnreadableRecord: The sizes of the columns contradict the length of the sample.
    """
    offset = 4 * fixed_sizes.count(None)
    sizes = iter(np.frombuffer(sample[:offset], "<u4").tolist() if len(sample) >= offset else ())
    values: dict[str, bytes] = {}
    for name, size in zip(encodings, fixed_sizes, strict=True):
        length = next(sizes, len(sample)) if size is None else size
        values[name] = sample[offset : offset + length]
        offset += length
    if offset != len(sample):
        raise UnreadableRecord(f"its columns have {offset:,} bytes, the sample has {len(sample):,}")
    return values


def _decode_text(name: str, value: bytes) -> str:
    """Decode a text value.

    Raises:
        UnreadableRecord: The value is not UTF-8.
    """
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableRecord(f"column {name!r} has invalid UTF-8 at byte {error.start}: {error.reason}") from error


def _as_text(name: str, encoding: str, value: bytes) -> str:
    """Return a metadata value as text."""
    if encoding in _TEXT_ENCODINGS:
        return _decode_text(name, value)
    kind = "int64" if encoding == "int" else encoding
    return str(np.frombuffer(value, kind)[0]) if kind in _NUMBER_ENCODINGS else f"({encoding}, {len(value):,} bytes)"


def _decode_ids(
    name: str, encoding: str, value: bytes, ids_dtype: str | None
) -> npt.NDArray[np.uint16] | npt.NDArray[np.uint32]:
    """Decode the token ids of a value; an array of several axes is flattened in row-major order.

    Raises:
        UnreadableRecord: The value is not an array of token ids.
    """
    dtype, shape = _ids_dtype(encoding, ids_dtype), encoding.split(":")[2:]
    try:
        if not dtype:
            dtype, value = _DTYPE_OF_CODE[value[0]], value[1:]
        expected = math.prod(map(int, shape[0].split(","))) if shape else None
        if encoding != "bytes" and expected is None:
            axes, width = value[0] >> 2, 1 << (value[0] & 3)
            expected = math.prod(np.frombuffer(value[1 : 1 + axes * width], f"<u{width}").tolist())
            value = value[1 + axes * width :]
        ids = np.frombuffer(value, np.dtype(dtype).newbyteorder("<"))
    except (ValueError, LookupError) as error:
        raise UnreadableRecord(f"column {name!r} is not an array of token ids") from error
    if expected is not None and len(ids) != expected:
        raise UnreadableRecord(f"column {name!r} holds {len(ids):,} ids, but its shape requires {expected:,}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 32:
        raise UnreadableRecord(f"column {name!r} holds {int(ids.min())}, which is not a token id")
    return ids.astype(np.uint16) if ids.dtype.itemsize <= 2 else ids.astype(np.uint32)
