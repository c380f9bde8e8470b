"""Exclusive files: one writer at a time, released by the system when its process dies."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType

from vorox.core.errors import ConfigError
from vorox.core.process_identity import ProcessIdentity, this_process


class FileLock:
    """An exclusive lock on a file, held until ``release`` or the death of the process.

    The file says who holds it; it is not opened through a symbolic link. ``blocking=False`` refuses at once with the
    holder's name.
    """

    def __init__(self, path: Path, *, blocking: bool = True, purpose: str = "") -> None:
        self.path = path
        self._blocking = blocking
        self._purpose = purpose
        self._file = None

    def acquire(self) -> FileLock:
        """Take the lock.

        Raises:
            ConfigError: Somebody else holds it and ``blocking`` is off.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        file = os.fdopen(os.open(self.path, flags, 0o644), "a+b", buffering=0)
        try:
            _lock(file.fileno(), self._blocking)
        except OSError as error:
            file.seek(0)
            holder = _describe(file.read())
            file.close()
            raise ConfigError(
                f"{self._purpose or self.path.name} is in use by {holder}",
                where=str(self.path),
                hint="wait for it to finish or stop that process",
            ) from error
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
    """Who holds a lock at this moment, or ``None`` if nobody does. For readers: takes nothing.

    A file that names no living process of this host is not locked; otherwise the lock itself is asked, with a request
    that lasts an instant.
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
        pass  # there is no file, or none that we may read: nobody whom we could name
    return None


def _is_gone(content: bytes) -> bool:
    """Whether the process that a lock file names is known not to live."""
    holder = _read_holder(content)
    return holder is not None and holder.is_dead()


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
        # A byte far beyond the content, so that the holder's name stays readable for others.
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
