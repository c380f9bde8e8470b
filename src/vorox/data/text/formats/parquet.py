"""Parquet: a row is a record, one of its columns is the text.

Runs of row groups go in, documents and bad records come out; nothing but the wanted columns is read, in batches of
bounded size. A span's bytes are those of its row groups in the file, a record's those of its row group: rows have no
bytes of their own, their ordinal within the file tells them apart (and decides what is held out). Invariant: a row
group is never cut, so a unit is at least one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, Document, UnitSpan
from vorox.data.storage import StoredFile
from vorox.data.text.content import Limits, length_bytes, open_content_seekable
from vorox.data.text.formats.json_lines import as_text
from vorox.data.text.formats.pieces import Piece, too_large

_BATCH_BYTES = 8 << 20
_BUFFER_BYTES = 8 << 20
_LEAST_SUSPECT_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group that has rows.

    Attributes:
        index: Its number in the file.
        first_row: Ordinal of its first row.
        num_rows: Its rows.
        start_byte: Its first byte in the file.
        end_byte: The first one behind it.
        text_bytes: What its text column decompresses to.
    """

    index: int
    first_row: int
    num_rows: int
    start_byte: int
    end_byte: int
    text_bytes: int


@contextlib.contextmanager
def _opened(file: StoredFile, limits: Limits) -> Generator[Any]:
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")  # untyped, and slow to import
    with open_content_seekable(file, limits) as reader:
        try:
            with parquet.ParquetFile(reader, pre_buffer=False, buffer_size=_BUFFER_BYTES) as opened:
                yield opened
        except (arrow.ArrowException, OSError) as error:
            raise DataError(
                f"the Parquet file cannot be read: {' '.join(str(error).split())}", where=file.uri,
                hint="it is damaged or not complete: fetch or write it again, or take it out of data.sources",
            ) from error  # fmt: skip


def row_groups(file: StoredFile, text_field: str, limits: Limits) -> Iterator[RowGroup]:
    """The row groups of a file that have rows.

    Raises:
        DataError: It is no Parquet file, has not that column, or its footer cannot be true.
    """
    for row in _row_groups(file, text_field, limits).tolist():
        yield RowGroup(*row)


@functools.lru_cache(maxsize=1 << 10)
def _row_groups(file: StoredFile, text_field: str, limits: Limits) -> npt.NDArray[np.int64]:
    """A row for each: numbers, because there are many in large files, and many such files."""
    with _opened(file, limits) as opened:
        _check_column(file, opened, text_field)
        footer = opened.metadata
        column = next(
            index for index in range(footer.num_columns)
            if opened.schema.column(index).path in {text_field, f"{text_field}.list.element"}
        )  # fmt: skip
        found: list[RowGroup] = []
        first_row = 0
        for index in range(footer.num_row_groups):
            group = footer.row_group(index)
            if group.num_rows:
                chunks = [group.column(number) for number in range(group.num_columns)]
                start = min(_start(chunk) for chunk in chunks)
                end = max(_start(chunk) + chunk.total_compressed_size for chunk in chunks)
                text = group.column(column)
                _refuse_bombs(file, text, limits)
                found.append(RowGroup(index, first_row, group.num_rows, start, end, text.total_uncompressed_size))
            first_row += group.num_rows
    size_bytes, previous = length_bytes(file, limits), 0
    for group in found:
        if not previous <= group.start_byte < group.end_byte <= size_bytes:
            raise DataError(
                f"row group {group.index} is said to lie at bytes {group.start_byte:,} to {group.end_byte:,}, which "
                "cannot be", where=file.uri, hint="the footer is damaged: fetch or write the file again",
            )  # fmt: skip
        previous = group.end_byte
    return np.array([dataclasses.astuple(group) for group in found], np.int64).reshape(len(found), 6)


def _start(chunk: Any) -> int:
    offsets = [chunk.data_page_offset, chunk.dictionary_page_offset if chunk.has_dictionary_page else None]
    return min(offset for offset in offsets if offset is not None)


def _refuse_bombs(file: StoredFile, chunk: Any, limits: Limits) -> None:
    size, stored = chunk.total_uncompressed_size, max(chunk.total_compressed_size, 1)
    if size > limits.max_bytes or size > max(_LEAST_SUSPECT_BYTES, limits.max_ratio * stored):
        option = "max_decompressed_bytes" if size > limits.max_bytes else "max_decompression_ratio"
        raise DataError(
            f"{stored:,} compressed bytes come to {size:,}: this looks like a decompression bomb", where=file.uri,
            hint=f"take the file out of data.sources; if you trust it, raise the source's {option}",
        )  # fmt: skip


def _check_column(file: StoredFile, opened: Any, name: str) -> None:
    types = import_module("pyarrow.types")
    schema = opened.schema_arrow
    head, *rest = [name] if name in schema.names else name.split(".")
    field: Any = schema.field(head) if schema.names.count(head) == 1 else None
    for part in rest:
        if field is not None:
            is_inside = types.is_struct(field.type) and field.type.get_field_index(part) >= 0
            field = field.type.field(part) if is_inside else None
    if field is None:
        there = ", ".join(repr(column) for column in schema.names[:20]) or "no columns"
        raise DataError(
            f"the Parquet file has no column {name!r}; it has {there}", where=file.uri,
            hint="set the source's text_field to one of them",
        )  # fmt: skip
    kind = field.type.value_type if types.is_dictionary(field.type) else field.type
    is_text = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)  # null: no value at all
    if not any(fits(kind) for fits in is_text):
        raise DataError(
            f"column {name!r} holds {field.type}, not text", where=file.uri,
            hint="set the source's text_field to a column of text",
        )  # fmt: skip


