"""A bounded queue between two stages, with byte credits and output in sequence order.

Producers reserve the bytes of an item before they compute it, then fill the slot. Consumers receive items strictly by
sequence number, independent of which producer finishes first; that returns the credits. To avoid deadlock, the next
item in order is always admitted, and an item larger than the whole queue passes when the queue is empty. ``finish``
marks the end for consumers; ``cancel`` releases all threads. Invariants: the output does not depend on timing; the
bytes held are at most the limit, plus the next item in order, plus the excess of items over their reservations.
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
        name: The stages before and after it: ``decode>tokenize``.
        depth: Items waiting now.
        held_bytes: Bytes reserved or waiting now.
        limit_bytes: Capacity in bytes.
        peak_bytes: Maximum of ``held_bytes`` so far.
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
    """A queue of items numbered from 0, each put in once and taken out in order.

    Args:
        name: For statistics and messages.
        limit_bytes: Capacity in bytes, at least 1.
    """

    def __init__(self, name: str, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise ValueError(f"limit_bytes is {limit_bytes}, but must be at least 1")
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
        """Wait until there is room for an item. False: the queue was cancelled."""
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
        """Put a reserved item into its slot; its actual size replaces the estimate."""
        with self._changed:
            if self._cancelled:
                return
            self._hold(size_bytes - self._reserved[sequence])
            self._reserved[sequence] = size_bytes
            self._items[sequence] = item
            self._changed.notify_all()

    def put(self, sequence: int, item: Any, size_bytes: int) -> bool:
        """Reserve and fill a slot. False: the queue was cancelled."""
        if not self.reserve(sequence, size_bytes):
            return False
        self.fill(sequence, item, size_bytes)
        return True

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until ``get`` would not block. False: timeout."""
        with self._changed:
            if self._is_ready():
                return True
            started = time.perf_counter()
            is_ready = self._changed.wait_for(self._is_ready, timeout_seconds)
            self._consumer_wait_seconds += time.perf_counter() - started
            return is_ready

    def get(self) -> tuple[int, Any] | None:
        """Return the next item in order with its number; None at the end or if the queue is cancelled."""
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
    def num_taken(self) -> int:
        """Items taken out so far."""
        with self._changed:
            return self._next

    def finish(self, end: int) -> None:
        """Mark the end: all item numbers are below ``end``."""
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def cancel(self) -> None:
        """Drop all items and release all waiting threads."""
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

    def _is_ready(self) -> bool:
        return self._cancelled or self._next in self._items or self._next == self._end

    def _hold(self, size_bytes: int) -> None:
        self._held_bytes += size_bytes
        self._peak_bytes = max(self._peak_bytes, self._held_bytes)
