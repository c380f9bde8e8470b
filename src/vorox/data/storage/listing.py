"""Listing the files of a location; of a remote one from two operations of its ``Store``.

A location (one file, a folder or a pattern) goes in, its files come out. Invariant: a listing is sorted and omits
hidden names.
"""

from __future__ import annotations

from vorox.data.storage import local, requests
from vorox.data.storage.locations import (
    NoMatchingSuffix,
    NoSuchLocation,
    StoredFile,
    canonical_uri,
    glob_root,
    has_magic,
    matches_glob,
    scheme_of,
)
from vorox.data.storage.reading import store_of
from vorox.data.storage.requests import RetryingClient, current_budget
from vorox.data.storage.store import Store


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
        return list_remote(store_of(scheme), location, suffixes, skip_directories)
    return local.list_files(location, suffixes, skip_directories=skip_directories)


def list_remote(
    store: Store, location: str, suffixes: tuple[str, ...], skip_directories: frozenset[str]
) -> list[StoredFile]:
    """List all files of a location of a store, sorted by uri: see ``list_files``."""
    budget, location = current_budget(), canonical_uri(location)
    listing = _list(store, location, suffixes, skip_directories, RetryingClient(location, budget))
    return sorted(requests.run(listing, location, budget), key=lambda file: file.uri)


async def _list(
    store: Store, location: str, suffixes: tuple[str, ...], skip_directories: frozenset[str], client: RetryingClient
) -> list[StoredFile]:
    is_pattern = has_magic(location)
    if not location.endswith("/"):
        single = await store.describe(location, client)
        if single is not None:
            return [single]
    folder = location.rstrip("/") + "/"
    other_suffixes: set[str] = set()

    def matches(uri: str) -> bool:
        *folders, name = uri[len(folder) :].split("/")
        if any(part.startswith(".") for part in (*folders, name)) or not name or skip_directories & set(folders):
            return False
        other_suffixes.add("." + name.rpartition(".")[2] if "." in name else "")
        return name.lower().endswith(suffixes)

    found = await store.list_prefix(folder, matches, client)
    if found:
        return found
    if is_pattern and not other_suffixes:  # no object or folder has such a name
        return await _list_glob(store, location, client)
    if other_suffixes:
        raise NoMatchingSuffix(location, suffixes, other_suffixes)
    raise NoSuchLocation(
        "No object has this name, and no folder of this name contains any", where=location,
        hint="check the uri, and that the bucket or repository exists and is readable",
    )  # fmt: skip


async def _list_glob(store: Store, location: str, client: RetryingClient) -> list[StoredFile]:
    folder = glob_root(location) + "/"
    pattern = location[len(folder) :]
    literal = pattern[: min(pattern.find(sign) for sign in "*?[" if sign in pattern)]
    found = await store.list_prefix(
        folder + literal, lambda uri: matches_glob(uri[len(folder) :], pattern), client
    )  # fmt: skip
    if not found:
        raise NoSuchLocation(
            "The pattern matches no object", where=location,
            hint="check the pattern: * stays within a folder, ** crosses folders",
        )  # fmt: skip
    return found
