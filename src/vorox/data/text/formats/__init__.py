"""File formats: splitting files into blocks of whole records, and reading records as documents.

Spans of stored files go in; ``Document``s (``TokenDocument``s for token shards) and ``BadRecord``s come out in file
order. Each format is a module with the same functions: split a file into blocks, count records, read the records of a
span. Invariants: a record does not depend on its span; exactly one span yields it; an unreadable record is yielded
with its position, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, Record, UnitSpan, UnreadableRecord
from vorox.data.storage import StoredFile
from vorox.data.text.conversations import lone_surrogate
from vorox.data.text.file_content import (
    COMPRESSED_SUFFIXES,
    compression_by_suffix,
    detect_damage,
    length_bytes,
    limits_of,
)
from vorox.data.text.formats import arrow, custom, delimited, json_lines, mds, parquet, plain_text, token_shards
from vorox.data.text.formats.json_lines import parse_line
from vorox.data.text.formats.plain_text import text_boundary_before
from vorox.data.text.formats.record_blocks import RecordBlock, line_end_after, line_end_before

__all__ = [
    "RecordBlock",
    "UnreadableRecord",
    "count_records",
    "first_block",
    "has_many_records",
    "has_row_groups",
    "line_end_after",
    "line_end_before",
    "lone_surrogate",
    "measure",
    "parse_line",
    "read_record",
    "read_records",
    "records_are_lines",
    "records_reader",
    "split_blocks",
    "suffixes",
    "text_boundary_before",
]

Accept = Callable[[int], bool]
"""Whether a record belongs to the split, by its first byte, or by its ordinal in formats with row groups."""
ReadRecords = Callable[[SourceConfig, StoredFile, UnitSpan, Accept], Iterator[Record]]
"""Yields the records that begin in a span and that ``Accept`` selects."""


@dataclass(frozen=True, slots=True)
class _Format:
    """The functions of a format.

    Attributes:
        suffixes: File suffixes to search folders for.
        split_blocks: Blocks of a range; the end is ``None`` for the end of the content.
        count: Records in a block; ``None`` where a block is one record.
        read: Records of a span.
        measure: Bytes of text before an offset, where that is not the offset itself.
        has_row_groups: Whether records have no byte range of their own, only that of their row group or file.
    """

    suffixes: tuple[str, ...]
    split_blocks: Callable[[SourceConfig, StoredFile, int, int | None, int, int], Iterator[RecordBlock]]
    count: Callable[[SourceConfig, StoredFile, int, int], int] | None
    read: ReadRecords
    measure: Callable[[SourceConfig, StoredFile, int | None], int] | None = None
    has_row_groups: bool = False


_FORMATS: dict[str, _Format] = {
    "python_stdlib": _Format((".py",), plain_text.split_text, None, plain_text.read_records),
    "txt": _Format((".txt",), plain_text.split_text, None, plain_text.read_records),
    "jsonl": _Format((".jsonl", ".ndjson"), json_lines.split_blocks, json_lines.count, json_lines.read_records),
    "csv": _Format(
        (".csv", ".tsv"), delimited.split_blocks, delimited.count, delimited.read_records, delimited.measure
    ),
    "parquet": _Format(
        (".parquet",), parquet.split_blocks, parquet.count, parquet.read_records, parquet.measure, has_row_groups=True
    ),
    "arrow": _Format(
        (".arrow",), arrow.split_blocks, arrow.count, arrow.read_records, arrow.measure, has_row_groups=True
    ),
    "mds": _Format((".mds",), mds.split_blocks, mds.count, mds.read_records, mds.measure),
    "bin": _Format(
        (".bin",), token_shards.split_blocks, token_shards.count, token_shards.read_records, token_shards.measure
    ),
}
_CUSTOM = _Format((), custom.split_blocks, custom.count, custom.read_records, has_row_groups=True)
"""The format of a user's function, for every name that is not in ``_FORMATS``."""


def _format(source: SourceConfig) -> _Format:
    return _FORMATS.get(source.format, _CUSTOM)


def has_row_groups(format_name: str) -> bool:
    """Whether records have no byte range of their own, only that of their row group or file."""
    return _FORMATS.get(format_name, _CUSTOM).has_row_groups


def records_are_lines(source: SourceConfig) -> bool:
    return source.format == "jsonl"


def suffixes(source: SourceConfig) -> tuple[str, ...]:
    """Return the file suffixes, in lower case, to search folders for."""
    plain = custom.suffixes(source) if _format(source) is _CUSTOM else _format(source).suffixes
    if source.format in {"python_stdlib", "bin"}:
        return plain
    return (*plain, *(name + ending for name in plain for ending in COMPRESSED_SUFFIXES))


