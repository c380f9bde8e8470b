"""Delimited text (CSV, RFC 4180): a header, then records whose quoted fields may span lines.

Spans that begin at a record go in; documents and bad records come out. Where a record ends depends on every quote
before it, so a file is split in one forward pass. Invariants: a span holds whole records; rows are numbered from 0
after the header; a row whose number of fields differs from the header's is quarantined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.data.chat.column_meaning import OTHER_FILES, ReadColumns, missing_column, named_columns
from vorox.data.chat.conversations import plain_text, read_messages
from vorox.data.documents import BadRecord, Document, UnitSpan, UnreadableRecord
from vorox.data.storage import StoredFile
from vorox.data.text.decompression import Limits
from vorox.data.text.file_content import (
    detect_damage,
    is_stored_as_read,
    length_bytes,
    limits_of,
    open_content,
    reject_binary,
)
from vorox.data.text.formats.record_blocks import (
    BYTE_ORDER_MARK,
    RecordBlock,
    find_record_ends,
    iter_chunks,
    iter_records,
    memoize_blocks,
    split_content,
    too_large,
)

_USUAL_HEADER_BYTES, _MAX_HEADER_BYTES = 1 << 16, 1 << 20


class RecordEnds:
    """Finds the record ends in consecutive chunks of content that begins at a record."""

    def __init__(self, delimiter: bytes, newline: bytes = b"\n") -> None:
        self._delimiter, self._newline = delimiter[0], newline
        self._opening = delimiter + b'"'
        self._state = "start"  # of a field; inside a "plain" or "quoted" field; after a "quote" inside a quoted one

    def __call__(self, chunk: bytes) -> npt.NDArray[np.int64] | list[int]:
        """Return the offsets in the chunk at which records end."""
        if self._state in {"start", "plain"} and b'"' not in chunk:
            self._state = "start" if chunk[-1] in {self._delimiter, self._newline[0]} else "plain"
            return np.flatnonzero(np.frombuffer(chunk, np.uint8) == self._newline[0]) + 1
        return self._with_quotes(chunk)

    def _with_quotes(self, chunk: bytes) -> list[int]:
        ends: list[int] = []
        at, size, state = 0, len(chunk), self._state
        while at < size:
            if state == "quoted":
                quote = chunk.find(b'"', at)
                state, at = ("quoted", size) if quote < 0 else ("quote", quote + 1)
            elif state == "quote":  # a doubled quote is a literal quote, any other ends the field
                state, at = ("quoted", at + 1) if chunk[at] == 0x22 else ("plain", at)
            elif state == "start" and chunk[at] == 0x22:
                state, at = "quoted", at + 1
            else:
                newline = chunk.find(self._newline, at)
                opening = chunk.find(self._opening, at, newline if newline >= 0 else size)
                if opening >= 0:
                    state, at = "quoted", opening + 2
                elif newline >= 0:
                    ends.append(newline + 1)
                    state, at = "start", newline + 1
                else:
                    state, at = "start" if chunk[-1] == self._delimiter else "plain", size
        self._state = state
        return ends


def split_fields(record: bytes, delimiter: bytes, newline: bytes = b"\n") -> list[bytes]:
    """Split one record into fields, without quotes and line end (``newline``, or CR and LF).

    Raises:
        UnreadableRecord: A quote is never closed, or text follows a closing quote.
    """
    body = record[:-1] if record.endswith(newline) else record
    body = body.removesuffix(b"\r")
    if b'"' not in body:
        return body.split(delimiter)
    fields: list[bytes] = []
    at = 0
    while True:
        if body[at : at + 1] == b'"':
            close = _closing_quote(body, at + 1)
            if close < 0:
                raise UnreadableRecord(f"the quote at byte {at} of the record is never closed")
            fields.append(body[at + 1 : close].replace(b'""', b'"'))
            at = close + 1
            if at < len(body) and body[at : at + 1] != delimiter:
                raise UnreadableRecord(f"text follows the closing quote at byte {close} of the record")
        else:
            end = body.find(delimiter, at)
            end = len(body) if end < 0 else end
            fields.append(body[at:end])
            at = end
        if at >= len(body):
            return fields
        at += 1


def _closing_quote(body: bytes, at: int) -> int:
    while True:
        quote = body.find(b'"', at)
        if quote < 0 or body[quote + 1 : quote + 2] != b'"':
            return quote
        at = quote + 2


@functools.lru_cache(maxsize=1 << 12)
def header(file: StoredFile, delimiter: str, limits: Limits) -> tuple[tuple[str, ...], int, bytes]:
    """Return the column names of a file, the offset of its first data record, and what ends its lines: LF, or CR alone.

    A column without a name gets one by its place, ``Unnamed: 0``, as in pandas.

    Raises:
        DataError: The header cannot be read.
    """
    start, ends, newline = _start_of(file, _USUAL_HEADER_BYTES, delimiter, limits)
    if not len(ends) and len(start) == _USUAL_HEADER_BYTES:
        start, ends, newline = _start_of(file, _MAX_HEADER_BYTES, delimiter, limits)
    reject_binary(file, start)
    if not start:
        return (), 0, newline
    end = int(ends[0]) if len(ends) else len(start)
    problem = ""
    if not len(ends) and len(start) == _MAX_HEADER_BYTES:
        problem = f"the first record has more than {_MAX_HEADER_BYTES:,} bytes"
    try:
        names = split_fields(start[:end].removeprefix(BYTE_ORDER_MARK), delimiter.encode(), newline)
        columns = tuple(name.decode("utf-8").strip() or f"Unnamed: {index}" for index, name in enumerate(names))
    except (UnreadableRecord, UnicodeDecodeError) as error:
        columns, problem = (), problem or str(error)
    if problem:
        raise DataError(
            f"The CSV header cannot be read: {problem}", where=file.uri,
            hint="the first record must name the columns",
        )  # fmt: skip
    return columns, end, newline


def _start_of(
    file: StoredFile, size: int, delimiter: str, limits: Limits
) -> tuple[bytes, npt.NDArray[np.int64] | list[int], bytes]:  # fmt: skip
    """Return the first bytes of a file, the record ends in them, and the byte that ends lines."""
    end = min(size, file.size_bytes) if is_stored_as_read(file, limits) else None
    with open_content(file, 0, end, limits) as reader:
        start = reader.read(size)
    for newline in (b"\n", b"\r"):
        ends = RecordEnds(delimiter.encode(), newline)(start) if start else []
        if len(ends):
            return start, ends, newline
    return start, [], b"\n"


def check_fields(source: SourceConfig, file: StoredFile) -> None:
    """Refuse a file without a column that the source names."""
    if header(file, source.delimiter, limits_of(source))[1]:
        for name, setting in named_columns(source):
            _column(source, file, name, setting)


def _column(source: SourceConfig, file: StoredFile, name: str, setting: str = "text_field") -> int:
    columns, _, _ = header(file, source.delimiter, limits_of(source))
    if columns.count(name) == 1:
        return columns.index(name)
    present = ", ".join(repr(column) for column in columns[:20]) or "no columns"
    problem = f"names column {name!r} {columns.count(name)} times" if name in columns else f"has no column {name!r}"
    remedy = missing_column(source, name, setting, columns)
    raise DataError(
        f"The CSV file {problem}; its header has {present}", where=file.uri,
        hint=f"{remedy}, or its delimiter; a CSV file needs a header; {OTHER_FILES}",
    )  # fmt: skip


def measure(source: SourceConfig, file: StoredFile, end: int | None) -> int:
    """Return the bytes before ``end``, without the header."""
    limits = limits_of(source)
    _, data_start, _ = header(file, source.delimiter, limits)
    return max(0, (length_bytes(file, limits) if end is None else end) - data_start)


def split_blocks(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int
) -> Iterator[RecordBlock]:
    """Yield blocks of whole records after the header."""
    limits, delimiter = limits_of(source), source.delimiter
    _, data_start, newline = header(file, delimiter, limits)
    damage = detect_damage(file, limits) if end is None else None
    if damage is not None and data_start >= damage.end_byte:
        yield RecordBlock(0, 0, first_ordinal, 0)  # the header itself is damaged
        return
    if data_start == 0:
        return
    check_fields(source, file)
    begin = max(start, data_start)
    key = ("csv", file, delimiter, begin, end, block_bytes, first_ordinal, limits)
    find = RecordEnds(delimiter.encode(), newline)
    yield from memoize_blocks(key, lambda: split_content(file, begin, end, block_bytes, first_ordinal, limits, find))


def count(source: SourceConfig, file: StoredFile, start: int, end: int) -> int:
    """Count the records in a range."""
    limits = limits_of(source)
    find = RecordEnds(source.delimiter.encode(), header(file, source.delimiter, limits)[2])
    with open_content(file, start, end, limits) as reader:
        total, last = 0, start
        for _, ends in find_record_ends(reader, start, find):
            total += len(ends)
            last = int(ends[-1]) if len(ends) else last
    return total + (last < end)


def read_records(
    source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[Document | BadRecord]:
    """Yield the records in a span for whose first byte ``accept`` is true."""
    limits, delimiter = limits_of(source), source.delimiter.encode()
    columns, data_start, newline = header(file, source.delimiter, limits)
    read = ReadColumns.of(source)
    texts_of = read.among(columns)
    wanted = [_column(source, file, name) for name in (*texts_of, *source.metadata_fields)]
    start = max(span.start_byte, data_start)
    with open_content(file, start, span.end_byte, limits) as reader:
        find = RecordEnds(delimiter, newline)
        chunks = ((chunk, find(chunk)) for chunk in iter_chunks(reader))
        records = iter_records(chunks, start, source.max_record_bytes)
        for ordinal, (offset, length, record) in enumerate(records, span.first_ordinal):
            if not accept(offset) or (record is not None and not record.strip()):
                continue  # a blank line keeps its ordinal
            position = (span.file_index, ordinal, offset, length)
            try:
                if record is None:
                    raise UnreadableRecord(too_large(length, source.max_record_bytes))
                texts = _texts(split_fields(record, delimiter, newline), columns, wanted)
                values = dict(zip(texts_of, texts, strict=False))
                chat = read_messages(read, values, columns) if source.chat_fields else None
                if not source.chat_fields:
                    read.check_guarded(values)
            except UnreadableRecord as error:
                yield BadRecord(*position, None, str(error))
                continue
            further = texts[len(texts_of) :]
            metadata = dict(zip(source.metadata_fields, further, strict=True)) if source.metadata_fields else None
            if chat is not None:
                text = plain_text(chat.messages)
                yield Document(*position, text, metadata, messages=chat.messages, tools=chat.tools)
            elif not source.chat_fields:
                yield Document(*position, texts[0], metadata)


def first_rows(
    source: SourceConfig, file: StoredFile, span: UnitSpan
) -> Generator[Mapping[str, object] | BadRecord]:  # fmt: skip
    """Yield the first records with the values of all columns."""
    limits, delimiter = limits_of(source), source.delimiter.encode()
    columns, data_start, newline = header(file, source.delimiter, limits)
    with open_content(file, data_start, None, limits) as reader:
        find = RecordEnds(delimiter, newline)
        chunks = ((chunk, find(chunk)) for chunk in iter_chunks(reader))
        for ordinal, (offset, length, record) in enumerate(iter_records(chunks, data_start, source.max_record_bytes)):
            if record is not None and not record.strip():
                continue
            try:
                if record is None:
                    raise UnreadableRecord(too_large(length, source.max_record_bytes))
                texts = _texts(split_fields(record, delimiter, newline), columns, range(len(columns)))
                yield dict(zip(columns, texts, strict=True))
            except UnreadableRecord as error:
                yield BadRecord(span.file_index, ordinal, offset, length, None, str(error))


def _texts(fields: Sequence[bytes], columns: Sequence[str], wanted: Sequence[int]) -> list[str]:
    if len(fields) != len(columns):
        raise UnreadableRecord(f"the record has {len(fields)} fields, the header has {len(columns)}")
    texts: list[str] = []
    for index in wanted:
        try:
            texts.append(fields[index].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UnreadableRecord(
                f"invalid UTF-8 at byte {error.start} of column {columns[index]!r}: {error.reason}"
            ) from error
    return texts
