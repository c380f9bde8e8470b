"""Reading: list, read a range, open for random access; the same for every scheme.

A location or a ``StoredFile`` goes in and is dispatched to the module of its scheme. Remote objects have a sequential
reader with read-ahead and a random-access one. A unit that is fetched in one thread and decoded in another passes its
bytes along in ``PrefetchedRanges``. Invariant: what is read is the version that was listed, under every scheme; a
change raises a ``DataError`` that names the object.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import io
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar, cast

from vorox.core.extensions import is_extension
from vorox.data.storage import local
from vorox.data.storage.background import RANGE_CACHE, RangeFetch
from vorox.data.storage.locations import WRITABLE_SCHEMES, StoredFile, scheme_of
from vorox.data.storage.remote_listing import list_remote
from vorox.data.storage.retry import current_budget, run_in_context
from vorox.data.storage.store import Store

T = TypeVar("T")

_FETCHES_AHEAD = 2
_MIN_RANDOM_READ_BYTES = 1 << 20
_FIRST_FETCH_BYTES = 1 << 18
_OPEN_ENDED_DIVISOR = 8
_SHORT_BYTES = 1 << 22


@functools.cache
def store_of(scheme: str) -> Store:
    """Return the store of a scheme; its module is imported on first use."""
    if scheme in WRITABLE_SCHEMES:
        from vorox.data.storage.cloud import CloudStore

        return CloudStore(scheme)
    if scheme == "hf":
        from vorox.data.storage.hub import HubStore

        return HubStore()
    if is_extension(scheme):
        from vorox.data.storage.user_store import UserStore

        return UserStore(scheme)
    from vorox.data.storage.web import WebStore

    return WebStore()


def list_files(
    location: str, suffixes: tuple[str, ...], *, skip_directories: frozenset[str] = frozenset()
) -> list[StoredFile]:
    """List all files of a location, sorted by uri.

    A file or a glob is used as given; a folder is searched recursively for the suffixes, without names that start with
    a dot.

    Args:
        location: Path, folder, glob (``**`` crosses folders), ``stdlib:``, or any of these under ``s3://``, ``gs://``,
            ``az://``, ``hf://`` and ``https://``.
        suffixes: File name suffixes, in lower case, that count inside a folder.
        skip_directories: Names of directories that are not entered.

    Raises:
        ConfigError: The scheme is unknown, its extra is not installed, or the location contains credentials.
        DataError: The location does not exist, matches nothing, or cannot be read.
    """
    scheme = scheme_of(location)
    if scheme is not None:
        return list_remote(store_of(scheme), location, suffixes, skip_directories)
    return local.list_files(location, suffixes, skip_directories=skip_directories)


@contextlib.contextmanager
def open_range(file: StoredFile, start_byte: int = 0, end_byte: int | None = None) -> Generator[BinaryIO]:
    """Open the bytes ``[start_byte, end_byte)`` of a listed file.

    Raises:
        DataError: The file cannot be read, or it changed since it was listed (checked again when the block ends).
    """
    if file.scheme is None:
        with local.open_range(file, start_byte, end_byte) as reader:
            yield reader
        return
    prefetched = open_prefetched(file, start_byte, file.size_bytes if end_byte is None else end_byte)
    with prefetched or open_remote_range(store_of(file.scheme), file, start_byte, end_byte) as reader:
        yield cast("BinaryIO", reader)


def open_seekable(file: StoredFile) -> BinaryIO:
    """Open a listed file for random access. The caller closes it.

    Raises:
        DataError: The file cannot be read, or it changed since it was listed; its reads raise this too.
    """
    return local.open_seekable(file) if file.scheme is None else open_remote_seekable(store_of(file.scheme), file)


class _RangeReader(io.RawIOBase):
    """Sequential reader of the bytes ``[start, end)``, which fetches a few ranges ahead.

    The first fetch is small, because many readers need only a few bytes, and a second one takes the rest of a file of
    up to 4 MiB. In longer files, without a known end, fetches grow with what was read, so that unused read-ahead stays
    a small fraction of it.
    """

    def __init__(self, store: Store, file: StoredFile, start_byte: int, end_byte: int | None) -> None:
        self._store, self._file = store, file
        self._start_byte = self._requested_byte = start_byte
        self._end_byte = file.size_bytes if end_byte is None else min(end_byte, file.size_bytes)
        self._has_end = end_byte is not None
        self._budget = current_budget()
        self._fetches: deque[tuple[RangeFetch, int, int]] = deque()  # with the part of it that is read
        self._view = memoryview(b"")
        self._fetch_ahead(1)

    def readable(self) -> bool:
        return True

    def _next_fetch_bytes(self) -> int:
        limit, num_read_bytes = self._budget.policy.request_bytes, self._requested_byte - self._start_byte
        if num_read_bytes and (self._has_end or self._end_byte - self._start_byte <= _SHORT_BYTES):
            return limit
        return min(limit, max(_FIRST_FETCH_BYTES, num_read_bytes // _OPEN_ENDED_DIVISOR))

    def _fetch_ahead(self, num_fetches: int) -> None:
        budget = current_budget(self._budget)  # a reader may outlive the unit of work that opened it
        while self._requested_byte < self._end_byte and len(self._fetches) < num_fetches:
            start, end = self._requested_byte, min(self._requested_byte + self._next_fetch_bytes(), self._end_byte)
            fetch = RANGE_CACHE.get(
                self._file, start, start, end,
                lambda first, last: RangeFetch(self._store, self._file, first, last, budget),
            )  # fmt: skip
            self._requested_byte = min(fetch.end_byte, self._end_byte)
            self._fetches.append((fetch, start, self._requested_byte))

    def readinto(self, buffer: Any) -> int:
        if not self._view and self._fetches:
            fetch, start, end = self._fetches.popleft()
            self._view = memoryview(fetch.bytes())[start - fetch.start_byte : end - fetch.start_byte]
            self._fetch_ahead(_FETCHES_AHEAD)
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._view))
        target[:count] = self._view[:count]
        self._view = self._view[count:]
        return count

    def close(self) -> None:
        if not RANGE_CACHE.is_registered(self._file):
            for fetch, _, _ in self._fetches:
                fetch.cancel()
        self._fetches.clear()
        super().close()


def open_remote_range(store: Store, file: StoredFile, start_byte: int, end_byte: int | None) -> BinaryIO:
    """Open a range of a listed object, read ahead."""
    return cast("BinaryIO", io.BufferedReader(_RangeReader(store, file, start_byte, end_byte), 1 << 20))


class _RandomReader(io.RawIOBase):
    """Random access by ranges of at least a mebibyte; the end of the file has a window of its own, for footers."""

    def __init__(self, store: Store, file: StoredFile) -> None:
        self._store, self._file = store, file
        self._budget = current_budget()
        self._position = 0
        self._windows: dict[str, tuple[int, bytearray]] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        end = min(self._position + len(target), self._file.size_bytes)
        count = 0
        while self._position < end:
            start, window = self._window(end - self._position)
            offset = self._position - start
            length = min(len(window) - offset, end - self._position)
            target[count : count + length] = memoryview(window)[offset : offset + length]
            self._position += length
            count += length
        return count

    def _window(self, wanted_bytes: int) -> tuple[int, bytearray]:
        """Return the window that contains the position, fetched if necessary."""
        for start, window in self._windows.values():
            if start <= self._position < start + len(window):
                return start, window
        size = self._file.size_bytes
        if size - self._position <= _MIN_RANDOM_READ_BYTES:
            name, start, end = "end", max(0, size - _MIN_RANDOM_READ_BYTES), size
        else:
            length = min(max(wanted_bytes, _MIN_RANDOM_READ_BYTES), self._budget.policy.request_bytes)
            name, start, end = "middle", self._position, min(self._position + length, size)
            tail = self._windows.get("end")
            if tail is not None:
                end = min(end, tail[0])
        fetch = RANGE_CACHE.get(
            self._file, self._position, start, end,
            lambda first, last: RangeFetch(self._store, self._file, first, last, self._budget),
        )  # fmt: skip
        self._windows[name] = fetch.start_byte, fetch.bytes()
        return self._windows[name]


def open_remote_seekable(store: Store, file: StoredFile) -> BinaryIO:
    """Open a listed object for random access."""
    return cast("BinaryIO", io.BufferedReader(_RandomReader(store, file), 1 << 16))


@dataclass(frozen=True, slots=True)
class PrefetchedRanges:
    """Ranges of files in memory, each as (file, first byte, bytes)."""

    ranges: tuple[tuple[StoredFile, int, bytes], ...]

    @property
    def size_bytes(self) -> int:
        return sum(len(data) for _, _, data in self.ranges)

    def open(self, file: StoredFile, start_byte: int, end_byte: int) -> io.BytesIO | None:
        """Open a range; ``None`` if it is not completely inside one of these."""
        for known, first, data in self.ranges:
            if known == file and first <= start_byte and end_byte <= first + len(data):
                return io.BytesIO(memoryview(data)[start_byte - first : end_byte - first])
        return None


_prefetched: contextvars.ContextVar[PrefetchedRanges | None] = contextvars.ContextVar("prefetched", default=None)


def open_prefetched(file: StoredFile, start_byte: int, end_byte: int) -> io.BytesIO | None:
    """Open a range that was prefetched for the current context; ``None`` if it was not."""
    prefetched = _prefetched.get()
    return None if prefetched is None else prefetched.open(file, start_byte, end_byte)


def read_prefetched(items: Iterator[T], prefetched: PrefetchedRanges) -> Iterator[T]:
    """Yield the items of a generator, which reads from prefetched ranges where they cover what it opens."""
    return run_in_context(items, _prefetched, prefetched)
