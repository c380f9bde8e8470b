"""A bounded queue between two stages: byte credits in, items out in the order of their numbers.

Producers reserve the bytes of an item before they make it and then fill the slot; consumers take items strictly by
sequence number, whichever producer was quicker. Credits come back when an item is taken. Rules against deadlock: the
item that is next in order is always admitted, and an item larger than the whole queue passes when the queue is empty.
Closing works in both directions: ``finish`` tells consumers where the numbers end, ``cancel`` releases everybody.
Invariants: the output does not depend on timing; the bytes held are at most the limit, one item that is next in order,
and the excess of items over their reservations.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """Counters of a queue.

    Attributes:
        name: The stages that it lies between: ``decode>tokenize``.
        depth: Items waiting now.
        held_bytes: Bytes that are reserved or waiting now.
        limit_bytes: Its credits.
        peak_bytes: The most that was ever held.
        items: Items taken out.
        producer_wait_seconds: Time that producers waited for credits, summed over their threads.
        consumer_wait_seconds: Time that consumers waited for an item, summed over their threads.
    """

    name: str
    depth: int
    held_bytes: int
    limit_bytes: int
    peak_bytes: int
    items: int
    producer_wait_seconds: float
    consumer_wait_seconds: float


class CreditQueue:
    """Items numbered from 0, each put in once, taken out in order.

    Args:
        name: For statistics and messages.
        limit_bytes: Credits, at least 1.
    """

    def __init__(self, name: str, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise ValueError(f"a queue of {limit_bytes} bytes")
        self._name = name
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._reserved: dict[int, int] = {}
        self._items: dict[int, Any] = {}
        self._next = 0
        self._end: int | None = None
        self._cancelled = False
        self._held_bytes = self._peak_bytes = 0
        self._producer_wait_seconds = self._consumer_wait_seconds = 0.0

    def reserve(self, sequence: int, size_bytes: int) -> bool:
        """Wait until an item may be made. False: the queue was cancelled."""
        with self._changed:
            if not self._cancelled and not self._admits(sequence, size_bytes):
                started = time.perf_counter()
                while not self._cancelled and not self._admits(sequence, size_bytes):
                    self._changed.wait()
                self._producer_wait_seconds += time.perf_counter() - started
            if self._cancelled:
                return False
            self._reserved[sequence] = size_bytes
            self._hold(size_bytes)
            return True

    def fill(self, sequence: int, item: Any, size_bytes: int) -> None:
        """Put in a reserved item; its true size replaces the estimate."""
        with self._changed:
            if self._cancelled:
                return
            self._hold(size_bytes - self._reserved[sequence])
            self._reserved[sequence] = size_bytes
            self._items[sequence] = item
            self._changed.notify_all()

    def put(self, sequence: int, item: Any, size_bytes: int) -> bool:
        """Reserve and fill in one. False: the queue was cancelled."""
        if not self.reserve(sequence, size_bytes):
            return False
        self.fill(sequence, item, size_bytes)
        return True

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until ``get`` would return at once. False: it would not yet."""
        with self._changed:
            if self._is_decided():
                return True
            started = time.perf_counter()
            is_decided = self._changed.wait_for(self._is_decided, timeout_seconds)
            self._consumer_wait_seconds += time.perf_counter() - started
            return is_decided

    def get(self) -> tuple[int, Any] | None:
        """Return the next item in order with its number; None when there are no more or the queue is cancelled."""
        with self._changed:
            self.wait()
            if self._cancelled or self._next not in self._items:
                return None
            sequence = self._next
            self._next += 1
            self._hold(-self._reserved.pop(sequence))
            item = self._items.pop(sequence)
            self._changed.notify_all()
            return sequence, item

    @property
    def taken(self) -> int:
        """Items taken out so far."""
        with self._changed:
            return self._next

    def finish(self, end: int) -> None:
        """Mark the end: no item has the number ``end`` or a higher one."""
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def cancel(self) -> None:
        """Drop all items and release everybody who waits."""
        with self._changed:
            self._cancelled = True
            self._items.clear()
            self._changed.notify_all()

    def statistics(self) -> QueueStatistics:
        with self._changed:
            return QueueStatistics(
                self._name,
                len(self._items),
                self._held_bytes,
                self._limit_bytes,
                self._peak_bytes,
                self._next,
                self._producer_wait_seconds,
                self._consumer_wait_seconds,
            )

    def _admits(self, sequence: int, size_bytes: int) -> bool:
        fits = self._held_bytes + size_bytes <= self._limit_bytes
        return fits or sequence == self._next or not self._reserved

    def _is_decided(self) -> bool:
        return self._cancelled or self._next in self._items or self._next == self._end

    def _hold(self, size_bytes: int) -> None:
        self._held_bytes += size_bytes
        self._peak_bytes = max(self._peak_bytes, self._held_bytes)
