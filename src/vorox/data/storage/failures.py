"""What an answer of a store means: to be tried again, not there, changed since it was listed, or refused.

A status, headers and an address go in; a ``TransientError``, ``NotThere`` or ``DataError`` comes out. Invariant:
neither headers nor addresses that were redirected to get into messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from vorox.core.errors import ConfigError, DataError
from vorox.core.redaction import redact
from vorox.data.storage.retry import TransientError, retry_after_seconds

_TRANSIENT = frozenset({408, 425, 429})
_LASTING_SERVER_ERRORS = frozenset({501, 505})
_HUB_MISSING = frozenset({"RepoNotFound", "RevisionNotFound", "EntryNotFound"})


class NotThere(Exception):
    """The store has no such object."""


class RefusedByCondition(Exception):
    """The condition of a write does not hold. The object that is there may be our own, whose answer was lost."""


def raise_for_status(
    status: int, headers: Mapping[str, str], *, uri: str, credentials_hint: str, message: str = ""
) -> None:
    """Pass a good answer, raise what the others mean.

    Args:
        message: What the server says about it, as far as it is known.
    """
    if status < 400:
        return
    said = f"HTTP {status}" + (f" ({redact(message)[:200]})" if message else "")
    if status in _TRANSIENT or (status >= 500 and status not in _LASTING_SERVER_ERRORS):
        raise TransientError(said, retry_after_seconds(headers.get("Retry-After")))
    if status in {404, 410} or headers.get("X-Error-Code") in _HUB_MISSING:
        raise NotThere(said)
    if status in {401, 403}:
        raise DataError(f"the store refuses access: {said}", where=uri, hint=credentials_hint)
    if status in {412, 416}:
        changed(uri)
    raise DataError(f"the store refuses the request: {said}", where=uri, hint="check the uri")


def changed(uri: str, what: str = "") -> NoReturn:
    """Refuse an object that is no longer the one that was listed."""
    raise DataError(
        f"the object changed after it was listed{f': {what}' if what else ''}", where=uri,
        hint="put the old object back, or run the same command again to use the new one; what was built from "
        "unchanged files is kept",
    )  # fmt: skip


def gone(uri: str) -> NoReturn:
    """Refuse an object that was listed and is no longer there."""
    changed(uri, "it is gone, or this version of it is")


def gives_no_parts(uri: str) -> DataError:
    """Return the refusal of a server that ignores ``Range``."""
    return DataError(
        "the server gives no parts of files (it ignores Range)", where=uri,
        hint="copy the file to this machine and read it there",
    )  # fmt: skip


def split_bucket(uri: str) -> tuple[str, str]:
    """Split a uri into bucket (or container) and name of an object."""
    scheme, _, place = uri.partition("://")
    bucket, _, name = place.partition("/")
    if not bucket:
        raise ConfigError("the uri names no bucket", where=uri, hint=f"write it as {scheme}://BUCKET/FOLDER")
    return bucket, name


def no_bucket(uri: str) -> DataError:
    """Return the refusal of a bucket that does not exist."""
    bucket, _ = split_bucket(uri)
    return DataError(f"there is no bucket {bucket!r}", where=uri, hint="check the name, or create the bucket")
