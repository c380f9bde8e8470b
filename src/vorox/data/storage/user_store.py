"""User-defined stores, by import path: ``mine.py:lake://folder/*.jsonl``.

A scheme that is an import path goes in (``lake`` in ``mine.py`` returns the store); an implementation of
``store.Store`` over the user's synchronous methods comes out. Retries, resumption at the byte, read-ahead and
globs work as for every remote store. Invariant: a read of the wrong length is an error, never short data.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from vorox.core.errors import DataError, VoroxError
from vorox.core.user_code.extensions import load_function
from vorox.data.storage.failures import ObjectNotFound, raise_changed
from vorox.data.storage.locations import StoredFile
from vorox.data.storage.requests import RetryingClient, RetryPolicy, TransientError
from vorox.data.storage.store import Receive, UriFilter

_READ_BYTES = 1 << 20


class StoredObject(NamedTuple):
    """An object as a user's store lists it.

    Attributes:
        name: The part of its URI after ``://``.
        size_bytes: Size in bytes.
        version: A string that changes whenever the content does: a version, an ETag or a hash.
    """

    name: str
    size_bytes: int
    version: str


class ObjectStore(Protocol):
    """The methods of a user's store. Any thread may call them, several at a time."""

    def list(self, prefix: str) -> Iterable[tuple[str, int, str]]:
        """Return (name, size in bytes, version) of every object whose name starts with ``prefix``."""
        ...

    def read(self, name: str, version: str, start_byte: int, end_byte: int) -> bytes:
        """Return the bytes ``[start_byte, end_byte)`` of the given version.

        Raises:
            FileNotFoundError: The object no longer exists in this version.
            OSError: The read failed for now and is retried.
        """
        ...


class UserStore:
    """A user's store behind the protocol of ``store.Store``."""

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self._store: ObjectStore = load_function(scheme, kind="store", where="data.sources.*.paths")()

    async def describe(self, uri: str, client: RetryingClient) -> StoredFile | None:
        found = await self.list_prefix(uri, lambda other: other == uri, client)
        return found[0] if found else None

    async def list_prefix(self, prefix: str, matches: UriFilter, client: RetryingClient) -> list[StoredFile]:
        def list_objects() -> list[StoredObject]:
            listed = self._store.list(prefix.partition("://")[2])
            return [StoredObject(str(name), int(size), str(version)) for name, size, version in listed]

        objects = await client.run(lambda: self._call(prefix, list_objects))
        files = [
            StoredFile(uri, size, f"version:{version}", 0, f"version:{version}")
            for name, size, version in objects
            if matches(uri := f"{self._scheme}://{name}")
        ]
        return [file for file in files if file.uri.startswith(prefix)]

    async def stream_range(
        self, file: StoredFile, start_byte: int, end_byte: int, receive: Receive, policy: RetryPolicy
    ) -> None:
        del policy
        name, version = file.uri.partition("://")[2], (file.version or "").removeprefix("version:")
        for start in range(start_byte, end_byte, _READ_BYTES):
            end = min(start + _READ_BYTES, end_byte)
            try:
                read = functools.partial(self._store.read, name, version, start, end)
                data = await self._call(file.uri, read)
            except ObjectNotFound:
                raise_changed(file.uri)
            if len(data) != end - start:
                raise DataError(
                    f"The store returned {len(data):,} bytes instead of {end - start:,}", where=file.uri,
                    hint=f"correct the method read of {self._scheme}",
                )  # fmt: skip
            receive(data)

    async def _call(self, uri: str, function: Any) -> Any:
        """Call a method in a thread and translate its errors."""
        try:
            return await asyncio.to_thread(function)
        except VoroxError:
            raise
        except FileNotFoundError as error:
            raise ObjectNotFound(str(error)) from error
        except OSError as error:
            raise TransientError(f"{type(error).__name__}: {error}") from error
        except Exception as error:
            raise DataError(
                f"The store {self._scheme} failed: {type(error).__name__}: {error}", where=uri,
                hint="correct the store, or raise OSError for failures that are worth a retry",
            ) from error  # fmt: skip
