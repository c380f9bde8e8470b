"""Which process wrote a file: host, process id and start, because a later process may have the same id.

In a container every process that trains is process 1, so an id alone says nothing about who is gone. The start is
counted by the kernel from boot, not by the wall clock, which may be set while a process lives. Locks, leases, windows,
the owner of a mirror and temporary names all record a ``ProcessIdentity`` and ask it ``is_dead``.
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
    """A process, as others find it recorded.

    Attributes:
        host: Name of its machine.
        process_id: Its number there.
        start: Eight hex digits that tell it from every other process of that number; empty in files of versions that
            recorded the number alone.
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
        """The identity in a mapping that may hold more; ``None`` if it names no process."""
        if not isinstance(value, Mapping):
            return None
        fields = cast("Mapping[str, Any]", value)
        host, process_id, start = fields.get("host"), fields.get("pid"), fields.get("start", "")
        if not isinstance(host, str) or type(process_id) is not int or not isinstance(start, str):
            return None
        return cls(host, process_id, start)

    def is_dead(self) -> bool:
        """Whether it is known to have ended. Processes of other hosts never are."""
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
    """What tells this boot of this machine from every other; of this process alone where the system does not say."""
    try:
        return f"{socket.gethostname()} {_boot_id()}"
    except OSError:
        return str(this_process())


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def this_process() -> ProcessIdentity:
    """The identity of this process."""
    return _identity(socket.gethostname(), os.getpid())


def machine_identity() -> str:
    """Identify this machine since its last boot, for records that machines of one host name share; empty if unknown."""
    try:
        namespace = Path("/proc/self/ns/pid").readlink()
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()} {namespace}"
    except OSError:
        return ""


@functools.lru_cache(maxsize=1)
def _identity(host: str, process_id: int) -> ProcessIdentity:
    return ProcessIdentity(host, process_id, _start(process_id))


def _start(process_id: int) -> str:
    """Digest of when a process began; empty if that cannot be known."""
    try:
        fields = (
            Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        began = f"{_boot_id()} {fields[19]}"  # clock ticks since boot
    except (OSError, IndexError):
        import psutil

        try:
            began = f"{psutil.Process(process_id).create_time():.2f}"
        except psutil.Error:
            return ""
    return hashlib.sha256(began.encode()).hexdigest()[:8]
