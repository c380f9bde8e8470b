"""The storage API, the same for every scheme: list, read a range, open for random access, put, remove.

A location or a ``StoredFile`` goes in and is dispatched to the module of its scheme. Invariant: what is read is the
version that was listed, under every scheme; a change raises a ``DataError`` that names the object. Local files are
written by ``core.atomic``; this module writes objects of ``s3://``, ``gs://`` and ``az://`` only.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO, cast

from vorox.core.extensions import is_extension
from vorox.data.storage import local, writing
from vorox.data.storage.failures import split_bucket
from vorox.data.storage.locations import StoredFile, scheme_of
from vorox.data.storage.remote import Store, open_prefetched, open_remote_range, open_remote_seekable
from vorox.data.storage.remote_listing import list_remote
from vorox.data.storage.writing import WRITABLE_SCHEMES, Content, PutMode, WritableStore, not_writable


@functools.cache
def _store(scheme: str) -> Store:
    """Return the store of a scheme; its module is imported on first use."""
    if scheme in WRITABLE_SCHEMES:
        from vorox.data.storage.cloud import CloudStore

        return CloudStore(scheme)
    if scheme == "hf":
        from vorox.data.storage.hub import HubStore

        return HubStore()
    if is_extension(scheme):
        from vorox.data.storage.user_store import UserStore

        return UserStore(scheme)
    from vorox.data.storage.web import WebStore

    return WebStore()


def list_files(
    location: str, suffixes: tuple[str, ...], *, skip_directories: frozenset[str] = frozenset()
) -> list[StoredFile]:
    """List all files of a location, sorted by uri.

    A file or a glob is used as given; a folder is searched recursively for the suffixes, without names that start with
    a dot.

    Args:
        location: Path, folder, glob (``**`` crosses folders), ``stdlib:``, or any of these under ``s3://``, ``gs://``,
            ``az://``, ``hf://`` and ``https://``.
        suffixes: File name suffixes, in lower case, that count inside a folder.
        skip_directories: Names of directories that are not entered.

    Raises:
        ConfigError: The scheme is unknown, its extra is not installed, or the location contains credentials.
        DataError: The location does not exist, matches nothing, or cannot be read.
    """
    scheme = scheme_of(location)
    if scheme is not None:
        return list_remote(_store(scheme), location, suffixes, skip_directories)
    return local.list_files(location, suffixes, skip_directories=skip_directories)


@contextlib.contextmanager
def open_range(file: StoredFile, start_byte: int = 0, end_byte: int | None = None) -> Generator[BinaryIO]:
    """Open the bytes ``[start_byte, end_byte)`` of a listed file.

    Raises:
        DataError: The file cannot be read, or it changed since it was listed (checked again when the block ends).
    """
    if file.scheme is None:
        with local.open_range(file, start_byte, end_byte) as reader:
            yield reader
        return
    prefetched = open_prefetched(file, start_byte, file.size_bytes if end_byte is None else end_byte)
    with prefetched or open_remote_range(_store(file.scheme), file, start_byte, end_byte) as reader:
        yield cast("BinaryIO", reader)


def open_seekable(file: StoredFile) -> BinaryIO:
    """Open a listed file for random access. The caller closes it.

    Raises:
        DataError: The file cannot be read, or it changed since it was listed; its reads raise this too.
    """
    return local.open_seekable(file) if file.scheme is None else open_remote_seekable(_store(file.scheme), file)


def list_objects(folder: str) -> list[StoredFile]:
    """List every object below a folder of a store, hidden ones included, sorted by uri; empty for a missing folder.

    Raises:
        DataError: The bucket does not exist or cannot be read.
    """
    return writing.list_below(_writable_store(folder), folder)


def put_file(path: Path, uri: str) -> StoredFile:
    """Upload a file, in parts if it is large, and overwrite what exists.

    Returns:
        The object, with the size and checksum that the store reports.

    Raises:
        ConfigError: The scheme is not writable, or its extra is not installed.
        DataError: The store refuses the object, or does not respond within the retry budget.
        OSError: The file cannot be read.
    """
    return writing.put(_writable_store(uri), uri, Content.of_file(path), "overwrite")


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
    return writing.put(_writable_store(uri), uri, Content.of_bytes(data), mode)


def remove_object(uri: str) -> None:
    """Remove an object. Removing one that does not exist is not an error.

    Raises:
        ConfigError, DataError: As ``put_file``.
    """
    writing.remove(_writable_store(uri), uri)


def check_writable(location: str) -> None:
    """Refuse a location that cannot be written to, without a request to the store.

    Raises:
        ConfigError: The scheme is not writable, or the uri lacks a bucket or contains credentials.
    """
    scheme = scheme_of(location)
    if scheme not in WRITABLE_SCHEMES:
        raise not_writable(location)
    split_bucket(location)


def _writable_store(location: str) -> WritableStore:
    scheme = scheme_of(location)
    if scheme not in WRITABLE_SCHEMES:
        raise not_writable(location)
    return cast("WritableStore", _store(scheme))
