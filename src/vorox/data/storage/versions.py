"""What pins the content of a file: what its store says, else a SHA-256 that is remembered.

A ``StoredFile`` goes in, a version comes out that differs whenever the content does. Invariant: a remembered hash is
used only for the very state of the file that it was taken from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from pathlib import Path
from typing import cast

from vorox.core.atomic import canonical_json, make_directory, write_file
from vorox.data.storage.locations import StoredFile
from vorox.data.storage.verbs import open_range

_PIECE_BYTES = 1 << 22
_SETTLED_NANOSECONDS = 2_000_000_000


def content_hash(file: StoredFile) -> str:
    """SHA-256 of the whole file, hex."""
    digest = hashlib.sha256()
    with open_range(file) as reader:
        while piece := reader.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


class ContentVersions:
    """What pins the content of files, remembered so that unchanged files are hashed once.

    A remembered hash counts only for the very stamp (size, both times, inode) it was taken under, and is remembered
    only when the file had been left alone for two seconds, so that a change within one tick of the clock is noticed.

    Args:
        path: Where the memory lies. ``None`` keeps nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, list[str]] = {}
        self._changed = False
        if path is not None and path.exists():
            with contextlib.suppress(ValueError, OSError):  # a damaged memory costs hashing, nothing else
                value = json.loads(path.read_bytes())
                if isinstance(value, dict):
                    self._known = cast("dict[str, list[str]]", value)

    def version(self, file: StoredFile) -> str:
        """What the store pins the file by, else the SHA-256 of its content."""
        if file.version is not None:
            return file.version
        known = self._known.get(file.uri)
        if isinstance(known, list) and len(known) == 2 and known[0] == file.stamp:
            return known[1]
        settled = time.time_ns() - file.modified_nanoseconds > _SETTLED_NANOSECONDS
        version = content_hash(file)
        if settled:
            self._known[file.uri] = [file.stamp, version]
            self._changed = True
        return version

    def save(self) -> None:
        """Write the memory for the next run, where that is possible: without it, files are hashed again."""
        if self._path is not None and self._changed:
            with contextlib.suppress(OSError):
                make_directory(self._path.parent)
                write_file(self._path, canonical_json(self._known))
            self._changed = False
