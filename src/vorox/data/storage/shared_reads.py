"""Shared reads: the recent pieces of registered files stay in memory, so that no byte is fetched twice.

A stream cuts a file into units, counts their records, builds them, and rebuilds what was evicted; each of these opens
its own readers on the same bytes within a short time. The files of a stream are registered while it is open. Readers of
a registered file take pieces from here and fetch what is missing. Invariants: pieces of a file never overlap, each was
fetched from the version that was listed, and together they take at most ``limit_bytes`` and one piece.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable
from typing import Generic, Protocol, TypeVar

from vorox.data.storage.locations import StoredFile

_LIMIT_BYTES = 64 << 20
_SMALL_FILE_BYTES = 1 << 20


class Piece(Protocol):
    """A range of a file that has been fetched or is being fetched."""

    @property
    def start_byte(self) -> int: ...

    @property
    def end_byte(self) -> int: ...

    @property
    def has_failed(self) -> bool: ...


P = TypeVar("P", bound=Piece)


class SharedReads(Generic[P]):
    """The pieces of one process, by file. Safe to use from any thread.

    Args:
        limit_bytes: Size of all pieces together; the least recently used go first.
        small_file_bytes: Files up to this size are fetched whole, in one request.
    """

    def __init__(self, limit_bytes: int = _LIMIT_BYTES, small_file_bytes: int = _SMALL_FILE_BYTES) -> None:
        self._limit_bytes, self._small_file_bytes = limit_bytes, small_file_bytes
        self._lock = threading.Lock()
        self._users: Counter[StoredFile] = Counter()
        self._pieces: OrderedDict[tuple[StoredFile, int], P] = OrderedDict()
        self._starts: dict[StoredFile, list[int]] = {}
        self._held_bytes = 0

    @contextlib.contextmanager
    def registered(self, files: Iterable[StoredFile]) -> Generator[None]:
        """Share the reads of some files. Contexts may overlap; the last one to end drops the pieces."""
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
        """Whether pieces of a file are shared, and so must not be cancelled by one of their readers."""
        return file in self._users

    def piece(
        self, file: StoredFile, position: int, start_byte: int, end_byte: int, fetch: Callable[[int, int], P]
    ) -> P:
        """Return the piece that holds a position; fetch one if there is none.

        Args:
            file: The file.
            position: A byte of ``[start_byte, end_byte)``.
            start_byte: Where a fetched piece of a larger file starts, unless another piece reaches further.
            end_byte: Where it ends, unless another one starts before.
            fetch: Start to fetch a range, without waiting for it.
        """
        with self._lock:
            if file not in self._users:
                return fetch(start_byte, end_byte)
            if file.size_bytes <= self._small_file_bytes:
                start_byte, end_byte = 0, file.size_bytes
            starts = self._starts.setdefault(file, [])
            after = bisect.bisect_right(starts, position)
            if after:
                before = self._pieces[file, starts[after - 1]]
                if before.has_failed:
                    self._drop(file, before.start_byte)
                    after -= 1
                elif position < before.end_byte:
                    self._pieces.move_to_end((file, before.start_byte))
                    return before
                else:
                    start_byte = max(start_byte, before.end_byte)
            if after < len(starts):
                end_byte = min(end_byte, starts[after])
            piece = fetch(start_byte, end_byte)
            self._pieces[file, start_byte] = piece
            bisect.insort(starts, start_byte)
            self._held_bytes += end_byte - start_byte
            while self._held_bytes > self._limit_bytes and len(self._pieces) > 1:
                self._drop(*next(iter(self._pieces)))
            return piece

    def _drop(self, file: StoredFile, start_byte: int) -> None:
        piece = self._pieces.pop((file, start_byte))
        self._held_bytes -= piece.end_byte - piece.start_byte
        starts = self._starts[file]
        starts.remove(start_byte)
        if not starts and file not in self._users:
            del self._starts[file]
