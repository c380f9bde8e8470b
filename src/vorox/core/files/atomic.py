"""Atomic, durable file operations; every commit to disk goes through this module.

There are three ways to commit. After a crash, each leaves the old or the new state, never a torn one:

- ``write_file`` replaces a whole file: temporary name, fsync, rename, fsync of the directory.
- ``append`` adds bytes to a log in one write, optionally fsynced. Readers must tolerate a torn last line.
- ``core.files.staged_directory`` commits a directory of files with the operations here.

Files are never opened or removed through symbolic links. Modes are at most 0644 for files, 0600 for files that may hold
secrets (``private``), and 0755 for directories, even if the umask would allow more.

Every system call that changes the disk goes through ``_perform``, so a test can record the sequence, interrupt it at
any point, or make any call fail (``observe``). Temporary names start with ``.tmp-``; readers ignore them, and
``sweep_temporary`` removes those of dead writers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from vorox.core.files.file_holder import ProcessIdentity, this_process

MANIFEST_NAME = "MANIFEST.json"
TEMPORARY_PREFIX = ".tmp-"
_STALE_SECONDS = 86_400.0
"""Age at which a temporary file of another machine or container is stale; writing one takes seconds."""
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF}
"""Errors of ``fsync`` for a directory on a file system that cannot do it; those of a failing disk are others."""
_UNKNOWN = "0" * 8
"""An unknown part of a writer's identity, in names."""

FILE_MODE, PRIVATE_MODE, DIRECTORY_MODE = 0o644, 0o600, 0o755
_EXACT = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)

Result = TypeVar("Result")
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class FileOperation:
    """A call that changes the disk; a crash can happen between any two."""

    kind: str  # mkdir, create, write, fsync, rename, fsync_directory, remove
    path: Path
    target: Path | None = None
    data: bytes = b""


Observer = Callable[[FileOperation], None]
_observer: Observer | None = None


@contextlib.contextmanager
def observe(observer: Observer) -> Generator[None]:
    """Call ``observer`` before every operation; an exception that it raises replaces the operation. For tests."""
    global _observer
    previous, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = previous


def _perform(
    kind: str, path: Path, action: Callable[[], Result], *, target: Path | None = None, data: Buffer = b""
) -> Result:
    if _observer is not None:
        _observer(FileOperation(kind, path, target, bytes(data)))
    return action()


def write(file: IO[bytes], path: Path, data: Buffer) -> None:
    """Write all of ``data`` to an open file."""

    def action() -> None:
        # An unbuffered write may be partial: on a nearly full disk, and always beyond 2 GiB.
        view = memoryview(data)
        rest = view.cast("B") if view.nbytes else b""
        while rest:
            rest = rest[file.write(rest) :]

    _perform("write", path, action, data=data)


def sync_file(file: IO[bytes], path: Path) -> None:
    """Flush an open file to disk."""

    def action() -> None:
        file.flush()
        os.fsync(file.fileno())

    _perform("fsync", path, action)


def sync_path(path: Path) -> None:
    """Flush a file that another library wrote to disk."""
    with _open(path, os.O_RDWR, "r+b") as file:
        sync_file(file, path)


def create(path: Path, *, private: bool = False) -> IO[bytes]:
    """Create a file and open it for unbuffered writing; fails if it exists."""
    flags, mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_MODE if private else FILE_MODE
    return _perform("create", path, lambda: _open(path, flags, "wb", mode))


def _open(path: Path, flags: int, mode: str, permissions: int = FILE_MODE) -> IO[bytes]:
    return os.fdopen(os.open(path, flags | _EXACT, permissions), mode, buffering=0)


def sync_directory(path: Path) -> None:
    """Make renames and removals in ``path`` durable.

    Does nothing on Windows and on file systems (CIFS, vboxsf, some FUSE) that have no call for it: there the server, or
    the disk behind them, decides when a rename is durable. Readers tolerate its loss, which leaves the old state.
    """

    def action() -> None:
        if os.name == "nt":
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise
        finally:
            os.close(descriptor)

    _perform("fsync_directory", path, action)


def make_directory(path: Path) -> list[Path]:
    """Create a directory and its parents, each made durable in its own parent; return the new ones, innermost first.

    If one cannot be created, the others are removed.
    """
    missing: list[Path] = []
    current = path
    while not current.exists():
        missing.append(current)
        current = current.parent
    try:
        for directory in reversed(missing):
            _perform("mkdir", directory, lambda directory=directory: directory.mkdir(DIRECTORY_MODE, exist_ok=True))
            sync_directory(directory.parent)
    except OSError:
        remove_if_empty([directory for directory in missing if directory.exists()])
        raise
    return missing


