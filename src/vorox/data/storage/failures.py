"""What a store's response means: retry, not found, changed, or refused.

A status, headers and a uri go in; a ``TransientError``, ``ObjectNotFound`` or ``DataError`` comes out. Invariant:
messages contain neither headers nor the targets of redirects.
"""

from __future__ import annotations

import email.utils
import time
from collections.abc import Mapping
from typing import NoReturn

from vorox.core.errors import ConfigError, DataError
from vorox.core.redaction import redact
from vorox.data.storage.requests import TransientError

_TRANSIENT = frozenset({408, 425, 429})
_PERMANENT_SERVER_ERRORS = frozenset({501, 505})
_HUB_NOT_FOUND = frozenset({"RepoNotFound", "RevisionNotFound", "EntryNotFound"})


class ObjectNotFound(Exception):
    """The store has no such object."""


class ObjectChanged(DataError):
    """An object differs from the one that was listed, or is gone."""


class PreconditionFailed(Exception):
    """The condition of a write does not hold. The existing object may be our own upload, whose response was lost."""


def raise_for_status(
    status: int, headers: Mapping[str, str], *, uri: str, credentials_hint: str, message: str = ""
) -> None:
    """Raise the error of an HTTP status; return for a successful one.

    Args:
        status: HTTP status.
        headers: Of the response.
        uri: The requested object.
        credentials_hint: What the user can do about a 401 or 403.
        message: The server's explanation, if known.
    """
    if status < 400:
        return
    text = f"HTTP {status}" + (f" ({redact(message)[:200]})" if message else "")
    if status in _TRANSIENT or (status >= 500 and status not in _PERMANENT_SERVER_ERRORS):
        raise TransientError(text, retry_after_seconds(headers.get("Retry-After")))
    if status in {404, 410} or headers.get("X-Error-Code") in _HUB_NOT_FOUND:
        raise ObjectNotFound(text)
    if status in {401, 403}:
        raise DataError(f"The store refuses access: {text}", where=uri, hint=credentials_hint)
    if status in {412, 416}:
        raise_changed(uri)
    raise DataError(f"The store refuses the request: {text}", where=uri, hint="check the uri")


def raise_changed(uri: str, what: str = "") -> NoReturn:
    """Refuse an object that differs from the one that was listed."""
    raise ObjectChanged(
        f"The object changed after it was listed{f': {what}' if what else ''}", where=uri,
        hint="restore the old object, or run the same command again to use the new one; everything built from "
        "unchanged files is kept",
    )  # fmt: skip


def raise_deleted(uri: str) -> NoReturn:
    """Refuse an object that was deleted after it was listed."""
    raise_changed(uri, "it, or this version of it, was deleted")


def no_range_support(uri: str) -> DataError:
    """Return the error for a server that ignores ``Range`` headers."""
    return DataError(
        "The server does not support range requests (it ignores Range)", where=uri,
        hint="copy the file to this machine and read it there",
    )  # fmt: skip


def split_bucket(uri: str) -> tuple[str, str]:
    """Split a uri into the bucket (or container) and the object's key."""
    scheme, _, path = uri.partition("://")
    bucket, _, key = path.partition("/")
    if not bucket:
        raise ConfigError("The uri lacks a bucket", where=uri, hint=f"write it as {scheme}://BUCKET/FOLDER")
    return bucket, key


def missing_bucket(uri: str) -> DataError:
    """Return the error for a bucket that does not exist."""
    bucket, _ = split_bucket(uri)
    return DataError(f"Bucket {bucket!r} does not exist", where=uri, hint="check its name, or create it")


def retry_after_seconds(value: str | None, *, now_unix_seconds: float | None = None) -> float | None:
    """Parse a Retry-After header: seconds or a date; ``None`` if it is missing or malformed."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        then = email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError):
        return None
    return max(0.0, then - (time.time() if now_unix_seconds is None else now_unix_seconds))
