"""Work on items by several threads: results come in the order of the items, and little is begun ahead of them.

For work that leaves the interpreter lock alone: hashing, decompressing, reading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    items: Iterable[Item], work: Callable[[Item], Result], threads: int
) -> Generator[tuple[Item, Result], None, None]:
    """Each item with what ``work`` makes of it. At most ``threads`` are worked on at the same time.

    Raises:
        Exception: What ``work`` raises, at its item; nothing further is begun then.
    """
    begun: deque[tuple[Item, Future[Result]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="vorox-parallel")
    try:
        for item in items:
            if len(begun) == threads:
                first, future = begun.popleft()
                yield first, future.result()
            begun.append((item, pool.submit(work, item)))
        while begun:
            first, future = begun.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
