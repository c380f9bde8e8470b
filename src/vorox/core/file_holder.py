"""Holders of files: the process that a file names, and locks that end with their process.

Locks, leases, streaming windows, owners of mirrors, heartbeats and temporary files record a ``ProcessIdentity``: host,
process id and start time, because process ids are reused. In a container every training process has id 1, so an id
alone cannot identify a dead process. The start time is counted by the kernel from boot, not by the wall clock, which
may be changed. A ``FileLock`` is held by one process at a time.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from vorox.core.errors import ConfigError

_HELD_ERRORS = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK}
"""Of a lock that another process holds; the last two on Windows."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, as recorded in files.

    Attributes:
        host: Host name.
        process_id: Process id.
        start: Eight hex digits of a hash of its start time; empty in files of versions that did not record it.
    """

    host: str
    process_id: int
    start: str = ""

    def __str__(self) -> str:
        return f"process {self.process_id} on {self.host}"

    def to_json(self) -> dict[str, str | int]:
        return {"host": self.host, "pid": self.process_id, "start": self.start}

    @classmethod
    def from_json(cls, value: Any) -> ProcessIdentity | None:
        """Return the identity in a mapping, which may have other keys; ``None`` if it names no process."""
        if not isinstance(value, Mapping):
            return None
        fields = cast("Mapping[str, Any]", value)
        host, process_id, start = fields.get("host"), fields.get("pid"), fields.get("start", "")
        if not isinstance(host, str) or type(process_id) is not int or not isinstance(start, str):
            return None
        return cls(host, process_id, start)

    @classmethod
    def parse(cls, content: bytes) -> ProcessIdentity | None:
        """Return the identity that the JSON text of a file names; ``None`` if it names no process."""
        try:
            return cls.from_json(json.loads(content))
        except ValueError:
            return None

    def is_dead(self) -> bool:
        """Whether the process is known to be dead; never for processes of other hosts."""
        if self.host != socket.gethostname():
            return False
        import psutil

        try:
            if psutil.Process(self.process_id).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        except (psutil.Error, ValueError, OverflowError):
            return False
        start = _start(self.process_id)
        return bool(self.start and start and self.start != start)


def this_process() -> ProcessIdentity:
    """Return the identity of this process."""
    return _identity(socket.gethostname(), os.getpid())


def boot_identity() -> str:
    """Return an identity of this boot of this machine; of this process if the boot id is not available."""
    try:
        return f"{socket.gethostname()} {_boot_id()}"
    except OSError:
        return str(this_process())


def machine_identity() -> str:
    """Return an identity of this boot and PID namespace, for hosts that share a name; empty if unknown."""
    try:
        return f"{_boot_id()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@functools.lru_cache(maxsize=1)
def _identity(host: str, process_id: int) -> ProcessIdentity:
    return ProcessIdentity(host, process_id, _start(process_id))


def _start(process_id: int) -> str:
    """Return a digest of a process's start time; empty if it is unknown."""
    try:
        fields = (
            Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        started = f"{_boot_id()} {fields[19]}"  # clock ticks since boot
    except (OSError, IndexError):
        import psutil

        try:
            started = f"{psutil.Process(process_id).create_time():.2f}"
        except psutil.Error:
            return ""
    return hashlib.sha256(started.encode()).hexdigest()[:8]


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
            holder = ProcessIdentity.parse(file.read()) or "another process"
            file.close()
            name = self._purpose or self.path.name
            name = name[:1].upper() + name[1:]
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
            holder = ProcessIdentity.parse(content)
            if not content or (holder is not None and holder.is_dead()):
                return None
            try:
                _probe(file.fileno())
            except OSError:
                return str(holder or "another process")
    except OSError:
        pass  # the file does not exist or is not readable: no known holder
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
