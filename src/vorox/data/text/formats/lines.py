"""What a record is in each format: where records begin, and how their bytes become documents.

Spans of stored files go in, ``Document``s and ``BadRecord``s come out, in the order of the file. Text formats
(``python_stdlib``, ``txt``) make one document of a span; ``jsonl`` makes one of every line. Invariants: a record is
read the same whatever span it lies in, each is yielded by exactly one span, and one that cannot be read is reported
with its line and its bytes, never left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import cast

from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, Document, UnitSpan
from vorox.data.storage import StoredFile, open_range

SUFFIXES: dict[str, tuple[str, ...]] = {
    "python_stdlib": (".py",),
    "txt": (".txt",),
    "jsonl": (".jsonl", ".ndjson"),
}
"""Endings by which a folder is searched."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_WINDOW_BYTES = 1 << 20


def records_are_lines(source: SourceConfig) -> bool:
    return source.format == "jsonl"


def boundary_before(source: SourceConfig, file: StoredFile, at: int, low: int) -> int | None:
    """The last place in ``(low, at]`` where the file may be cut; ``None`` if there is none.

    Lines are never cut. A text without a line end nearby is cut between two characters.
    """
    end = at
    while end > low:
        start = max(low, end - _WINDOW_BYTES)
        window = _read(file, start, end)
        newline = window.rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        if not records_are_lines(source):
            return _character_start(file, at, low)
        end = start
    return None


def boundary_after(file: StoredFile, at: int, high: int) -> int:
    """The first place at or after ``at`` where a line ends, or ``high``."""
    start = at
    while start < high:
        end = min(high, start + _WINDOW_BYTES)
        newline = _read(file, start, end).find(b"\n")
        if newline >= 0:
            return start + newline + 1
        start = end
    return high


def _character_start(file: StoredFile, at: int, low: int) -> int:
    """A character boundary above ``low``: the last one up to ``at``, else the first one behind it."""
    start = max(low + 1, at - 3)
    stop = min(at + 4, file.size_bytes)
    starts = [start + offset for offset, byte in enumerate(_read(file, start, stop)) if byte & 0xC0 != 0x80]
    if stop == file.size_bytes:
        starts.append(stop)
    before = [place for place in starts if place <= at]
    return before[-1] if before else starts[0] if starts else at


def cut(source: SourceConfig, file: StoredFile, start: int, end: int, piece_bytes: int) -> list[int]:
    """Boundaries, ``start`` and ``end`` included, that leave pieces of about ``piece_bytes``."""
    boundaries = [start]
    while end - boundaries[-1] > piece_bytes:
        low = boundaries[-1]
        boundary = boundary_before(source, file, low + piece_bytes, low)
        if boundary is None:
            boundary = boundary_after(file, low + piece_bytes, end)
        if boundary >= end:
            break
        boundaries.append(boundary)
    return [*boundaries, end]


def count_records(source: SourceConfig, file: StoredFile, start: int, end: int) -> int:
    """Ordinals that a span uses up: its lines, or one."""
    return count_lines(file, start, end) if records_are_lines(source) else 1


def count_lines(file: StoredFile, start: int, end: int) -> int:
    """Line ends in a range."""
    count = 0
    with open_range(file, start, end) as reader:
        while piece := reader.read(_WINDOW_BYTES):
            count += piece.count(b"\n")
    return count


def read_records(
    source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[Document | BadRecord]:
    """The records that begin in a span and whose first byte ``accept`` takes."""
    if records_are_lines(source):
        yield from _read_lines(source, file, span, accept)
    elif accept(span.start_byte):
        yield _read_text(file, span)


def read_lines_of(
    file: StoredFile, start: int, end: int, first_ordinal: int = 0
) -> Iterator[tuple[int, int, bytes]]:  # fmt: skip
    """(ordinal, byte offset, bytes with the line end) of every line in a range that starts at a line."""
    offset, ordinal = start, first_ordinal
    with open_range(file, start, end) as reader:
        for line in cast("Iterator[bytes]", reader):
            yield ordinal, offset, line
            offset += len(line)
            ordinal += 1


def _read_lines(
    source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[Document | BadRecord]:
    for ordinal, offset, line in read_lines_of(file, span.start_byte, span.end_byte, span.first_ordinal):
        if not accept(offset):
            continue
        body = line.removeprefix(_BYTE_ORDER_MARK) if offset == 0 else line
        if not body.strip():
            continue  # a blank line is no record, but it keeps its ordinal
        place = (span.file_index, ordinal, offset, len(line))
        try:
            yield Document(*place, parse_line(body, source.text_field))
        except UnreadableRecord as error:
            yield BadRecord(*place, ordinal + 1, str(error))


class UnreadableRecord(ValueError):
    """A record that holds no text; the message says why."""


def parse_line(line: bytes, text_field: str) -> str:
    """The text of one jsonl record.

    Raises:
        UnreadableRecord: It is not UTF-8, not JSON, not an object, or has no text in that field.
    """
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UnreadableRecord(f"invalid UTF-8 at byte {error.start} of the line: {error.reason}") from error
    except RecursionError as error:
        raise UnreadableRecord("invalid JSON: nested too deeply") from error
    except json.JSONDecodeError as error:
        raise UnreadableRecord(f"invalid JSON at column {error.colno}: {error.msg}") from error
    except ValueError as error:  # a number of more digits than Python converts
        raise UnreadableRecord(f"invalid JSON: {error}") from error
    if not isinstance(record, dict):
        raise UnreadableRecord(f"the record is not an object but {_kind(record)}")
    fields = cast("dict[str, object]", record)
    if text_field not in fields:
        present = ", ".join(repr(key) for key in list(fields)[:8])
        raise UnreadableRecord(f"no field {text_field!r}; the record has {present or 'no fields'}")
    text = fields[text_field]
    if not isinstance(text, str):
        raise UnreadableRecord(f"field {text_field!r} is not a string but {_kind(text)}")
    surrogate = lone_surrogate(text)
    if surrogate is not None:
        raise UnreadableRecord(f"field {text_field!r} has half a surrogate pair at character {surrogate}")
    return text


def _kind(value: object) -> str:
    names = {"dict": "an object", "list": "an array", "bool": "a boolean", "str": "a string", "NoneType": "null"}
    return names.get(type(value).__name__, "a number")


def lone_surrogate(text: str) -> int | None:
    """Index of the first character that no UTF-8 can hold, if there is one."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


def _read_text(file: StoredFile, span: UnitSpan) -> Document | BadRecord:
    start, body = span.start_byte, _read(file, span.start_byte, span.end_byte)
    if start == 0 and body.startswith(_BYTE_ORDER_MARK):
        start, body = len(_BYTE_ORDER_MARK), body[len(_BYTE_ORDER_MARK) :]
    place = (span.file_index, span.first_ordinal, start, len(body))
    try:
        return Document(*place, body.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = 1 + count_lines(file, 0, start) + body.count(b"\n", 0, error.start)
        return BadRecord(*place, line, f"invalid UTF-8 at byte {start + error.start}: {error.reason}")


def _read(file: StoredFile, start: int, end: int) -> bytes:
    with open_range(file, start, end) as reader:
        return reader.read(end - start)
