"""Files of stores behind the network: what every store has in common.

A store can tell about one object, search below a prefix, and try to send a range. Out of these three come listings
(folders, patterns, single objects) and readers (a range read ahead by pieces, and random access). Invariants: a
listing is sorted, hidden names are left out as on a disk, every byte that arrived is kept through failures, and no
piece is asked for twice.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, BinaryIO, Protocol, TypeVar, cast

from vorox.core.errors import DataError
from vorox.data.storage import background
from vorox.data.storage.locations import NoSuchEnding, StoredFile, absolute, fixed_part, has_magic, matches
from vorox.data.storage.retry import RetryBudget, RetryPolicy, current_budget, with_retries
from vorox.data.storage.shared_reads import SharedReads

T = TypeVar("T")

Keep = Callable[[str], bool]
"""Whether an object of this uri is wanted."""

Receive = Callable[[bytes], None]
"""Takes the next bytes of a body."""

_PIECES_AHEAD = 2
_LEAST_RANDOM_BYTES = 1 << 20
_FIRST_PIECE_BYTES = 1 << 18
_OPEN_SHARE = 8


class Asker:
    """Puts questions to a store until they are answered, out of one budget."""

    def __init__(self, uri: str, budget: RetryBudget) -> None:
        self.uri, self.budget = uri, budget

    @property
    def policy(self) -> RetryPolicy:
        return self.budget.policy

    async def __call__(self, attempt: Callable[[], Awaitable[T]], *, has_deadline: bool = True) -> T:
        return await with_retries(attempt, uri=self.uri, budget=self.budget, has_deadline=has_deadline)


class Store(Protocol):
    """What a scheme must be able to do. Uris are canonical; failures are those of ``failures``."""

    async def describe(self, uri: str, ask: Asker) -> StoredFile | None:
        """One object; ``None`` if there is none of exactly this name."""
        ...

    async def search(self, prefix: str, keep: Keep, ask: Asker) -> list[StoredFile]:
        """Every wanted object whose uri begins with the prefix."""
        ...

    async def send(
        self, file: StoredFile, start_byte: int, end_byte: int, receive: Receive, policy: RetryPolicy
    ) -> None:
        """One try of a range of the version that was listed."""
        ...


def list_remote(
    store: Store, location: str, suffixes: tuple[str, ...], skip_directories: frozenset[str]
) -> list[StoredFile]:
    """All files of a location of a store, sorted by uri: see ``storage.list_files``."""
    budget = current_budget()
    ask = Asker(absolute(location), budget)
    found = background.run(_list(store, absolute(location), suffixes, skip_directories, ask), ask.uri, budget)
    return sorted(found, key=lambda file: file.uri)


async def _list(
    store: Store, location: str, suffixes: tuple[str, ...], skip_directories: frozenset[str], ask: Asker
) -> list[StoredFile]:
    if has_magic(location):
        return await _list_pattern(store, location, ask)
    if not location.endswith("/"):
        single = await store.describe(location, ask)
        if single is not None:
            return [single]
    folder = location.rstrip("/") + "/"
    endings: set[str] = set()

    def keep(uri: str) -> bool:
        *folders, name = uri[len(folder) :].split("/")
        if any(part.startswith(".") for part in (*folders, name)) or not name or skip_directories & set(folders):
            return False
        endings.add("." + name.rpartition(".")[2] if "." in name else "")
        return name.lower().endswith(suffixes)

    found = await store.search(folder, keep, ask)
    if found:
        return found
    if endings:
        raise NoSuchEnding(location, suffixes, endings)
    raise DataError(
        "there is no such object, and no folder of this name holds any", where=location,
        hint="check the uri: the bucket or repository exists and can be read",
    )  # fmt: skip


async def _list_pattern(store: Store, location: str, ask: Asker) -> list[StoredFile]:
    folder = fixed_part(location) + "/"
    pattern = location[len(folder) :]
    literal = pattern[: min(pattern.find(sign) for sign in "*?[" if sign in pattern)]
    found = await store.search(folder + literal, lambda uri: matches(uri[len(folder) :], pattern), ask)
    if not found:
        raise DataError(
            "as a pattern it matches no object", where=location,
            hint="check the pattern: * stays within a folder, ** crosses folders",
        )  # fmt: skip
    return found


class _Piece:
    """A range that is on its way: started at once, resumed at the byte where it broke, collected when needed."""

    def __init__(self, store: Store, file: StoredFile, start_byte: int, end_byte: int, budget: RetryBudget) -> None:
        self.start_byte, self.end_byte = start_byte, end_byte
        self._store, self._file, self._budget = store, file, budget
        self._got = bytearray()
        self._future: Future[None] = background.start(self._fetch())

    async def _fetch(self) -> None:
        async def attempt() -> None:
            position = self.start_byte + len(self._got)
            if position < self.end_byte:
                await self._store.send(self._file, position, self.end_byte, self._got.extend, self._budget.policy)

        await with_retries(
            attempt, uri=self._file.uri, budget=self._budget, progress=lambda: len(self._got)
        )  # fmt: skip
        assert len(self._got) == self.end_byte - self.start_byte, "a store sent another length and did not say so"

    def bytes(self) -> bytearray:
        background.finish(self._future, self._file.uri, self._budget)
        return self._got

    @property
    def has_failed(self) -> bool:
        return self._future.done() and (self._future.cancelled() or self._future.exception() is not None)

    def cancel(self) -> None:
        self._future.cancel()


shared_reads: SharedReads[_Piece] = SharedReads()
"""Pieces of the files that streams have registered."""


class _RangeReader(io.RawIOBase):
    """The bytes ``[start, end)`` one after the other, a few pieces ahead of the reader.

    It begins with one small piece, because many readers want only a look. Where no end is known, the pieces grow with
    what was read, so that what was fetched in vain is a small part of what was not.
    """

    def __init__(self, store: Store, file: StoredFile, start_byte: int, end_byte: int | None) -> None:
        self._store, self._file = store, file
        self._start_byte = self._asked_byte = start_byte
        self._end_byte = file.size_bytes if end_byte is None else end_byte
        self._has_end = end_byte is not None
        self._budget = current_budget()
        self._pieces: deque[tuple[_Piece, int, int]] = deque()  # with the range of it that is read
        self._view = memoryview(b"")
        self._ask(1)

    def readable(self) -> bool:
        return True

    def _piece_bytes(self) -> int:
        most = self._budget.policy.piece_bytes
        if self._asked_byte == self._start_byte or not self._has_end:
            return min(most, max(_FIRST_PIECE_BYTES, (self._asked_byte - self._start_byte) // _OPEN_SHARE))
        return most

    def _ask(self, pieces_ahead: int) -> None:
        budget = current_budget(self._budget)  # a reader may outlive the unit of work that opened it
        while self._asked_byte < self._end_byte and len(self._pieces) < pieces_ahead:
            start, end = self._asked_byte, min(self._asked_byte + self._piece_bytes(), self._end_byte)
            piece = shared_reads.piece(
                self._file, start, start, end, lambda first, last: _Piece(self._store, self._file, first, last, budget)
            )
            self._asked_byte = min(piece.end_byte, self._end_byte)
            self._pieces.append((piece, start, self._asked_byte))

    def readinto(self, buffer: Any) -> int:
        if not self._view and self._pieces:
            piece, start, end = self._pieces.popleft()
            self._view = memoryview(piece.bytes())[start - piece.start_byte : end - piece.start_byte]
            self._ask(_PIECES_AHEAD)
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._view))
        target[:count] = self._view[:count]
        self._view = self._view[count:]
        return count

    def close(self) -> None:
        if not shared_reads.is_registered(self._file):
            for piece, _, _ in self._pieces:
                piece.cancel()
        self._pieces.clear()
        super().close()


def open_remote_range(store: Store, file: StoredFile, start_byte: int, end_byte: int | None) -> BinaryIO:
    """A part of a listed object, read ahead."""
    return cast("BinaryIO", io.BufferedReader(_RangeReader(store, file, start_byte, end_byte), 1 << 20))


class _RandomReader(io.RawIOBase):
    """Random access by ranges: what is asked for, at least a mebibyte, and the end of the file kept for footers."""

    def __init__(self, store: Store, file: StoredFile) -> None:
        self._store, self._file = store, file
        self._budget = current_budget()
        self._position = 0
        self._windows: dict[str, tuple[int, bytearray]] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        end = min(self._position + len(target), self._file.size_bytes)
        count = 0
        while self._position < end:
            start, window = self._window(end - self._position)
            offset = self._position - start
            taken = min(len(window) - offset, end - self._position)
            target[count : count + taken] = memoryview(window)[offset : offset + taken]
            self._position += taken
            count += taken
        return count

    def _window(self, wanted_bytes: int) -> tuple[int, bytearray]:
        """A window that holds the position, fetched if there is none."""
        for start, window in self._windows.values():
            if start <= self._position < start + len(window):
                return start, window
        size = self._file.size_bytes
        if size - self._position <= _LEAST_RANDOM_BYTES:
            name, start, end = "end", max(0, size - _LEAST_RANDOM_BYTES), size
        else:
            length = min(max(wanted_bytes, _LEAST_RANDOM_BYTES), self._budget.policy.piece_bytes)
            name, start, end = "middle", self._position, min(self._position + length, size)
            tail = self._windows.get("end")
            if tail is not None:
                end = min(end, tail[0])
        piece = shared_reads.piece(
            self._file, self._position, start, end,
            lambda first, last: _Piece(self._store, self._file, first, last, self._budget),
        )  # fmt: skip
        self._windows[name] = piece.start_byte, piece.bytes()
        return self._windows[name]


def open_remote_seekable(store: Store, file: StoredFile) -> BinaryIO:
    """A listed object for random access."""
    return cast("BinaryIO", io.BufferedReader(_RandomReader(store, file), 1 << 16))
