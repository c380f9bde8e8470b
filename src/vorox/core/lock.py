"""File locks: one writer at a time, released by the operating system when the process dies."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import TracebackType

from vorox.core.errors import ConfigError
from vorox.core.process_identity import ProcessIdentity, this_process

_HELD_ERRORS = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK}
"""Of a lock that another process holds; the last two on Windows."""


class FileLock:
    """An exclusive lock on a file, held until ``release`` or the death of the process.

    The file records the holder and is not opened through a symbolic link. With ``blocking=False``, a lock held by
    another process raises an error that names the holder.
    """

    def __init__(self, path: Path, *, blocking: bool = True, purpose: str = "") -> None:
        self.path = path
        self._blocking = blocking
        self._purpose = purpose
        self._file = None

    def acquire(self) -> FileLock:
        """Acquire the lock.

        Raises:
            ConfigError: Another process holds it and ``blocking`` is off, or the file system has no locks.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        file = os.fdopen(os.open(self.path, flags, 0o644), "a+b", buffering=0)
        try:
            _lock(file.fileno(), self._blocking)
        except OSError as error:
            file.seek(0)
            holder = _describe(file.read())
            file.close()
            name = _capitalised(self._purpose or self.path.name)
            if error.errno in _HELD_ERRORS:
                text, hint = f"{name} is in use by {holder}", "wait until that process finishes, or stop it"
            else:
                text = f"{name} cannot be locked: {error.strerror or error}"
                hint = "use a directory on a file system that supports file locks (for NFS, mount it with locks)"
            raise ConfigError(text, where=str(self.path), hint=hint) from error
        file.seek(0)
        file.truncate()
        file.write(json.dumps(this_process().to_json()).encode())
        self._file = file
        return self

    def release(self) -> None:
        if self._file is not None:
            self._file.close()  # closing releases the lock
            self._file = None

    def __enter__(self) -> FileLock:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def lock_holder(path: Path) -> str | None:
    """Return the holder of a lock, or ``None`` if it is free. Does not acquire it.

    A file that names a dead process of this host is not locked; otherwise a momentary shared lock is tried.
    """
    try:
        with path.open("rb", buffering=0) as file:
            content = file.read(4096)
            if not content or _is_gone(content):
                return None
            try:
                _probe(file.fileno())
            except OSError:
                return _describe(content)
    except OSError:
        pass  # the file does not exist or is not readable: no known holder
    return None


def _is_gone(content: bytes) -> bool:
    """Whether the process that a lock file names is known to be dead."""
    holder = _read_holder(content)
    return holder is not None and holder.is_dead()


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _describe(content: bytes) -> str:
    return str(_read_holder(content) or "another process")


def _read_holder(content: bytes) -> ProcessIdentity | None:
    try:
        return ProcessIdentity.from_json(json.loads(content))
    except ValueError:
        return None


if os.name == "nt":
    import msvcrt

    def _lock(descriptor: int, blocking: bool) -> None:
        # A byte far beyond the content, so that other processes can still read the holder.
        os.lseek(descriptor, 1 << 30, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_LOCK if blocking else msvcrt.LK_NBLCK, 1)  # pyright: ignore

    def _probe(descriptor: int) -> None:
        _lock(descriptor, blocking=False)
else:
    import fcntl

    def _lock(descriptor: int, blocking: bool) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))

    def _probe(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
