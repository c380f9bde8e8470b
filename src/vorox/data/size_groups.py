"""Grouping consecutive items into batches of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batch_by_size(sized: Iterable[tuple[T, int]], limit: int) -> Iterator[list[T]]:
    """Yield consecutive items in batches whose sizes add up to at most ``limit``; a larger item is a batch by itself.

    Args:
        sized: Pairs of (item, size).
        limit: Maximum total size of a batch.
    """
    batch: list[T] = []
    total = 0
    for item, size in sized:
        if batch and total + size > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch
