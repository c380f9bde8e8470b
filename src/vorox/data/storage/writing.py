"""Writing to stores: whole objects, each proven by what the store says of it, replaced only as far as was asked.

Bytes or a file and a uri go in; the object as the store describes it comes out. A large file goes up in parts, each of
them tried again by itself. Invariants: an object appears with all of its bytes or not at all, what the store received
is held against what was sent (size and checksum), and a write under a condition never replaces anything else.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from vorox.core.errors import ConfigError, DataError
from vorox.core.redaction import redact
from vorox.data.storage import background
from vorox.data.storage.failures import RefusedByCondition
from vorox.data.storage.locations import StoredFile, absolute
from vorox.data.storage.remote import Asker, Store
from vorox.data.storage.retry import RetryPolicy, StoreUnreachable, TransientError, current_budget

Over = StoredFile | Literal["anything", "nothing"]
"""What a new object may replace: whatever is there, nothing at all, or exactly this version."""

PART_BYTES = 16 << 20
"""What is larger goes up in parts of this size. A multiple of 256 KiB and at least 5 MiB, as the stores ask."""

WRITABLE_SCHEMES = ("s3", "gs", "az")


class ConditionFailed(DataError):
    """Another object stands where one was to be put, or the one that was to be replaced is no longer there."""


@dataclass(frozen=True, slots=True)
class Content:
    """What is to be put.

    Attributes:
        size_bytes: Its length.
        data: All of it, or the file that it lies in, which does not change while it is put.
    """

    size_bytes: int
    data: bytes | Path

    @classmethod
    def of_bytes(cls, data: bytes) -> Content:
        return cls(len(data), data)

    @classmethod
    def of_file(cls, path: Path) -> Content:
        return cls(path.stat().st_size, path)

    def read(self) -> bytes:
        """Return all of it.

        Raises:
            OSError: The file cannot be read, or has changed its length.
        """
        if isinstance(self.data, bytes):
            return self.data
        data = self.data.read_bytes()
        if len(data) != self.size_bytes:
            raise OSError(f"{self.data} changed its length while it was copied")
        return data

    def checksums(self, part_bytes: int | None) -> tuple[str, bytes]:
        """Return the ETag that S3 gives it, put in parts of a size or at once (``None``), and its MD5.

        It guards against accidents, not against people.
        """
        if part_bytes is None:
            whole = hashlib.md5(self.read(), usedforsecurity=False)
            return whole.hexdigest(), whole.digest()
        assert isinstance(self.data, Path)
        whole, digests = hashlib.md5(usedforsecurity=False), list[bytes]()
        with self.data.open("rb") as file:
            while data := file.read(part_bytes):
                whole.update(data)
                digests.append(hashlib.md5(data, usedforsecurity=False).digest())
        etag = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
        return f"{etag}-{len(digests)}", whole.digest()


class WritableStore(Store, Protocol):
    """What a scheme must be able to do besides reading."""

    async def put(self, uri: str, content: Content, over: Over, ask: Asker) -> StoredFile:
        """Write an object; raises ``RefusedByCondition`` if it may not replace what is there."""
        ...

    async def remove(self, uri: str, ask: Asker) -> None:
        """Remove an object; one that is not there is no failure."""
        ...

    async def holds(self, file: StoredFile, digest: bytes, policy: RetryPolicy) -> bool:
        """Return whether an object has the content with an MD5, by one try of reading it."""
        ...


def received_other_bytes(uri: str) -> TransientError:
    """What a store holds is not what was sent: it is sent again."""
    return TransientError(f"the store received other bytes than were sent to {uri.rpartition('/')[2]}")


def cannot_be_written(location: str) -> ConfigError:
    known = ", ".join(f"{scheme}://" for scheme in WRITABLE_SCHEMES)
    return ConfigError("nothing can be written there", where=redact(location), hint=f"give a place under {known}")


def put(store: WritableStore, uri: str, content: Content, over: Over) -> StoredFile:
    """Write one object: see ``storage.put_bytes``."""
    budget = current_budget()
    uri = absolute(uri)
    ask = Asker(uri, budget)
    try:
        return background.run(store.put(uri, content, over, ask), uri, budget)
    except RefusedByCondition:
        found = background.run(_our_own(store, uri, content, ask), uri, budget)
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
    _, digest = await asyncio.to_thread(content.checksums, None)
    try:
        return found if await ask(lambda: store.holds(found, digest, ask.policy)) else None
    except StoreUnreachable:  # nobody can know
        raise
    except DataError:  # replaced while it was read: not ours
        return None


def remove(store: WritableStore, uri: str) -> None:
    """Remove one object: see ``storage.remove_object``."""
    budget = current_budget()
    background.run(store.remove(absolute(uri), Asker(uri, budget)), uri, budget)


def list_below(store: Store, folder: str) -> list[StoredFile]:
    """Every object of a folder: see ``storage.list_objects``."""
    budget = current_budget()
    folder = absolute(folder) + "/"
    found = background.run(store.search(folder, lambda _: True, Asker(folder, budget)), folder, budget)
    return sorted(found, key=lambda file: file.uri)
