"""Parquet: a row is a record, one of its columns is the text.

Spans of row groups go in; documents and bad records come out. Only the requested columns are read, in batches of
bounded size after decoding: a dictionary stays one, and a row group that expands too much is refused. The byte range of
a span covers its row groups, according to the footer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, Document, UnitSpan
from vorox.data.storage import StoredFile
from vorox.data.text.decompression import Limits
from vorox.data.text.file_content import length_bytes, limits_of, open_content_seekable
from vorox.data.text.formats.columnar import (
    RowGroup,
    check_columns,
    read_batch,
    record_columns,
    reject_bomb,
    row_group_blocks,
    rows_of,
    text_columns,
    text_size,
    validate,
)
from vorox.data.text.formats.record_blocks import RecordBlock

_IMAGE_ROWS = 64
_BATCH_BYTES = 8 << 20
_BUFFER_BYTES = 8 << 20
_MEASURED_BYTES = 1 << 20
"""Compressed size up to which the text of a row group is decoded to measure it."""

_EXPANDING = frozenset({"PLAIN_DICTIONARY", "RLE_DICTIONARY", "DELTA_BYTE_ARRAY"})
"""Encodings in which a value may take fewer bytes than its text."""


@contextlib.contextmanager
def _open_parquet(file: StoredFile, limits: Limits, dictionaries: Sequence[str] = ()) -> Generator[Any]:
    """Open a file.

    Args:
        file: The file.
        limits: Limits on a compressed file.
        dictionaries: Paths of columns to read as dictionary and indices, so that equal values are in memory once.
    """
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")  # untyped, and slow to import
    with open_content_seekable(file, limits) as reader:
        try:
            with parquet.ParquetFile(
                reader, pre_buffer=False, buffer_size=_BUFFER_BYTES, read_dictionary=list(dictionaries)
            ) as opened:
                yield opened
        except (arrow.ArrowException, OSError) as error:
            raise DataError(
                f"The Parquet file cannot be read: {' '.join(str(error).split())}", where=file.uri,
                hint="it is corrupt or incomplete: download or write it again, or remove it from data.sources",
            ) from error  # fmt: skip


@functools.lru_cache(maxsize=1 << 10)
def schema_of(file: StoredFile, limits: Limits) -> Any:
    """Return the Arrow schema of a file.

    Raises:
        DataError: The file is not Parquet.
    """
    with _open_parquet(file, limits) as opened:
        return opened.schema_arrow


def check_fields(source: SourceConfig, file: StoredFile) -> None:
    """Refuse a file without a column that the source names."""
    check_columns(file, schema_of(file, limits_of(source)), source)


def row_groups(source: SourceConfig, file: StoredFile) -> Iterator[RowGroup]:
    """Yield the row groups of a file that are not empty.

    Raises:
        DataError: The file is not Parquet, lacks the text column, or has an inconsistent footer.
    """
    limits = limits_of(source)
    schema = schema_of(file, limits)
    check_columns(file, schema, source)
    for row in _row_groups(file, text_columns(source, schema.names), limits).tolist():
        yield RowGroup(*row)


@functools.lru_cache(maxsize=1 << 10)
def _row_groups(file: StoredFile, texts: tuple[str, ...], limits: Limits) -> npt.NDArray[np.int64]:
    """Return one ``RowGroup`` per row of an array, which is compact for many large files."""
    with _open_parquet(file, limits) as opened:
        paths = _text_paths(opened, texts)
        expanding = _expanding_paths(opened, paths)
        footer = opened.metadata
        found: list[RowGroup] = []
        first_row = 0
        for index in range(footer.num_row_groups):
            group = footer.row_group(index)
            if group.num_rows:
                chunks = [group.column(number) for number in range(group.num_columns)]
                start = min(_start(chunk) for chunk in chunks)
                end = max(_start(chunk) + chunk.total_compressed_size for chunk in chunks)
                read = [chunk for chunk in chunks if chunk.path_in_schema in paths]
                size = sum(chunk.total_uncompressed_size for chunk in read)
                for chunk in read:
                    reject_bomb(file, chunk.total_uncompressed_size, chunk.total_compressed_size, limits)
                found.append(RowGroup(index, first_row, group.num_rows, start, end, size))
            first_row += group.num_rows
        _check_places(found, file, limits)
        small = [group.index for group in found if _stored_bytes(footer, group.index, paths) <= _MEASURED_BYTES]
    if expanding and small:
        with _open_parquet(file, limits, expanding) as opened:
            measured = {index: _decoded_bytes(file, opened, index, paths, limits) for index in small}
        found = [
            dataclasses.replace(group, text_bytes=max(group.text_bytes, measured.get(group.index, 0)))
            for group in found
        ]
    return np.array([dataclasses.astuple(group) for group in found], np.int64).reshape(len(found), 6)


def _check_places(groups: Sequence[RowGroup], file: StoredFile, limits: Limits) -> None:
    size_bytes, previous = length_bytes(file, limits), 0
    for group in groups:
        if not previous <= group.start_byte < group.end_byte <= size_bytes:
            raise DataError(
                f"The footer places row group {group.index} at bytes {group.start_byte:,} to {group.end_byte:,}, which "
                "is impossible", where=file.uri, hint="the footer is corrupt: download or write the file again",
            )  # fmt: skip
        previous = group.end_byte


def _text_paths(opened: Any, texts: Sequence[str]) -> frozenset[str]:
    """Return the leaves of the text columns: a column may be a struct or a list, and ``a.b`` is a leaf of a struct."""
    paths = [opened.schema.column(index).path for index in range(opened.metadata.num_columns)]
    return frozenset(path for path in paths for text in texts if path == text or path.startswith(f"{text}."))


def _expanding_paths(opened: Any, paths: frozenset[str]) -> tuple[str, ...]:
    """Return the leaves of text whose encoding may be smaller than their text in some row group."""
    footer, found = opened.metadata, set[str]()
    for index in range(footer.num_row_groups):
        group = footer.row_group(index)
        for chunk in (group.column(number) for number in range(group.num_columns)):
            if chunk.path_in_schema in paths and chunk.physical_type == "BYTE_ARRAY" and _expands(chunk):
                found.add(chunk.path_in_schema)
    return tuple(sorted(found))


def _expands(chunk: Any) -> bool:
    return not _EXPANDING.isdisjoint(chunk.encodings)


def _stored_bytes(footer: Any, index: int, paths: frozenset[str]) -> int:
    group = footer.row_group(index)
    chunks = (group.column(number) for number in range(group.num_columns))
    return sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema in paths)


def _decoded_bytes(file: StoredFile, opened: Any, index: int, paths: frozenset[str], limits: Limits) -> int:
    """Return the bytes of text of a row group, from one pass over its text columns."""
    group, total = opened.metadata.row_group(index), 0
    columns = sorted({path.partition(".")[0] for path in paths})
    stored = _stored_bytes(opened.metadata, index, paths)
    for batch in opened.iter_batches(_batch_rows(group, paths), row_groups=[index], columns=columns, use_threads=False):
        total += sum(text_size(column) for column in batch.columns)
        reject_bomb(file, total, stored, limits)
    return total


def _batch_rows(group: Any, paths: frozenset[str]) -> int:
    """Return how many rows of a row group are decoded at once, so that they take about ``_BATCH_BYTES``.

    A dictionary is in memory once. A value of the encoding that shares prefixes may be as long as the whole column.
    """
    chunks = [group.column(number) for number in range(group.num_columns)]
    texts = [chunk for chunk in chunks if chunk.path_in_schema in paths]
    size = max(sum(chunk.total_uncompressed_size for chunk in texts), 1)
    shares_prefixes = any("DELTA_BYTE_ARRAY" in chunk.encodings for chunk in texts)
    rows = _BATCH_BYTES // size if shares_prefixes else group.num_rows * _BATCH_BYTES // size
    return max(1, min(group.num_rows, rows))


def _start(chunk: Any) -> int:
    offsets = [chunk.data_page_offset, chunk.dictionary_page_offset if chunk.has_dictionary_page else None]
    return min(offset for offset in offsets if offset is not None)


def measure(source: SourceConfig, file: StoredFile, end: int | None) -> int:
    """Return the approximate bytes of text before ``end``."""
    groups = row_groups(source, file)
    return sum(group.text_bytes for group in groups if end is None or group.start_byte < end)


def split_blocks(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int
) -> Iterator[RecordBlock]:
    """Yield blocks of whole row groups with about ``block_bytes`` of text."""
    del first_ordinal  # known from the footer
    yield from row_group_blocks(row_groups(source, file), start, end, block_bytes)


def count(source: SourceConfig, file: StoredFile, start: int, end: int) -> int:
    """Count the rows of the row groups in a range."""
    groups = row_groups(source, file)
    return sum(group.num_rows for group in groups if start <= group.start_byte < end)


def read_records(
    source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[Document | BadRecord]:
    """Yield the rows of the row groups in a span for whose ordinal ``accept`` is true."""
    groups, limits = list(row_groups(source, file)), limits_of(source)
    schema = schema_of(file, limits)
    with _open_parquet(file, limits) as opened:
        paths = _text_paths(opened, text_columns(source, schema.names))
        expanding = _expanding_paths(opened, paths)
    with _open_parquet(file, limits, expanding) as opened:
        for group in groups:
            if span.start_byte <= group.start_byte < span.end_byte:
                yield from _read_group(source, file, opened, group, paths, span.file_index, accept)


def _read_group(
    source: SourceConfig,
    file: StoredFile,
    opened: Any,
    group: RowGroup,
    paths: frozenset[str],
    file_index: int,
    accept: Callable[[int], bool],
) -> Iterator[Document | BadRecord]:
    batch_rows = _batch_rows(opened.metadata.row_group(group.index), paths)
    if source.images_field is not None:
        batch_rows = min(batch_rows, _IMAGE_ROWS)  # the size of images is not known
    columns = list(record_columns(source, opened.schema_arrow.names))
    ordinal, total, limits = group.first_row, 0, limits_of(source)
    stored = _stored_bytes(opened.metadata, group.index, paths)
    texts = [name.partition(".")[0] for name in text_columns(source, opened.schema_arrow.names)]
    for batch in opened.iter_batches(batch_rows, row_groups=[group.index], columns=columns, use_threads=False):
        validate(batch, file)
        total += sum(text_size(batch.column(batch.schema.names.index(name))) for name in dict.fromkeys(texts))
        reject_bomb(file, total, stored, limits)
        yield from read_batch(source, batch, group, file_index, ordinal, accept)
        ordinal += batch.num_rows


def first_rows(source: SourceConfig, file: StoredFile, span: UnitSpan) -> Generator[Mapping[str, object]]:
    """Yield the first rows with the values of all columns."""
    del span
    limits = limits_of(source)
    with _open_parquet(file, limits) as opened:
        paths = _text_paths(opened, opened.schema_arrow.names)
        expanding = _expanding_paths(opened, paths)
    with _open_parquet(file, limits, expanding) as opened:
        filled = (index for index in range(opened.metadata.num_row_groups) if opened.metadata.row_group(index).num_rows)
        for index in filled:
            rows = min(_batch_rows(opened.metadata.row_group(index), paths), _IMAGE_ROWS)
            for batch in opened.iter_batches(rows, row_groups=[index], use_threads=False):
                validate(batch, file)
                yield from rows_of(batch)
