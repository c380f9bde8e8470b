"""Exclusive files: one writer at a time, released by the system when its process dies."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import TracebackType

from vorox.core.errors import ConfigError


class FileLock:
    """An exclusive lock on a file, held until ``release`` or the death of the process.

    The file says who holds it. ``blocking=False`` refuses at once with the holder's name.
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
        file = self.path.open("a+b", buffering=0)
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
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
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


def _describe(content: bytes) -> str:
    try:
        holder = json.loads(content)
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


if os.name == "nt":
    import msvcrt

    def _lock(descriptor: int, blocking: bool) -> None:
        # A byte far beyond the content, so that the holder's name stays readable for others.
        os.lseek(descriptor, 1 << 30, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_LOCK if blocking else msvcrt.LK_NBLCK, 1)  # pyright: ignore
else:
    import fcntl

    def _lock(descriptor: int, blocking: bool) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
