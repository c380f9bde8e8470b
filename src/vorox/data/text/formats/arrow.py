"""Arrow streams of ``datasets.save_to_disk``: each row is a record, one column is the text.

Spans of record batches go in; documents and bad records come out. A stream has no footer, so one pass over the file
locates its record batches. Invariant: a truncated stream, or one with trailing bytes, is rejected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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
    damaged_batch,
    read_batch,
    reject_bomb,
    row_group_blocks,
    rows_of,
    schema_of_bytes,
    text_columns,
    text_size,
)
from vorox.data.text.formats.record_blocks import RecordBlock

_FILE_MAGIC = b"ARROW1"
_STREAM_MAGIC = b"\xff" * 4
_PIECE_BYTES = 1 << 26
_END_OF_STREAM = _STREAM_MAGIC + bytes(4)


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

    def read(self, size: int) -> bytes:
        """Read bytes for Arrow, which reads no further than the current message.

        In pieces: a damaged message may claim any length, for which no memory may be reserved in advance.
        """
        parts: list[bytes] = []
        left = size
        while left > 0 and (part := self._content.read(min(left, _PIECE_BYTES))):
            parts.append(part)
            left -= len(part)
        self.offset += size - left
        self._is_at_end = self._is_at_end or left > 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

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
        DataError: The file is not an Arrow stream.
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
        return import_module("pyarrow.ipc").read_schema(first)


class _Batches:
    """Reads the record batches of a stream, and checks each in full before it is used.

    Args:
        file: The file, for messages.
        schema: Its schema.
        dictionaries: The messages with the values of dictionary-encoded columns, in the order of the stream.
    """

    def __init__(self, file: StoredFile, schema: Any, dictionaries: Sequence[Any] = ()) -> None:
        self._file, self._schema, self._bytes = file, schema, schema_of_bytes(schema)
        self.dictionaries = list(dictionaries)

    def next(self, messages: _Messages) -> Any:
        """Return the next record batch; ``None`` at the end. Dictionaries on the way are kept.

        Raises:
            DataError: A batch contradicts itself.
        """
        while (message := messages.next()) is not None:
            if message.type == "dictionary":
                self.dictionaries.append(message)
                continue
            return self.decode(message)
        return None

    def decode(self, message: Any) -> Any:
        """Return the record batch of a message.

        Raises:
            DataError: It contradicts itself.
        """
        arrow = import_module("pyarrow")
        try:
            self._read(message, self._bytes).validate(full=True)
            return self._read(message, self._schema)
        except (arrow.ArrowException, OSError, SystemError) as error:
            raise damaged_batch(self._file, error) from error

    def _read(self, message: Any, schema: Any) -> Any:
        ipc = import_module("pyarrow.ipc")
        if not self.dictionaries:
            return ipc.read_record_batch(message, schema)
        stream = io.BytesIO()  # only a whole stream can be read with its dictionaries
        stream.write(schema.serialize())
        for part in (*self.dictionaries, message):
            stream.write(part.serialize())
        stream.write(_END_OF_STREAM)
        stream.seek(0)
        with ipc.open_stream(stream) as reader:
            return reader.read_next_batch()


def check_fields(source: SourceConfig, file: StoredFile) -> None:
    """Refuse a file without a column that the source names."""
    check_columns(file, schema_of(file, limits_of(source)), source)


def _groups(source: SourceConfig, file: StoredFile) -> Iterator[RowGroup]:
    limits = limits_of(source)
    schema = schema_of(file, limits)
    check_columns(file, schema, source)
    columns = text_columns(source, schema.names)
    for row in _scan_batches(file, columns, limits)[0].tolist():
        yield RowGroup(*row)


@functools.lru_cache(maxsize=1 << 10)
def _scan_batches(
    file: StoredFile, texts: tuple[str, ...], limits: Limits
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return one ``RowGroup`` per row of an array, and the ranges of dictionaries, from one pass over the file."""
    schema = schema_of(file, limits)
    batches = _Batches(file, schema)
    columns = list(dict.fromkeys(name if name in schema.names else name.partition(".")[0] for name in texts))
    found: list[RowGroup] = []
    dictionaries: list[tuple[int, int]] = []
    total = 0
    with _open_messages(file, 0, None, limits) as messages:
        messages.next()
        start, first_row, index = messages.offset, 0, 0
        for message in iter(messages.next, None):
            if message.type == "dictionary":
                batches.dictionaries.append(message)
                dictionaries.append((start, messages.offset))
                start = messages.offset
                continue
            batch = batches.decode(message)
            if batch.num_rows:
                text_bytes = sum(text_size(batch.column(schema.names.index(name))) for name in columns)
                total += text_bytes
                reject_bomb(file, total, messages.offset, limits)
                found.append(RowGroup(index, first_row, batch.num_rows, start, messages.offset, text_bytes))
            start, first_row, index = messages.offset, first_row + batch.num_rows, index + 1
        end = messages.offset
    trailing = length_bytes(file, limits) - end
    if trailing:
        raise DataError(
            f"{trailing:,} bytes follow the end of the Arrow stream at byte {end:,}", where=file.uri,
            hint="the file is corrupt or holds several streams: write it again",
        )  # fmt: skip
    groups = np.array([dataclasses.astuple(group) for group in found], np.int64).reshape(len(found), 6)
    return groups, np.array(dictionaries, np.int64).reshape(len(dictionaries), 2)