def measure(source: SourceConfig, file: StoredFile, end: int | None) -> int:
    """Text up to a place in the file, about."""
    groups = row_groups(file, source.text_field, Limits.of(source))
    return sum(group.text_bytes for group in groups if end is None or group.start_byte < end)


def cut(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, piece_bytes: int, first_ordinal: int
) -> Iterator[Piece]:
    """Runs of whole row groups with about ``piece_bytes`` of text."""
    del first_ordinal  # the footer knows it
    run: list[RowGroup] = []
    size = 0
    for group in row_groups(file, source.text_field, Limits.of(source)):
        if group.start_byte < start or (end is not None and group.start_byte >= end):
            continue
        if run and size + group.text_bytes > piece_bytes:
            yield Piece(run[0].start_byte, run[-1].end_byte, run[0].first_row, size)
            run, size = [], 0
        run.append(group)
        size += group.text_bytes
    if run:
        yield Piece(run[0].start_byte, run[-1].end_byte, run[0].first_row, size)


def count(source: SourceConfig, file: StoredFile, start: int, end: int) -> int:
    """Rows of the row groups in a range."""
    groups = row_groups(file, source.text_field, Limits.of(source))
    return sum(group.num_rows for group in groups if start <= group.start_byte < end)


def read_records(
    source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[Document | BadRecord]:
    """The rows of the row groups in a span whose ordinal ``accept`` takes."""
    limits = Limits.of(source)
    groups = list(row_groups(file, source.text_field, limits))
    with _opened(file, limits) as opened:
        for name in source.metadata_fields:
            _check_metadata(file, opened, name)
        for group in groups:
            if span.start_byte <= group.start_byte < span.end_byte:
                yield from _read_group(source, opened, group, span.file_index, accept)


def _check_metadata(file: StoredFile, opened: Any, name: str) -> None:
    names = opened.schema_arrow.names
    if name not in names:
        raise DataError(
            f"the Parquet file has no column {name!r}; it has {', '.join(map(repr, names[:20]))}", where=file.uri,
            hint="set the source's metadata_fields to some of them",
        )  # fmt: skip


def _read_group(
    source: SourceConfig, opened: Any, group: RowGroup, file_index: int, accept: Callable[[int], bool]
) -> Iterator[Document | BadRecord]:
    batch_rows = max(1, min(group.num_rows, group.num_rows * _BATCH_BYTES // max(group.text_bytes, 1)))
    columns = [source.text_field, *source.metadata_fields]
    place = (group.start_byte, group.end_byte - group.start_byte)
    ordinal = group.first_row
    for batch in opened.iter_batches(batch_rows, row_groups=[group.index], columns=columns, use_threads=False):
        metadata = {name: batch.column(batch.schema.names.index(name)) for name in source.metadata_fields}
        content, starts, lengths = _binary(batch, source.text_field)
        for row, (start_byte, length) in enumerate(zip(starts, lengths, strict=True)):
            if not accept(ordinal + row):
                continue
            record = _record(content, start_byte, length, source.max_record_bytes)
            if isinstance(record, str):
                asked = {name: column[row].as_py() for name, column in metadata.items()}
                shown = {name: as_text(value) for name, value in asked.items() if value is not None}
                yield Document(file_index, ordinal + row, *place, record, shown if metadata else None)
            else:
                yield BadRecord(file_index, ordinal + row, *place, None, f"column {source.text_field!r} {record[0]}")
        ordinal += batch.num_rows


def _binary(batch: Any, name: str) -> tuple[memoryview, list[int], list[int | None]]:
    """The text column as bytes, because Parquet does not promise that its text is UTF-8: start and length of each."""
    arrow, compute = import_module("pyarrow"), import_module("pyarrow.compute")
    names = batch.schema.names
    if name in names:
        column = batch.column(names.index(name))
    else:
        head, *rest = name.split(".")
        column = batch.column(names.index(head))
        for part in rest:
            column = compute.struct_field(column, part)
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    column = column.cast(arrow.large_binary())
    _, offsets, content = column.buffers()
    starts = np.frombuffer(offsets, np.int64, len(column), 8 * column.offset) if len(column) else np.zeros(0, np.int64)
    return memoryview(content or b""), starts.tolist(), compute.binary_length(column).to_pylist()


def _record(content: memoryview, start_byte: int, length: int | None, max_record_bytes: int) -> str | tuple[str]:
    """The text of a row, or what is wrong with it."""
    if length is None:
        return ("is null",)
    if length > max_record_bytes:
        return (f"is too large: {too_large(length, max_record_bytes)}",)
    try:
        return str(content[start_byte : start_byte + length], "utf-8")
    except UnicodeDecodeError as error:
        return (f"has invalid UTF-8 at byte {error.start}: {error.reason}",)
