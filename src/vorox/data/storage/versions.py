"""Content versions of files: the store's own version, else a SHA-256 that is remembered between runs.

A ``StoredFile`` goes in, a version comes out that changes whenever the content does. Invariant: a remembered hash is
used only for exactly the file state it was computed from.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path
from typing import cast

from vorox.core.files.atomic import canonical_json, make_directory, write_file
from vorox.core.files.json_reader import read_json
from vorox.data.storage.locations import StoredFile
from vorox.data.storage.reading import open_range

_READ_BYTES = 1 << 22
_SETTLE_NANOSECONDS = 2_000_000_000


def content_hash(file: StoredFile) -> str:
    """Return the SHA-256 of a whole file, in hexadecimal."""
    digest = hashlib.sha256()
    with open_range(file) as reader:
        while data := reader.read(_READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


class ContentVersions:
    """Versions of files, remembered so that unchanged files are hashed once.

    A remembered hash is valid only for exactly the signature (size, both times, inode) it was computed under. It is
    remembered only if the file had not changed for two seconds, so that a change within one clock tick is detected.

    Args:
        path: File of remembered hashes. ``None`` remembers nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, list[str]] = {}
        self._changed = False
        if path is not None and path.exists():
            with contextlib.suppress(ValueError, OSError):  # without it, files are hashed again
                value = read_json(path)
                if isinstance(value, dict):
                    self._known = cast("dict[str, list[str]]", value)

    def version(self, file: StoredFile) -> str:
        """Return the version that the store reports, else the SHA-256 of the content."""
        if file.version is not None:
            return file.version
        known = self._known.get(file.uri)
        if isinstance(known, list) and len(known) == 2 and known[0] == file.stat_signature:
            return known[1]
        is_settled = time.time_ns() - file.modified_nanoseconds > _SETTLE_NANOSECONDS
        version = content_hash(file)
        if is_settled:
            self._known[file.uri] = [file.stat_signature, version]
            self._changed = True
        return version

    def save(self) -> None:
        """Save the hashes for the next run. Errors are ignored: without the file, files are hashed again."""
        if self._path is not None and self._changed:
            with contextlib.suppress(OSError):
                make_directory(self._path.parent)
                write_file(self._path, canonical_json(self._known))
            self._changed = False
