"""Locations and listed files: schemes, canonical uris, glob patterns, and ``StoredFile``.

A location (a path, or a uri of a store) goes in; its scheme, its canonical form and names relative to it come out,
without access to disk or network. Invariants: a uri never contains credentials, wildcards do not match hidden names,
and every file has exactly one canonical uri.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from vorox.core.errors import ConfigError, DataError
from vorox.core.redaction import MARK, MIN_ENVIRONMENT_SECRET, redact
from vorox.core.schema.train import OBJECT_STORES

STANDARD_LIBRARY = "stdlib:"
"""Scheme of this Python's standard library: ``stdlib:json/decoder.py`` is the same text for the same Python version."""

REMOTE_SCHEMES = (*OBJECT_STORES, "hf", "http", "https")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_USER_SCHEME = re.compile(r"([^:\s]+:[A-Za-z_]\w*)://")
_SECRET_VARIABLES = (
    "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY",
    "AZURE_CLIENT_SECRET",
)  # fmt: skip
_MAGIC = re.compile(r"[*?[]")


class NoSuchLocation(DataError):
    """Nothing has this name, and nothing matches it as a pattern."""


class NoMatchingSuffix(DataError):
    """A folder contains files, but none with a requested suffix.

    Attributes:
        found: Some suffixes that it does contain.
    """

    def __init__(self, folder: str, suffixes: Sequence[str], found: Collection[str]) -> None:
        self.found = tuple(sorted(found)[:8])
        super().__init__(
            f"The folder contains no {' or '.join(suffixes)} file; it contains "
            f"{', '.join(suffix or 'files without a suffix' for suffix in self.found)}",
            where=folder,
            hint=f"name the files by a glob, such as {escape_glob(folder.rstrip('/'))}/**/*{self.found[-1]}",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as it was listed.

    Attributes:
        uri: Absolute path, or a name under a scheme.
        size_bytes: Size.
        stat_signature: Changes whenever the content may have changed: size, times and inode of a local file, the listed
            commit on the hub. Guards reads and avoids hashing; identifies nothing, since copies of a file differ in it.
        modified_nanoseconds: Modification time, which decides whether the signature can be trusted; 0 if unknown.
        version: How the store pins the content: ``version:`` (S3), ``generation:`` (GCS), ``blob:`` (hub), ``etag:``,
            or the weaker ``modified:``. ``None`` for local files, which are hashed.
        content: Content hash from the store, which identifies copies; ``None`` if the store provides none.
        hashes: Hashes of the bytes from an index file next to it, as (algorithm, hexadecimal digest).
        scheme: The scheme of a remote file; ``None`` for local files and the standard library.
    """

    uri: str
    size_bytes: int
    stat_signature: str
    modified_nanoseconds: int
    version: str | None = None
    content: str | None = None
    hashes: tuple[tuple[str, str], ...] = ()
    scheme: str | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scheme", _parse_scheme(self.uri))


def scheme_of(location: str) -> str | None:
    """Return ``s3``, ``gs``, ``az``, ``hf``, ``http``, ``https`` or the import path of a user's store.

    Paths and the standard library have none: ``None``.

    Raises:
        ConfigError: The scheme is unknown, or the uri contains credentials.
    """
    scheme = _parse_scheme(location)
    if scheme is None:
        return None
    if ":" not in scheme and scheme not in REMOTE_SCHEMES:
        raise ConfigError(
            f"Scheme {scheme}:// is not supported", where=redact(location),
            hint=f"use {', '.join(f'{known}://' for known in REMOTE_SCHEMES)}, a local path, or a store of your own: "
            "mine.py:my_store://...",
        )  # fmt: skip
    if _has_credentials(scheme, location):
        raise ConfigError(
            "The uri contains credentials", where=redact(location),
            hint="remove them; pass them in the environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, "
            "HF_TOKEN) or use files that need none",
        )  # fmt: skip
    return scheme


def _parse_scheme(location: str) -> str | None:
    """Return the scheme of a uri, known or not; ``None`` for a path. Only the scheme of a user's store has a colon."""
    if (match := _USER_SCHEME.match(location)) is not None:
        return match[1]
    match = _SCHEME.match(location)
    return None if match is None else match[1].lower()


def _has_credentials(scheme: str, location: str) -> bool:
    """Return whether a uri contains a login, a signed query or a secret from the environment.

    Object names may look like secrets, so only logins and query parameters are matched by pattern.
    """
    if f"://{MARK}@" in redact(location):
        return True
    secrets = [os.environ.get(name, "") for name in _SECRET_VARIABLES]
    if any(secret in location for secret in secrets if len(secret) >= MIN_ENVIRONMENT_SECRET):
        return True
    names = [name for name, _ in parse_qsl(urlsplit(location).query)] if scheme in {"http", "https"} else []
    return any(MARK in redact(f"{name}=Zx9Zx9Zx9Zx9Zx9") for name in names)


def has_magic(location: str) -> bool:
    """Return whether a location is a glob pattern. In http and https urls, ``?`` starts the query instead."""
    scheme = scheme_of(location)
    if scheme in {"http", "https"}:
        return any(sign in location for sign in "*[")
    return _MAGIC.search(location.partition("://")[2] if scheme else location) is not None


def escape_glob(location: str) -> str:
    """Return a pattern that matches a location as it is written."""
    scheme, separator, rest = location.rpartition("://")
    return scheme + separator + _MAGIC.sub(lambda match: f"[{match.group()}]", rest)


def canonical_uri(location: str) -> str:
    """Return the canonical form: an absolute path, or a uri with ``hf://`` spelled out. Links are not resolved."""
    scheme = scheme_of(location)
    if scheme is None:
        return os.path.abspath(Path(location).expanduser())  # noqa: PTH100 - Path.resolve would follow links
    rest = location.partition("://")[2]
    if scheme == "hf" and not rest.startswith(("datasets/", "models/", "spaces/")):
        rest = f"datasets/{rest}"
    if scheme not in {"http", "https"}:
        rest = rest.rstrip("/")
    return f"{scheme}://{rest}"


def glob_root(location: str) -> str:
    """Return the folder above the first wildcard of a canonical pattern."""
    head, separator, rest = location.rpartition("://")
    fixed: list[str] = []
    for segment in rest.split("/"):
        if _MAGIC.search(segment):
            break
        fixed.append(segment)
    return head + separator + "/".join(fixed)


def relative_name(location: str, uri: str) -> str | None:
    """Return a listed file's name relative to the location it was listed from; ``None`` if it is not below it."""
    if location.startswith(STANDARD_LIBRARY):
        return uri.removeprefix(STANDARD_LIBRARY) if uri.startswith(STANDARD_LIBRARY) else None
    root = canonical_uri(location)
    if uri == root:
        return uri.replace("\\", "/").rpartition("/")[2]
    root = root.rstrip("/\\")
    if has_magic(root) and not uri.startswith((f"{root}/", f"{root}\\")):  # a folder's name may look like a pattern
        root = glob_root(root).rstrip("/\\")
    if uri.startswith(root) and uri[len(root) :][:1] in {"/", "\\"}:
        return uri[len(root) + 1 :].replace("\\", "/")
    return None


def matches_glob(name: str, pattern: str) -> bool:
    """Return whether a relative name matches a pattern: ``**`` crosses folders, wildcards skip hidden names."""
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
