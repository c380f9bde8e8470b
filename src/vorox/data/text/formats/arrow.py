"""Arrow streams of ``datasets.save_to_disk``: each row is a record, one column is the text.

Spans of record batches go in; documents and bad records come out. A stream has no footer, so one pass over the file
locates its record batches. Invariant: a truncated stream, or one with trailing bytes, is rejected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator
from importlib import import_module
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, Document, UnitSpan
from vorox.data.storage import StoredFile
from vorox.data.text.decompression import Limits
from vorox.data.text.file_content import length_bytes, limits_of, open_content
from vorox.data.text.formats.columnar import (
    RowGroup,
    check_columns,
    check_present,
    image_columns,
    read_batch,
    row_group_blocks,
    text_buffers,
)
from vorox.data.text.formats.record_blocks import RecordBlock

_FILE_MAGIC = b"ARROW1"
_STREAM_MAGIC = b"\xff" * 4


class _Messages:
    """A reader of consecutive IPC messages that tracks its offset in the stream.

    Args:
        content: The stream, positioned at a message.
        offset: Its position; afterwards, the end of the last message.
    """

    closed = False

    def __init__(self, content: BinaryIO, offset: int) -> None:
        self._content, self.offset = content, offset
        self._is_at_end = False
        self._reader = import_module("pyarrow").PythonFile(self, mode="r")

    def read(self, size: int = -1) -> bytes:
        """Read bytes for Arrow, which reads no further than the current message."""
        data = self._content.read(size)
        self.offset += len(data)
        self._is_at_end = self._is_at_end or len(data) < size
        return data

    def next(self) -> Any:
        """Return the next message; ``None`` at the end-of-stream marker.

        Raises:
            EOFError: The content ends without that marker.
        """
        try:
            return import_module("pyarrow.ipc").read_message(self._reader)
        except EOFError:
            if self._is_at_end:
                raise
            return None


@contextlib.contextmanager
def _open_messages(file: StoredFile, start: int, end: int | None, limits: Limits) -> Generator[_Messages]:
    arrow = import_module("pyarrow")  # untyped, and slow to import
    try:
        with open_content(file, start, end, limits) as content:
            yield _Messages(content, start)
    except (arrow.ArrowException, EOFError, OSError) as error:
        reason = "it is truncated" if isinstance(error, EOFError) else " ".join(str(error).split())
        raise DataError(
            f"The Arrow stream cannot be read: {reason}", where=file.uri,
            hint="it is corrupt or incomplete: download or write it again, or remove it from data.sources",
        ) from error  # fmt: skip


@functools.lru_cache(maxsize=1 << 10)
def schema_of(file: StoredFile, limits: Limits) -> Any:
    """Return the schema of a stream.

    Raises:
        DataError: The file is not an Arrow stream, or has a dictionary-encoded column.
    """
    with open_content(file, 0, len(_FILE_MAGIC), limits) as content:
        start = content.read(len(_FILE_MAGIC))
    if not start.startswith(_STREAM_MAGIC):
        what = "an Arrow file (Feather), not an Arrow stream" if start == _FILE_MAGIC else "not an Arrow stream"
        raise DataError(
            f"The file is {what}", where=file.uri,
            hint="convert an Arrow file to Parquet: "
            "pyarrow.parquet.write_table(pyarrow.feather.read_table(FILE), NEW)",
        )  # fmt: skip
    with _open_messages(file, 0, None, limits) as messages:
        first = messages.next()
        if first is None:
            raise EOFError
        schema = import_module("pyarrow.ipc").read_schema(first)
    types = import_module("pyarrow.types")
    encoded = [field.name for field in schema if types.is_dictionary(field.type)]
    if encoded:
        raise DataError(
            f"Column {encoded[0]!r} is dictionary-encoded, which Arrow streams do not support here", where=file.uri,
            hint="write the table as Parquet and set format: parquet",
        )  # fmt: skip
    return schema


def _batches(source: SourceConfig, file: StoredFile) -> Iterator[RowGroup]:
    for row in _scan_batches(file, source.text_field, source.chat_fields, limits_of(source)).tolist():
        yield RowGroup(*row)


@functools.lru_cache(maxsize=1 << 10)
def _scan_batches(
    file: StoredFile, text_field: str, chat_fields: tuple[str, ...], limits: Limits
) -> npt.NDArray[np.int64]:  # fmt: skip
    """Return one ``RowGroup`` per row of an array, from one pass over the file."""
    ipc, schema = import_module("pyarrow.ipc"), schema_of(file, limits)
    check_columns(file, schema, text_field, chat_fields)
    found: list[RowGroup] = []
    with _open_messages(file, 0, None, limits) as messages:
        messages.next()
        start, first_row = messages.offset, 0
        for index, message in enumerate(iter(messages.next, None)):
            batch = ipc.read_record_batch(message, schema)
            if batch.num_rows:
                if chat_fields:
                    text_bytes = sum(batch.column(schema.names.index(name)).nbytes for name in chat_fields)
                else:
                    text_bytes = sum(length or 0 for length in text_buffers(batch, text_field)[2])
                found.append(RowGroup(index, first_row, batch.num_rows, start, messages.offset, text_bytes))
            start, first_row = messages.offset, first_row + batch.num_rows
        end = messages.offset
    trailing = length_bytes(file, limits) - end
    if trailing:
        raise DataError(
            f"{trailing:,} bytes follow the end of the Arrow stream at byte {end:,}", where=file.uri,
            hint="the file is corrupt or holds several streams: write it again",
        )  # fmt: skip
    return np.array([dataclasses.astuple(group) for group in found], np.int64).reshape(len(found), 6)


def measure(source: SourceConfig, file: StoredFile, end: int | None) -> int:
    """Return the approximate bytes of text before ``end``."""
    return sum(group.text_bytes for group in _batches(source, file) if end is None or group.start_byte < end)


def split_blocks(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int
) -> Iterator[RecordBlock]:
    """Yield blocks of whole record batches with about ``block_bytes`` of text."""
    del first_ordinal  # known from the pass over the file
    yield from row_group_blocks(_batches(source, file), start, end, block_bytes)


def count(source: SourceConfig, file: StoredFile, start: int, end: int) -> int:
    """Count the rows of the record batches in a range."""
    return sum(group.num_rows for group in _batches(source, file) if start <= group.start_byte < end)


def first_row(source: SourceConfig, file: StoredFile, start: int) -> int:
    """Return the ordinal of the first row of the record batch at an offset; 0 if none starts there."""
    return next((group.first_row for group in _batches(source, file) if group.start_byte == start), 0)


def read_records(
    source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[Document | BadRecord]:
    """Yield the rows of the record batches in a span for whose ordinal ``accept`` is true."""
    limits = limits_of(source)
    ipc, schema = import_module("pyarrow.ipc"), schema_of(file, limits)
    check_columns(file, schema, source.text_field, source.chat_fields)
    check_present(file, schema.names, source.metadata_fields, "metadata_fields")
    check_present(file, schema.names, image_columns(source), "images_field")
    ordinal = span.first_ordinal
    with _open_messages(file, span.start_byte, span.end_byte, limits) as messages:
        start = messages.offset
        while start < span.end_byte:
            batch = ipc.read_record_batch(messages.next(), schema)
            group = RowGroup(0, ordinal, batch.num_rows, start, messages.offset, 0)
            yield from read_batch(source, batch, group, span.file_index, ordinal, accept)
            start, ordinal = messages.offset, ordinal + batch.num_rows
