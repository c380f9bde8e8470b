"""How places of bytes are named: schemes, patterns, and the file as it was when it was listed.

A location (a path, or a uri of a store) goes in; its scheme, its canonical form, the folder that names inside of it
are relative to come out, all without touching disk or network. Invariants: a uri never carries credentials, hidden
names are matched by no wildcard, and one thing has one canonical uri.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from vorox.core.errors import ConfigError, DataError
from vorox.core.redaction import MARK, redact

STANDARD_LIBRARY = "stdlib:"
"""Scheme of this Python's own library: ``stdlib:json/decoder.py`` is the same text wherever the version is the same."""

REMOTE_SCHEMES = ("s3", "gs", "az", "hf", "http", "https")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_SECRET_VARIABLES = (
    "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY",
    "AZURE_CLIENT_SECRET",
)  # fmt: skip
_MAGIC = re.compile(r"[*?[]")


class NoSuchEnding(DataError):
    """A folder that holds files, and none with an ending that was searched for.

    Attributes:
        endings: Some endings that it holds.
    """

    def __init__(self, folder: str, suffixes: Sequence[str], endings: Collection[str]) -> None:
        self.endings = tuple(sorted(endings)[:8])
        super().__init__(
            f"the folder holds no {' or '.join(suffixes)} file; it holds "
            f"{', '.join(ending or 'files without an ending' for ending in self.endings)}",
            where=folder, hint=f"name the files by a glob, such as {folder.rstrip('/')}/**/*{self.endings[-1]}",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file as it was when it was listed.

    Attributes:
        uri: Absolute path, or a name under a scheme.
        size_bytes: Its length.
        stamp: Changes whenever the content may have changed (times and inode; the commit it was listed at on the hub).
            It guards reads and spares hashing; it identifies nothing, since copies of a file differ in it.
        modified_nanoseconds: Time of the last change, for deciding whether the stamp can be trusted; 0 where unknown.
        version: What the store itself pins the content by: ``version:`` (S3), ``generation:`` (GCS), ``blob:`` (hub),
            ``etag:``, or the weaker ``modified:``. ``None`` for files of this machine, which are hashed.
        content: A hash of the content as the store tells it, for knowing copies; ``None`` where it tells none.
        hashes: What an index beside the file says of its bytes, as (algorithm, hexadecimal digest).
    """

    uri: str
    size_bytes: int
    stamp: str
    modified_nanoseconds: int
    version: str | None = None
    content: str | None = None
    hashes: tuple[tuple[str, str], ...] = ()


def scheme_of(location: str) -> str | None:
    """Return ``s3``, ``gs``, ``az``, ``hf``, ``http`` or ``https``; ``None`` for paths and for the standard library.

    Raises:
        ConfigError: The scheme is none of these, or the uri carries credentials.
    """
    match = _SCHEME.match(location)
    if match is None:
        return None
    scheme = match[1].lower()
    if scheme not in REMOTE_SCHEMES:
        raise ConfigError(
            f"there is no way to read {scheme}://", where=redact(location),
            hint=f"use {', '.join(f'{known}://' for known in REMOTE_SCHEMES)} or a path of this machine",
        )  # fmt: skip
    if _carries_credentials(scheme, location):
        raise ConfigError(
            "the uri carries credentials", where=redact(location),
            hint="take them out; give them by the environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, "
            "HF_TOKEN) or use files that need none",
        )  # fmt: skip
    return scheme


def _carries_credentials(scheme: str, location: str) -> bool:
    """Whether a login, a signed query or a secret of the environment is part of a uri; names may look like secrets."""
    if f"://{MARK}@" in redact(location):
        return True
    if any(value and value in location for value in map(os.environ.get, _SECRET_VARIABLES)):
        return True
    names = [name for name, _ in parse_qsl(urlsplit(location).query)] if scheme in {"http", "https"} else []
    return any(MARK in redact(f"{name}=Zx9Zx9Zx9Zx9Zx9") for name in names)


def has_magic(location: str) -> bool:
    """Whether a location is a pattern. In the web's addresses ``?`` is none: it begins a query."""
    scheme = scheme_of(location)
    if scheme in {"http", "https"}:
        return any(sign in location for sign in "*[")
    return _MAGIC.search(location.partition("://")[2] if scheme else location) is not None


def absolute(location: str) -> str:
    """The canonical form: ``~`` and the working directory filled in, ``hf://`` spelt out; links stay as they are."""
    scheme = scheme_of(location)
    if scheme is None:
        return os.path.abspath(Path(location).expanduser())  # noqa: PTH100 - Path.resolve would follow links
    rest = location.partition("://")[2]
    if scheme == "hf" and not rest.startswith(("datasets/", "models/", "spaces/")):
        rest = f"datasets/{rest}"
    if scheme not in {"http", "https"}:
        rest = rest.rstrip("/")
    return f"{scheme}://{rest}"


def fixed_part(location: str) -> str:
    """The folder above the first wildcard of a canonical pattern."""
    head, separator, rest = location.rpartition("://")
    kept: list[str] = []
    for segment in rest.split("/"):
        if _MAGIC.search(segment):
            break
        kept.append(segment)
    return head + separator + "/".join(kept)


def place_in(location: str, uri: str) -> str | None:
    """The name of a listed file relative to the location it was listed from; ``None`` if it is not from there."""
    if location.startswith(STANDARD_LIBRARY):
        return uri.removeprefix(STANDARD_LIBRARY) if uri.startswith(STANDARD_LIBRARY) else None
    root = absolute(location)
    if uri == root:
        return uri.replace("\\", "/").rpartition("/")[2]
    if has_magic(root) and not (scheme_of(location) is None and Path(root).exists()):
        root = fixed_part(root)
    root = root.rstrip("/\\")
    if uri.startswith(root) and uri[len(root) :][:1] in {"/", "\\"}:
        return uri[len(root) + 1 :].replace("\\", "/")
    return None


def matches(name: str, pattern: str) -> bool:
    """Whether a relative name fits a pattern in which ``**`` crosses folders and no wildcard meets a hidden name."""
    return _match(name.split("/"), pattern.split("/"))


def _match(names: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        if len(patterns) == 1:
            return bool(names) and not any(name.startswith(".") for name in names)
        return _match(names, patterns[1:]) or (
            bool(names) and not names[0].startswith(".") and _match(names[1:], patterns)
        )
    if not names or (names[0].startswith(".") and not patterns[0].startswith(".")):
        return False
    return fnmatch.fnmatchcase(names[0], patterns[0]) and _match(names[1:], patterns[1:])
