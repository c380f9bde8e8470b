"""Giving a generator a context variable of its own, which must not be set for whoever iterates it."""

from __future__ import annotations

import contextvars
from collections.abc import Generator, Iterator
from typing import TypeVar, cast

T = TypeVar("T")
V = TypeVar("V")


def iterated_with(items: Iterator[T], variable: contextvars.ContextVar[V], value: V) -> Iterator[T]:
    """The same items, each made while ``variable`` has ``value``; a generator is also closed so."""
    context = contextvars.copy_context()
    context.run(variable.set, value)
    try:
        while True:
            try:
                item = context.run(next, items)
            except StopIteration:
                return
            yield item
    finally:
        if isinstance(items, Generator):
            context.run(cast("Generator[T]", items).close)