def has_many_records(source: SourceConfig) -> bool:
    """Whether a block holds many records, not one."""
    return _format(source).count is not None


def measure(source: SourceConfig, file: StoredFile, end: int | None = None) -> int:
    """Return the approximate bytes of text before ``end``; a compressed file is read once."""
    own = _format(source).measure
    if own is not None:
        return own(source, file, end)
    return length_bytes(file, limits_of(source)) if end is None else end


def split_blocks(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int = 0
) -> Iterator[RecordBlock]:
    """Lazily yield blocks of about ``block_bytes`` of text that end at record boundaries.

    Args:
        source: The source, which names the format.
        file: The file.
        start: Start of the range: 0 or the end of a block.
        end: End of the range; ``None`` for the end of the content.
        block_bytes: Only a block of a single record (in Parquet: row group) is larger.
        first_ordinal: Ordinal of the first record.

    Raises:
        DataError: The file cannot be read or is not in the source's format.
    """
    return _format(source).split_blocks(source, file, start, end, block_bytes, first_ordinal)


def first_block(source: SourceConfig, file: StoredFile, end: int | None, block_bytes: int) -> RecordBlock | None:
    """Return the first block with any text, from the last bytes of its range alone where the format allows."""
    if not records_are_lines(source) or compression_by_suffix(file.uri) is not None:
        return next((block for block in split_blocks(source, file, 0, end, block_bytes) if block.text_bytes), None)
    stop = high = file.size_bytes if end is None else end
    if high > block_bytes:
        boundary = line_end_before(file, block_bytes, 0)
        stop = line_end_after(file, block_bytes, high) if boundary is None else boundary
    return RecordBlock(0, stop, 0, stop) if stop else None


def count_records(source: SourceConfig, file: StoredFile, start: int, end: int) -> int:
    """Return the number of ordinals in a block."""
    count = _format(source).count
    return 1 if count is None else count(source, file, start, end)


def records_reader(source: SourceConfig) -> ReadRecords:
    """Return the ``read_records`` of a source's format, to be looked up once for many spans."""
    read = _format(source).read
    return partial(_read_damaged, read) if source.damaged_files == "keep_readable" else read


def read_records(source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Accept) -> Iterator[Record]:
    """Yield the records that begin in a span and that ``accept`` selects.

    Raises:
        DataError: The file cannot be read or is not in the source's format.
    """
    return records_reader(source)(source, file, span, accept)


def _read_damaged(
    read: ReadRecords, source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Accept
) -> Iterator[Record]:
    """Read a file that may be damaged: an empty span is one unreadable record."""
    if span.start_byte == span.end_byte:
        return iter([_unreadable_rest(source, file, span)])
    return read(source, file, span, accept)


def _unreadable_rest(source: SourceConfig, file: StoredFile, span: UnitSpan) -> BadRecord:
    damage = detect_damage(file, limits_of(source))
    if damage is None:
        raise DataError(
            f"The file was damaged after byte {span.start_byte:,} of its content, but no longer is",
            where=file.uri, hint="build in another data.cache.directory, or with --force-rebuild",
        )  # fmt: skip
    reason = (
        f"{damage.reason}; the rest of the file is quarantined because damaged_files is keep_readable: download or "
        "write the file again"
    )
    size = max(0, damage.end_byte - span.start_byte)
    return BadRecord(span.file_index, span.first_ordinal, span.start_byte, size, None, reason, is_rest_of_file=True)


def read_record(
    source: SourceConfig, file: StoredFile, file_index: int, ordinal: int, byte_offset: int, byte_length: int
) -> Record:
    """Return the record at the position of a known document.

    Raises:
        DataError: No record is at that position, or the file cannot be read.
    """
    first_ordinal = arrow.first_row(source, file, byte_offset) if source.format == "arrow" else ordinal
    span = UnitSpan(file_index, byte_offset, byte_offset + byte_length, first_ordinal)
    accept: Accept = _accept_all
    if has_row_groups(source.format):
        accept = lambda key: key == ordinal  # noqa: E731
    record = next(iter(read_records(source, file, span, accept)), None)
    if record is None:
        raise DataError(
            f"Record {ordinal} is not at byte {byte_offset:,}", where=file.uri,
            hint="the file changed since the cache was built",
        )  # fmt: skip
    return record


def _accept_all(key: int) -> bool:
    del key
    return True
