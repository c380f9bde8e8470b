"""Leases: which builder is building which unit, one small file ``leases/u000001234`` per unit in progress.

A builder acquires a unit by hard-linking its own file to the lease's name, which succeeds for one builder only, and
releases it by removing the link. A lease therefore names its holder from the start, and touching one file renews all
leases of a builder. File systems without hard links get a separate file per lease. A lease expires when its process is
known to be dead, or when it was not renewed for a minute by the clock of the file system. Invariant: leases only save
work; two builders of one unit are harmless, because the commit happens under the manifest's lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from vorox.core.files.atomic import make_directory, temporary_name
from vorox.core.files.file_holder import FileLock, ProcessIdentity, this_process
from vorox.core.files.json_reader import read_json
from vorox.data.cache.files.manifest import LOCK_NAME

DIRECTORY_NAME = "leases"
STALE_SECONDS = 60.0
HEARTBEAT_SECONDS = 10.0
_MEASURE_OFFSET_SECONDS = 5.0

_LIVE_TOKENS: set[str] = set()
"""Tokens of the live builders of this process."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lease.

    Attributes:
        process: The builder's process.
        token: Identifies the builder within the process.
    """

    process: ProcessIdentity
    token: str

    def __str__(self) -> str:
        return str(self.process)

    def is_dead(self) -> bool:
        """Whether the builder is known to be dead; unknown for processes of other machines and containers."""
        if self.process == this_process():
            return self.token not in _LIVE_TOKENS
        return self.process.is_dead()


def lease_path(directory: Path, unit: int | str) -> Path:
    """Return the path of the lease on a unit of a cache, or on a key of the unit store."""
    return directory / DIRECTORY_NAME / (f"u{unit:09d}" if isinstance(unit, int) else f"u{unit}")


def read_holder(path: Path) -> Holder | None:
    """Return the holder of a lease; None if the lease does not exist or is unreadable."""
    try:
        value = read_json(path)
        process = ProcessIdentity.from_json(value)
        return None if process is None else Holder(process, str(value["token"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_held(path: Path, now: float) -> bool:
    """Whether a lease may be in force: its process is alive, or a process that is not visible renewed it recently.

    Unlike ``is_expired``, this uses no clock for visible processes, so a clock that jumps frees no lease.

    Args:
        path: The lease.
        now: The time by the clock of its file system.
    """
    holder = read_holder(path)
    if holder is not None and holder.process.is_visible:
        return not holder.is_dead()
    return not is_expired(path, now)


def is_expired(path: Path, now: float | None = None, stale_seconds: float = STALE_SECONDS) -> bool:
    """Whether a lease has expired.

    Args:
        path: The lease.
        now: The time by the clock of its file system; None: by this machine's clock.
        stale_seconds: Age at which a lease expires unless it is renewed.
    """
    holder = read_holder(path)
    if holder is not None and holder.is_dead():
        return True
    try:
        return (time.time() if now is None else now) - path.stat().st_mtime > stale_seconds
    except FileNotFoundError:
        return True


class Leases:
    """The leases of one builder. Use as a context manager; leaving it releases all leases.

    Args:
        directory: The cache.
        stale_seconds: Age at which a lease expires unless it is renewed.
        heartbeat_seconds: Renewal interval.
    """

    def __init__(
        self, directory: Path, *, stale_seconds: float = STALE_SECONDS, heartbeat_seconds: float = HEARTBEAT_SECONDS
    ) -> None:
        self._directory = directory
        self._stale_seconds = stale_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._token = uuid.uuid4().hex
        self._held: set[int | str] = set()
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._renew, name="lease heartbeat", daemon=True)
        self._own = temporary_name(directory / DIRECTORY_NAME / "builder")
        self._disk_offset_seconds: float | None = None
        self._offset_measured_at = 0.0
        self._links = True
        self._content = json.dumps({**this_process().to_json(), "token": self._token}).encode()

    def __enter__(self) -> Leases:
        make_directory(self._own.parent)
        _LIVE_TOKENS.add(self._token)
        self._write(self._own)
        self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for unit in list(self._held):
            with contextlib.suppress(OSError):
                self.release(unit)
        with contextlib.suppress(OSError):
            self._own.unlink(missing_ok=True)
        _LIVE_TOKENS.discard(self._token)
        if self._heart.is_alive():
            self._heart.join()

    def acquire(self, unit: int | str) -> bool:
        """Lease a unit. False: another builder holds it."""
        path = lease_path(self._directory, unit)
        while not self._create(path):
            if not is_expired(path, self._disk_time(), self._stale_seconds):
                return False
            with FileLock(self._directory / LOCK_NAME):  # or this could remove the lease of a faster builder
                if is_expired(path, self._disk_time(), self._stale_seconds):
                    path.unlink(missing_ok=True)
        with self._changed:
            self._held.add(unit)
        return True

    def _disk_time(self) -> float:
        """Return the time by the clock of the file system, because the clocks of machines that share it may differ."""
        at = time.monotonic()
        if self._disk_offset_seconds is None or at - self._offset_measured_at > _MEASURE_OFFSET_SECONDS:
            with contextlib.suppress(OSError):  # keep the previous offset
                os.utime(self._own)
                self._disk_offset_seconds, self._offset_measured_at = self._own.stat().st_mtime - at, at
        return time.time() if self._disk_offset_seconds is None else at + self._disk_offset_seconds

    def _create(self, path: Path) -> bool:
        try:
            if self._links:
                try:
                    os.link(self._own, path)
                    return True
                except FileExistsError:
                    return False
                except OSError:
                    self._links = False  # exFAT, some network file systems, or links are forbidden
            self._write(path)
        except FileExistsError:
            return False
        return True

    def _write(self, path: Path) -> None:
        file = path.open("xb", buffering=0)
        try:
            with file:
                file.write(self._content)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def release(self, unit: int | str) -> None:
        """Release a unit."""
        with self._changed:
            self._held.discard(unit)
            self._changed.notify_all()
        path = lease_path(self._directory, unit)
        holder = read_holder(path)
        if holder is not None and holder.token == self._token:
            path.unlink(missing_ok=True)

    def wait_for_room(self, limit: int, timeout_seconds: float) -> None:
        """Wait until fewer than ``limit`` units are held, up to a timeout."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._held) < limit, timeout_seconds)

    def holder(self, unit: int | str) -> Holder | None:
        """Return the holder of a unit's lease."""
        return read_holder(lease_path(self._directory, unit))

    def _renew(self) -> None:
        while not self._ended.wait(self._heartbeat_seconds):
            with self._changed:
                held = list(self._held)
            for path in (self._own, *(lease_path(self._directory, unit) for unit in held if not self._links)):
                with contextlib.suppress(OSError):  # lost while the machine slept; the commit notices
                    os.utime(path)
