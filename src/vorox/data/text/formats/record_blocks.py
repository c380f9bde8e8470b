"""Record boundaries, and content split at them into blocks of whole records.

Content, read chunk by chunk, goes in; blocks with the ordinal of their first record, or the records themselves, come
out, in one forward pass and bounded memory. Invariant: a block ends at the last record boundary within its size limit,
so that a file is split the same way whether it can be read backwards or not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from vorox.data.storage import StoredFile
from vorox.data.text.decompression import Limits
from vorox.data.text.file_content import (
    DEFAULT_LIMITS,
    detect_damage,
    is_stored_as_read,
    open_content,
)

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
WINDOW_BYTES = 1 << 20
"""Bytes per read in search of a line end."""

_MAX_MEMOIZED = 1 << 16
_CHUNK_BYTES = 1 << 20

EndsOfChunk = tuple[int, npt.NDArray[np.int64]]
"""(offset at which a chunk of the content ends, offsets at which records end in it)."""

FindEnds = Callable[[bytes], npt.NDArray[np.int64] | list[int]]
"""Returns the offsets in a chunk at which records end; called with consecutive chunks."""


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """A run of whole records; an empty block marks the rest of a file as unreadable.

    Attributes:
        start_byte: Its first byte in the content.
        end_byte: The first byte after it.
        first_ordinal: Ordinal of its first record within the file.
        text_bytes: Approximate bytes of text; unit sizes are measured in these.
    """

    start_byte: int
    end_byte: int
    first_ordinal: int
    text_bytes: int


def read_range(file: StoredFile, start: int, end: int, limits: Limits) -> bytes:
    """Return the bytes of a range of the content."""
    with open_content(file, start, end, limits) as reader:
        return reader.read(end - start)


def line_end_before(file: StoredFile, at: int, low: int, limits: Limits = DEFAULT_LIMITS) -> int | None:
    """Return the last line end in ``(low, at]``; ``None`` if there is none."""
    end = at
    while end > low:
        start = max(low, end - WINDOW_BYTES)
        newline = read_range(file, start, end, limits).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return None


def line_end_after(file: StoredFile, at: int, high: int, limits: Limits = DEFAULT_LIMITS) -> int:
    """Return the first line end at or after ``at``, or ``high``."""
    start = at
    while start < high:
        end = min(high, start + WINDOW_BYTES)
        newline = read_range(file, start, end, limits).find(b"\n")
        if newline >= 0:
            return start + newline + 1
        start = end
    return high


def line_ends(chunk: bytes) -> npt.NDArray[np.int64]:
    """Return the offsets in a chunk at which lines end."""
    return np.flatnonzero(np.frombuffer(chunk, np.uint8) == 0x0A) + 1


def count_lines(file: StoredFile, start: int, end: int, limits: Limits = DEFAULT_LIMITS) -> int:
    """Count the line ends in a range."""
    count = 0
    with open_content(file, start, end, limits) as reader:
        while chunk := reader.read(WINDOW_BYTES):
            count += chunk.count(b"\n")
    return count


def blocks_from_ends(
    chunks: Iterable[EndsOfChunk],
    start_byte: int,
    block_bytes: int,
    first_ordinal: int = 0,
    *,
    is_damaged: bool = False,
) -> Iterator[RecordBlock]:
    """Yield blocks of at most ``block_bytes``, or of a single record that is larger.

    Damaged content ends after its last complete record, with an empty block for the rest.
    """
    low, low_ordinal = start_byte, first_ordinal
    last, last_ordinal = start_byte, first_ordinal  # the last record boundary, and the ordinal after it
    stop, passed = start_byte, first_ordinal
    for stop, ends in chunks:
        while stop - low > block_bytes:
            fitting = int(np.searchsorted(ends, low + block_bytes, side="right"))
            if fitting and int(ends[fitting - 1]) > last:
                last, last_ordinal = int(ends[fitting - 1]), passed + fitting
            elif last <= low:
                if fitting == len(ends):
                    break  # so far a single record, larger than a block
                last, last_ordinal = int(ends[fitting]), passed + fitting + 1
            yield RecordBlock(low, last, low_ordinal, last - low)
            low, low_ordinal = last, last_ordinal
        passed += len(ends)
        if len(ends) and int(ends[-1]) <= low + block_bytes:
            last, last_ordinal = int(ends[-1]), passed
    if is_damaged:
        if last > low:
            yield RecordBlock(low, last, low_ordinal, last - low)
        yield RecordBlock(last, last, last_ordinal, 0)
    elif stop > low:
        yield RecordBlock(low, stop, low_ordinal, stop - low)


def split_content(
    file: StoredFile,
    start: int,
    end: int | None,
    block_bytes: int,
    first_ordinal: int,
    limits: Limits,
    find_ends: FindEnds,
) -> Iterator[RecordBlock]:
    """Split a range of a file's content into blocks in one pass."""
    if end == file.size_bytes and is_stored_as_read(file, limits):
        end = None  # an open end limits the read-ahead, in case the caller wants only the first blocks
    with open_content(file, start, end, limits) as reader:
        is_damaged = end is None and detect_damage(file, limits) is not None
        yield from blocks_from_ends(
            find_record_ends(reader, start, find_ends), start, block_bytes, first_ordinal, is_damaged=is_damaged
        )


def find_record_ends(reader: BinaryIO, start: int, find_ends: FindEnds) -> Iterator[EndsOfChunk]:
    """Yield the record boundaries of content whose first byte has the offset ``start``."""
    for chunk in iter_chunks(reader):
        ends = np.asarray(find_ends(chunk), dtype=np.int64) + start
        start += len(chunk)
        yield start, ends


def iter_chunks(reader: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: reader.read(_CHUNK_BYTES), b"")


_memoized: OrderedDict[Hashable, tuple[RecordBlock, ...]] = OrderedDict()


def memoize_blocks(key: Hashable, split: Callable[[], Iterator[RecordBlock]]) -> Iterator[RecordBlock]:
    """Yield the blocks of ``split``. Caches them after the first complete pass, because both splits need them."""
    known = _memoized.get(key)
    if known is not None:
        yield from known
        return
    blocks: list[RecordBlock] = []
    for block in split():
        blocks.append(block)
        yield block
    _memoized[key] = tuple(blocks)
    while len(_memoized) > _MAX_MEMOIZED:
        _memoized.popitem(last=False)


def iter_records(
    chunks: Iterable[tuple[bytes, npt.NDArray[np.int64] | list[int]]], start_byte: int, max_record_bytes: int
) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield (offset, length, bytes) of every record; the bytes of an oversized record are ``None``.

    Args:
        chunks: The content in chunks, each with the record ends in it, relative to the start of the chunk.
        start_byte: Offset of the first chunk.
        max_record_bytes: Larger records are not buffered.
    """
    offset, size = start_byte, 0
    parts: list[bytes] = []
    for chunk, ends in chunks:
        at = 0
        for end in ends if isinstance(ends, list) else ends.tolist():
            size += end - at
            yield offset, size, b"".join([*parts, chunk[at:end]]) if size <= max_record_bytes else None
            offset, at, size = offset + size, end, 0
            parts.clear()
        size += len(chunk) - at
        if size > max_record_bytes:
            parts.clear()
        elif at < len(chunk):
            parts.append(chunk[at:])
    if size:
        yield offset, size, b"".join(parts) if size <= max_record_bytes else None


def too_large(length_bytes: int, max_record_bytes: int) -> str:
    """Return the reason for quarantining an oversized record."""
    return f"the record has {length_bytes:,} bytes, more than max_record_bytes={max_record_bytes:,}"
