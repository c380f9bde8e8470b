"""JSON arrays: an element is a record, one of its fields is the text.

Spans that begin at an element go in; documents and bad records come out. Where an element ends depends on every bracket
and quote before it, so a file is split in one forward pass. Invariants: a span holds whole elements; a record has the
bytes of its element, without the comma and the white space around it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Iterator, Mapping

from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.data.chat.column_meaning import ReadColumns
from vorox.data.documents import BadRecord, Document, UnitSpan, UnreadableRecord
from vorox.data.storage import StoredFile
from vorox.data.text.decompression import Limits
from vorox.data.text.file_content import detect_damage, limits_of, open_content, reject_binary
from vorox.data.text.formats.json_lines import parse_object, read_object
from vorox.data.text.formats.record_blocks import (
    BYTE_ORDER_MARK,
    RecordBlock,
    find_record_ends,
    iter_chunks,
    iter_records,
    memoize_blocks,
    split_content,
    too_large,
)

_STRUCTURE = re.compile(rb'["\[\]{},]')
_STRING_END = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SPACE = b" \t\r\n"
_HEAD_BYTES = 1 << 16


class ElementEnds:
    """Finds the ends of elements in consecutive chunks of an array, whose first chunk begins at an element."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def __call__(self, chunk: bytes) -> list[int]:
        """Return the offsets in the chunk at which elements end: after their comma, or the bracket of the array."""
        ends: list[int] = []
        at, size = 0, len(chunk)
        if self._is_escaped:
            at, self._is_escaped = 1, False
        while at < size:
            if self._in_string:
                found = _STRING_END.match(chunk, at)
                if found is None:
                    tail = chunk[at:]
                    self._is_escaped = (len(tail) - len(tail.rstrip(b"\\"))) % 2 == 1
                    return ends
                self._in_string, at = False, found.end()
                continue
            found = _STRUCTURE.search(chunk, at)
            if found is None:
                return ends
            sign, at = found.group(), found.end()
            if sign == b'"':
                self._in_string = True
            elif sign in b"[{":
                self._depth += 1
            elif self._depth and sign in b"]}":
                self._depth -= 1
            elif self._depth == 0 and sign in b",]":
                ends.append(at)
        return ends


@functools.lru_cache(maxsize=1 << 12)
def elements_start(file: StoredFile, limits: Limits) -> int:
    """Return the offset of the first element; 0 if the content is empty.

    Raises:
        DataError: The content is not an array.
    """
    with open_content(file, 0, None, limits) as reader:
        head = reader.read(_HEAD_BYTES)
    reject_binary(file, head)
    body = head.removeprefix(BYTE_ORDER_MARK).lstrip(_SPACE)
    if not body:
        return 0
    if not body.startswith(b"["):
        raise DataError(
            "The file is not a JSON array", where=file.uri,
            hint="set the source's format to jsonl if it has one JSON object per line",
        )  # fmt: skip
    return len(head) - len(body) + 1


def split_blocks(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int
) -> Iterator[RecordBlock]:
    """Yield blocks of whole elements, in one pass over the content."""
    limits = limits_of(source)
    damage = detect_damage(file, limits) if end is None else None
    if damage is not None and damage.end_byte == 0:
        yield RecordBlock(0, 0, first_ordinal, 0)
        return
    begin = max(start, elements_start(file, limits))
    if begin == 0 or begin == end:
        return
    key = ("json", file, begin, end, block_bytes, first_ordinal, limits)
    yield from memoize_blocks(
        key, lambda: split_content(file, begin, end, block_bytes, first_ordinal, limits, ElementEnds())
    )  # fmt: skip


def count(source: SourceConfig, file: StoredFile, start: int, end: int) -> int:
    """Count the elements in a range."""
    limits = limits_of(source)
    start = max(start, elements_start(file, limits))
    with open_content(file, start, end, limits) as reader:
        total, last = 0, start
        for _, ends in find_record_ends(reader, start, ElementEnds()):
            total += len(ends)
            last = int(ends[-1]) if len(ends) else last
    return total + (last < end)


def read_records(
    source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[Document | BadRecord]:
    """Yield the elements in a span for whose first byte ``accept`` is true."""
    columns = ReadColumns.of(source)
    for ordinal, offset, length, element in _read_elements(source, file, span):
        if not accept(offset):
            continue
        position = (span.file_index, ordinal, offset, length)
        if element is None:
            yield BadRecord(*position, None, too_large(length, source.max_record_bytes))
        elif not element:
            yield BadRecord(*position, None, "a comma without an element after it: remove it")
        else:
            found = read_object(element, columns, position, None)
            if found is not None:
                yield found


def _read_elements(
    source: SourceConfig, file: StoredFile, span: UnitSpan
) -> Iterator[tuple[int, int, int, bytes | None]]:  # fmt: skip
    """Yield (ordinal, byte offset, length, bytes) of each element; the bytes of an oversized one are ``None``."""
    limits = limits_of(source)
    first = elements_start(file, limits)
    start = max(span.start_byte, first)
    with open_content(file, start, span.end_byte, limits) as reader:
        find = ElementEnds()
        chunks = ((chunk, find(chunk)) for chunk in iter_chunks(reader))
        records = iter_records(chunks, start, source.max_record_bytes)
        for ordinal, (offset, length, record) in enumerate(records, span.first_ordinal):
            if record is None:
                yield ordinal, offset, length, None
                continue
            core = record.strip(_SPACE)
            place = offset + len(record) - len(record.lstrip(_SPACE))
            is_last = core.endswith(b"]") and not core.startswith(b"[")
            core = core[:-1].rstrip(_SPACE) if core.endswith(b",") or is_last else core
            if core or (record.strip(_SPACE) and not (is_last and offset == first)):
                yield ordinal, place, len(core), core


def first_rows(
    source: SourceConfig, file: StoredFile, span: UnitSpan
) -> Generator[Mapping[str, object] | BadRecord]:  # fmt: skip
    """Yield the first records with the values of all fields."""
    for ordinal, offset, length, element in _read_elements(source, file, span):
        position = (span.file_index, ordinal, offset, length)
        try:
            if element is None:
                raise UnreadableRecord(too_large(length, source.max_record_bytes))
            yield parse_object(element)
        except UnreadableRecord as error:
            yield BadRecord(*position, None, str(error))
