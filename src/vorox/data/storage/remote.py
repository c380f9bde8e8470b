"""Listings and readers for every remote store, built from its three operations.

A ``Store`` can describe one object, list a prefix, and stream a range in one try. This module builds listings and
readers (sequential with prefetch, and random access) from these three. Invariants: a listing is sorted and omits hidden
names, bytes that arrived before a failure are kept, and no reader requests a range twice.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, Protocol, cast

from vorox.core.errors import DataError
from vorox.data.storage import background
from vorox.data.storage.locations import (
    NoMatchingSuffix,
    StoredFile,
    canonical_uri,
    glob_root,
    has_magic,
    matches_glob,
)
from vorox.data.storage.range_cache import RangeCache
from vorox.data.storage.retry import RetryBudget, RetryingClient, RetryPolicy, current_budget, with_retries

UriFilter = Callable[[str], bool]
"""Returns whether the object of a uri belongs to a listing."""

Receive = Callable[[bytes], None]
"""Called with consecutive pieces of a response body."""

_FETCHES_AHEAD = 2
_MIN_RANDOM_READ_BYTES = 1 << 20
_FIRST_FETCH_BYTES = 1 << 18
_OPEN_ENDED_DIVISOR = 8


class Store(Protocol):
    """What a scheme implements for reading. Uris are canonical; errors are those of ``failures``."""

    async def describe(self, uri: str, client: RetryingClient) -> StoredFile | None:
        """Return one object; ``None`` if no object has exactly this name."""
        ...

    async def list_prefix(self, prefix: str, matches: UriFilter, client: RetryingClient) -> list[StoredFile]:
        """Return every matching object whose uri starts with the prefix."""
        ...

    async def stream_range(
        self, file: StoredFile, start_byte: int, end_byte: int, receive: Receive, policy: RetryPolicy
    ) -> None:
        """Read a range of the listed version, in one try."""
        ...


def list_remote(
    store: Store, location: str, suffixes: tuple[str, ...], skip_directories: frozenset[str]
) -> list[StoredFile]:
    """List all files of a location of a store, sorted by uri: see ``storage.list_files``."""
    budget, location = current_budget(), canonical_uri(location)
    listing = _list(store, location, suffixes, skip_directories, RetryingClient(location, budget))
    return sorted(background.run(listing, location, budget), key=lambda file: file.uri)


async def _list(
    store: Store, location: str, suffixes: tuple[str, ...], skip_directories: frozenset[str], client: RetryingClient
) -> list[StoredFile]:
    if has_magic(location):
        return await _list_glob(store, location, client)
    if not location.endswith("/"):
        single = await store.describe(location, client)
        if single is not None:
            return [single]
    folder = location.rstrip("/") + "/"
    other_suffixes: set[str] = set()

    def matches(uri: str) -> bool:
        *folders, name = uri[len(folder) :].split("/")
        if any(part.startswith(".") for part in (*folders, name)) or not name or skip_directories & set(folders):
            return False
        other_suffixes.add("." + name.rpartition(".")[2] if "." in name else "")
        return name.lower().endswith(suffixes)

    found = await store.list_prefix(folder, matches, client)
    if found:
        return found
    if other_suffixes:
        raise NoMatchingSuffix(location, suffixes, other_suffixes)
    raise DataError(
        "No object has this name, and no folder of this name contains any", where=location,
        hint="check the uri, and that the bucket or repository exists and is readable",
    )  # fmt: skip


async def _list_glob(store: Store, location: str, client: RetryingClient) -> list[StoredFile]:
    folder = glob_root(location) + "/"
    pattern = location[len(folder) :]
    literal = pattern[: min(pattern.find(sign) for sign in "*?[" if sign in pattern)]
    found = await store.list_prefix(
        folder + literal, lambda uri: matches_glob(uri[len(folder) :], pattern), client
    )  # fmt: skip
    if not found:
        raise DataError(
            "The pattern matches no object", where=location,
            hint="check the pattern: * stays within a folder, ** crosses folders",
        )  # fmt: skip
    return found


class _RangeFetch:
    """A range that is being fetched: starts immediately, resumes at the byte after a failure, awaited when read."""

    def __init__(self, store: Store, file: StoredFile, start_byte: int, end_byte: int, budget: RetryBudget) -> None:
        self.start_byte, self.end_byte = start_byte, end_byte
        self._store, self._file, self._budget = store, file, budget
        self._received = bytearray()
        self._future: Future[None] = background.start(self._fetch())

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
        background.finish(self._future, self._file.uri, self._budget)
        return self._received

    @property
    def has_failed(self) -> bool:
        return self._future.done() and (self._future.cancelled() or self._future.exception() is not None)

    def cancel(self) -> None:
        self._future.cancel()


RANGE_CACHE: RangeCache[_RangeFetch] = RangeCache()


def cache_ranges(files: Iterable[StoredFile]) -> AbstractContextManager[None]:
    """Cache what any reader fetches of these files until the block ends, so that it is not fetched again.

    Blocks may overlap. The cache is bounded and shared by the process: see ``range_cache``.
    """
    return RANGE_CACHE.register(files)


class _RangeReader(io.RawIOBase):
    """Sequential reader of the bytes ``[start, end)``, which fetches a few ranges ahead.

    The first fetch is small, because many readers need only a few bytes. Without a known end, fetches grow with what
    was read, so that unused read-ahead stays a small fraction of it.
    """

    def __init__(self, store: Store, file: StoredFile, start_byte: int, end_byte: int | None) -> None:
        self._store, self._file = store, file
        self._start_byte = self._requested_byte = start_byte
        self._end_byte = file.size_bytes if end_byte is None else end_byte
        self._has_end = end_byte is not None
        self._budget = current_budget()
        self._fetches: deque[tuple[_RangeFetch, int, int]] = deque()  # with the part of it that is read
        self._view = memoryview(b"")
        self._fetch_ahead(1)

    def readable(self) -> bool:
        return True

    def _next_fetch_bytes(self) -> int:
        limit = self._budget.policy.request_bytes
        if self._requested_byte == self._start_byte or not self._has_end:
            return min(limit, max(_FIRST_FETCH_BYTES, (self._requested_byte - self._start_byte) // _OPEN_ENDED_DIVISOR))
        return limit

    def _fetch_ahead(self, num_fetches: int) -> None:
        budget = current_budget(self._budget)  # a reader may outlive the unit of work that opened it
        while self._requested_byte < self._end_byte and len(self._fetches) < num_fetches:
            start, end = self._requested_byte, min(self._requested_byte + self._next_fetch_bytes(), self._end_byte)
            fetch = RANGE_CACHE.get(
                self._file, start, start, end,
                lambda first, last: _RangeFetch(self._store, self._file, first, last, budget),
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
            lambda first, last: _RangeFetch(self._store, self._file, first, last, self._budget),
        )  # fmt: skip
        self._windows[name] = fetch.start_byte, fetch.bytes()
        return self._windows[name]


def open_remote_seekable(store: Store, file: StoredFile) -> BinaryIO:
    """Open a listed object for random access."""
    return cast("BinaryIO", io.BufferedReader(_RandomReader(store, file), 1 << 16))
