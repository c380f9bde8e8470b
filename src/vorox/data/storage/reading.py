"""Reading: a range, or random access; the same for every scheme.

A ``StoredFile`` goes in and is dispatched to the module of its scheme. Remote objects have a sequential reader with
read-ahead and a random-access one. They fetch ranges in the background (``RangeFetch``), which ``RangeCache`` shares
among readers. A unit that is fetched in one thread and decoded in another passes its bytes along in
``PrefetchedRanges``. Invariants: what is read is the version that was listed, under every scheme; a change raises a
``DataError`` that names the object; bytes that arrived before a failure are kept, and no reader requests a range twice.
"""

from __future__ import annotations

import bisect
import contextlib
import contextvars
import functools
import io
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar, cast

from vorox.core.schema.train import OBJECT_STORES
from vorox.core.user_code.extensions import is_extension
from vorox.data.storage import local, requests
from vorox.data.storage.locations import StoredFile
from vorox.data.storage.requests import RetryBudget, current_budget, run_in_context, with_retries
from vorox.data.storage.store import Store

T = TypeVar("T")

_FETCHES_AHEAD = 2
_MIN_RANDOM_READ_BYTES = 1 << 20
_FIRST_FETCH_BYTES = 1 << 18
_OPEN_ENDED_DIVISOR = 8
_SHORT_BYTES = 1 << 22
_CACHE_BYTES = 64 << 20
_SMALL_FILE_BYTES = 1 << 20


@functools.cache
def store_of(scheme: str) -> Store:
    """Return the store of a scheme; its module is imported on first use."""
    if scheme in OBJECT_STORES:
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


class RangeFetch:
    """A range that is being fetched: starts immediately, resumes at the byte after a failure, awaited when read.

    Readers and the cache hold it. When the last releases it, a fetch in progress is cancelled: none is retried after
    its readers were closed.
    """

    def __init__(self, store: Store, file: StoredFile, start_byte: int, end_byte: int, budget: RetryBudget) -> None:
        self.start_byte, self.end_byte = start_byte, end_byte
        self._store, self._file, self._budget = store, file, budget
        self._received = bytearray()
        self._num_holders, self._lock = 1, threading.Lock()  # the caller
        self._future: Future[None] = requests.start(self._fetch())

    async def _fetch(self) -> None:
        async def attempt() -> None:
            position = self.start_byte + len(self._received)
            if position < self.end_byte:
                await self._store.stream_range(
                    self._file, position, self.end_byte, self._received.extend, self._budget.policy
                )

        await with_retries(
            attempt, uri=self._file.uri, budget=self._budget, progress=lambda: len(self._received)
        )  # fmt: skip
        assert len(self._received) == self.end_byte - self.start_byte, "a store sent another length without an error"

    def bytes(self) -> bytearray:
        """Wait for the range and return it."""
        requests.finish(self._future, self._file.uri, self._budget)
        return self._received

    @property
    def has_failed(self) -> bool:
        return self._future.done() and (self._future.cancelled() or self._future.exception() is not None)

    def hold(self) -> None:
        """Count one more holder."""
        with self._lock:
            self._num_holders += 1

    def release(self) -> None:
        """Count one holder less, and cancel the fetch after the last."""
        with self._lock:
            self._num_holders -= 1
            if self._num_holders == 0:
                self._future.cancel()


