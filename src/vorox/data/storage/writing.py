"""Writing to stores: whole objects, each proven by what the store says of it, replaced only as far as was asked.

Bytes or a file and a uri go in; the object as the store describes it comes out. A large file goes up in parts, each of
them tried again by itself. Invariants: an object appears with all of its bytes or not at all, what the store received
is held against what was sent (size and checksum), and a write under a condition never replaces anything else.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from vorox.core.errors import ConfigError, DataError
from vorox.core.redaction import redact
from vorox.data.storage import transport
from vorox.data.storage.locations import StoredFile, absolute
from vorox.data.storage.remote import Asker, Store
from vorox.data.storage.retry import StoreUnreachable, TransientError, current_budget

Over = StoredFile | Literal["anything", "nothing"]
"""What a new object may replace: whatever is there, nothing at all, or exactly this version."""

PART_BYTES = 16 << 20
"""What is larger goes up in parts of this size. A multiple of 256 KiB and at least 5 MiB, as the stores ask."""

WRITABLE_SCHEMES = ("s3", "gs")


class ConditionFailed(DataError):
    """Another object stands where one was to be put, or the one that was to be replaced is no longer there."""


class RefusedByCondition(Exception):
    """The store says that the condition of a write does not hold. It may be our own write whose answer was lost."""


@dataclass(frozen=True, slots=True)
class Content:
    """What is to be put.

    Attributes:
        size_bytes: Its length.
        read: Gives the bytes ``[start, end)``; called from threads.
    """

    size_bytes: int
    read: Callable[[int, int], bytes]

    @classmethod
    def of_bytes(cls, data: bytes) -> Content:
        return cls(len(data), lambda start, end: data[start:end])

    @classmethod
    def of_file(cls, path: Path) -> Content:
        """A file that does not change while it is put."""

        def read(start: int, end: int) -> bytes:
            with path.open("rb") as file:
                file.seek(start)
                data = file.read(end - start)
            if len(data) != end - start:
                raise OSError(f"{path} became shorter while it was copied")
            return data

        return cls(path.stat().st_size, read)

    async def part(self, start: int, end: int) -> tuple[bytes, bytes]:
        """The bytes ``[start, end)`` and their MD5, without holding up the loop."""

        def work() -> tuple[bytes, bytes]:
            data = self.read(start, end)
            return data, md5(data)

        return await asyncio.to_thread(work)


class WritableStore(Store, Protocol):
    """What a scheme must be able to do besides reading."""

    async def put(self, uri: str, content: Content, over: Over, ask: Asker) -> StoredFile:
        """Write an object; raises ``RefusedByCondition`` if it may not replace what is there."""
        ...

    async def remove(self, uri: str, ask: Asker) -> None:
        """Remove an object; one that is not there is no failure."""
        ...


def md5(data: bytes) -> bytes:
    """The checksum by which every store tells what it received; it guards against accidents, not against people."""
    return hashlib.md5(data, usedforsecurity=False).digest()


def received_other_bytes(uri: str) -> TransientError:
    """What a store holds is not what was sent: it is sent again."""
    return TransientError(f"the store received other bytes than were sent to {uri.rpartition('/')[2]}")


def cannot_be_written(location: str) -> ConfigError:
    known = " or ".join(f"{scheme}://" for scheme in WRITABLE_SCHEMES)
    return ConfigError("nothing can be written there", where=redact(location), hint=f"give a place under {known}")


def put(store: WritableStore, uri: str, content: Content, over: Over) -> StoredFile:
    """Write one object: see ``storage.put_bytes``."""
    budget = current_budget()
    uri = absolute(uri)
    ask = Asker(uri, budget)
    try:
        return transport.run(store.put(uri, content, over, ask), uri, budget)
    except RefusedByCondition:
        found = transport.run(_our_own(store, uri, content, ask), uri, budget)
    if found is None:
        raise ConditionFailed(
            "another object is there than the one that was to be replaced", where=uri,
            hint="somebody else writes to the same place",
        )  # fmt: skip
    return found


async def _our_own(store: WritableStore, uri: str, content: Content, ask: Asker) -> StoredFile | None:
    """The object that is there if it has the very bytes that were to be put: an earlier try had come through."""
    found = await store.describe(uri, ask)
    if found is None or found.size_bytes != content.size_bytes:
        return None
    there = bytearray()

    async def attempt() -> None:
        there.clear()
        if found.size_bytes:
            await store.send(found, 0, found.size_bytes, there.extend, ask.policy)

    try:
        await ask(attempt)
    except StoreUnreachable:  # nobody can know
        raise
    except DataError:  # replaced while it was read: not ours
        return None
    return found if bytes(there) == content.read(0, content.size_bytes) else None


def remove(store: WritableStore, uri: str) -> None:
    """Remove one object: see ``storage.remove_object``."""
    budget = current_budget()
    transport.run(store.remove(absolute(uri), Asker(uri, budget)), uri, budget)


def list_below(store: Store, folder: str) -> list[StoredFile]:
    """Every object of a folder: see ``storage.list_objects``."""
    budget = current_budget()
    folder = absolute(folder) + "/"
    found = transport.run(store.search(folder, lambda _: True, Asker(folder, budget)), folder, budget)
    return sorted(found, key=lambda file: file.uri)
