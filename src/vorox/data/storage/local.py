"""Local files and Python's standard library: sorted listings, and reads that detect changes.

A path, a folder, a glob or ``stdlib:...`` goes in, ``StoredFile``s come out, which open as a range or for random
access. Invariants: a listing is sorted and contains every file once, and reading a file that changed since it was
listed is an error.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import io
import os
import sysconfig
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from vorox.core.errors import DataError
from vorox.core.files.atomic import MANIFEST_NAME
from vorox.core.run_layout import RunLayout
from vorox.data.storage.locations import STANDARD_LIBRARY, NoMatchingSuffix, StoredFile, canonical_uri


def local_path(uri: str) -> Path:
    """Return the path of a local uri."""
    if uri.startswith(STANDARD_LIBRARY):
        return _standard_library() / uri.removeprefix(STANDARD_LIBRARY)
    return Path(uri)


@functools.cache
def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _failure(error: OSError, uri: str) -> DataError:
    if isinstance(error, PermissionError):
        hint = "grant this user read permission, or remove the file from data.sources"
    elif isinstance(error, FileNotFoundError):
        hint = "check the path; it is relative to the working directory of the command"
    else:
        hint = "check its disk or network share"
    return DataError(f"The file cannot be read: {error.strerror or error}", where=uri, hint=hint)


def _describe(uri: str, status: os.stat_result) -> StoredFile:
    modified = max(status.st_mtime_ns, status.st_ctime_ns)
    signature = f"{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}-{status.st_ino}"
    return StoredFile(uri, status.st_size, signature, modified)


def list_files(
    location: str, suffixes: tuple[str, ...], *, skip_directories: frozenset[str] = frozenset()
) -> list[StoredFile]:
    """List all files of a location, sorted by uri.

    A file or a glob is used as given; a folder is searched recursively for the suffixes, without names that start with
    a dot and without the runs, caches and exports of Vorox in it. Links are followed, each directory is entered once.

    Args:
        location: Path, folder, glob (``**`` crosses folders), or ``stdlib:``.
        suffixes: File name suffixes, in lower case, that count inside a folder.
        skip_directories: Names of directories that are not entered.

    Raises:
        DataError: The location does not exist, matches nothing, or cannot be read.
    """
    if not location:  # else the working directory
        raise DataError("A path is empty", hint="name a file, a folder or a glob; is a variable unset?")
    root = local_path(location) if location.startswith(STANDARD_LIBRARY) else Path(canonical_uri(location))
    try:
        if root.is_dir():
            found = list(_walk(root, skip_directories))
            paths = [path for path in found if path.name.lower().endswith(suffixes)]
            if found and not paths:
                raise NoMatchingSuffix(str(root), suffixes, {path.suffix for path in found})
        elif root.exists():
            paths = [root]
        else:
            found = [Path(path) for path in glob.glob(str(root), recursive=True) if Path(path).is_file()]  # noqa: PTH207
            paths = list(_outside_own(found, Path(listing_root(location))))
            if not paths:
                raise DataError(
                    "No such file, and no file matches it as a pattern", where=str(root),
                    hint="check the path; it is relative to the working directory of the command",
                )  # fmt: skip
        files: list[StoredFile] = []
        for path in paths:
            uri = str(path)
            if location.startswith(STANDARD_LIBRARY):
                uri = STANDARD_LIBRARY + path.relative_to(_standard_library()).as_posix()
            files.append(_describe(uri, path.stat()))
    except OSError as error:
        raise _failure(error, str(error.filename or root)) from error
    return sorted(files, key=lambda file: file.uri)


_OWN_FILES: Final = (
    {RunLayout.record.name, RunLayout.config.name}, {"RECIPE.json"}, {MANIFEST_NAME, "config.json"}
)  # fmt: skip
"""What a run, a cache and an export hold: logs, chains and settings are no text to train on."""


def _is_written_by_vorox(names: Iterable[str]) -> bool:
    present = set(names)
    return any(own <= present for own in _OWN_FILES)


def _outside_own(paths: Iterable[Path], root: Path) -> Iterator[Path]:
    """Yield the files between which and a root there is no directory of Vorox."""
    is_own: dict[Path, bool] = {}
    for path in paths:
        inside = [folder for folder in path.parents if root in folder.parents]
        for folder in inside:
            if folder not in is_own:
                is_own[folder] = any(all((folder / name).is_file() for name in own) for own in _OWN_FILES)
        if not any(is_own[folder] for folder in inside):
            yield path


def listing_root(location: str) -> str:
    """Return the folder that names are relative to: a folder itself, a file's parent, the fixed part of a glob."""
    path = Path(canonical_uri(location))
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
        if Path(folder) != root and _is_written_by_vorox(files):
            names.clear()
            continue
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in skip_directories)
        for name in sorted(files):
            path = Path(folder, name)
            if not name.startswith(".") and (path.is_file() or not path.exists()):
                yield path  # a dangling link is listed, so that its stat fails with its name


class _Range(io.RawIOBase):
    """The bytes ``[start, end)`` of an open file."""

    def __init__(self, file: BinaryIO, start_byte: int, end_byte: int) -> None:
        file.seek(start_byte)
        self._file = file
        self._remaining_bytes = end_byte - start_byte

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: self._remaining_bytes]
        count = cast("io.RawIOBase", self._file).readinto(view) or 0
        self._remaining_bytes -= count
        return count


@contextlib.contextmanager
def open_range(file: StoredFile, start_byte: int = 0, end_byte: int | None = None) -> Generator[BinaryIO]:
    """Open the bytes ``[start_byte, end_byte)`` of a listed file.

    Raises:
        DataError: The file cannot be read, or it changed since it was listed (checked again when the block ends).
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


class _Seekable(io.RawIOBase):
    """A listed file for random access; every read is checked against the listing."""

    def __init__(self, file: StoredFile, raw: io.FileIO) -> None:
        self._file, self._raw = file, raw

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._raw.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        try:
            count = self._raw.readinto(buffer)
            _refuse_change(self._file, self._raw)
        except OSError as error:
            raise _failure(error, self._file.uri) from error
        return count or 0

    def close(self) -> None:
        self._raw.close()
        super().close()


def open_seekable(file: StoredFile) -> BinaryIO:
    """Open a listed file for random access.

    Raises:
        DataError: The file cannot be read, or it changed since it was listed; its reads raise this too.
    """
    try:
        raw = local_path(file.uri).open("rb", buffering=0)
    except OSError as error:
        raise _failure(error, file.uri) from error
    try:
        _refuse_change(file, raw)
    except BaseException:
        raw.close()
        raise
    return cast("BinaryIO", io.BufferedReader(_Seekable(file, raw), 1 << 20))


def _refuse_change(file: StoredFile, raw: io.FileIO) -> None:
    if _describe(file.uri, os.fstat(raw.fileno())).stat_signature != file.stat_signature:
        if not file.stat_signature:  # of a file that a run has recorded, and that was not found again
            raise DataError(
                "The file's content is not the recorded one", where=file.uri,
                hint="restore the file; the rows that were built from it are kept in the cache",
            )  # fmt: skip
        raise DataError(
            "The file changed after it was listed", where=file.uri,
            hint="run the same command again; everything built from unchanged files is kept",
        )  # fmt: skip
