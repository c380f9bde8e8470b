"""Lines and texts: where they may be cut, how many there are, and files that are one document each (txt, .py).

Spans of stored files go in, documents and bad records come out. A text is a document, cut between lines where it is
larger than a unit of work. Invariants: lines are never cut, a text without a line end nearby is cut between two
characters, and the pieces of a compressed file are those of the same file uncompressed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, Document, UnitSpan
from vorox.data.storage import StoredFile
from vorox.data.text.compression import compression_of
from vorox.data.text.content import DEFAULT_LIMITS, Limits, length_bytes, open_content, refuse_foreign
from vorox.data.text.formats.pieces import EndsOfChunk, Piece, cut_at_ends, remembered

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
WINDOW_BYTES = 1 << 20


def records_are_lines(source: SourceConfig) -> bool:
    return source.format == "jsonl"


def boundary_before(source: SourceConfig, file: StoredFile, at: int, low: int) -> int | None:
    """The last place in ``(low, at]`` where the file may be cut; ``None`` if there is none.

    Lines are never cut. A text without a line end nearby is cut between two characters.
    """
    limits = Limits.of(source)
    end = at
    while end > low:
        start = max(low, end - WINDOW_BYTES)
        window = _read(file, start, end, limits)
        newline = window.rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        if not records_are_lines(source):
            return _character_start(file, at, low, limits)
        end = start
    return None


def boundary_after(file: StoredFile, at: int, high: int, limits: Limits = DEFAULT_LIMITS) -> int:
    """The first place at or after ``at`` where a line ends, or ``high``."""
    start = at
    while start < high:
        end = min(high, start + WINDOW_BYTES)
        newline = _read(file, start, end, limits).find(b"\n")
        if newline >= 0:
            return start + newline + 1
        start = end
    return high


def _character_start(file: StoredFile, at: int, low: int, limits: Limits) -> int:
    """A character boundary above ``low``: the last one up to ``at``, else the first one behind it."""
    start = max(low + 1, at - 3)
    size_bytes = length_bytes(file, limits)
    stop = min(at + 4, size_bytes)
    starts = [start + offset for offset, byte in enumerate(_read(file, start, stop, limits)) if byte & 0xC0 != 0x80]
    if stop == size_bytes:
        starts.append(stop)
    before = [place for place in starts if place <= at]
    return before[-1] if before else starts[0] if starts else at


def boundaries(source: SourceConfig, file: StoredFile, start: int, end: int, piece_bytes: int) -> Iterator[int]:
    """Boundaries, ``start`` and ``end`` included, that leave pieces of about ``piece_bytes``."""
    low = start
    yield low
    while end - low > piece_bytes:
        boundary = boundary_before(source, file, low + piece_bytes, low)
        if boundary is None:
            boundary = boundary_after(file, low + piece_bytes, end, Limits.of(source))
        if boundary >= end:
            break
        low = boundary
        yield low
    yield end


def cut_text(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, piece_bytes: int, first_ordinal: int
) -> Iterator[Piece]:
    """Pieces of a text: each is a document."""
    end = length_bytes(file, Limits.of(source)) if end is None else end
    if end > start:
        pairs = itertools.pairwise(boundaries(source, file, start, end, piece_bytes))
        for number, (low, high) in enumerate(pairs):
            yield Piece(low, high, first_ordinal + number, high - low)


def cut_lines(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, piece_bytes: int, first_ordinal: int
) -> Iterator[Piece]:
    """Runs of whole lines. The lines of a piece are counted when the next one is asked for."""
    if compression_of(file.uri) is not None:
        limits = Limits.of(source)
        key = ("lines", file, start, end, piece_bytes, first_ordinal, limits)
        yield from remembered(key, lambda: _cut_forward(file, start, end, piece_bytes, first_ordinal, limits))
        return
    end = file.size_bytes if end is None else end
    ordinal = first_ordinal
    for low, high in itertools.pairwise(boundaries(source, file, start, end, piece_bytes)) if end > start else ():
        yield Piece(low, high, ordinal, high - low)
        if high < end:
            ordinal += count_lines(file, low, high)


def _cut_forward(
    file: StoredFile, start: int, end: int | None, piece_bytes: int, first_ordinal: int, limits: Limits
) -> Iterator[Piece]:
    """The pieces of a compressed file in one pass over it."""
    with open_content(file, start, end, limits) as reader:
        ends = _line_ends(iter(lambda: reader.read(WINDOW_BYTES), b""), start)
        yield from cut_at_ends(ends, start, piece_bytes, first_ordinal)


def _line_ends(chunks: Iterator[bytes], offset: int) -> Iterator[EndsOfChunk]:
    for chunk in chunks:
        ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == 0x0A) + (offset + 1)
        offset += len(chunk)
        yield offset, ends.astype(np.int64, copy=False)


def count_lines(file: StoredFile, start: int, end: int, limits: Limits = DEFAULT_LIMITS) -> int:
    """Line ends in a range."""
    count = 0
    with open_content(file, start, end, limits) as reader:
        while piece := reader.read(WINDOW_BYTES):
            count += piece.count(b"\n")
    return count


def read_lines_of(
    file: StoredFile,
    start: int,
    end: int,
    first_ordinal: int = 0,
    *,
    max_record_bytes: int = 1 << 62,
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[tuple[int, int, int, bytes | None]]:
    """(ordinal, byte offset, length, bytes with the line end) of every line in a range that starts at a line.

    A line that is larger than ``max_record_bytes`` is passed over without being held: its bytes are ``None``.
    """
    offset, ordinal = start, first_ordinal
    with open_content(file, start, end, limits) as reader:
        while line := reader.readline(max_record_bytes + 1):
            size = len(line)
            whole: bytes | None = line
            if size > max_record_bytes:
                whole = None
                while not line.endswith(b"\n") and (line := reader.readline(WINDOW_BYTES)):
                    size += len(line)
            yield ordinal, offset, size, whole
            offset += size
            ordinal += 1


def read_text(source: SourceConfig, file: StoredFile, span: UnitSpan) -> Document | BadRecord:
    """The document that a piece of a text is."""
    limits = Limits.of(source)
    start, body = span.start_byte, _read(file, span.start_byte, span.end_byte, limits)
    if start == 0:
        refuse_foreign(file, body[:16])
        if body.startswith(BYTE_ORDER_MARK):
            start, body = len(BYTE_ORDER_MARK), body[len(BYTE_ORDER_MARK) :]
    place = (span.file_index, span.first_ordinal, start, len(body))
    try:
        return Document(*place, body.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = 1 + count_lines(file, 0, start, limits) + body.count(b"\n", 0, error.start)
        return BadRecord(*place, line, f"invalid UTF-8 at byte {start + error.start}: {error.reason}")


def read_texts(
    source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[Document | BadRecord]:
    """As a sequence of one, or of none where it is not accepted."""
    if accept(span.start_byte):
        yield read_text(source, file, span)


def _read(file: StoredFile, start: int, end: int, limits: Limits) -> bytes:
    with open_content(file, start, end, limits) as reader:
        return reader.read(end - start)
