"""Requests to stores in the background: the event loop of this process, and the ranges it fetches.

A coroutine goes in; its result, or the ``DataError`` that ended it, is returned in the calling thread. A ``Store``
streams a range of one object in one try; ``RangeFetch`` adds retries, and ``RangeCache`` shares fetches among readers.
Invariants: one loop per process, created on first use; a forked child gets its own loop and clients and never closes
its parent's; every byte is of the listed version, bytes that arrived before a failure are kept, and no reader requests
a range twice.
"""

from __future__ import annotations

import asyncio
import atexit
import bisect
import contextlib
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from vorox.data.storage.locations import StoredFile
from vorox.data.storage.retry import RetryBudget, with_retries
from vorox.data.storage.store import Store

T = TypeVar("T")

Close = Callable[[], Awaitable[None]]

_CACHE_BYTES = 64 << 20
_SMALL_FILE_BYTES = 1 << 20


class _Background:
    def __init__(self) -> None:
        self.process = os.getpid()
        self.clients: dict[str, tuple[Any, Close]] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="vorox-storage", daemon=True).start()


_lock = threading.Lock()
_instances: list[_Background] = []
"""The last one belongs to this process. Earlier ones were inherited by fork and stay referenced, because collecting
them would close their selector and remove the parent's sockets from the epoll set that both processes share."""


def _background() -> _Background:
    with _lock:
        if not _instances or _instances[-1].process != os.getpid():
            _instances.append(_Background())
            atexit.register(_close_at_exit, os.getpid())
        return _instances[-1]


def _reset_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_lock)


def _close_at_exit(process: int) -> None:
    if process == os.getpid():
        with contextlib.suppress(Exception):
            close_connections()


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the background loop of this process."""
    return _background().loop


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Schedule a coroutine on the background loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop())


def finish(future: Future[T], uri: str, budget: RetryBudget) -> T:
    """Wait for scheduled work and return its result; report a stall once it is late."""
    try:
        with contextlib.suppress(TimeoutError):
            return future.result(timeout=budget.policy.late_seconds)
        if future.done():
            return future.result()
        with budget.tracker(uri) as stall:
            stall.report(f"no response for {budget.policy.late_seconds:g} s", failed=False)
            return future.result()
    except BaseException:
        future.cancel()
        raise


def run(coroutine: Coroutine[Any, Any, T], uri: str, budget: RetryBudget) -> T:
    """Run a coroutine on the background loop and return its result."""
    return finish(start(coroutine), uri, budget)


async def client(name: str, create: Callable[[], Awaitable[tuple[T, Close]]]) -> T:
    """Return this process's client of a name, created on first use.

    Args:
        name: Its name.
        create: Returns a new client and the function that closes it.
    """
    clients = _background().clients
    if name not in clients:
        created, close = await create()
        if name in clients:  # another task created one meanwhile
            await close()
        else:
            clients[name] = created, close
    return clients[name][0]


async def drop_client(name: str) -> None:
    """Close a client, if it exists. The next request creates a new one from the environment of that moment."""
    _, close = _background().clients.pop(name, (None, None))
    if close is not None:
        await close()


def close_connections() -> None:
    """Close every connection of this process. Later requests reconnect, with the environment of that moment."""
    if not _instances or _instances[-1].process != os.getpid():
        return

    async def close() -> None:
        for name in list(_instances[-1].clients):
            await drop_client(name)

    start(close()).result(timeout=10)


class RangeFetch:
    """A range that is being fetched: starts immediately, resumes at the byte after a failure, awaited when read."""

    def __init__(self, store: Store, file: StoredFile, start_byte: int, end_byte: int, budget: RetryBudget) -> None:
        self.start_byte, self.end_byte = start_byte, end_byte
        self._store, self._file, self._budget = store, file, budget
        self._received = bytearray()
        self._future: Future[None] = start(self._fetch())

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
        finish(self._future, self._file.uri, self._budget)
        return self._received

    @property
    def has_failed(self) -> bool:
        return self._future.done() and (self._future.cancelled() or self._future.exception() is not None)

    def cancel(self) -> None:
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

    def is_registered(self, file: StoredFile) -> bool:
        """Return whether ranges of a file are shared, so that no single reader may cancel them."""
        return file in self._users

    def get(
        self, file: StoredFile, position: int, start_byte: int, end_byte: int, fetch: Callable[[int, int], RangeFetch]
    ) -> RangeFetch:
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


RANGE_CACHE = RangeCache()


def cache_ranges(files: Iterable[StoredFile]) -> AbstractContextManager[None]:
    """Cache what any reader fetches of these files until the block ends, so that it is not fetched again.

    Blocks may overlap. The cache is bounded and shared by the process.
    """
    return RANGE_CACHE.register(files)
