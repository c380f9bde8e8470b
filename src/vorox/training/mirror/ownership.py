"""Ownership of a mirror: one writing process at a time, by a lease with a fencing token.

``OWNER.json`` names the process and its fencing token, and is renewed every ``RENEW_SECONDS``. It is written by
conditional puts only, so of two processes that acquire it one is refused, and an owner whose lease was taken over
notices at its next renewal. Leases expire by the store's timestamps; the lease of a dead process on this machine is
taken over immediately.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from vorox.core.errors import ConfigError, DataError
from vorox.core.files import atomic
from vorox.core.files.file_holder import ProcessIdentity, this_process
from vorox.core.files.json_reader import parse_json
from vorox.data.storage import (
    RetryPolicy,
    StoredFile,
    WriteConflict,
    put_bytes,
    remove_object,
    retry_budget,
    silent,
)
from vorox.records.log import Echo
from vorox.training.mirror.contents import OWNER_NAME, Contents, list_mirror, read_object

RENEW_SECONDS = 30.0
LEASE_SECONDS = 120.0
"""A lease that was not renewed for so long has expired."""

_POLL_SECONDS = 2.0
_READS = 3
"""Attempts to read ``OWNER.json`` while its owner replaces it."""


class Ownership:
    """This process's lease of a mirror, renewed in the background until it is released.

    Attributes:
        fencing_token: Increases with every owner; part of every name that this process writes.
        lost: Whether another process has taken over.
    """

    def __init__(self, uri: str, fencing_token: int, over: StoredFile | None) -> None:
        self.fencing_token, self.lost = fencing_token, False
        self._uri = f"{uri}/{OWNER_NAME}"
        self._renewals = 0
        self._stored = put_bytes(self._content(released=False), self._uri, mode="create" if over is None else over)
        self._ended, self._putting = threading.Event(), threading.Lock()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._renew,), name="vorox-mirror-owner", daemon=True)
        self._thread.start()

    def _content(self, *, released: bool) -> bytes:
        self._renewals += 1
        return atomic.pretty_json(
            {
                "format": "vorox-mirror-owner/1",
                "claim": self.fencing_token,
                "renewals": self._renewals,
                "released": released,
                "holder": this_process().to_json(),
            }
        )

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS) and not self.lost:
            self._put(released=False)

    def confirm(self) -> None:
        """Renew the lease now; sets ``lost`` if another process has taken over."""
        self._put(released=False)

    def _put(self, *, released: bool) -> None:
        try:
            with self._putting, retry_budget(RetryPolicy(retries_per_unit=3), tracker=silent):
                content = self._content(released=released)
                try:
                    self._stored = put_bytes(content, self._uri, mode=self._stored)
                except WriteConflict as failure:
                    self._stored = put_bytes(content, self._uri, mode=self._check_own(failure))
        except WriteConflict:
            self.lost = True
        except DataError:
            pass  # the store is unreachable; the uploader reports it

    def _check_own(self, failure: WriteConflict) -> StoredFile:
        """Return the stored ``OWNER.json`` if this process wrote it, in a put whose response was lost.

        Raises:
            WriteConflict: Another process wrote it.
            DataError: It cannot be read.
        """
        found = list_mirror(self._uri.rpartition("/")[0]).others.get(OWNER_NAME)
        if found is None or parse_json(read_object(found), OWNER_NAME, dict).get("claim") != self.fencing_token:
            raise failure
        return found

    def release(self, timeout_seconds: float) -> None:
        """Release the lease, so that others can acquire it immediately; bounded by the timeout."""
        self._ended.set()
        self._thread.join(timeout_seconds)
        if self.lost or self._thread.is_alive():
            return
        thread = threading.Thread(
            target=contextvars.copy_context().run, args=(lambda: self._put(released=True),), daemon=True
        )
        thread.start()
        thread.join(timeout_seconds)


def acquire(uri: str, echo: Echo, *, sleep: Callable[[float], None] = time.sleep) -> tuple[Ownership, Contents]:
    """Acquire the lease of a mirror, and check that the mirror can be written, listed and deleted from.

    Args:
        uri: The run's folder.
        echo: Reports waiting for another process's lease to expire.
        sleep: How to wait.

    Returns:
        The ownership, and the contents of the mirror.

    Raises:
        ConfigError: Another process owns the mirror.
        DataError: The store refuses access or cannot be reached.
    """
    probe = f"{uri}/.probe-{os.getpid()}-{os.urandom(4).hex()}"
    now = put_bytes(b"can this be written?", probe)
    found = list_mirror(uri)
    remove_object(now.uri)
    known = found.others.get(OWNER_NAME)
    record = _read(known)
    if known is not None and not record:
        known, record = _owner(uri)
    if known is not None and not record.get("released") and not _is_dead(record.get("holder")):
        stamp = found.others[probe.rpartition("/")[2]].modified_nanoseconds
        silent_seconds = max(0.0, (stamp - known.modified_nanoseconds) / 1e9)
        known, record = _wait_for_silence(uri, known, record, silent_seconds, echo, sleep)
    last = record.get("claim", 0)
    try:
        return Ownership(uri, max(last if type(last) is int else 0, found.last_fencing_token) + 1, known), found
    except WriteConflict:
        raise _in_use(uri, _owner(uri)[1]) from None


def _wait_for_silence(
    uri: str, known: StoredFile, record: Mapping[str, Any], silent_seconds: float, echo: Echo,
    sleep: Callable[[float], None],
) -> tuple[StoredFile | None, Mapping[str, Any]]:  # fmt: skip
    """Wait until the owner's lease has expired or is released; return the last state of ``OWNER.json``."""
    left = LEASE_SECONDS - silent_seconds
    if left > 0:
        echo(
            f"The mirror {uri} was in use by {_holder_name(record)} {silent_seconds:.0f} s ago; "
            f"waiting up to {left:.0f} s for its lease to expire",
            "warning",
        )
    while left > 0:
        sleep(min(left, _POLL_SECONDS))
        left -= _POLL_SECONDS
        current = list_mirror(uri).others.get(OWNER_NAME)
        if current is None or current.version != known.version:
            current, later = _owner(uri)
            if current is None or later.get("released"):
                return current, later
            raise _in_use(uri, later or record)
    return known, record


def _in_use(uri: str, record: Mapping[str, Any]) -> ConfigError:
    return ConfigError(
        f"The mirror of this run is in use by {_holder_name(record)}", where=uri,
        hint="wait for that process or stop it, or set another checkpoint.mirror for this run",
    )  # fmt: skip


def _owner(uri: str) -> tuple[StoredFile | None, dict[str, Any]]:
    """Read ``OWNER.json`` and its content, again if the owner replaces it meanwhile."""
    file, record = None, dict[str, Any]()
    for _ in range(_READS):
        file = list_mirror(uri).others.get(OWNER_NAME)
        record = _read(file)
        if file is None or record:
            break
    return file, record


def _read(file: StoredFile | None) -> dict[str, Any]:
    """Return the content of ``OWNER.json``, empty if it cannot be read."""
    if file is None:
        return {}
    try:
        value = parse_json(read_object(file), OWNER_NAME)
    except (ValueError, DataError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _holder_name(record: Mapping[str, Any]) -> str:
    return str(ProcessIdentity.from_json(record.get("holder")) or "another process")


def _is_dead(holder: Any) -> bool:
    """Whether an owner is known to be dead."""
    process = ProcessIdentity.from_json(holder)
    return process is not None and process.is_dead()
