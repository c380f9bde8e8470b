"""Who builds which unit at the moment: ``leases/u000001234``, a small file per unit that is under way.

Builders meet through them without speaking to each other: a unit is taken by linking the builder's own file to its
name, which only one of them can, and given back by removing that. So a lease says whose it is from its first instant,
and renewing one renews all; where the disk knows no links, each lease is a file of its own. A lease is void when its
process, on this host, is dead, or when it was not renewed for a minute by the clock of the disk that it lies on.
Invariant: nothing but time depends on a lease; two builders of one unit do no harm, because what counts is decided
under the manifest's lock.
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

from vorox.core.atomic import make_directory, temporary_name
from vorox.core.lock import FileLock
from vorox.core.process_identity import ProcessIdentity, this_process
from vorox.data.cache.manifest import LOCK_NAME

DIRECTORY_NAME = "leases"
STALE_SECONDS = 60.0
HEARTBEAT_SECONDS = 10.0
_COMPARE_EVERY_SECONDS = 5.0

_LIVE_TOKENS: set[str] = set()
"""Of the builders of this process that still exist."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease.

    Attributes:
        process: Its process.
        token: Which builder of the process.
    """

    process: ProcessIdentity
    token: str

    def __str__(self) -> str:
        return str(self.process)

    def is_dead(self) -> bool:
        """Whether it is known not to work any more; processes of other hosts never are."""
        if (self.process.host, self.process.process_id) == (this_process().host, this_process().process_id):
            return self.token not in _LIVE_TOKENS
        return self.process.is_dead()


def lease_path(directory: Path, unit: int) -> Path:
    return directory / DIRECTORY_NAME / f"u{unit:09d}"


def read_holder(path: Path) -> Holder | None:
    """Who holds a lease; ``None`` if nobody does or it does not say."""
    try:
        value = json.loads(path.read_bytes())
        process = ProcessIdentity.from_json(value)
        return None if process is None else Holder(process, str(value["token"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_held(path: Path, now: float) -> bool:
    """Whether a lease may bind somebody: its process lives on this host, or another host renewed it lately.

    Unlike ``is_expired`` it asks no clock about processes of this host, so that a clock that jumps frees nothing.

    Args:
        path: The lease.
        now: The time by the disk that it lies on.
    """
    holder = read_holder(path)
    if holder is not None and holder.process.host == this_process().host:
        return not holder.is_dead()
    return not is_expired(path, now)


def is_expired(path: Path, now: float | None = None, stale_seconds: float = STALE_SECONDS) -> bool:
    """Whether a lease that lies there binds nobody any more.

    Args:
        path: The lease.
        now: The time by the disk that it lies on; None: by this machine, which is good enough for what is a day old.
        stale_seconds: How old a lease may be before it is void.
    """
    holder = read_holder(path)
    if holder is not None and holder.is_dead():
        return True
    try:
        return (time.time() if now is None else now) - path.stat().st_mtime > stale_seconds
    except FileNotFoundError:
        return True


class Leases:
    """The leases of one builder. Enter it; leaving gives back whatever is still held.

    Args:
        directory: The cache.
        stale_seconds: How old a lease may be before it is void.
        heartbeat_seconds: How often those held are renewed.
    """

    def __init__(
        self, directory: Path, *, stale_seconds: float = STALE_SECONDS, heartbeat_seconds: float = HEARTBEAT_SECONDS
    ) -> None:
        self._directory = directory
        self._stale_seconds = stale_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._token = uuid.uuid4().hex
        self._held: set[int] = set()
        self._changing = threading.Condition()
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="lease heartbeat", daemon=True)
        self._own = temporary_name(directory / DIRECTORY_NAME / "builder")
        self._disk_minus_clock: float | None = None
        self._compared_at = 0.0
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
        for unit in sorted(self._held):
            with contextlib.suppress(OSError):
                self.release(unit)
        with contextlib.suppress(OSError):
            self._own.unlink(missing_ok=True)
        _LIVE_TOKENS.discard(self._token)
        if self._heart.is_alive():
            self._heart.join()

    def acquire(self, unit: int) -> bool:
        """Take a unit unless another builder has it."""
        path = lease_path(self._directory, unit)
        while not self._create(path):
            if not is_expired(path, self._disk_time(), self._stale_seconds):
                return False
            with FileLock(self._directory / LOCK_NAME):  # so that nobody removes the lease of who was faster
                if is_expired(path, self._disk_time(), self._stale_seconds):
                    path.unlink(missing_ok=True)
        with self._changing:
            self._held.add(unit)
        return True

    def _disk_time(self) -> float:
        """What the disk takes for now: machines that share it need not agree about the time."""
        at = time.monotonic()
        if self._disk_minus_clock is None or at - self._compared_at > _COMPARE_EVERY_SECONDS:
            with contextlib.suppress(OSError):  # as before, then
                os.utime(self._own)
                self._disk_minus_clock, self._compared_at = self._own.stat().st_mtime - at, at
        return time.time() if self._disk_minus_clock is None else at + self._disk_minus_clock

    def _create(self, path: Path) -> bool:
        try:
            if self._links:
                try:
                    os.link(self._own, path)
                    return True
                except FileExistsError:
                    return False
                except OSError:
                    self._links = False  # exFAT and some network disks; or nobody may link here
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

    def release(self, unit: int) -> None:
        """Give a unit back."""
        with self._changing:
            self._held.discard(unit)
            self._changing.notify_all()
        path = lease_path(self._directory, unit)
        holder = read_holder(path)
        if holder is not None and holder.token == self._token:
            path.unlink(missing_ok=True)

    def wait_for_room(self, limit: int, timeout_seconds: float) -> None:
        """Wait until fewer than so many units are held, for some time at most."""
        with self._changing:
            self._changing.wait_for(lambda: len(self._held) < limit, timeout_seconds)

    def holder(self, unit: int) -> Holder | None:
        """Who has a unit."""
        return read_holder(lease_path(self._directory, unit))

    def _beat(self) -> None:
        while not self._ended.wait(self._heartbeat_seconds):
            with self._changing:
                held = sorted(self._held)
            for path in (self._own, *(lease_path(self._directory, unit) for unit in held if not self._links)):
                with contextlib.suppress(OSError):  # taken from us while the machine slept: the commit will find out
                    os.utime(path)
