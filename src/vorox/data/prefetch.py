"""Ordered prefetching: threads compute the items of a sequence ahead of the consumer.

A function from an index to an item goes in, an iterator comes out. Threads claim indices in order and the consumer
receives items in order, so the result does not depend on the number of threads or the depth, and an error is raised
at the item that caused it. For work that releases the GIL: reading, hashing, decompressing.
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
"""How long ``close`` waits for a thread that hangs in a read. Threads are daemons and do not keep a process alive."""


class Prefetcher(Generic[Item]):
    """An iterator over the items of consecutive indices, and a context manager that closes it.

    Args:
        read: Computes the item of an index; called from several threads.
        num_items: Returns the number of items that can be read now. Past the end, ``read`` is called to raise the
            reason.
        first: Index of the first item.
        num_threads: Prefetching threads; 0 reads each item on request.
        depth: Maximum number of items that are ready or in progress.
        on_close: Called by ``close`` before the threads are joined.
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
        self._ready: dict[int, Callable[[], Item]] = {}  # each returns its item, or raises the error of reading it
        self._closed = False
        self._changed = threading.Condition()
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
            Exception: The error that ``read`` raised for this item, or for the index past the end. It closes the
                iterator.
        """
        result = self._await_next()
        with self._changed:
            self._ready.pop(self._next_index, None)
            self._next_index += 1
            self._changed.notify_all()
        try:
            return result()
        except BaseException:
            self.close()
            raise

    def next_error(self) -> Exception | None:
        """Wait until the next item is ready; return the error that ``next`` will raise for it, if any."""
        try:
            self.peek()
        except Exception as error:
            return error
        return None

    def peek(self) -> Item:
        """Return the next item, which stays the next one; raises as ``next``, without closing the iterator."""
        return self._await_next()()

    def close(self) -> None:
        """Stop prefetching. Thread-safe and idempotent."""
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

    def _await_next(self) -> Callable[[], Item]:
        """Wait until the next item is ready; return a function that returns it or raises its error."""
        if self._closed:
            raise RuntimeError("The prefetcher is closed")
        index = self._next_index
        try:
            if not self._threads:
                if index not in self._ready:
                    self._ready[index] = _outcome(self._read, index)
                return self._ready[index]
            if index >= self._num_items():
                return _outcome(self._read_past_end, index)
            with self._changed:
                self._changed.notify_all()  # the number of items may have changed
                self._changed.wait_for(lambda: self._closed or index in self._ready)
                if self._closed:
                    raise RuntimeError("The prefetcher was closed while an item was awaited")
                return self._ready[index]
        except BaseException:
            self.close()
            raise

    def _read_past_end(self, index: int) -> Item:
        self._read(index)  # raises the reason
        raise AssertionError(f"Item {index} is past the end, but reading it did not fail")

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
    """Call ``read``; return a function that returns its item or raises its error."""
    try:
        item = read(index)
    except BaseException as error:  # the consumer raises it
        return functools.partial(_raise, error)
    return lambda: item


def _raise(error: BaseException) -> NoReturn:
    raise error


def map_ordered(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    num_threads: int,
    *,
    on_close: Callable[[], None] | None = None,
) -> Generator[tuple[Item, Result], None, None]:
    """Yield each item with the result of ``function``, in order, computed by ``num_threads`` threads.

    ``on_close`` is called when no further result is needed, so that ``function`` may return early.

    Raises:
        Exception: The error of ``function``, at its item.
    """
    listed = list(items)
    with Prefetcher(
        lambda index: function(listed[index]),
        lambda: len(listed),
        num_threads=num_threads,
        depth=num_threads,
        on_close=on_close,
    ) as results:
        for item in listed:
            yield item, next(results)
