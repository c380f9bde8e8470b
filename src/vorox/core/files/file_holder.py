"""Holders of files: the process that a file names, and locks that end with their process.

Locks, leases, streaming windows, owners of mirrors, heartbeats and temporary files record a ``ProcessIdentity``: host,
process id, the table of processes that the id belongs to, and the start time, because process ids are reused. In a
container every training process has id 1, and machines and containers may share a host name, so neither an id nor a
host name identifies a dead process. The start time is counted by the kernel from boot, not by the wall clock, which may
be changed. A ``FileLock`` is held by one process at a time.

Invariant: a process is called dead only by one that would see it alive. Every question of this kind is
``ProcessIdentity.is_dead``; about the others nothing is known, and what they hold expires by time.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from vorox.core.errors import ConfigError
from vorox.core.files.failing_disk import is_failing
from vorox.core.files.json_reader import MalformedJson, open_regular, parse_json

_HELD_ERRORS = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK}
"""Of a lock that another process holds; the last two on Windows."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, as recorded in files.

    Attributes:
        host: Host name, for messages.
        process_id: Process id.
        namespace: Eight hex digits of a hash of machine, boot and PID namespace, within which process ids are unique;
            empty if it is unknown.
        start: Eight hex digits of a hash of its start time; empty if it is unknown.
    """

    host: str
    process_id: int
    namespace: str = ""
    start: str = ""

    def __str__(self) -> str:
        return f"process {self.process_id} on {self.host}"

    def to_json(self) -> dict[str, str | int]:
        return {"host": self.host, "pid": self.process_id, "namespace": self.namespace, "start": self.start}

    @classmethod
    def from_json(cls, value: Any) -> ProcessIdentity | None:
        """Return the identity in a mapping, which may have other keys; ``None`` if it names no process."""
        if not isinstance(value, Mapping):
            return None
        fields = cast("Mapping[str, Any]", value)
        texts = [fields.get(key) for key in ("host", "namespace", "start")]
        process_id = fields.get("pid")
        if type(process_id) is not int or not all(isinstance(text, str) for text in texts):
            return None
        host, namespace, start = cast("list[str]", texts)
        return cls(host, process_id, namespace, start)

    @classmethod
    def parse(cls, content: bytes) -> ProcessIdentity | None:
        """Return the identity that the JSON text of a file names; ``None`` if it names no process."""
        try:
            return cls.from_json(parse_json(content, "LOCK"))
        except ValueError:
            return None

    @property
    def is_visible(self) -> bool:
        """Whether this process would see it alive: both are of one PID namespace of one boot of one machine."""
        return bool(self.namespace) and self.namespace == pid_namespace()

    def is_dead(self) -> bool:
        """Whether the process is known to be dead; never for processes of other machines or PID namespaces."""
        if not self.is_visible:
            return False
        if not _exists(self.process_id) or _is_zombie(self.process_id):
            return True
        start = _start(self.process_id)
        return bool(self.start and start and self.start != start)

    def is_stopped(self) -> bool:
        """Whether the process is known to be stopped (SIGSTOP, SIGTSTP)."""
        import psutil

        try:
            return self.is_visible and psutil.Process(self.process_id).status() == psutil.STATUS_STOPPED
        except (psutil.Error, ValueError):
            return False


def this_process() -> ProcessIdentity:
    """Return the identity of this process."""
    return _identity(socket.gethostname(), os.getpid())


def boot_identity() -> str:
    """Return an identity of this boot of this machine; of this process if the boot id is not available."""
    try:
        return f"{socket.gethostname()} {_boot_id()}"
    except OSError:
        return str(this_process())


def pid_namespace() -> str:
    """Return eight hex digits that name the process ids which this process sees; empty if that is unknown.

    Boot and PID namespace decide it; the id of the installed system also keeps apart machines that were cloned while
    they ran. A ``/proc`` of another PID namespace says nothing about the processes of this one.
    """
    return _namespace(os.getpid())


@functools.lru_cache(maxsize=1)
def _namespace(process_id: int) -> str:
    try:
        if sys.platform != "linux":
            parts = [socket.gethostname(), f"{uuid.getnode():x}"]  # there are no PID namespaces
        elif int(str(Path("/proc/self").readlink())) == process_id:
            parts = [_boot_id(), str(Path("/proc/self/ns/pid").readlink()), _machine_id()]
        else:
            return ""
    except (OSError, ValueError):
        return ""
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:8]


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _machine_id() -> str:
    """Return the id of the installed system, whose containers may have ids of their own; empty if it has none."""
    try:
        return Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


@functools.lru_cache(maxsize=1)
def _identity(host: str, process_id: int) -> ProcessIdentity:
    return ProcessIdentity(host, process_id, pid_namespace(), _start(process_id))


def _exists(process_id: int) -> bool:
    """Whether a process id is in use; ``/proc`` may hide the processes of other users, a signal does not."""
    if os.name == "nt":
        import psutil

        return psutil.pid_exists(process_id)
    if process_id <= 0:
        return False
    try:
        os.kill(process_id, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True  # it belongs to another user
    return True


def _is_zombie(process_id: int) -> bool:
    import psutil

    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError):
        return False


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
            with contextlib.closing(file):
                named = OSError(error.errno, error.strerror, str(self.path))
                if is_failing(named):  # it says nothing about the lock; the caller explains it
                    raise named from error
                file.seek(0)
                holder = ProcessIdentity.parse(file.read()) or "another process"
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

    def reacquire_if_removed(self) -> bool:
        """Acquire the lock on a new file if its file was removed or replaced; return whether it was.

        Raises:
            ConfigError: Another process holds the new file.
        """
        held = self._file
        if held is None:
            return False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(), os.fstat(held.fileno())):
                return False
        self.acquire()
        held.close()
        return True

    def moved_to(self) -> Path | None:
        """Return where the file of the held lock is now if it is not at its path; ``None`` if that is not known."""
        if self._file is None:
            return None
        held = os.fstat(self._file.fileno())
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(self.path.stat(), held):
                return None
        with contextlib.suppress(OSError, ValueError):
            found = _path_of(self._file.fileno())
            if os.path.samestat(found.stat(), held):
                return found
        return None

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

    A file that names a dead process is not locked; otherwise a momentary shared lock is tried.
    """
    try:
        with open_regular(path) as file:
            content = file.read(4096)
            holder = ProcessIdentity.parse(content)
            if not content or (holder is not None and holder.is_dead()):
                return None
            try:
                _probe(file.fileno())
            except OSError:
                return str(holder or "another process")
    except (OSError, MalformedJson):
        pass  # the file does not exist or is not readable: no known holder
    return None


def _path_of(descriptor: int) -> Path:
    """Return the path of an open file, where the system tells it."""
    if sys.platform == "darwin":
        import fcntl

        return Path(os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")))
    return Path(f"/proc/self/fd/{descriptor}").readlink()


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
