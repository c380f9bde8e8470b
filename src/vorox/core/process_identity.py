"""Process identity: host, process id and start time, because process ids are reused.

In a container every training process has id 1, so an id alone cannot identify a dead process. The start time is counted
by the kernel from boot, not by the wall clock, which may be changed. Locks, leases, streaming windows, owners of
mirrors and temporary files record a ``ProcessIdentity``.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast


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


def boot_identity() -> str:
    """Return an identity of this boot of this machine; of this process if the boot id is not available."""
    try:
        return f"{socket.gethostname()} {_boot_id()}"
    except OSError:
        return str(this_process())


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def this_process() -> ProcessIdentity:
    """Return the identity of this process."""
    return _identity(socket.gethostname(), os.getpid())


def machine_identity() -> str:
    """Return an identity of this boot and PID namespace, for hosts that share a name; empty if unknown."""
    try:
        namespace = Path("/proc/self/ns/pid").readlink()
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()} {namespace}"
    except OSError:
        return ""


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
