"""The verbs of storage, the same whatever the scheme: list, read a range, open for random access; put and remove.

A location or a ``StoredFile`` comes in and goes to the module of its scheme. Invariant: what is read is what was
listed, on every scheme; a change is a ``DataError`` that names the object. Files of this machine are written by
``core.atomic``; here only objects of ``s3://``, ``gs://`` and ``az://`` are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO, cast

from vorox.data.storage import local, writing
from vorox.data.storage.failures import split_bucket
from vorox.data.storage.fetched import held_range
from vorox.data.storage.locations import StoredFile, scheme_of
from vorox.data.storage.remote import Store, list_remote, open_remote_range, open_remote_seekable
from vorox.data.storage.writing import WRITABLE_SCHEMES, Content, Over, WritableStore, cannot_be_written


@functools.cache
def _store(scheme: str) -> Store:
    """The one store of a scheme; its module is loaded only when it is needed."""
    if scheme in WRITABLE_SCHEMES:
        from vorox.data.storage.cloud import CloudStore

        return CloudStore(scheme)
    if scheme == "hf":
        from vorox.data.storage.hub import HubStore

        return HubStore()
    from vorox.data.storage.web import WebStore

    return WebStore()


def list_files(
    location: str, suffixes: tuple[str, ...], *, skip_directories: frozenset[str] = frozenset()
) -> list[StoredFile]:
    """All files of a location, sorted by uri.

    A file or a glob is taken as it is; a folder is searched recursively for the given suffixes. Names that start with
    a dot are left out of folders.

    Args:
        location: Path, folder, glob (``**`` crosses folders), ``stdlib:``, or any of these under ``s3://``, ``gs://``,
            ``az://``, ``hf://`` and ``https://``.
        suffixes: Endings, in lower case, that count inside a folder.
        skip_directories: Names of directories that are not entered.

    Raises:
        ConfigError: The scheme is unknown, its extra is not installed, or the location carries credentials.
        DataError: The location does not exist, matches nothing, or cannot be read.
    """
    scheme = scheme_of(location)
    if scheme is not None:
        return list_remote(_store(scheme), location, suffixes, skip_directories)
    return local.list_files(location, suffixes, skip_directories=skip_directories)


@contextlib.contextmanager
def open_range(file: StoredFile, start_byte: int = 0, end_byte: int | None = None) -> Generator[BinaryIO]:
    """Read a part of a listed file.

    Raises:
        DataError: The file cannot be read, or is not (or no longer, at the end) the one that was listed.
    """
    scheme = scheme_of(file.uri)
    if scheme is not None:
        held = held_range(file, start_byte, file.size_bytes if end_byte is None else end_byte)
        if held is not None:
            yield held
            return
        with open_remote_range(_store(scheme), file, start_byte, end_byte) as reader:
            yield reader
        return
    with local.open_range(file, start_byte, end_byte) as reader:
        yield reader


def open_seekable(file: StoredFile) -> BinaryIO:
    """Open a listed file for random access; close it, or use it in a ``with``.

    Raises:
        DataError: The file cannot be read, or is not the one that was listed; also from its reads.
    """
    scheme = scheme_of(file.uri)
    if scheme is not None:
        return open_remote_seekable(_store(scheme), file)
    return local.open_seekable(file)


def list_objects(folder: str) -> list[StoredFile]:
    """Every object below a folder of a store, hidden names and all, sorted by uri; none if there is no such folder.

    Raises:
        DataError: There is no such bucket, or it cannot be read.
    """
    return writing.list_below(_writable(folder), folder)


def put_file(path: Path, uri: str) -> StoredFile:
    """Write a file to a store, in parts if it is large, over whatever is there.

    Returns:
        The object, whose size and checksum the store has told.

    Raises:
        ConfigError: Nothing can be written under this scheme, or its extra is not installed.
        DataError: The store refuses it, or did not answer rightly within the budget.
        OSError: The file cannot be read.
    """
    return writing.put(_writable(uri), uri, Content.of_file(path), "anything")


def put_bytes(data: bytes, uri: str, *, over: Over = "anything") -> StoredFile:
    """Write an object.

    Args:
        data: All of it.
        uri: Where.
        over: What it may replace: ``"anything"``, ``"nothing"``, or only the version that was listed or put before. The
            store decides this in one step, so of two writers one is refused.

    Raises:
        ConditionFailed: Another object is there.
        ConfigError, DataError: As ``put_file``.
    """
    return writing.put(_writable(uri), uri, Content.of_bytes(data), over)


def remove_object(uri: str) -> None:
    """Remove an object; one that is not there is no failure.

    Raises:
        ConfigError, DataError: As ``put_file``.
    """
    writing.remove(_writable(uri), uri)


def check_writable(location: str) -> None:
    """Refuse a place that nothing can be written to, without asking any store.

    Raises:
        ConfigError: The scheme is none of those, or the uri names no bucket or carries credentials.
    """
    scheme = scheme_of(location)
    if scheme not in WRITABLE_SCHEMES:
        raise cannot_be_written(location)
    split_bucket(location)


def _writable(location: str) -> WritableStore:
    scheme = scheme_of(location)
    if scheme not in WRITABLE_SCHEMES:
        raise cannot_be_written(location)
    return cast("WritableStore", _store(scheme))
