"""When this process started, by the wall clock: before its interpreter and its imports."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def process_started_at() -> float:
    """Return the start of this process, in seconds since the epoch.

    On Linux from its age by the clock that counts from boot: psutil adds the time of boot, which is in whole seconds.
    """
    if sys.platform == "linux":
        try:
            fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            age_seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
            return time.time() - max(0.0, age_seconds)
        except (OSError, IndexError, ValueError):
            return time.time()
    import psutil

    return psutil.Process().create_time()
