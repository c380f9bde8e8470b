"""Token shards (.bin): a record is a document, the ids up to and including an end-of-text id.

Spans of a shard go in; token documents come out. An end of text before or after every document gives the same
documents; an empty document is skipped but keeps its ordinal. A document that continues in the next shard becomes two.
Invariant: ids are returned as stored; the builder rejects those outside the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from vorox.core.errors import ConfigError
from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, TokenDocument, UnitSpan
from vorox.data.storage import StoredFile, open_range
from vorox.data.text.file_content import open_content
from vorox.data.text.formats.record_blocks import (
    EndsOfChunk,
    RecordBlock,
    blocks_from_ends,
    iter_records,
    memoize_blocks,
    too_large,
)
from vorox.data.text.shard_format import SHORT_HEADER_BYTES, ShardHeader, headerless, parse_header

_CHUNK_BYTES = 1 << 20


def header(source: SourceConfig, file: StoredFile) -> ShardHeader:
    """Return the header of a stored shard.

    Raises:
        DataError: The file is not a shard, or contradicts its header or the source's ``ids_dtype``.
    """
    return _header(file, source.ids_dtype)


@functools.lru_cache(maxsize=1 << 12)
def _header(file: StoredFile, ids_dtype: str | None) -> ShardHeader:
    with open_range(file, 0, min(SHORT_HEADER_BYTES, file.size_bytes)) as reader:
        start = reader.read(SHORT_HEADER_BYTES)
    if ids_dtype is None:
        return parse_header(start, file.size_bytes, file.uri)
    return headerless(start, file.size_bytes, int(ids_dtype.removeprefix("uint")) // 8, file.uri)


def end_of_text(source: SourceConfig) -> int:
    if source.end_of_text_id is None:
        raise ConfigError(
            f"The token shards of source {source.name!r} need an end-of-text id before the tokenizer is known",
            where="data.sources", hint="set the source's end_of_text_id",
        )  # fmt: skip
    return source.end_of_text_id


def _chunks(source: SourceConfig, file: StoredFile, start: int, end: int | None) -> Iterator[bytes]:
    """Yield chunks of whole tokens."""
    size = header(source, file).token_bytes
    with open_content(file, start, None if end == file.size_bytes else end) as reader:
        rest = b""
        while chunk := reader.read(_CHUNK_BYTES):
            chunk = rest + chunk
            whole = len(chunk) // size * size
            rest = chunk[whole:]
            yield chunk[:whole]


def _ends(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, end_of_text_id: int
) -> Iterator[EndsOfChunk]:
    shard = header(source, file)
    offset = start
    for chunk in _chunks(source, file, start, end):
        found = np.flatnonzero(np.frombuffer(chunk, shard.dtype) == end_of_text_id)
        yield offset + len(chunk), (found + 1).astype(np.int64) * shard.token_bytes + offset
        offset += len(chunk)


def measure(source: SourceConfig, file: StoredFile, end: int | None) -> int:
    """Return the bytes of tokens before ``end``, without the header."""
    return max(0, (file.size_bytes if end is None else end) - header(source, file).header_bytes)


def split_blocks(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int
) -> Iterator[RecordBlock]:
    """Yield blocks of whole documents after the header."""
    begin = max(start, header(source, file).header_bytes)
    end_of_text_id = end_of_text(source)
    key = ("bin", source.ids_dtype, file, begin, end, block_bytes, first_ordinal, end_of_text_id)
    ends = _ends(source, file, begin, end, end_of_text_id)
    yield from memoize_blocks(key, lambda: blocks_from_ends(ends, begin, block_bytes, first_ordinal))


def count(source: SourceConfig, file: StoredFile, start: int, end: int) -> int:
    """Count the records in a range."""
    total, last = 0, max(start, header(source, file).header_bytes)
    for _, ends in _ends(source, file, last, end, end_of_text(source)):
        total += len(ends)
        last = int(ends[-1]) if len(ends) else last
    return total + (last < end)


def read_records(
    source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[TokenDocument | BadRecord]:
    """Yield the documents in a span for whose first byte ``accept`` is true."""
    shard, end_of_text_id = header(source, file), end_of_text(source)
    start = max(span.start_byte, shard.header_bytes)
    chunks = (
        (chunk, (np.flatnonzero(np.frombuffer(chunk, shard.dtype) == end_of_text_id) + 1) * shard.token_bytes)
        for chunk in _chunks(source, file, start, span.end_byte)
    )
    records = iter_records(chunks, start, source.max_record_bytes)
    for ordinal, (offset, length, record) in enumerate(records, span.first_ordinal):
        position = (span.file_index, ordinal, offset, length)
        if not accept(offset):
            continue
        if record is None:
            reason = f"{too_large(length, source.max_record_bytes)}; is {end_of_text_id} the end of text?"
            yield BadRecord(*position, None, reason)
            continue
        tokens = np.frombuffer(record, shard.dtype)
        if tokens[-1] == end_of_text_id:
            tokens = tokens[:-1]
        if len(tokens):
            yield TokenDocument(*position, tokens)
