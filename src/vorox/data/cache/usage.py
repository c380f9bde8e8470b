"""When a cache was last used, by a clock that nobody can set.

Opening or building a cache leaves ``USED.json`` in it: the boot of this machine and the time since then. On the same
boot the age of that is exact, whatever became of the wall clock; after a reboot, or on another machine, file times
count. Invariant: a cache never seems idle for longer than it was by either clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from vorox.core.atomic import canonical_json, disk_time, write_file
from vorox.core.process_identity import boot_identity
from vorox.data.cache.manifest import LOG_NAME
from vorox.data.cache.recipe import RECIPE_NAME

USED_NAME = "USED.json"


def mark_used(directory: Path) -> None:
    """Record that a cache is used now; nothing on a disk that is read-only."""
    with contextlib.suppress(OSError):
        os.utime(directory / RECIPE_NAME)
        write_file(directory / USED_NAME, canonical_json({"boot": boot_identity(), "uptime_seconds": _uptime()}))


def idle_seconds(directory: Path, now: float) -> float:
    """Time since a cache was last opened or built.

    Args:
        directory: The cache.
        now: The time by the disk that it lies on, from ``time_of``.
    """
    times = [path.stat().st_mtime for path in (directory / RECIPE_NAME, directory / LOG_NAME) if path.exists()]
    idle = max(0.0, now - max(times, default=0.0))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        used = json.loads((directory / USED_NAME).read_bytes())
        if used["boot"] == boot_identity():
            idle = min(idle, max(0.0, _uptime() - float(used["uptime_seconds"])))
    return idle


def time_of(directory: Path) -> float:
    """The time by the disk that a directory lies on; by this machine where nothing can be written."""
    try:
        return disk_time(directory)
    except OSError:
        return time.time()


def _uptime() -> float:
    """Seconds since boot, sleep included where the system counts it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
