"""Columnar formats (Parquet, Arrow): row groups as blocks, and their rows as documents.

Row groups and Arrow record batches go in; blocks, documents and bad records come out. A row has no byte range of its
own: its record has that of the row group, and its ordinal within the file identifies it and decides its split.
Invariant: a row group is never split, so a unit holds at least one.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import numpy as np

from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.data.chat.column_meaning import ReadColumns, missing_in_file, named_columns
from vorox.data.chat.conversations import messages_of, plain_text, read_messages
from vorox.data.documents import BadRecord, Document, PlacedImage, UnreadableRecord
from vorox.data.images.reading import read_images
from vorox.data.storage import StoredFile
from vorox.data.text.decompression import Limits
from vorox.data.text.formats.json_lines import as_text
from vorox.data.text.formats.record_blocks import RecordBlock, too_large

_MIN_SUSPECT_BYTES = 1 << 28


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


def _check_text_column(file: StoredFile, schema: Any, source: SourceConfig) -> None:
    """Reject a file without the text column of the source.

    Raises:
        DataError: The column is missing, or does not hold text.
    """
    types, name = import_module("pyarrow.types"), source.text_field
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
            hint=missing_in_file(source, name, "text_field", schema.names),
        )  # fmt: skip
    kind = field.type.value_type if types.is_dictionary(field.type) else field.type
    is_text = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)  # null: every value is null
    if not any(fits(kind) for fits in is_text):
        raise DataError(
            f"Column {name!r} holds {field.type}, not text", where=file.uri,
            hint="set the source's text_field to a column of text",
        )  # fmt: skip


def check_columns(file: StoredFile, schema: Any, source: SourceConfig) -> None:
    """Reject a file without a column that the source names.

    Raises:
        DataError: A column is missing, or the text column does not hold text.
    """
    for name, setting in named_columns(source):
        if setting == "text_field":
            _check_text_column(file, schema, source)
        elif name not in schema.names:
            raise DataError(
                f"The file has no column {name!r}; it has {', '.join(map(repr, schema.names[:20]))}", where=file.uri,
                hint=missing_in_file(source, name, setting, schema.names),
            )  # fmt: skip


def text_columns(source: SourceConfig, names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns with the text of a source, of those that a file has; ``a.b`` is the field b of a struct a.

    Guarded columns are among them (``ReadColumns``).
    """
    return ReadColumns.of(source).among(names)


