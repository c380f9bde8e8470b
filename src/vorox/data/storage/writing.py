"""Writing to ``s3://``, ``gs://`` and ``az://``: whole objects, verified, replaced only on a condition.

Bytes or a file and a uri go in; the object as the store describes it comes out. Large files are uploaded in parts, and
each part is retried on its own. Invariants: an object appears complete or not at all, its size and checksum in the
store are compared with what was sent, and a conditional write replaces nothing else. Local files are written by
``core.files.atomic``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

from vorox.core.errors import ConfigError, DataError
from vorox.core.redaction import redact
from vorox.core.schema.train import OBJECT_STORES
from vorox.data.storage import requests
from vorox.data.storage.failures import PreconditionFailed, split_bucket
from vorox.data.storage.locations import StoredFile, canonical_uri, scheme_of
from vorox.data.storage.reading import store_of
from vorox.data.storage.requests import RetryingClient, StoreUnreachable, current_budget
from vorox.data.storage.store import Content, PutMode, WritableStore


class WriteConflict(DataError):
    """The existing object is not the one that a conditional write expects."""


def put_file(path: Path, uri: str) -> StoredFile:
    """Upload a file, in parts if it is large, and overwrite what exists.

    Returns:
        The object, with the size and checksum that the store reports.

    Raises:
        ConfigError: The scheme is not writable, or its extra is not installed.
        DataError: The store refuses the object, or does not respond within the retry budget.
        OSError: The file cannot be read.
    """
    return _put(uri, Content.of_file(path), "overwrite")


def put_bytes(data: bytes, uri: str, *, mode: PutMode = "overwrite") -> StoredFile:
    """Write an object.

    Args:
        data: Its content.
        uri: Its name.
        mode: ``"overwrite"``, ``"create"``, or the version that it may replace. The store checks and writes in one
            atomic operation, so one of two concurrent writers is refused.

    Raises:
        WriteConflict: The existing object is not the one that ``mode`` allows.
        ConfigError, DataError: As ``put_file``.
    """
    return _put(uri, Content.of_bytes(data), mode)


def _put(uri: str, content: Content, mode: PutMode) -> StoredFile:
    store, budget, uri = _writable_store(uri), current_budget(), canonical_uri(uri)
    client = RetryingClient(uri, budget)
    try:
        return requests.run(store.put(uri, content, mode, client), uri, budget)
    except PreconditionFailed:
        found = requests.run(_find_own_upload(store, uri, content, client), uri, budget)
    if found is None:
        raise WriteConflict(
            "Another writer created or replaced this object", where=uri,
            hint="stop the other process that writes to this location",
        )  # fmt: skip
    return found


async def _find_own_upload(
    store: WritableStore, uri: str, content: Content, client: RetryingClient
) -> StoredFile | None:
    """Return the existing object if it has exactly this content: an earlier try succeeded and its response was lost."""
    found = await store.describe(uri, client)
    if found is None or found.size_bytes != content.size_bytes:
        return None
    _, md5 = await asyncio.to_thread(content.checksums, None)
    try:
        return found if await client.run(lambda: store.verify_upload(found, md5, client.policy)) else None
    except StoreUnreachable:  # unknown, so neither ours nor foreign
        raise
    except DataError:  # replaced while it was read: not ours
        return None


def remove_object(uri: str) -> None:
    """Remove an object. Removing one that does not exist is not an error.

    Raises:
        ConfigError, DataError: As ``put_file``.
    """
    store, budget, uri = _writable_store(uri), current_budget(), canonical_uri(uri)
    requests.run(store.remove(uri, RetryingClient(uri, budget)), uri, budget)


def list_objects(folder: str) -> list[StoredFile]:
    """List every object below a folder of a store, hidden ones included, sorted by uri; empty for a missing folder.

    Raises:
        DataError: The bucket does not exist or cannot be read.
    """
    store, budget, prefix = _writable_store(folder), current_budget(), canonical_uri(folder) + "/"
    listing = store.list_prefix(prefix, lambda _: True, RetryingClient(prefix, budget))
    return sorted(requests.run(listing, prefix, budget), key=lambda file: file.uri)


def check_writable(location: str) -> None:
    """Refuse a location that cannot be written to, without a request to the store.

    Raises:
        ConfigError: The scheme is not writable, or the uri lacks a bucket or contains credentials.
    """
    if scheme_of(location) not in OBJECT_STORES:
        known = ", ".join(f"{scheme}://" for scheme in OBJECT_STORES)
        raise ConfigError("The location is not writable", where=redact(location), hint=f"use one under {known}")
    split_bucket(location)


def _writable_store(location: str) -> WritableStore:
    check_writable(location)
    scheme = scheme_of(location)
    assert scheme is not None
    return cast("WritableStore", store_of(scheme))
