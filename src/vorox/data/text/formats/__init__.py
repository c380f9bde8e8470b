"""File formats: splitting files into blocks of whole records, and reading records as documents.

Spans of stored files go in; ``Document``s (``TokenDocument``s for token shards) and ``BadRecord``s come out in file
order. Each format is a module with the same functions: split a file into blocks, count records, read the records of a
span. Invariants: a record does not depend on its span; exactly one span yields it; an unreadable record is yielded
with its position, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.core.schema.source_formats import COMPRESSIONS, FORMATS, source_format
from vorox.data.chat.conversations import lone_surrogate
from vorox.data.documents import BadRecord, Record, UnitSpan, UnreadableRecord
from vorox.data.storage import StoredFile
from vorox.data.text.decompression import UTF_8
from vorox.data.text.file_content import (
    detect_damage,
    is_stored_as_read,
    length_bytes,
    limits_of,
)
from vorox.data.text.formats import (
    arrow,
    custom,
    delimited,
    json_array,
    json_lines,
    mds,
    parquet,
    plain_text,
    token_shards,
)
from vorox.data.text.formats.json_lines import parse_line
from vorox.data.text.formats.plain_text import text_boundary_before
from vorox.data.text.formats.record_blocks import RecordBlock, line_end_after, line_end_before

__all__ = [
    "RecordBlock",
    "UnreadableRecord",
    "count_records",
    "field_check",
    "first_block",
    "has_fields",
    "has_many_records",
    "has_row_groups",
    "is_built_in",
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
FirstRows = Callable[[SourceConfig, StoredFile, UnitSpan], Generator[Mapping[str, object] | BadRecord]]
"""Yields the records from the start of a file with the values of all fields, lazily; the span is that of the file."""


_UNKNOWN_END = 1 << 62
"""End of compressed content, whose length is not known before it is read."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """The functions of a format.

    Attributes:
        split_blocks: Blocks of a range; the end is ``None`` for the end of the content.
        count: Records in a block; ``None`` where a block is one record.
        read: Records of a span.
        measure: Bytes of text before an offset, where that is not the offset itself.
        first_rows: The first records with all of their fields, for detection, of a format that ``has_fields``.
        check_fields: Refuses a file that lacks a column which the source names, where all records have the same ones.
    """

    split_blocks: Callable[[SourceConfig, StoredFile, int, int | None, int, int], Iterator[RecordBlock]]
    count: Callable[[SourceConfig, StoredFile, int, int], int] | None
    read: ReadRecords
    measure: Callable[[SourceConfig, StoredFile, int | None], int] | None = None
    first_rows: FirstRows | None = None
    check_fields: Callable[[SourceConfig, StoredFile], None] | None = None


_READERS: dict[str, _Reader] = {
    "python_stdlib": _Reader(plain_text.split_text, None, plain_text.read_records),
    "txt": _Reader(plain_text.split_text, None, plain_text.read_records),
    "jsonl": _Reader(json_lines.split_blocks, json_lines.count, json_lines.read_records, None, json_lines.first_rows),
    "json": _Reader(json_array.split_blocks, json_array.count, json_array.read_records, None, json_array.first_rows),
    "csv": _Reader(
        delimited.split_blocks, delimited.count, delimited.read_records, delimited.measure, delimited.first_rows,
        delimited.check_fields,
    ),
    "parquet": _Reader(
        parquet.split_blocks, parquet.count, parquet.read_records, parquet.measure, parquet.first_rows,
        parquet.check_fields,
    ),
    "arrow": _Reader(
        arrow.split_blocks, arrow.count, arrow.read_records, arrow.measure, arrow.first_rows, arrow.check_fields
    ),
    "mds": _Reader(mds.split_blocks, mds.count, mds.read_records, mds.measure, mds.first_rows, mds.check_fields),
    "bin": _Reader(
        token_shards.split_blocks, token_shards.count, token_shards.read_records, token_shards.measure
    ),
}  # fmt: skip
"""The readers of ``core/schema/source_formats.py: FORMATS``."""
_CUSTOM = _Reader(custom.split_blocks, custom.count, custom.read_records)
"""The reader of a user's function, for every other name."""


