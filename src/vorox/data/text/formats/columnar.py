"""Columnar formats (Parquet, Arrow): row groups as blocks, and their rows as documents.

Row groups and Arrow record batches go in; blocks, documents and bad records come out. A row has no byte range of its
own: its record has that of the row group, and its ordinal within the file identifies it and decides its split.
Invariant: a row group is never split, so a unit holds at least one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, Document, PlacedImage, UnreadableRecord
from vorox.data.images import read_images
from vorox.data.storage import StoredFile
from vorox.data.text.conversations import messages_of, plain_text, read_messages
from vorox.data.text.formats.json_lines import as_text
from vorox.data.text.formats.record_blocks import RecordBlock, too_large


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that are stored together: a row group of Parquet, a record batch of an Arrow stream.

    Attributes:
        index: Index within the file.
        first_row: Ordinal of its first row.
        num_rows: Number of rows.
        start_byte: Its first byte in the file.
        end_byte: The first byte after it.
        text_bytes: Uncompressed bytes of its text column.
    """

    index: int
    first_row: int
    num_rows: int
    start_byte: int
    end_byte: int
    text_bytes: int


def row_group_blocks(
    groups: Iterable[RowGroup], start: int, end: int | None, block_bytes: int
) -> Iterator[RecordBlock]:
    """Yield blocks of whole row groups with about ``block_bytes`` of text."""
    run: list[RowGroup] = []
    size = 0
    for group in groups:
        if group.start_byte < start or (end is not None and group.start_byte >= end):
            continue
        if run and size + group.text_bytes > block_bytes:
            yield RecordBlock(run[0].start_byte, run[-1].end_byte, run[0].first_row, size)
            run, size = [], 0
        run.append(group)
        size += group.text_bytes
    if run:
        yield RecordBlock(run[0].start_byte, run[-1].end_byte, run[0].first_row, size)


def _check_text_column(file: StoredFile, schema: Any, name: str) -> None:
    """Reject a file without a text column of that name.

    Raises:
        DataError: The column is missing, or does not hold text.
    """
    types = import_module("pyarrow.types")
    head, *rest = [name] if name in schema.names else name.split(".")
    field: Any = schema.field(head) if schema.names.count(head) == 1 else None
    for part in rest:
        if field is not None:
            is_inside = types.is_struct(field.type) and field.type.get_field_index(part) >= 0
            field = field.type.field(part) if is_inside else None
    if field is None:
        present = ", ".join(repr(column) for column in schema.names[:20]) or "no columns"
        raise DataError(
            f"The file has no column {name!r}; it has {present}", where=file.uri,
            hint="set the source's text_field to one of them",
        )  # fmt: skip
    kind = field.type.value_type if types.is_dictionary(field.type) else field.type
    is_text = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)  # null: every value is null
    if not any(fits(kind) for fits in is_text):
        raise DataError(
            f"Column {name!r} holds {field.type}, not text", where=file.uri,
            hint="set the source's text_field to a column of text",
        )  # fmt: skip


def check_columns(file: StoredFile, schema: Any, text_field: str, chat_fields: Sequence[str]) -> None:
    """Reject a file without the text column, or without a column of the conversation.

    Raises:
        DataError: A column is missing, or the text column does not hold text.
    """
    if not chat_fields:
        _check_text_column(file, schema, text_field)
    check_present(file, schema.names, chat_fields, "chat_fields")


def check_present(file: StoredFile, names: Sequence[str], wanted: Sequence[str], setting: str) -> None:
    """Reject a file that lacks a column that a setting names.

    Raises:
        DataError: A column is missing.
    """
    for name in wanted:
        if name not in names:
            raise DataError(
                f"The file has no column {name!r}; it has {', '.join(map(repr, names[:20]))}", where=file.uri,
                hint=f"set the source's {setting} to some of them",
            )  # fmt: skip


def image_columns(source: SourceConfig) -> tuple[str, ...]:
    """Return the column of images, if the source has one."""
    return () if source.images_field is None else (source.images_field,)


def read_batch(
    source: SourceConfig,
    batch: Any,
    group: RowGroup,
    file_index: int,
    first_ordinal: int,
    accept: Callable[[int], bool],
) -> Iterator[Document | BadRecord]:
    """Yield the rows of a batch of a row group for whose ordinal ``accept`` is true."""
    byte_range = (group.start_byte, group.end_byte - group.start_byte)
    metadata = {name: batch.column(batch.schema.names.index(name)) for name in source.metadata_fields}
    if source.chat_fields:
        for row in range(batch.num_rows):
            if accept(first_ordinal + row):
                yield _conversation(source, batch, row, (file_index, first_ordinal + row, *byte_range))
        return
    content, starts, lengths = text_buffers(batch, source.text_field)
    images = None if source.images_field is None else batch.column(batch.schema.names.index(source.images_field))
    for row, (start_byte, length) in enumerate(zip(starts, lengths, strict=True), first_ordinal):
        if not accept(row):
            continue
        record = _record(content, start_byte, length, source.max_record_bytes)
        try:
            found = _images(source, images, row - first_ordinal)
        except UnreadableRecord as error:
            record = (f"has no readable images: {error}",)
            found = None
        if isinstance(record, str):
            yield Document(file_index, row, *byte_range, record, _metadata(metadata, row - first_ordinal), images=found)
        else:
            yield BadRecord(file_index, row, *byte_range, None, f"column {source.text_field!r} {record[0]}")


def _images(source: SourceConfig, column: Any, row: int) -> tuple[PlacedImage, ...] | None:
    return None if source.images_field is None else read_images(column[row].as_py(), source.images_field)


def _conversation(
    source: SourceConfig, batch: Any, row: int, position: tuple[int, int, int, int]
) -> Document | BadRecord:  # fmt: skip
    columns = {name: batch.column(batch.schema.names.index(name)) for name in source.chat_fields}
    try:
        values = {name: column[row].as_py() for name, column in columns.items()}
        messages = read_messages(source, values, batch.schema.names)
        column = None if source.images_field is None else batch.column(batch.schema.names.index(source.images_field))
        images = _images(source, column, row)
    except (UnreadableRecord, UnicodeDecodeError) as error:
        return BadRecord(*position, None, str(error))
    size = sum(len(message.content) for message in messages_of(messages))
    if size > source.max_record_bytes:
        return BadRecord(*position, None, too_large(size, source.max_record_bytes))
    metadata = {name: batch.column(batch.schema.names.index(name)) for name in source.metadata_fields}
    return Document(*position, plain_text(messages), _metadata(metadata, row), messages=messages, images=images)


def _metadata(columns: Mapping[str, Any], row: int) -> Mapping[str, str] | None:
    """Return the metadata of a row; null values are omitted."""
    if not columns:
        return None
    values = {name: column[row].as_py() for name, column in columns.items()}
    return {name: as_text(value) for name, value in values.items() if value is not None}


def text_buffers(batch: Any, name: str) -> tuple[memoryview, list[int], list[int | None]]:
    """Return the text column as bytes, with the start and length of each value: Arrow does not validate UTF-8."""
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
    """Return the text of a row, or a 1-tuple with the reason why it is unreadable."""
    if length is None:
        return ("is null",)
    if length > max_record_bytes:
        return (f"is too large: {too_large(length, max_record_bytes)}",)
    try:
        return str(content[start_byte : start_byte + length], "utf-8")
    except UnicodeDecodeError as error:
        return (f"has invalid UTF-8 at byte {error.start}: {error.reason}",)