def _read_dictionaries(file: StoredFile, ranges_N2: npt.NDArray[np.int64], before: int, limits: Limits) -> list[Any]:
    """Return the messages with the dictionaries that come before an offset."""
    found: list[Any] = []
    for start, end in ranges_N2[ranges_N2[:, 0] < before].tolist():
        with _open_messages(file, start, end, limits) as messages:
            found.append(messages.next())
    return found


def measure(source: SourceConfig, file: StoredFile, end: int | None) -> int:
    """Return the approximate bytes of text before ``end``."""
    return sum(group.text_bytes for group in _groups(source, file) if end is None or group.start_byte < end)


def split_blocks(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int
) -> Iterator[RecordBlock]:
    """Yield blocks of whole record batches with about ``block_bytes`` of text."""
    del first_ordinal  # known from the pass over the file
    yield from row_group_blocks(_groups(source, file), start, end, block_bytes)


def count(source: SourceConfig, file: StoredFile, start: int, end: int) -> int:
    """Count the rows of the record batches in a range."""
    return sum(group.num_rows for group in _groups(source, file) if start <= group.start_byte < end)


def first_row(source: SourceConfig, file: StoredFile, start: int) -> int:
    """Return the ordinal of the first row of the record batch at an offset; 0 if none starts there."""
    return next((group.first_row for group in _groups(source, file) if group.start_byte == start), 0)


def read_records(
    source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[Document | BadRecord]:
    """Yield the rows of the record batches in a span for whose ordinal ``accept`` is true."""
    limits = limits_of(source)
    schema = schema_of(file, limits)
    check_columns(file, schema, source)
    dictionaries: list[Any] = []
    if any(import_module("pyarrow.types").is_dictionary(field.type) for field in schema):
        ranges_N2 = _scan_batches(file, text_columns(source, schema.names), limits)[1]
        dictionaries = _read_dictionaries(file, ranges_N2, span.start_byte, limits)
    batches = _Batches(file, schema, dictionaries)
    ordinal = span.first_ordinal
    with _open_messages(file, span.start_byte, span.end_byte, limits) as messages:
        start = messages.offset
        while start < span.end_byte:
            batch = batches.next(messages)
            if batch is None:
                return
            group = RowGroup(0, ordinal, batch.num_rows, start, messages.offset, 0)
            yield from read_batch(source, batch, group, span.file_index, ordinal, accept)
            start, ordinal = messages.offset, ordinal + batch.num_rows


def first_rows(source: SourceConfig, file: StoredFile, span: UnitSpan) -> Generator[Mapping[str, object]]:
    """Yield the first rows with the values of all columns."""
    del span
    limits = limits_of(source)
    batches = _Batches(file, schema_of(file, limits))
    with _open_messages(file, 0, None, limits) as messages:
        messages.next()
        while (batch := batches.next(messages)) is not None:
            yield from rows_of(batch)
