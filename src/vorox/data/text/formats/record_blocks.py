"""Cutting a content at the ends of its records, in one pass forward and in bounded memory.

Where records end goes in, chunk by chunk; pieces with the ordinal of their first record, or the records themselves,
come out. Invariant: the pieces are those that going back from every multiple of the size to the last end of a record
would give, so that a file is cut alike whether it can be read backwards or not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from vorox.data.storage import StoredFile
from vorox.data.text.file_content import Limits, detect_damage, open_content
from vorox.data.text.signatures import compression_by_suffix

_MOST_CUTS_REMEMBERED = 1 << 16
_CHUNK_BYTES = 1 << 20

EndsOfChunk = tuple[int, npt.NDArray[np.int64]]
"""(where a chunk of the content ends, where records end in it)."""

FindEnds = Callable[[bytes], npt.NDArray[np.int64] | list[int]]
"""Returns the offsets in a chunk behind which records end; called with chunk after chunk."""


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """A run of whole records; an empty one says that the rest of the file cannot be read.

    Attributes:
        start_byte: Its first byte in the content.
        end_byte: The first one behind it.
        first_ordinal: Ordinal of its first record within the file.
        text_bytes: Text in it, about: what the size of units is counted in.
    """

    start_byte: int
    end_byte: int
    first_ordinal: int
    text_bytes: int


def blocks_from_ends(
    chunks: Iterable[EndsOfChunk],
    start_byte: int,
    block_bytes: int,
    first_ordinal: int = 0,
    *,
    is_damaged: bool = False,
) -> Iterator[RecordBlock]:
    """Pieces of at most ``block_bytes``, larger only where a single record is.

    Behind the last record that is whole, damaged content has an empty piece: what follows is put aside.
    """
    low, low_ordinal = start_byte, first_ordinal
    last, last_ordinal = start_byte, first_ordinal  # the last end of a record, and the ordinal behind it
    stop, passed = start_byte, first_ordinal
    for stop, ends in chunks:
        while stop - low > block_bytes:
            fitting = int(np.searchsorted(ends, low + block_bytes, side="right"))
            if fitting and int(ends[fitting - 1]) > last:
                last, last_ordinal = int(ends[fitting - 1]), passed + fitting
            elif last <= low:
                if fitting == len(ends):
                    break  # one record, larger than a piece so far
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
    """Cut a range of a content in one pass, at the ends of records."""
    if end == file.size_bytes and compression_by_suffix(file.uri) is None:
        end = None  # little is read ahead of an open end, in case that few pieces are wanted
    with open_content(file, start, end, limits) as reader:
        is_damaged = end is None and detect_damage(file, limits) is not None
        yield from blocks_from_ends(
            find_record_ends(reader, start, find_ends), start, block_bytes, first_ordinal, is_damaged=is_damaged
        )


def find_record_ends(reader: BinaryIO, start: int, find_ends: FindEnds) -> Iterator[EndsOfChunk]:
    """Yield where records end in a content that is read from ``start`` on."""
    for chunk in iter_chunks(reader):
        ends = np.asarray(find_ends(chunk), dtype=np.int64) + start
        start += len(chunk)
        yield start, ends


def iter_chunks(reader: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: reader.read(_CHUNK_BYTES), b"")


_memoized: OrderedDict[Hashable, tuple[RecordBlock, ...]] = OrderedDict()


def memoize_blocks(key: Hashable, make: Callable[[], Iterator[RecordBlock]]) -> Iterator[RecordBlock]:
    """The pieces that ``make`` gives; once it gave all, they are known without it. Both splits ask for the same."""
    known = _memoized.get(key)
    if known is not None:
        yield from known
        return
    pieces: list[RecordBlock] = []
    for piece in make():
        pieces.append(piece)
        yield piece
    _memoized[key] = tuple(pieces)
    while len(_memoized) > _MOST_CUTS_REMEMBERED:
        _memoized.popitem(last=False)


def iter_records(
    chunks: Iterable[tuple[bytes, npt.NDArray[np.int64] | list[int]]], start_byte: int, max_record_bytes: int
) -> Iterator[tuple[int, int, bytes | None]]:
    """(offset, length, bytes) of every record; no bytes of one that is larger than ``max_record_bytes``.

    Args:
        chunks: The content in chunks, each with where records end in it, counted from the chunk's start.
        start_byte: Where the first chunk starts.
        max_record_bytes: No more of a record is held.
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
    return f"the record has {length_bytes:,} bytes, more than max_record_bytes={max_record_bytes:,}"