def _reader(source: SourceConfig) -> _Reader:
    return _READERS.get(source.format, _CUSTOM)


def has_row_groups(format_name: str) -> bool:
    """Whether records have no byte range of their own, only that of their row group or file."""
    return source_format(format_name).has_row_groups


def is_built_in(source: SourceConfig) -> bool:
    """Whether the format is one of this module, not a user's function."""
    return source.format in FORMATS


def records_are_lines(source: SourceConfig) -> bool:
    return source_format(source.format).record == "line"


def suffixes(source: SourceConfig) -> tuple[str, ...]:
    """Return the file suffixes, in lower case, to search folders for."""
    plain = source_format(source.format).endings if is_built_in(source) else custom.suffixes(source)
    if not source_format(source.format).is_compressible:
        return plain
    return (*plain, *(name + ending for name in plain for ending in COMPRESSIONS))


def has_many_records(source: SourceConfig) -> bool:
    """Whether a block holds many records, not one."""
    return _reader(source).count is not None


def measure(source: SourceConfig, file: StoredFile, end: int | None = None) -> int:
    """Return the approximate bytes of text before ``end``; a compressed file is read once."""
    own = _reader(source).measure
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
    return _reader(source).split_blocks(source, file, start, end, block_bytes, first_ordinal)


def first_block(source: SourceConfig, file: StoredFile, end: int | None, block_bytes: int) -> RecordBlock | None:
    """Return the first block with any text, from the last bytes of its range alone where the format allows."""
    if not records_are_lines(source) or not is_stored_as_read(file, limits_of(source)):
        return next((block for block in split_blocks(source, file, 0, end, block_bytes) if block.text_bytes), None)
    stop = high = file.size_bytes if end is None else end
    if high > block_bytes:
        boundary = line_end_before(file, block_bytes, 0)
        stop = line_end_after(file, block_bytes, high) if boundary is None else boundary
    return RecordBlock(0, stop, 0, stop) if stop else None


def count_records(source: SourceConfig, file: StoredFile, start: int, end: int) -> int:
    """Return the number of ordinals in a block."""
    count = _reader(source).count
    return 1 if count is None else count(source, file, start, end)


def records_reader(source: SourceConfig) -> ReadRecords:
    """Return the ``read_records`` of a source's format, to be looked up once for many spans."""
    read = _reader(source).read
    if limits_of(source).encoding != UTF_8:
        read = partial(_read_transcoded, read)
    return partial(_read_damaged, read) if source.damaged_files == "keep_readable" else read


def read_records(source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Accept) -> Iterator[Record]:
    """Yield the records that begin in a span and that ``accept`` selects.

    Raises:
        DataError: The file cannot be read or is not in the source's format.
    """
    return records_reader(source)(source, file, span, accept)


def _read_transcoded(
    read: ReadRecords, source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Accept
) -> Iterator[Record]:
    """Read text of another encoding, which is named where it is invalid."""
    for record in read(source, file, span, accept):
        if isinstance(record, BadRecord):
            record = replace(record, reason=record.reason.replace("invalid UTF-8", f"invalid {source.encoding}"))
        yield record


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


def first_rows(
    source: SourceConfig, file: StoredFile, most_bytes: int | None = None
) -> Generator[Mapping[str, object] | BadRecord]:
    """Yield the first records of a file with all of their fields, read as ``read_records`` reads them.

    Args:
        source: The source, which names the format.
        file: The file.
        most_bytes: Bytes of JSON to read, of which the last record may be cut; ``None`` for as many as are consumed.

    Raises:
        DataError: The file cannot be read or is not in the source's format.
    """
    rows = _reader(source).first_rows
    assert rows is not None, "the format has fields"
    end = file.size_bytes if is_stored_as_read(file, limits_of(source)) else _UNKNOWN_END
    return rows(source, file, UnitSpan(0, 0, end if most_bytes is None else min(end, most_bytes), 0))


def has_fields(source: SourceConfig) -> bool:
    """Whether the records of a format have named fields."""
    return source_format(source.format).has_fields


def field_check(source: SourceConfig) -> Callable[[SourceConfig, StoredFile], None] | None:
    """Return what refuses a file without the columns of a source; ``None`` where each record has its own fields."""
    return _reader(source).check_fields


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
