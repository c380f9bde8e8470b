"""Read windows: which units each process that shares a stream's directory currently reads.

Each stream publishes the units that it reads next in ``windows/``; its peers check there before they evict chunks. A
process that waits for the one that builds publishes the units that it waits for, which the builder takes first: else
both could wait, one for room on the disk and the other for a unit that was evicted.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vorox.core.files.atomic import make_directory, remove_file, write_file
from vorox.core.files.file_holder import ProcessIdentity, this_process
from vorox.core.files.json_reader import read_json

DIRECTORY_NAME = "windows"
_EXPIRY_SECONDS = 3600.0
"""A process on another host that has published nothing for this long counts as dead."""

UnitRange = tuple[int, int]
"""Units ``[first, last)``."""


class PeerReads(NamedTuple):
    """What the other processes of a stream need."""

    windows: Sequence[UnitRange] = ()
    """Units that they read now or next."""
    awaited: Sequence[UnitRange] = ()
    """Units that processes of this machine wait for, because they expect another one to build them."""


class ReadWindow:
    """The units that one stream reads, published for its peers.

    Args:
        directory: The stream's directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory / DIRECTORY_NAME
        self._path = self._directory / f"{this_process().host}-{this_process().process_id}-{uuid.uuid4().hex[:8]}.json"
        self._units: list[UnitRange] = []
        self._awaited: list[UnitRange] = []
        self._is_published = False

    def publish(self, units: Sequence[UnitRange]) -> None:
        """Publish the units that this stream reads now or next."""
        if list(units) != self._units:
            self._units = list(units)
            self._write()

    def publish_awaited(self, units: UnitRange | None) -> None:
        """Publish the units that this stream waits for and does not build; None: none."""
        awaited = [units] if units else []
        if awaited != self._awaited:
            self._awaited = awaited
            self._write()

    def _write(self) -> None:
        self._is_published = True
        make_directory(self._directory)
        content = {**this_process().to_json(), "units": self._units, "awaited": self._awaited}
        write_file(self._path, json.dumps(content).encode())

    def peers(self) -> PeerReads:
        """Return what other streams of living processes read and wait for."""
        windows, awaited = list[UnitRange](), list[UnitRange]()
        for path in sorted(self._directory.glob("*.json")):
            if path == self._path:
                continue
            try:
                value = read_json(path)
                process = ProcessIdentity.from_json(value)
                if process is None:
                    continue
                if process.is_dead():
                    remove_file(path)
                elif process.is_visible or _is_recent(path):
                    windows += [(int(first), int(last)) for first, last in value["units"]]
                    if process.is_visible:
                        awaited += [(int(first), int(last)) for first, last in value.get("awaited", [])]
            except (OSError, ValueError, KeyError, TypeError):
                continue  # the file is being replaced, or is not a window
        return PeerReads(windows, awaited)

    def close(self) -> None:
        """Remove the window. Idempotent."""
        if self._is_published:
            self._path.unlink(missing_ok=True)
            self._is_published = False


def _is_recent(path: Path) -> bool:
    return time.time() - path.stat().st_mtime < _EXPIRY_SECONDS
