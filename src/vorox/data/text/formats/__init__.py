"""What a record is in each format: where records begin, and how their bytes become documents.

Spans of stored files go in, ``Document``s (of token shards: ``TokenDocument``s) and ``BadRecord``s come out, in the
order of the file. Each format is a module with the same verbs: cut a file at its records, count them, read those of a
span. Invariants: a record is read the same whatever span it lies in, each is yielded by exactly one span, and one that
cannot be read is reported with its place, never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vorox.core.errors import DataError
from vorox.core.extensions import is_extension
from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, Record, UnitSpan
from vorox.data.storage import StoredFile
from vorox.data.text import signatures
from vorox.data.text.file_content import Limits, detect_damage, length_bytes
from vorox.data.text.formats import arrow, custom, delimited, json_lines, mds, parquet, plain_text, token_shards
from vorox.data.text.formats.json_lines import UnreadableRecord, lone_surrogate, parse_line
from vorox.data.text.formats.plain_text import boundary_after, boundary_before, count_lines, records_are_lines
from vorox.data.text.formats.record_blocks import RecordBlock

__all__ = [
    "RecordBlock",
    "UnreadableRecord",
    "boundary_after",
    "boundary_before",
    "count_lines",
    "count_records",
    "first_block",
    "has_many_records",
    "has_row_groups",
    "lone_surrogate",
    "measure",
    "parse_line",
    "read_record",
    "read_records",
    "records_are_lines",
    "split_blocks",
    "suffixes",
]

Accept = Callable[[int], bool]
"""Whether the record at a place belongs to the split: its first byte, or its ordinal where it has none of its own."""


@dataclass(frozen=True, slots=True)
class _Format:
    """The verbs of a format.

    Attributes:
        suffixes: Endings by which a folder is searched.
        cut: Pieces of a range; the end is ``None`` for the end of the content.
        count: Records in a piece; ``None`` where a piece is a record.
        read: Records of a span.
        measure: Text up to a place, where that is not the place itself.
    """

    suffixes: tuple[str, ...]
    split_blocks: Callable[[SourceConfig, StoredFile, int, int | None, int, int], Iterator[RecordBlock]]
    count: Callable[[SourceConfig, StoredFile, int, int], int] | None
    read: Callable[[SourceConfig, StoredFile, UnitSpan, Accept], Iterator[Record]]
    measure: Callable[[SourceConfig, StoredFile, int | None], int] | None = None


def _count_lines(source: SourceConfig, file: StoredFile, start: int, end: int) -> int:
    return count_lines(file, start, end, Limits.from_source(source))


_FORMATS: dict[str, _Format] = {
    "python_stdlib": _Format((".py",), plain_text.split_text, None, plain_text.read_texts),
    "txt": _Format((".txt",), plain_text.split_text, None, plain_text.read_texts),
    "jsonl": _Format((".jsonl", ".ndjson"), plain_text.split_lines, _count_lines, json_lines.read_records),
    "csv": _Format(
        (".csv", ".tsv"), delimited.split_blocks, delimited.count, delimited.read_records, delimited.measure
    ),
    "parquet": _Format((".parquet",), parquet.split_blocks, parquet.count, parquet.read_records, parquet.measure),
    "arrow": _Format((".arrow",), arrow.split_blocks, arrow.count, arrow.read_records, arrow.measure),
    "mds": _Format((".mds",), mds.split_blocks, mds.count, mds.read_records, mds.measure),
    "bin": _Format(
        (".bin",), token_shards.split_blocks, token_shards.count, token_shards.read_records, token_shards.measure
    ),
}


_CUSTOM = _Format((), custom.split_blocks, custom.count, custom.read_records)


def has_row_groups(format_name: object) -> bool:
    """Whether records of a format have no bytes of their own, only those of the row group or file that they are in."""
    return format_name in ("parquet", "arrow") or is_extension(format_name)


def _format(source: SourceConfig) -> _Format:
    return _CUSTOM if is_extension(source.format) else _FORMATS[source.format]


def suffixes(source: SourceConfig) -> tuple[str, ...]:
    """Endings, in lower case, by which a folder is searched."""
    plain = custom.suffixes(source) if is_extension(source.format) else _format(source).suffixes
    if source.format in {"python_stdlib", "bin"}:
        return plain
    return (*plain, *(name + ending for name in plain for ending in signatures.SUFFIXES))


def has_many_records(source: SourceConfig) -> bool:
    """Whether a piece of a file is many records, not one."""
    return _format(source).count is not None


def measure(source: SourceConfig, file: StoredFile, end: int | None = None) -> int:
    """Bytes of text up to a place in the content, about; for a compressed file after one pass over it."""
    own = _format(source).measure
    if own is not None:
        return own(source, file, end)
    return length_bytes(file, Limits.from_source(source)) if end is None else end


def split_blocks(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int = 0
) -> Iterator[RecordBlock]:
    """Pieces of about ``block_bytes`` of text, cut at records; the first of them is ready before the others.

    Args:
        source: What the records are.
        file: The file.
        start: Where the range begins: 0 or the end of a piece.
        end: Where it ends; ``None`` for the end of the content.
        block_bytes: A piece is larger only where a record (in Parquet a row group) is.
        first_ordinal: Ordinal of the first record.

    Raises:
        DataError: The file cannot be read or is not what the source says.
    """
    return _format(source).split_blocks(source, file, start, end, block_bytes, first_ordinal)


def first_block(source: SourceConfig, file: StoredFile, end: int | None, block_bytes: int) -> RecordBlock | None:
    """Return the first piece that has any text, reading little of what lies before its end where that is possible."""
    if not records_are_lines(source) or signatures.compression_by_suffix(file.uri) is not None:
        return next((piece for piece in split_blocks(source, file, 0, end, block_bytes) if piece.text_bytes), None)
    stop = high = file.size_bytes if end is None else end
    if high > block_bytes:
        boundary = boundary_before(source, file, block_bytes, 0)
        stop = boundary_after(file, block_bytes, high) if boundary is None else boundary
    return RecordBlock(0, stop, 0, stop) if stop else None


def count_records(source: SourceConfig, file: StoredFile, start: int, end: int) -> int:
    """Ordinals that a piece uses up."""
    count = _format(source).count
    return 1 if count is None else count(source, file, start, end)


def read_records(source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Accept) -> Iterator[Record]:
    """The records that begin in a span and that ``accept`` takes; of an empty span, the rest of the file as one.

    Raises:
        DataError: The file cannot be read or is not what the source says.
    """
    if span.start_byte == span.end_byte and source.damaged_files == "keep_readable":
        return iter([_unreadable_rest(source, file, span)])
    return _format(source).read(source, file, span, accept)


def _unreadable_rest(source: SourceConfig, file: StoredFile, span: UnitSpan) -> BadRecord:
    damage = detect_damage(file, Limits.from_source(source))
    if damage is None:
        raise DataError(
            f"the file was damaged behind byte {span.start_byte:,} of its content, and is not any more",
            where=file.uri, hint="build into another data.cache.directory, or with --force-rebuild",
        )  # fmt: skip
    reason = (
        f"{damage.reason}; the rest of the file is put aside, for damaged_files is keep_readable: fetch or write the "
        "file again"
    )
    size = max(0, damage.end_byte - span.start_byte)
    return BadRecord(span.file_index, span.first_ordinal, span.start_byte, size, None, reason, is_rest_of_file=True)


def read_record(
    source: SourceConfig, file: StoredFile, file_index: int, ordinal: int, byte_offset: int, byte_length: int
) -> Record:
    """The one record at a place that a document had.

    Raises:
        DataError: There is none, or the file cannot be read.
    """
    first_ordinal = arrow.first_row(source, file, byte_offset) if source.format == "arrow" else ordinal
    span = UnitSpan(file_index, byte_offset, byte_offset + byte_length, first_ordinal)
    accept: Accept = _everything
    if has_row_groups(source.format):
        accept = lambda place: place == ordinal  # noqa: E731
    record = next(iter(read_records(source, file, span, accept)), None)
    if record is None:
        raise DataError(
            f"there is no record {ordinal} at byte {byte_offset:,}", where=file.uri,
            hint="the file changed since the cache was built",
        )  # fmt: skip
    return record


def _everything(place: int) -> bool:
    del place
    return True
