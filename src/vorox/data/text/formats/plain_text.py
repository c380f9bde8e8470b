"""Plain text (txt, .py): a file is a document, split at line ends where it is larger than a unit.

Spans of stored files go in; documents and bad records come out. Invariants: a text is split inside a line only if no
line end is near, and then between two characters; the blocks of a compressed file equal those of the same file
uncompressed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import BinaryIO

from vorox.core.schema.data import SourceConfig
from vorox.data.documents import BadRecord, Document, UnitSpan
from vorox.data.storage import StoredFile
from vorox.data.text.decompression import Limits
from vorox.data.text.file_content import (
    DEFAULT_LIMITS,
    detect_damage,
    is_stored_as_read,
    length_bytes,
    limits_of,
    open_content,
    reject_binary,
)
from vorox.data.text.formats.record_blocks import (
    BYTE_ORDER_MARK,
    WINDOW_BYTES,
    RecordBlock,
    count_lines,
    memoize_blocks,
    read_range,
)

_MAX_CHARACTER_BYTES = 4


def text_boundary_before(
    file: StoredFile, at: int, low: int, limits: Limits = DEFAULT_LIMITS
) -> int | None:  # fmt: skip
    """Return the last line end in ``(low, at]`` within a MiB, else a character boundary; ``None`` if ``at <= low``."""
    if at <= low:
        return None
    start = max(low, at - WINDOW_BYTES)
    newline = read_range(file, start, at, limits).rfind(b"\n")
    return start + newline + 1 if newline >= 0 else _character_start(file, at, low, limits)


def _character_start(file: StoredFile, at: int, low: int, limits: Limits) -> int:
    """Return a character boundary above ``low``: the last one up to ``at``, else the first one after it."""
    start = max(low + 1, at - _MAX_CHARACTER_BYTES + 1)
    size_bytes = length_bytes(file, limits)
    stop = min(at + _MAX_CHARACTER_BYTES, size_bytes)
    return _nearest_character(read_range(file, start, stop, limits), start, at, is_end=stop == size_bytes)


def _nearest_character(window: bytes, start: int, at: int, *, is_end: bool) -> int:
    """Return the last character boundary up to ``at`` in a window, else the first one after it."""
    starts = [start + offset for offset, byte in enumerate(window) if byte & 0xC0 != 0x80]
    if is_end:
        starts.append(start + len(window))
    before = [boundary for boundary in starts if boundary <= at]
    return before[-1] if before else starts[0] if starts else at


def split_text(
    source: SourceConfig, file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int
) -> Iterator[RecordBlock]:
    """Yield the blocks of a text, each a document. Damaged text ends at a line or character, with an empty block."""
    limits = limits_of(source)
    damage = detect_damage(file, limits) if end is None else None
    if damage is not None:  # the last bytes may be part of a truncated character or line
        end = max(start, damage.end_byte - _MAX_CHARACTER_BYTES)
        end = text_boundary_before(file, end, start, limits) or start
    if not is_stored_as_read(file, limits):
        key = ("text", file, start, end, block_bytes, first_ordinal, limits)
        blocks = memoize_blocks(key, lambda: _split_forward(file, start, end, block_bytes, first_ordinal, limits))
    else:
        stop = file.size_bytes if end is None else end
        blocks = _split_uncompressed(file, start, stop, block_bytes, first_ordinal, limits)
    ordinal = first_ordinal
    for block in blocks:
        yield block
        ordinal += 1
    if damage is not None:
        assert end is not None
        yield RecordBlock(end, end, ordinal, 0)


def _split_uncompressed(
    file: StoredFile, start: int, end: int, block_bytes: int, first_ordinal: int, limits: Limits
) -> Iterator[RecordBlock]:
    low, ordinal = start, first_ordinal
    while end - low > block_bytes:
        boundary = text_boundary_before(file, low + block_bytes, low, limits)
        if boundary is None or boundary >= end:
            break
        yield RecordBlock(low, boundary, ordinal, boundary - low)
        low, ordinal = boundary, ordinal + 1
    if end > low:
        yield RecordBlock(low, end, ordinal, end - low)


class _ForwardWindow:
    """Content that is read forward, with a window of it buffered."""

    def __init__(self, reader: BinaryIO, start: int) -> None:
        self._reader, self._buffer, self._base = reader, b"", start
        self.has_ended = False

    @property
    def end(self) -> int:
        """Offset up to which the content has been read."""
        return self._base + len(self._buffer)

    def move(self, start: int, end: int) -> None:
        """Read up to ``end`` or the end of the content, and drop everything before ``start``."""
        while True:
            dropped = max(0, min(start - self._base, len(self._buffer)))
            self._buffer, self._base = self._buffer[dropped:], self._base + dropped
            if self.end >= end or self.has_ended:
                return
            chunk = self._reader.read(WINDOW_BYTES)
            self._buffer += chunk
            self.has_ended = not chunk

    def boundary(self, at: int, low: int) -> int:
        """Return the result of ``text_boundary_before``, from the buffer."""
        newline = self._buffer.rfind(b"\n", max(low, at - WINDOW_BYTES) - self._base, at - self._base)
        if newline >= 0:
            return self._base + newline + 1
        start = max(low + 1, at - _MAX_CHARACTER_BYTES + 1)
        window = self._buffer[start - self._base : at + _MAX_CHARACTER_BYTES - self._base]
        return _nearest_character(window, start, at, is_end=self.has_ended and start + len(window) == self.end)


def _split_forward(
    file: StoredFile, start: int, end: int | None, block_bytes: int, first_ordinal: int, limits: Limits
) -> Iterator[RecordBlock]:
    """Yield the blocks of a compressed text in one pass: the same as ``_split_uncompressed`` yields."""
    with open_content(file, start, None, limits) as reader:
        content, low = _ForwardWindow(reader, start), start
        for ordinal in itertools.count(first_ordinal):
            at = low + block_bytes
            content.move(max(low, at - WINDOW_BYTES), at + _MAX_CHARACTER_BYTES + 1)
            stop = content.end if end is None else min(end, content.end)
            boundary = content.boundary(at, low) if stop - low > block_bytes else stop
            if boundary >= stop:
                if stop > low:
                    yield RecordBlock(low, stop, ordinal, stop - low)
                return
            yield RecordBlock(low, boundary, ordinal, boundary - low)
            low = boundary


def read_records(
    source: SourceConfig, file: StoredFile, span: UnitSpan, accept: Callable[[int], bool]
) -> Iterator[Document | BadRecord]:
    """Yield the document of a block, if ``accept`` is true for its first byte."""
    if accept(span.start_byte):
        yield _read_document(source, file, span)


def _read_document(source: SourceConfig, file: StoredFile, span: UnitSpan) -> Document | BadRecord:
    limits = limits_of(source)
    start, body = span.start_byte, read_range(file, span.start_byte, span.end_byte, limits)
    if start == 0:
        reject_binary(file, body)
        if body.startswith(BYTE_ORDER_MARK):
            start, body = len(BYTE_ORDER_MARK), body[len(BYTE_ORDER_MARK) :]
    position = (span.file_index, span.first_ordinal, start, len(body))
    try:
        return Document(*position, body.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = 1 + count_lines(file, 0, start, limits) + body.count(b"\n", 0, error.start)
        return BadRecord(*position, line, f"invalid UTF-8 at byte {start + error.start}: {error.reason}")
