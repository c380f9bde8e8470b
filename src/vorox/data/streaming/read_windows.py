"""Read windows: which units each process that shares a stream's directory currently reads.

Each stream publishes the units that it reads next in ``windows/``; its peers check there before they evict chunks.
Windows only affect speed: if one is missed, a unit is rebuilt.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from vorox.core.atomic import make_directory, remove_file, write_file
from vorox.core.process_identity import ProcessIdentity, this_process

DIRECTORY_NAME = "windows"
_EXPIRY_SECONDS = 3600.0
"""A process on another host that has published nothing for this long counts as dead."""

UnitRange = tuple[int, int]
"""Units ``[first, last)``."""


class ReadWindow:
    """The units that one stream reads, published for its peers.

    Args:
        directory: The stream's directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory / DIRECTORY_NAME
        self._path = self._directory / f"{this_process().host}-{this_process().process_id}-{uuid.uuid4().hex[:8]}.json"
        self._published: list[UnitRange] | None = None

    def publish(self, units: Sequence[UnitRange]) -> None:
        """Publish the units that this stream reads now or next."""
        if list(units) == self._published:
            return
        self._published = list(units)
        make_directory(self._directory)
        content = {**this_process().to_json(), "units": [list(one) for one in units]}
        write_file(self._path, json.dumps(content).encode())

    def peers(self) -> list[UnitRange]:
        """Return the units that other streams of living processes read."""
        found: list[UnitRange] = []
        for path in sorted(self._directory.glob("*.json")):
            if path == self._path:
                continue
            try:
                value = json.loads(path.read_bytes())
                process = ProcessIdentity.from_json(value)
                if process is None:
                    continue
                if process.is_dead():
                    remove_file(path)
                elif process.host == this_process().host or _is_recent(path):
                    found += [(int(first), int(last)) for first, last in value["units"]]
            except (OSError, ValueError, KeyError, TypeError):
                continue  # the file is being replaced, or is not a window
        return found

    def close(self) -> None:
        """Remove the window. Idempotent."""
        if self._published is not None:
            self._path.unlink(missing_ok=True)
            self._published = None


def _is_recent(path: Path) -> bool:
    return time.time() - path.stat().st_mtime < _EXPIRY_SECONDS
