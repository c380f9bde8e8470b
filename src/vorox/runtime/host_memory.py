"""Host memory of this process and this machine, by metric name; cheap enough for every log line."""

from __future__ import annotations

import sys

import psutil


class HostMemory:
    """Reads the memory use of this process."""

    def __init__(self) -> None:
        self._process = psutil.Process()

    def read(self) -> dict[str, float]:
        """Return current and peak resident memory, and the memory available on the machine."""
        return {
            "memory/host_bytes": float(self._process.memory_info().rss),
            "memory/host_peak_bytes": float(peak_host_bytes()),
            "memory/host_available_bytes": float(psutil.virtual_memory().available),
        }


def peak_host_bytes() -> int:
    """Return the peak resident memory of this process."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)