def record_columns(source: SourceConfig, names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that a source reads, of those that a file has."""
    return (*text_columns(source, names), *image_columns(source), *source.metadata_fields)


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
    names = batch.schema.names
    metadata = {name: batch.column(names.index(name)) for name in source.metadata_fields}
    images = None if source.images_field is None else batch.column(names.index(source.images_field))
    read = ReadColumns.of(source)
    if source.chat_fields:
        columns = {name: batch.column(names.index(name)) for name in read.among(names)}
        for row in range(batch.num_rows):
            if accept(first_ordinal + row):
                position = (file_index, first_ordinal + row, *byte_range)
                found = _conversation(read, columns, images, metadata, names, row, position)
                if found is not None:
                    yield found
        return
    guarded = {name: batch.column(names.index(name)) for name in names if name in read.guarded}
    guarded = {name: column for name, column in guarded.items() if column.null_count < batch.num_rows}
    content, starts, lengths = text_buffers(batch, source.text_field)
    for row, (start_byte, length) in enumerate(zip(starts, lengths, strict=True)):
        if not accept(first_ordinal + row):
            continue
        position = (file_index, first_ordinal + row, *byte_range)
        record = _record(content, start_byte, length, source.max_record_bytes)
        reason = "" if isinstance(record, str) else f"column {source.text_field!r} {record[0]}"
        found = None
        try:
            if guarded:
                read.check_guarded(_values(guarded, row), record)
            found = _images(source, images, row)
        except (UnreadableRecord, UnicodeDecodeError) as error:
            reason = str(error)
        if reason:
            yield BadRecord(*position, None, reason)
        else:
            yield Document(*position, cast("str", record), _metadata(metadata, row), images=found)


def _images(source: SourceConfig, column: Any, row: int) -> tuple[PlacedImage, ...] | None:
    return None if source.images_field is None else read_images(column[row].as_py(), source.images_field)


def _values(columns: Mapping[str, Any], row: int) -> dict[str, object]:
    return {name: column[row].as_py() for name, column in columns.items()}


def _conversation(
    read: ReadColumns,
    columns: Mapping[str, Any],
    images: Any,
    metadata: Mapping[str, Any],
    names: Sequence[str],
    row: int,
    position: tuple[int, int, int, int],
) -> Document | BadRecord | None:
    source = read.source
    try:
        chat = read_messages(read, _values(columns, row), names)
        found = _images(source, images, row)
    except (UnreadableRecord, UnicodeDecodeError) as error:
        return BadRecord(*position, None, str(error))
    if chat is None:
        return None
    size = sum(len(message.content) for message in messages_of(chat.messages))
    if size > source.max_record_bytes:
        return BadRecord(*position, None, too_large(size, source.max_record_bytes))
    text = plain_text(chat.messages)
    return Document(*position, text, _metadata(metadata, row), messages=chat.messages, tools=chat.tools, images=found)


def _metadata(columns: Mapping[str, Any], row: int) -> Mapping[str, str] | None:
    """Return the metadata of a row; null values are omitted."""
    if not columns:
        return None
    values = {name: column[row].as_py() for name, column in columns.items()}
    return {name: as_text(value) for name, value in values.items() if value is not None}


def text_buffers(batch: Any, name: str) -> tuple[memoryview, list[int], list[int | None]]:
    """Return the text column as bytes, with the start and length of each value: Arrow does not validate UTF-8.

    The values of a dictionary are not repeated.
    """
    arrow, compute = import_module("pyarrow"), import_module("pyarrow.compute")
    names = batch.schema.names
    if name in names:
        column = batch.column(names.index(name))
    else:
        head, *rest = name.split(".")
        column = batch.column(names.index(head))
        for part in rest:
            column = compute.struct_field(column, part)
    indices: list[int | None] | None = None
    if arrow.types.is_dictionary(column.type):
        indices, column = column.indices.to_pylist(), column.dictionary
    column = column.cast(arrow.large_binary())
    _, offsets, content = column.buffers()
    starts = np.frombuffer(offsets, np.int64, len(column), 8 * column.offset) if len(column) else np.zeros(0, np.int64)
    found: list[int] = starts.tolist()
    lengths: list[int | None] = compute.binary_length(column).to_pylist()
    if indices is not None:
        found = [0 if index is None else found[index] for index in indices]
        lengths = [None if index is None else lengths[index] for index in indices]
    return memoryview(content or b""), found, lengths


def text_size(array: Any) -> int:
    """Return the bytes of the texts in a column, each value of a dictionary as often as it occurs."""
    arrow, compute = import_module("pyarrow"), import_module("pyarrow.compute")
    types = arrow.types
    if types.is_dictionary(array.type):
        lengths = text_lengths(array.dictionary)
        if lengths is None:
            return int(array.nbytes)
        return int(compute.sum(lengths.take(array.indices)).as_py() or 0)
    if types.is_struct(array.type):
        return sum(text_size(array.field(index)) for index in range(array.type.num_fields))
    if types.is_list(array.type) or types.is_large_list(array.type) or types.is_map(array.type):
        return text_size(array.flatten() if hasattr(array, "flatten") else array.items)
    lengths = text_lengths(array)
    return int(array.nbytes) if lengths is None else int(compute.sum(lengths).as_py() or 0)


def text_lengths(array: Any) -> Any:
    """Return the byte length of each value of a column of text or bytes, as int64; ``None`` for other columns."""
    arrow, compute = import_module("pyarrow"), import_module("pyarrow.compute")
    types = arrow.types
    if types.is_string_view(array.type) or types.is_binary_view(array.type):
        array = array.cast(arrow.large_binary())
    elif not any(fits(array.type) for fits in (types.is_string, types.is_large_string, types.is_binary,
                                               types.is_large_binary)):  # fmt: skip
        return None
    return compute.binary_length(array).cast(arrow.int64())


def validate(batch: Any, file: StoredFile) -> None:
    """Check every offset, length and index of a batch from outside, before any value of it is read.

    Texts may be invalid UTF-8, which makes a record unreadable, not the file.

    Raises:
        DataError: The batch contradicts itself: reading it would read other memory.
    """
    arrow = import_module("pyarrow")
    try:
        try:
            batch.validate(full=True)
        except arrow.ArrowInvalid as error:
            if "UTF8" not in str(error):
                raise
            _as_bytes(batch).validate(full=True)
    except arrow.ArrowException as error:
        raise damaged_batch(file, error) from error


def _as_bytes(batch: Any) -> Any:
    """Return a batch with bytes in place of text, which have the same layout and no encoding to check."""
    ipc, sink = import_module("pyarrow.ipc"), io.BytesIO()
    with ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content = sink.getvalue()[len(batch.schema.serialize()) :]
    with ipc.open_stream(b"".join([schema_of_bytes(batch.schema).serialize(), content])) as reader:
        return reader.read_next_batch()


def damaged_batch(file: StoredFile, error: Exception) -> DataError:
    """Return the error for a batch that contradicts itself."""
    return DataError(
        f"A record batch contradicts itself: {' '.join(str(error).split())}", where=file.uri,
        hint="the file is corrupt: download or write it again, or remove it from data.sources",
    )  # fmt: skip


def schema_of_bytes(schema: Any) -> Any:
    """Return a schema with bytes in place of text, which has the same layout."""
    arrow = import_module("pyarrow")
    return arrow.schema([field.with_type(_bytes_type(field.type)) for field in schema])


def _bytes_type(kind: Any) -> Any:
    arrow = import_module("pyarrow")
    types = arrow.types
    for is_text, instead in (
        (types.is_string, arrow.binary()), (types.is_large_string, arrow.large_binary()),
        (types.is_string_view, arrow.binary_view()),
    ):  # fmt: skip
        if is_text(kind):
            return instead
    if types.is_struct(kind):
        return arrow.struct([kind.field(i).with_type(_bytes_type(kind.field(i).type)) for i in range(kind.num_fields)])
    if types.is_dictionary(kind):
        return arrow.dictionary(kind.index_type, _bytes_type(kind.value_type), kind.ordered)
    if types.is_map(kind):
        return arrow.map_(
            kind.key_field.with_type(_bytes_type(kind.key_type)), kind.item_field.with_type(_bytes_type(kind.item_type))
        )  # fmt: skip
    for is_nested, make in (
        (types.is_list, arrow.list_), (types.is_large_list, arrow.large_list), (types.is_list_view, arrow.list_view),
        (types.is_large_list_view, arrow.large_list_view),
    ):  # fmt: skip
        if is_nested(kind):
            return make(kind.value_field.with_type(_bytes_type(kind.value_type)))
    if types.is_fixed_size_list(kind):
        return arrow.list_(kind.value_field.with_type(_bytes_type(kind.value_type)), kind.list_size)
    return kind


def reject_bomb(file: StoredFile, size_bytes: int, stored_bytes: int, limits: Limits) -> None:
    """Refuse text that takes much more memory than it is stored in.

    Raises:
        DataError: It exceeds a limit of the source.
    """
    stored = max(stored_bytes, 1)
    if size_bytes > limits.max_bytes or size_bytes > max(_MIN_SUSPECT_BYTES, limits.max_ratio * stored):
        option = "max_decompressed_bytes" if size_bytes > limits.max_bytes else "max_decompression_ratio"
        raise DataError(
            f"{stored:,} compressed bytes expand to {size_bytes:,}: this looks like a decompression bomb",
            where=file.uri,
            hint=f"remove the file from data.sources; if you trust it, raise the source's {option}",
        )


def rows_of(batch: Any) -> Iterator[Mapping[str, object]]:
    """Yield the rows of a validated batch with all of their values; bytes that are no text stay bytes."""
    names = batch.schema.names
    for row in range(batch.num_rows):
        values: dict[str, object] = {}
        for name, column in zip(names, batch.columns, strict=True):
            try:
                values[name] = column[row].as_py()
            except (UnicodeDecodeError, ValueError, OverflowError):  # such as a date beyond the year 9999
                values[name] = None
        yield values


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
