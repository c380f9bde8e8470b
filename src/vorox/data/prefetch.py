"""Ordered prefetching: threads compute the items of a sequence ahead of their consumer.

A function from an index to an item goes in, an iterator comes out. Threads claim indices in order and the consumer
takes items in order, so neither the number of threads nor the depth changes an item, and an error is raised at the
item that it belongs to. For work that releases the interpreter lock: reading, hashing, decompressing.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import Generic, NoReturn, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_CLOSE_SECONDS = 5.0
"""How long ``close`` waits for a thread that hangs in a read; threads are daemons and keep no process alive."""


class Prefetcher(Generic[Item]):
    """An iterator over the items of consecutive indices. Leave its context to close it.

    Args:
        read: Compute the item of an index; called from several threads.
        num_items: Number of items that can be read by now. Past them, ``read`` is called to raise the reason.
        first: Index of the first item.
        num_threads: Threads that read ahead; 0 reads each item when it is requested.
        depth: Items that threads keep ready or in progress.
        on_close: Called when the consumer is done, before threads are joined.
    """

    def __init__(
        self,
        read: Callable[[int], Item],
        num_items: Callable[[], int],
        *,
        first: int = 0,
        num_threads: int,
        depth: int,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._read, self._num_items, self._on_close = read, num_items, on_close
        self._next_index = self._next_claim = first
        self._depth = depth
        self._ready: dict[int, Callable[[], Item]] = {}  # each returns its item, or raises what reading it raised
        self._closed = False
        self._changed = threading.Condition()
        self.wait_seconds = 0.0
        """Time that the consumer has spent waiting for items."""
        self._threads = [
            threading.Thread(target=self._work, name=f"vorox-prefetch-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queue_depth(self) -> int:
        """Number of items that are ready."""
        return len(self._ready)

    def __iter__(self) -> Prefetcher[Item]:
        return self

    def __next__(self) -> Item:
        """Return the next item.

        Raises:
            Exception: Whatever ``read`` raised for this item, or for an index past the last one. The iterator is
                closed then.
        """
        if self._closed:
            raise RuntimeError("the prefetcher is closed")
        start = time.perf_counter()
        try:
            item = self._take() if self._threads else self._read(self._next_index)
        except BaseException:
            self.close()
            raise
        finally:
            self.wait_seconds += time.perf_counter() - start
        if not self._threads:
            self._next_index += 1
        return item

    def close(self) -> None:
        """Stop reading ahead. Safe to call from any thread, and again."""
        if self._on_close is not None:
            self._on_close()
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Prefetcher[Item]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self) -> Item:
        with self._changed:
            index = self._next_index
            if index >= self._num_items():
                self._read(index)  # raises the reason
                raise AssertionError(f"item {index} is past the last one, yet it was read")
            self._changed.notify_all()  # there may be more items than before
            self._changed.wait_for(lambda: self._closed or index in self._ready)
            if self._closed:
                raise RuntimeError("the prefetcher was closed while an item was awaited")
            result = self._ready.pop(index)
            self._next_index += 1
            self._changed.notify_all()
        return result()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_claim())
                if self._closed:
                    return
                index = self._next_claim
                self._next_claim += 1
            result = _outcome(self._read, index)
            with self._changed:
                if not self._closed:
                    self._ready[index] = result
                    self._changed.notify_all()

    def _may_claim(self) -> bool:
        return self._next_claim < min(self._next_index + self._depth, self._num_items())


def _outcome(read: Callable[[int], Item], index: int) -> Callable[[], Item]:
    """Call ``read``; return what returns its item, or raises its error."""
    try:
        item = read(index)
    except BaseException as error:  # of whatever kind: the consumer must see it
        return functools.partial(_raise, error)
    return lambda: item


def _raise(error: BaseException) -> NoReturn:
    raise error


def map_ordered(
    function: Callable[[Item], Result], items: Iterable[Item], num_threads: int
) -> Generator[tuple[Item, Result], None, None]:
    """Yield each item with the result of ``function``, in order; at most ``num_threads`` run at a time.

    Raises:
        Exception: Whatever ``function`` raises, at its item.
    """
    listed = list(items)
    with Prefetcher(
        lambda index: function(listed[index]), lambda: len(listed), num_threads=num_threads, depth=num_threads
    ) as results:
        for item in listed:
            yield item, next(results)
