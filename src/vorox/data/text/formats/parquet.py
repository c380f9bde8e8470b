"""Parquet: a row is a record, one of its columns is the text.

Runs of row groups go in, documents and bad records come out; nothing but the wanted columns is read, in batches of
bounded size. A span's bytes are those of its row groups in the file, as the footer says them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, Document, UnitSpan
from vorox.data.storage import StoredFile
from vorox.data.text.file_content import Limits, length_bytes, open_content_seekable
from vorox.data.text.formats.columnar import (
    RowGroup,
    check_metadata_columns,
    check_text_column,
    read_batch,
    row_group_blocks,
)
from vorox.data.text.formats.record_blocks import RecordBlock

_BATCH_BYTES = 8 << 20
_BUFFER_BYTES = 8 << 20
_LEAST_SUSPECT_BYTES = 1 << 28


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
        check_text_column(file, opened.schema_arrow, text_field)
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


def measure(source: SourceConfig, file: StoredFile, end: int | None) -> int:
    """Text up to a place in the file, about."""
    groups = row_groups(file, source.text_field, Limits.from_source(source))
    return sum(group.text_bytes for group in groups if end is None or group.start_byte < end)


def split_blocks(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int
) -> Iterator[RecordBlock]:
    """Runs of whole row groups with about ``block_bytes`` of text."""
    del first_ordinal  # the footer knows it
    yield from row_group_blocks(
        row_groups(file, source.text_field, Limits.from_source(source)), start, end, block_bytes
    )


def count(source: SourceConfig, file: StoredFile, start: int, end: int) -> int:
    """Rows of the row groups in a range."""
    groups = row_groups(file, source.text_field, Limits.from_source(source))
    return sum(group.num_rows for group in groups if start <= group.start_byte < end)


def read_records(
    source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[Document | BadRecord]:
    """The rows of the row groups in a span whose ordinal ``accept`` takes."""
    limits = Limits.from_source(source)
    groups = list(row_groups(file, source.text_field, limits))
    with _opened(file, limits) as opened:
        check_metadata_columns(file, opened.schema_arrow.names, source.metadata_fields)
        for group in groups:
            if span.start_byte <= group.start_byte < span.end_byte:
                yield from _read_group(source, opened, group, span.file_index, accept)


def _read_group(
    source: SourceConfig, opened: Any, group: RowGroup, file_index: int, accept: Callable[[int], bool]
) -> Iterator[Document | BadRecord]:
    batch_rows = max(1, min(group.num_rows, group.num_rows * _BATCH_BYTES // max(group.text_bytes, 1)))
    columns = [source.text_field, *source.metadata_fields]
    ordinal = group.first_row
    for batch in opened.iter_batches(batch_rows, row_groups=[group.index], columns=columns, use_threads=False):
        yield from read_batch(source, batch, group, file_index, ordinal, accept)
        ordinal += batch.num_rows
