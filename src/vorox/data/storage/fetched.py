"""Ranges that were read ahead: they are handed out instead of being read again.

A unit's ranges are fetched in one thread and decoded in another. What decodes asks for ranges as if nothing had been
fetched; those that lie inside of what was come out of memory, all others from the store. Invariant: the bytes are the
same either way, because what was fetched was checked against its listing like every read.
"""

from __future__ import annotations

import contextvars
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from vorox.data.storage.contexts import iterated_with
from vorox.data.storage.locations import StoredFile

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fetched:
    """Pieces of files in memory: each with its file and its first byte."""

    pieces: tuple[tuple[StoredFile, int, bytes], ...]

    @property
    def size_bytes(self) -> int:
        return sum(len(piece) for _, _, piece in self.pieces)

    def reader(self, file: StoredFile, start_byte: int, end_byte: int) -> io.BytesIO | None:
        """The range, if a piece has all of it."""
        for held, first, piece in self.pieces:
            if held == file and first <= start_byte and end_byte <= first + len(piece):
                return io.BytesIO(memoryview(piece)[start_byte - first : end_byte - first])
        return None


_held: contextvars.ContextVar[Fetched | None] = contextvars.ContextVar("fetched", default=None)


def held_range(file: StoredFile, start_byte: int, end_byte: int) -> io.BytesIO | None:
    """A range out of what was read ahead for whoever asks, if it is there."""
    fetched = _held.get()
    return None if fetched is None else fetched.reader(file, start_byte, end_byte)


def reading_from(items: Iterator[T], fetched: Fetched) -> Iterator[T]:
    """The same items, made with ``fetched`` at hand: for generators, which must not set it for whoever iterates."""
    return iterated_with(items, _held, fetched)
