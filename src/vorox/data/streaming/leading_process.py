"""The process that builds a stream's units for the other processes of its machine.

Processes that train on one stream read the same segments. One of them leads: it splits the source and builds. The
others wait for its chunks, so text is fetched once. If it does not build the unit that a process waits for, because it
does not need the unit or has ended, that process builds it itself. Leases keep two processes from building one unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from vorox.data.cache.files.leases import DIRECTORY_NAME, is_held

PATIENCE_SECONDS = 5.0
"""How long to wait while no process builds any unit."""


class LeadingProcess:
    """What another process knows about the leading one: whether waiting for its units makes sense.

    Args:
        directory: The stream's directory.
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._leases, self._clock = directory / DIRECTORY_NAME, clock
        self._polled_at = self._active_at = -float("inf")

    def is_expected(self) -> bool:
        """Return whether to keep waiting; polled during a wait. A pause of the polls begins a new wait."""
        now = self._clock()
        if now - self._polled_at > PATIENCE_SECONDS or self._is_building():
            self._active_at = now
        self._polled_at = now
        return now - self._active_at < PATIENCE_SECONDS

    def _is_building(self) -> bool:
        return any(is_held(path, time.time()) for path in self._leases.glob("u*"))