class RangeCache:
    """The ranges that all readers of registered files share, in memory. Thread-safe.

    Splitting a file into units, counting its records, building the units and rebuilding evicted ones each open readers
    of their own on the same bytes; a reader of a registered file fetches only what no other has. Ranges of a file do
    not overlap, and the cache holds at most ``limit_bytes`` plus one range.

    Args:
        limit_bytes: Total size of all ranges; the least recently used are evicted first.
        small_file_bytes: Files up to this size are fetched whole, in one request.
    """

    def __init__(self, limit_bytes: int = _CACHE_BYTES, small_file_bytes: int = _SMALL_FILE_BYTES) -> None:
        self._limit_bytes, self._small_file_bytes = limit_bytes, small_file_bytes
        self._lock = threading.Lock()
        self._users: Counter[StoredFile] = Counter()
        self._ranges: OrderedDict[tuple[StoredFile, int], RangeFetch] = OrderedDict()
        self._starts: dict[StoredFile, list[int]] = {}
        self._size_bytes = 0

    @contextlib.contextmanager
    def register(self, files: Iterable[StoredFile]) -> Generator[None]:
        """Cache the ranges of some files until the block ends. Blocks may overlap; the last to end drops the ranges."""
        listed = list(files)
        with self._lock:
            self._users.update(listed)
        try:
            yield
        finally:
            with self._lock:
                self._users.subtract(listed)
                for file in listed:
                    if self._users[file] <= 0:
                        del self._users[file]
                        for start_byte in list(self._starts.get(file, ())):
                            self._drop(file, start_byte)

    def get(
        self, file: StoredFile, position: int, start_byte: int, end_byte: int, fetch: Callable[[int, int], RangeFetch]
    ) -> RangeFetch:
        """Return the range that contains a position, held for the caller; start fetching it if it is not cached.

        Args:
            file: The file.
            position: A byte of ``[start_byte, end_byte)``.
            start_byte: Start of the range to fetch, unless a cached range reaches beyond it.
            end_byte: End of the range to fetch, unless a cached range starts before it.
            fetch: Starts fetching a range, without waiting for it.
        """
        with self._lock:
            if file not in self._users:
                return fetch(start_byte, end_byte)
            if file.size_bytes <= self._small_file_bytes:
                start_byte, end_byte = 0, file.size_bytes
            starts = self._starts.setdefault(file, [])
            after = bisect.bisect_right(starts, position)
            if after:
                before = self._ranges[file, starts[after - 1]]
                if before.has_failed:
                    self._drop(file, before.start_byte)
                    after -= 1
                elif position < before.end_byte:
                    self._ranges.move_to_end((file, before.start_byte))
                    before.hold()
                    return before
                else:
                    start_byte = max(start_byte, before.end_byte)
            if after < len(starts):
                end_byte = min(end_byte, starts[after])
            fetched = fetch(start_byte, end_byte)
            fetched.hold()  # by the cache
            self._ranges[file, start_byte] = fetched
            bisect.insort(starts, start_byte)
            self._size_bytes += end_byte - start_byte
            while self._size_bytes > self._limit_bytes and len(self._ranges) > 1:
                self._drop(*next(iter(self._ranges)))
            return fetched

    def _drop(self, file: StoredFile, start_byte: int) -> None:
        dropped = self._ranges.pop((file, start_byte))
        dropped.release()
        self._size_bytes -= dropped.end_byte - dropped.start_byte
        starts = self._starts[file]
        starts.remove(start_byte)
        if not starts and file not in self._users:
            del self._starts[file]


RANGE_CACHE = RangeCache()


def cache_ranges(files: Iterable[StoredFile]) -> AbstractContextManager[None]:
    """Cache what any reader fetches of these files until the block ends, so that it is not fetched again.

    Blocks may overlap. The cache is bounded and shared by the process.
    """
    return RANGE_CACHE.register(files)


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
            fetch, start, end = self._fetches[0]
            self._view = memoryview(fetch.bytes())[start - fetch.start_byte : end - fetch.start_byte]
            self._fetches.popleft()
            fetch.release()
            self._fetch_ahead(_FETCHES_AHEAD)
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._view))
        target[:count] = self._view[:count]
        self._view = self._view[count:]
        return count

    def close(self) -> None:
        while self._fetches:
            self._fetches.popleft()[0].release()
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
        try:
            self._windows[name] = fetch.start_byte, fetch.bytes()
        finally:
            fetch.release()
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
