"""Parquet: a row is a record, one of its columns is the text.

Spans of row groups go in; documents and bad records come out. Only the requested columns are read, in batches of
bounded size. The byte range of a span covers its row groups, according to the footer.
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
from vorox.data.text.decompression import Limits
from vorox.data.text.file_content import length_bytes, limits_of, open_content_seekable
from vorox.data.text.formats.columnar import (
    RowGroup,
    check_columns,
    check_present,
    image_columns,
    read_batch,
    row_group_blocks,
)
from vorox.data.text.formats.record_blocks import RecordBlock

_IMAGE_ROWS = 64
_BATCH_BYTES = 8 << 20
_BUFFER_BYTES = 8 << 20
_MIN_SUSPECT_BYTES = 1 << 28


@contextlib.contextmanager
def _open_parquet(file: StoredFile, limits: Limits) -> Generator[Any]:
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")  # untyped, and slow to import
    with open_content_seekable(file, limits) as reader:
        try:
            with parquet.ParquetFile(reader, pre_buffer=False, buffer_size=_BUFFER_BYTES) as opened:
                yield opened
        except (arrow.ArrowException, OSError) as error:
            raise DataError(
                f"The Parquet file cannot be read: {' '.join(str(error).split())}", where=file.uri,
                hint="it is corrupt or incomplete: download or write it again, or remove it from data.sources",
            ) from error  # fmt: skip


def row_groups(source: SourceConfig, file: StoredFile) -> Iterator[RowGroup]:
    """Yield the row groups of a file that are not empty.

    Raises:
        DataError: The file is not Parquet, lacks the text column, or has an inconsistent footer.
    """
    for row in _row_groups(file, source.text_field, source.chat_fields, limits_of(source)).tolist():
        yield RowGroup(*row)


@functools.lru_cache(maxsize=1 << 10)
def _row_groups(
    file: StoredFile, text_field: str, chat_fields: tuple[str, ...], limits: Limits
) -> npt.NDArray[np.int64]:  # fmt: skip
    """Return one ``RowGroup`` per row of an array, which is compact for many large files."""
    with _open_parquet(file, limits) as opened:
        check_columns(file, opened.schema_arrow, text_field, chat_fields)
        footer = opened.metadata
        paths = [opened.schema.column(index).path for index in range(footer.num_columns)]
        if chat_fields:
            columns = [index for index, path in enumerate(paths) if path.partition(".")[0] in chat_fields]
        else:
            columns = [next(i for i, path in enumerate(paths) if path in {text_field, f"{text_field}.list.element"})]
        found: list[RowGroup] = []
        first_row = 0
        for index in range(footer.num_row_groups):
            group = footer.row_group(index)
            if group.num_rows:
                chunks = [group.column(number) for number in range(group.num_columns)]
                start = min(_start(chunk) for chunk in chunks)
                end = max(_start(chunk) + chunk.total_compressed_size for chunk in chunks)
                texts = [group.column(column) for column in columns]
                for text in texts:
                    _reject_bomb(file, text, limits)
                size = sum(text.total_uncompressed_size for text in texts)
                found.append(RowGroup(index, first_row, group.num_rows, start, end, size))
            first_row += group.num_rows
    size_bytes, previous = length_bytes(file, limits), 0
    for group in found:
        if not previous <= group.start_byte < group.end_byte <= size_bytes:
            raise DataError(
                f"The footer places row group {group.index} at bytes {group.start_byte:,} to {group.end_byte:,}, which "
                "is impossible", where=file.uri, hint="the footer is corrupt: download or write the file again",
            )  # fmt: skip
        previous = group.end_byte
    return np.array([dataclasses.astuple(group) for group in found], np.int64).reshape(len(found), 6)


def _start(chunk: Any) -> int:
    offsets = [chunk.data_page_offset, chunk.dictionary_page_offset if chunk.has_dictionary_page else None]
    return min(offset for offset in offsets if offset is not None)


def _reject_bomb(file: StoredFile, chunk: Any, limits: Limits) -> None:
    size, stored = chunk.total_uncompressed_size, max(chunk.total_compressed_size, 1)
    if size > limits.max_bytes or size > max(_MIN_SUSPECT_BYTES, limits.max_ratio * stored):
        option = "max_decompressed_bytes" if size > limits.max_bytes else "max_decompression_ratio"
        raise DataError(
            f"{stored:,} compressed bytes expand to {size:,}: this looks like a decompression bomb", where=file.uri,
            hint=f"remove the file from data.sources; if you trust it, raise the source's {option}",
        )  # fmt: skip


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
    groups = list(row_groups(source, file))
    with _open_parquet(file, limits_of(source)) as opened:
        check_present(file, opened.schema_arrow.names, source.metadata_fields, "metadata_fields")
        check_present(file, opened.schema_arrow.names, image_columns(source), "images_field")
        for group in groups:
            if span.start_byte <= group.start_byte < span.end_byte:
                yield from _read_group(source, opened, group, span.file_index, accept)


def _read_group(
    source: SourceConfig, opened: Any, group: RowGroup, file_index: int, accept: Callable[[int], bool]
) -> Iterator[Document | BadRecord]:
    batch_rows = max(1, min(group.num_rows, group.num_rows * _BATCH_BYTES // max(group.text_bytes, 1)))
    if source.images_field is not None:
        batch_rows = min(batch_rows, _IMAGE_ROWS)  # the size of images is not known
    columns = [*(source.chat_fields or (source.text_field,)), *image_columns(source), *source.metadata_fields]
    ordinal = group.first_row
    for batch in opened.iter_batches(batch_rows, row_groups=[group.index], columns=columns, use_threads=False):
        yield from read_batch(source, batch, group, file_index, ordinal, accept)
        ordinal += batch.num_rows
