"""An in-memory cache of fetched ranges that all readers share, and the prefetched ranges of a unit.

Splitting a file into units, counting its records, building the units and rebuilding evicted ones each open readers of
their own on the same bytes. Readers of a registered file take ranges from the cache and fetch only what is missing. A
unit that is prefetched in one thread and decoded in another passes its bytes along in ``PrefetchedRanges``. Invariants:
cached ranges of a file do not overlap, every byte was fetched from the listed version, and the cache holds at most
``limit_bytes`` plus one range.
"""

from __future__ import annotations

import bisect
import contextlib
import contextvars
import io
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from vorox.data.storage.locations import StoredFile
from vorox.data.storage.retry import run_in_context

T = TypeVar("T")

_LIMIT_BYTES = 64 << 20
_SMALL_FILE_BYTES = 1 << 20


class RangeFetch(Protocol):
    """A range of a file that has been fetched or is being fetched."""

    @property
    def start_byte(self) -> int: ...

    @property
    def end_byte(self) -> int: ...

    @property
    def has_failed(self) -> bool: ...


F = TypeVar("F", bound=RangeFetch)


class RangeCache(Generic[F]):
    """The cached ranges of this process, by file. Thread-safe.

    Args:
        limit_bytes: Total size of all ranges; the least recently used are evicted first.
        small_file_bytes: Files up to this size are fetched whole, in one request.
    """

    def __init__(self, limit_bytes: int = _LIMIT_BYTES, small_file_bytes: int = _SMALL_FILE_BYTES) -> None:
        self._limit_bytes, self._small_file_bytes = limit_bytes, small_file_bytes
        self._lock = threading.Lock()
        self._users: Counter[StoredFile] = Counter()
        self._ranges: OrderedDict[tuple[StoredFile, int], F] = OrderedDict()
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

    def is_registered(self, file: StoredFile) -> bool:
        """Return whether ranges of a file are shared, so that no single reader may cancel them."""
        return file in self._users

    def get(self, file: StoredFile, position: int, start_byte: int, end_byte: int, fetch: Callable[[int, int], F]) -> F:
        """Return the range that contains a position; start fetching it if it is not cached.

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
                    return before
                else:
                    start_byte = max(start_byte, before.end_byte)
            if after < len(starts):
                end_byte = min(end_byte, starts[after])
            fetched = fetch(start_byte, end_byte)
            self._ranges[file, start_byte] = fetched
            bisect.insort(starts, start_byte)
            self._size_bytes += end_byte - start_byte
            while self._size_bytes > self._limit_bytes and len(self._ranges) > 1:
                self._drop(*next(iter(self._ranges)))
            return fetched

    def _drop(self, file: StoredFile, start_byte: int) -> None:
        dropped = self._ranges.pop((file, start_byte))
        self._size_bytes -= dropped.end_byte - dropped.start_byte
        starts = self._starts[file]
        starts.remove(start_byte)
        if not starts and file not in self._users:
            del self._starts[file]


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
