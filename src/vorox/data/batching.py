"""Runs of consecutive items of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batch_by_size(sized: Iterable[tuple[T, int]], limit: int) -> Iterator[list[T]]:
    """Cut (item, size) in order into groups of at most ``limit`` in all; a larger item is a group of its own."""
    group: list[T] = []
    total = 0
    for item, size in sized:
        if group and total + size > limit:
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group
