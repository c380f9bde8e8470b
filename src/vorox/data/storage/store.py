"""What a scheme implements: protocols of stores for reading and writing, and the content of an upload.

Uris are canonical. A method makes one try, or takes a ``RetryingClient``; errors are translated by ``failures``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from vorox.data.storage.locations import StoredFile
from vorox.data.storage.requests import RetryingClient, RetryPolicy, TransientError

UriFilter = Callable[[str], bool]
"""Returns whether the object of a uri belongs to a listing."""

Receive = Callable[[bytes], None]
"""Called with consecutive pieces of a response body."""

PutMode = StoredFile | Literal["overwrite", "create"]
"""What a new object may replace: any object, none, or exactly this version."""

PART_BYTES = 16 << 20
"""Larger objects are uploaded in parts of this size: a multiple of 256 KiB and at least 5 MiB, as stores require."""


class Store(Protocol):
    """What a scheme implements for reading."""

    async def describe(self, uri: str, client: RetryingClient) -> StoredFile | None:
        """Return one object; ``None`` if no object has exactly this name."""
        ...

    async def list_prefix(self, prefix: str, matches: UriFilter, client: RetryingClient) -> list[StoredFile]:
        """Return every matching object whose uri starts with the prefix."""
        ...

    async def stream_range(
        self, file: StoredFile, start_byte: int, end_byte: int, receive: Receive, policy: RetryPolicy
    ) -> None:
        """Read a range of the listed version, in one try."""
        ...


@dataclass(frozen=True, slots=True)
class Content:
    """The content of an upload.

    Attributes:
        size_bytes: Its size.
        data: The bytes, or the file that contains them, which must not change during the upload.
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
        """Return the bytes.

        Raises:
            OSError: The file cannot be read, or its length changed.
        """
        if isinstance(self.data, bytes):
            return self.data
        data = self.data.read_bytes()
        if len(data) != self.size_bytes:
            raise OSError(f"{self.data} changed its length during the upload")
        return data

    def checksums(self, part_bytes: int | None) -> tuple[str, bytes]:
        """Return the S3 ETag of an upload in parts of some size, or in one request (``None``), and the MD5.

        MD5 detects corruption, not tampering.
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
    """What a scheme implements for writing."""

    async def put(self, uri: str, content: Content, mode: PutMode, client: RetryingClient) -> StoredFile:
        """Write an object; raises ``PreconditionFailed`` if it may not replace the existing one."""
        ...

    async def remove(self, uri: str, client: RetryingClient) -> None:
        """Remove an object. Removing one that does not exist is not an error."""
        ...

    async def verify_upload(self, file: StoredFile, md5: bytes, policy: RetryPolicy) -> bool:
        """Read an object in one try; return whether its content has an MD5."""
        ...


def corrupt_upload(uri: str) -> TransientError:
    """Return the error for an object whose checksum differs from what was sent. It is sent again."""
    return TransientError(f"the store received other bytes than were sent to {uri.rpartition('/')[2]}")