def remove_if_empty(directories: Sequence[Path]) -> None:
    """Remove what ``make_directory`` created, innermost first, up to the first one that is not empty."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()


def rename(source: Path, target: Path) -> None:
    """Rename durably, replacing ``target`` if it exists."""
    _perform("rename", source, lambda: source.replace(target), target=target)
    sync_directory(target.parent)


def remove_file(path: Path) -> None:
    _perform("remove", path, lambda: path.unlink(missing_ok=True))


def remove_directory(path: Path) -> None:
    """Remove a committed directory; its manifest goes durably first, so a partly removed one never looks complete.

    Of a symbolic link, only the link is removed.
    """
    if path.is_symlink():
        remove_file(path)
        sync_directory(path.parent)
        return
    if (path / MANIFEST_NAME).exists():
        remove_file(path / MANIFEST_NAME)
        sync_directory(path)
    for inner in sorted(path.rglob("*"), reverse=True):
        if inner.is_dir() and not inner.is_symlink():
            _perform("remove", inner, inner.rmdir)
        else:
            remove_file(inner)
    _perform("remove", path, path.rmdir)
    sync_directory(path.parent)


def temporary_name(path: Path, writer: ProcessIdentity | None = None) -> Path:
    """Return a name next to ``path`` that readers ignore and that identifies its writer, by default this process."""
    own = writer or this_process()
    identity = f"{own.host}-{own.process_id}-{own.namespace or _UNKNOWN}-{own.start or _UNKNOWN}"
    return path.with_name(f"{TEMPORARY_PREFIX}{identity}-{uuid.uuid4().hex[:8]}-{path.name}")


_TEMPORARY = re.compile(
    re.escape(TEMPORARY_PREFIX)
    + r"(?P<host>.+?)-(?P<pid>\d+)-(?P<namespace>[0-9a-f]{8})-(?P<start>[0-9a-f]{8})-[0-9a-f]{8}-.+"
)


def sweep_temporary(directory: Path) -> list[Path]:
    """Remove the stale temporary files and directories in ``directory``; return their paths."""
    removed: list[Path] = []
    for path in filter(is_stale_temporary, sorted(directory.glob(f"{TEMPORARY_PREFIX}*"))):
        if path.is_dir() and not path.is_symlink():
            _perform("remove", path, lambda path=path: shutil.rmtree(path, ignore_errors=True))
        else:
            remove_file(path)
        removed.append(path)
    return removed


def is_stale_temporary(path: Path) -> bool:
    """Whether a path is a temporary file or directory of a dead process.

    Whether a process of another machine or container is alive cannot be known. Such a file is stale once it is a day
    old, by the clock of its file system.
    """
    match = _TEMPORARY.fullmatch(path.name)
    if match is None:
        return False
    namespace, start = (match[name].replace(_UNKNOWN, "") for name in ("namespace", "start"))
    writer = ProcessIdentity(match["host"], int(match["pid"]), namespace, start)
    if writer.is_visible:
        return writer.is_dead()
    try:
        return disk_time(path.parent) - path.lstat().st_mtime > _STALE_SECONDS
    except OSError:
        return False


def disk_time(directory: Path) -> float:
    """Return the time by the clock of a directory's file system; machines that share it may have different clocks.

    Raises:
        OSError: The directory is not writable.
    """
    path = temporary_name(directory / "clock")
    try:
        path.touch(FILE_MODE, exist_ok=False)
        return path.stat().st_mtime
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def stage_file(path: Path, data: Buffer, *, private: bool = False) -> Path:
    """Write a file durably under a temporary name next to ``path``, ready for ``rename``; return that name."""
    temporary = temporary_name(path)
    try:
        with create(temporary, private=private) as file:
            write(file, temporary, data)
            sync_file(file, temporary)
    except BaseException:
        discard_staged(temporary)
        raise
    return temporary


def discard_staged(temporary: Path) -> None:
    """Remove a staged file that is not needed; ``sweep_temporary`` removes it later if the disk fails now."""
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


def write_file(path: Path, data: Buffer, *, private: bool = False) -> None:
    """Replace the content of ``path`` atomically and durably."""
    temporary = stage_file(path, data, private=private)
    try:
        rename(temporary, path)
    except BaseException:
        discard_staged(temporary)
        raise


def canonical_json(value: Any) -> bytes:
    """Serialise JSON for hashes and comparisons: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def pretty_json(value: Any) -> bytes:
    """Serialise JSON for files that people read: indented, sorted keys."""
    return (json.dumps(value, sort_keys=True, indent=2, allow_nan=False) + "\n").encode("ascii")


def append(path: Path, data: Buffer, *, sync: bool, private: bool = False) -> None:
    """Append bytes to a file in one write; creates it if it does not exist."""
    created = not path.exists()
    flags, mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_MODE if private else FILE_MODE
    with _open(path, flags, "ab", mode) as file:
        if created:
            _perform("create", path, lambda: None)
        write(file, path, data)
        if sync:
            sync_file(file, path)
    if created and sync:
        sync_directory(path.parent)


def truncate(path: Path, size_bytes: int) -> None:
    """Truncate a file durably, to remove a torn last line from a log."""
    with _open(path, os.O_RDWR, "r+b") as file:
        _perform("truncate", path, lambda: file.truncate(size_bytes), data=str(size_bytes).encode())
        sync_file(file, path)


def is_disk_full(error: BaseException) -> bool:
    """Whether an ``OSError`` means a full disk or an exhausted quota."""
    return isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
