"""Where bytes are: sorted listings, identities that change with the content, and ranged reads.

A location comes in (a file, a folder, a glob, or the ``stdlib:`` scheme), ``StoredFile``s go out; then a range of one
of them. Local files and the standard library are here; object stores and hubs join by scheme with the same three
verbs. Invariants: a listing is sorted and names every file once, and a range is only ever read from the content that
was listed: a file that changed since then is an error, never other data.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import io
import json
import os
import sysconfig
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from vorox.core.atomic import canonical_json, make_directory, write_file
from vorox.core.errors import DataError

STANDARD_LIBRARY = "stdlib:"
"""Scheme of this Python's own library: ``stdlib:json/decoder.py`` is the same text wherever the version is the same."""

_PIECE_BYTES = 1 << 22
_SETTLED_NANOSECONDS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file as it was when it was listed.

    Attributes:
        uri: Absolute path, or a name under a scheme.
        size_bytes: Its length.
        stamp: Changes whenever the content may have changed (times and inode; an ETag for remote objects). It guards
            reads and spares hashing; it identifies nothing, since copies of a file differ in it.
        modified_nanoseconds: Time of the last change, for deciding whether the stamp can be trusted.
    """

    uri: str
    size_bytes: int
    stamp: str
    modified_nanoseconds: int


def local_path(uri: str) -> Path:
    """The path behind a uri of this machine."""
    if uri.startswith(STANDARD_LIBRARY):
        return _standard_library() / uri.removeprefix(STANDARD_LIBRARY)
    return Path(uri)


@functools.cache
def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _failure(error: OSError, uri: str) -> DataError:
    if isinstance(error, PermissionError):
        hint = "give this user read permission, or take the file out of data.sources"
    elif isinstance(error, FileNotFoundError):
        hint = "check the path; it is relative to the directory the command runs in"
    else:
        hint = "check the disk or the network share that it lies on"
    return DataError(f"cannot read: {error.strerror or error}", where=uri, hint=hint)


def _describe(uri: str, status: os.stat_result) -> StoredFile:
    modified = max(status.st_mtime_ns, status.st_ctime_ns)
    stamp = f"{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}-{status.st_ino}"
    return StoredFile(uri, status.st_size, stamp, modified)


def list_files(
    location: str, suffixes: tuple[str, ...], *, skip_directories: frozenset[str] = frozenset()
) -> list[StoredFile]:
    """All files of a location, sorted by uri.

    A file or a glob is taken as it is; a folder is searched recursively for the given suffixes. Names that start with
    a dot are left out of folders. Links are followed, each directory is entered once.

    Args:
        location: Path, folder, glob (``**`` crosses folders), or ``stdlib:``.
        suffixes: Endings, in lower case, that count inside a folder.
        skip_directories: Names of directories that are not entered.

    Raises:
        DataError: The location does not exist, matches nothing, or cannot be read.
    """
    root = local_path(location) if location.startswith(STANDARD_LIBRARY) else Path(absolute(location))
    try:
        if root.is_dir():
            found = list(_walk(root, skip_directories))
            chosen = [path for path in found if path.name.lower().endswith(suffixes)]
            if found and not chosen:
                endings = sorted({path.suffix or "(none)" for path in found})[:8]
                raise DataError(
                    f"the folder holds no {' or '.join(suffixes)} file; it holds {', '.join(endings)}",
                    where=str(root), hint=f"name the files by a glob, such as {root}/**/*{endings[-1]}",
                )  # fmt: skip
        elif root.exists():
            chosen = [root]
        else:
            chosen = [Path(path) for path in glob.glob(str(root), recursive=True) if Path(path).is_file()]  # noqa: PTH207
            if not chosen:
                raise DataError(
                    "there is no such file, and as a pattern it matches none", where=str(root),
                    hint="check the path; it is relative to the directory the command runs in",
                )  # fmt: skip
        files: list[StoredFile] = []
        for path in chosen:
            uri = str(path)
            if location.startswith(STANDARD_LIBRARY):
                uri = STANDARD_LIBRARY + path.relative_to(_standard_library()).as_posix()
            files.append(_describe(uri, path.stat()))
    except OSError as error:
        raise _failure(error, str(error.filename or root)) from error
    return sorted(files, key=lambda file: file.uri)


def absolute(location: str) -> str:
    """The location with ``~`` and the working directory filled in; links stay as they are."""
    return os.path.abspath(Path(location).expanduser())  # noqa: PTH100 - Path.resolve would follow links


def root_of(location: str) -> str:
    """The folder that the names inside a location are relative to: itself, a file's folder, a glob's fixed part."""
    path = Path(absolute(location))
    if path.is_dir():
        return str(path)
    if path.exists():
        return str(path.parent)
    while glob.has_magic(str(path)):
        path = path.parent
    return str(path)


def _walk(root: Path, skip_directories: frozenset[str]) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    entered: set[tuple[int, int]] = set()
    for folder, names, files in os.walk(root, followlinks=True, onerror=fail):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in entered:
            names.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in skip_directories)
        for name in sorted(files):
            path = Path(folder, name)
            if not name.startswith(".") and (path.is_file() or not path.exists()):
                yield path  # a dangling link is listed, so that its stat says which one it is


class _Range(io.RawIOBase):
    """The bytes ``[start, end)`` of an open file as a file of its own."""

    def __init__(self, file: BinaryIO, start_byte: int, end_byte: int) -> None:
        file.seek(start_byte)
        self._file = file
        self._left_bytes = end_byte - start_byte

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: self._left_bytes]
        count = cast("io.RawIOBase", self._file).readinto(view) or 0
        self._left_bytes -= count
        return count


@contextlib.contextmanager
def open_range(file: StoredFile, start_byte: int = 0, end_byte: int | None = None) -> Generator[BinaryIO]:
    """Read a part of a listed file.

    Raises:
        DataError: The file cannot be read, or is not (or no longer, at the end) the one that was listed.
    """
    end_byte = file.size_bytes if end_byte is None else end_byte
    try:
        with local_path(file.uri).open("rb", buffering=0) as raw:
            _refuse_change(file, raw)
            with io.BufferedReader(_Range(cast("BinaryIO", raw), start_byte, end_byte), 1 << 20) as reader:
                yield cast("BinaryIO", reader)
            _refuse_change(file, raw)
    except OSError as error:
        raise _failure(error, file.uri) from error


def _refuse_change(file: StoredFile, raw: io.FileIO) -> None:
    if _describe(file.uri, os.fstat(raw.fileno())).stamp != file.stamp:
        raise DataError(
            "the file changed while its source was being read", where=file.uri,
            hint="run the same command again; what was built from unchanged files is kept",
        )  # fmt: skip


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
        """SHA-256 of the file's content."""
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
