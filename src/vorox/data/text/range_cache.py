"""Ranges of remote files that were read while units were cut, kept in memory until the units are built.

Chunks of a file go in as they are read; the next reader of the same bytes gets them from here. Invariant: bounded
memory; the bytes are those of the version that was listed, because every read from a store is checked against it.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator
from typing import Any, BinaryIO, TypeVar, cast

from vorox.data.storage import StoredFile, open_range, scheme_of, shared_reads
from vorox.data.storage.contexts import iterated_with

T = TypeVar("T")

_LIMIT_BYTES = 256 << 20


class RangeCache:
    """Chunks of files by their first byte; the oldest go first.

    Args:
        limit_bytes: Bytes that are kept at most.
    """

    def __init__(self, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._files: OrderedDict[StoredFile, dict[int, bytes]] = OrderedDict()
        self._size_bytes = 0

    def during(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the same items, made while remote ranges are read through this cache."""
        return iterated_with(items, _active, self)

    def add(self, file: StoredFile, start_byte: int, chunk: bytes) -> None:
        """Keep a chunk, in place of older ones if there is no room."""
        with self._lock:
            chunks = self._files.setdefault(file, {})
            self._size_bytes += len(chunk) - len(chunks.pop(start_byte, b""))
            chunks[start_byte] = chunk
            while self._size_bytes > self._limit_bytes:
                oldest, chunks = next(iter(self._files.items()))
                self._size_bytes -= len(chunks.pop(next(iter(chunks))))
                if not chunks:
                    del self._files[oldest]

    def chunk_at(self, file: StoredFile, byte: int) -> memoryview | None:
        """Return the rest of the chunk that holds a byte."""
        with self._lock:
            for start, chunk in self._files.get(file, {}).items():
                if start <= byte < start + len(chunk):
                    return memoryview(chunk)[byte - start :]
        return None

    def range_of(self, file: StoredFile, start_byte: int, end_byte: int) -> bytes | None:
        """Return a range; ``None`` if not all of it is kept."""
        parts: list[memoryview] = []
        while start_byte < end_byte:
            part = self.chunk_at(file, start_byte)
            if part is None:
                return None
            parts.append(part[: end_byte - start_byte])
            start_byte += len(parts[-1])
        return b"".join(parts)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._files.clear()
            self._size_bytes = 0


CUT_RANGES = RangeCache()
"""What this process read while it cut units, and has not built yet."""

_active: contextvars.ContextVar[RangeCache | None] = contextvars.ContextVar("range_cache", default=None)


@contextlib.contextmanager
def open_through_cache(
    file: StoredFile, start_byte: int = 0, end_byte: int | None = None, *, always: bool = False
) -> Generator[BinaryIO]:
    """Read a part of a stored file as ``open_range`` does; of a remote one, what is in the cache comes from there.

    The files of an open stream have their own cache: see ``storage.shared_reads``.

    Args:
        file: The file.
        start_byte: Where the part begins.
        end_byte: Where it ends; ``None`` for the end of the file.
        always: Use ``CUT_RANGES`` also outside of ``during``.
    """
    cache = CUT_RANGES if always else _active.get()
    if cache is None or scheme_of(file.uri) is None or shared_reads.is_registered(file):
        with open_range(file, start_byte, end_byte) as reader:
            yield reader
        return
    with io.BufferedReader(_CachedRange(cache, file, start_byte, end_byte), 1 << 20) as reader:
        yield cast("BinaryIO", reader)


class _CachedRange(io.RawIOBase):
    """A range read from the cache as far as it goes, then from the store."""

    def __init__(self, cache: RangeCache, file: StoredFile, start_byte: int, end_byte: int | None) -> None:
        self._cache, self._file, self._position, self._end_byte = cache, file, start_byte, end_byte
        self._opened = contextlib.ExitStack()
        self._reader: BinaryIO | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        end = self._file.size_bytes if self._end_byte is None else self._end_byte
        size = min(len(buffer), end - self._position)
        if size <= 0:
            return 0
        piece: memoryview | bytes | None = None
        if self._reader is None:
            piece = self._cache.chunk_at(self._file, self._position)
        if piece is None:
            if self._reader is None:
                self._reader = self._opened.enter_context(open_range(self._file, self._position, self._end_byte))
            piece = self._reader.read(size)
            self._cache.add(self._file, self._position, piece)
        piece = piece[:size]
        memoryview(buffer)[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def close(self) -> None:
        self._opened.close()
        super().close()
