"""Lines and texts: where they may be cut, how many there are, and files that are one document each (txt, .py).

Spans of stored files go in, documents and bad records come out. A text is a document, cut between lines where it is
larger than a unit of work. Invariants: lines are never cut, a text without a line end nearby is cut between two
characters, and the pieces of a compressed file are those of the same file uncompressed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, Document, UnitSpan
from vorox.data.storage import StoredFile
from vorox.data.text.file_content import DEFAULT_LIMITS, Limits, detect_damage, length_bytes, open_content
from vorox.data.text.formats.record_blocks import RecordBlock, memoize_blocks, split_content
from vorox.data.text.signatures import SIGNATURE_BYTES, compression_by_suffix, reject_binary

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
WINDOW_BYTES = 1 << 20
_LONGEST_CHARACTER_BYTES = 4


def records_are_lines(source: SourceConfig) -> bool:
    return source.format == "jsonl"


def boundary_before(source: SourceConfig, file: StoredFile, at: int, low: int) -> int | None:
    """The last place in ``(low, at]`` where the file may be cut; ``None`` if there is none.

    Lines are never cut. A text without a line end nearby is cut between two characters.
    """
    limits = Limits.from_source(source)
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
    start = max(low + 1, at - _LONGEST_CHARACTER_BYTES + 1)
    size_bytes = length_bytes(file, limits)
    stop = min(at + _LONGEST_CHARACTER_BYTES, size_bytes)
    return _nearest_character(_read(file, start, stop, limits), start, at, is_end=stop == size_bytes)


def _nearest_character(window: bytes, start: int, at: int, *, is_end: bool) -> int:
    """The last place up to ``at`` in a window where a character begins, else the first one behind it."""
    starts = [start + offset for offset, byte in enumerate(window) if byte & 0xC0 != 0x80]
    if is_end:
        starts.append(start + len(window))
    before = [place for place in starts if place <= at]
    return before[-1] if before else starts[0] if starts else at


def boundaries(source: SourceConfig, file: StoredFile, start: int, end: int, block_bytes: int) -> Iterator[int]:
    """Boundaries, ``start`` and ``end`` included, that leave pieces of about ``block_bytes``."""
    low = start
    yield low
    while end - low > block_bytes:
        boundary = boundary_before(source, file, low + block_bytes, low)
        if boundary is None:
            boundary = boundary_after(file, low + block_bytes, end, Limits.from_source(source))
        if boundary >= end:
            break
        low = boundary
        yield low
    yield end


def split_text(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int
) -> Iterator[RecordBlock]:
    """Pieces of a text: each is a document. Damaged text ends at a line or character, with an empty piece behind it."""
    limits = Limits.from_source(source)
    damage = detect_damage(file, limits) if end is None else None
    if damage is not None:  # what its last bytes would have gone on as is not known
        end = max(start, damage.end_byte - _LONGEST_CHARACTER_BYTES)
        end = boundary_before(source, file, end, start) or start
    if compression_by_suffix(file.uri) is not None:
        key = ("text", file, start, end, block_bytes, first_ordinal, limits)
        pieces = memoize_blocks(key, lambda: _split_text_forward(file, start, end, block_bytes, first_ordinal, limits))
    else:
        pieces = _split_text(source, file, start, file.size_bytes if end is None else end, block_bytes, first_ordinal)
    ordinal = first_ordinal
    for piece in pieces:
        yield piece
        ordinal += 1
    if damage is not None:
        assert end is not None
        yield RecordBlock(end, end, ordinal, 0)


def _split_text(
    source: SourceConfig, file: StoredFile, start: int, end: int, block_bytes: int, first_ordinal: int
) -> Iterator[RecordBlock]:
    pairs = itertools.pairwise(boundaries(source, file, start, end, block_bytes)) if end > start else ()
    for ordinal, (low, high) in enumerate(pairs, first_ordinal):
        yield RecordBlock(low, high, ordinal, high - low)


class _Passing:
    """A content that is read forward, of which a stretch is held."""

    def __init__(self, reader: BinaryIO, start: int) -> None:
        self._reader, self._held, self._base = reader, b"", start
        self.has_ended = False

    @property
    def end(self) -> int:
        """How far it was read."""
        return self._base + len(self._held)

    def hold(self, start: int, end: int) -> None:
        """Read up to ``end`` if there is so much, and let go of what lies before ``start``."""
        while True:
            dropped = max(0, min(start - self._base, len(self._held)))
            self._held, self._base = self._held[dropped:], self._base + dropped
            if self.end >= end or self.has_ended:
                return
            piece = self._reader.read(WINDOW_BYTES)
            self._held += piece
            self.has_ended = not piece

    def boundary(self, at: int, low: int) -> int:
        """What ``boundary_before`` gives for a text, out of what is held."""
        newline = self._held.rfind(b"\n", max(low, at - WINDOW_BYTES) - self._base, at - self._base)
        if newline >= 0:
            return self._base + newline + 1
        start = max(low + 1, at - _LONGEST_CHARACTER_BYTES + 1)
        window = self._held[start - self._base : at + _LONGEST_CHARACTER_BYTES - self._base]
        return _nearest_character(window, start, at, is_end=self.has_ended and start + len(window) == self.end)


def _split_text_forward(
    file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int, limits: Limits
) -> Iterator[RecordBlock]:
    """The pieces of a compressed text in one pass over it: those that looking back from where each ends would give."""
    with open_content(file, start, None, limits) as reader:
        content, low = _Passing(reader, start), start
        for ordinal in itertools.count(first_ordinal):
            at = low + block_bytes
            content.hold(max(low, at - WINDOW_BYTES), at + _LONGEST_CHARACTER_BYTES + 1)
            stop = content.end if end is None else min(end, content.end)
            boundary = content.boundary(at, low) if stop - low > block_bytes else stop
            if boundary >= stop:
                if stop > low:
                    yield RecordBlock(low, stop, ordinal, stop - low)
                return
            yield RecordBlock(low, boundary, ordinal, boundary - low)
            low = boundary


def split_lines(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int
) -> Iterator[RecordBlock]:
    """Yield runs of whole lines, cut in one pass over the content."""
    limits = Limits.from_source(source)
    if end == start:
        return
    key = ("lines", file, start, end, block_bytes, first_ordinal, limits)
    yield from memoize_blocks(
        key, lambda: split_content(file, start, end, block_bytes, first_ordinal, limits, _line_ends)
    )


def _line_ends(chunk: bytes) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.frombuffer(chunk, np.uint8) == 0x0A) + 1


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
    limits = Limits.from_source(source)
    start, body = span.start_byte, _read(file, span.start_byte, span.end_byte, limits)
    if start == 0:
        reject_binary(file, body[:SIGNATURE_BYTES])
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
