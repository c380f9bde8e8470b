"""The verbs of storage, the same whatever the scheme: list, read a range, open for random access.

A location or a ``StoredFile`` comes in and goes to the module of its scheme. Invariant: what is read is what was
listed, on every scheme; a change is a ``DataError`` that names the object.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from typing import BinaryIO

from vorox.data.storage import local
from vorox.data.storage.fetched import held_range
from vorox.data.storage.locations import StoredFile, scheme_of
from vorox.data.storage.remote import Store, list_remote, open_remote_range, open_remote_seekable


@functools.cache
def _store(scheme: str) -> Store:
    """The one store of a scheme; its module is loaded only when it is needed."""
    if scheme == "s3":
        from vorox.data.storage.amazon import AmazonStore

        return AmazonStore()
    if scheme == "gs":
        from vorox.data.storage.google import GoogleStore

        return GoogleStore()
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
            ``hf://`` and ``https://``.
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
