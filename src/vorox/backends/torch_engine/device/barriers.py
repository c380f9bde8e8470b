"""How OpenMP threads wait at barriers: they spin while cores are free, and sleep otherwise.

A step of a small model has hundreds of parallel regions, and waking a sleeping thread costs as much as many of them
compute. A spinning thread, however, occupies the core that a neighbour needs. So threads spin for a bounded time, and a
``BarrierWatch`` measures once per second how much processor time others use. It does not change any bit.

libgomp has no call for this. It does not spin, however, while the process has more OpenMP threads than cores
(``gomp_throttled_spin_count_var``), so the watch makes them sleep by keeping a second, idle team of threads.

Only libgomp on Linux is switched; other runtimes sleep. ``OMP_WAIT_POLICY`` and ``GOMP_SPINCOUNT`` of the user win.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from functools import cache
from pathlib import Path

import psutil

SPIN_COUNT = 10_000
"""Iterations before a waiting thread sleeps: 0.1 to 0.5 ms, longer than the host takes between two operators."""
INTERVAL_SECONDS = 1.0
SLACK_CORES = 0.25
"""Processor time that others may use beside a team that spins, in cores."""
_VARIABLES = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": str(SPIN_COUNT)}


def prepare() -> None:
    """Set the environment of the OpenMP runtime, unless the user has; it is read when torch is imported."""
    if not any(name in os.environ for name in _VARIABLES):
        os.environ.update(_VARIABLES)


@cache
def watch(num_threads: int) -> BarrierWatch | None:
    """Start the watch of this process; ``None`` with a different runtime, or if the user has decided."""
    if num_threads == 1 or any(os.environ.get(name) != value for name, value in _VARIABLES.items()):
        return None
    library = loaded_libgomp()
    if library is None:
        return None
    found = BarrierWatch(num_threads, library)
    threading.Thread(target=found.run, name="vorox-barriers", daemon=True).start()
    return found


def loaded_libgomp() -> ctypes.CDLL | None:
    """Return the libgomp that this process has loaded."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    for line in maps.read_text(encoding="utf-8").splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libgomp") and path.exists():
            library = ctypes.CDLL(str(path))
            return library if hasattr(library, "GOMP_parallel") else None
    return None


class BarrierWatch:
    """Lets the OpenMP threads of this process spin or sleep.

    Args:
        num_threads: Threads of the team that computes.
        library: The libgomp in use.
    """

    def __init__(self, num_threads: int, library: ctypes.CDLL) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._num_threads, self._library = num_threads, library
        self._release: threading.Event | None = None
        self._holder: threading.Thread | None = None

    def decide(self, others_cores: float) -> None:
        """Let threads spin or sleep, by the processor time that others use, in cores."""
        free = len(self._cores) - self._num_threads + SLACK_CORES
        if others_cores > free and self._holder is None:
            self._sleep()
        elif others_cores <= free and self._holder is not None:
            self._spin()

    def _sleep(self) -> None:
        """Start a thread that keeps an idle team, with which the process has more OpenMP threads than cores."""
        is_ready, release = threading.Event(), threading.Event()
        self._holder = threading.Thread(
            target=self._hold, args=(is_ready, release), name="vorox-barriers-idle-team", daemon=True
        )
        self._release = release
        self._holder.start()
        is_ready.wait()

    def _spin(self) -> None:
        """End that thread; its team ends with it."""
        assert self._release is not None
        assert self._holder is not None
        self._release.set()
        self._holder.join()
        self._holder = self._release = None

    def _hold(self, is_ready: threading.Event, release: threading.Event) -> None:
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # free(NULL) is the body of the region
        num_threads = max(2, len(self._cores) + 2 - self._num_threads)
        self._library.GOMP_parallel(nothing, None, ctypes.c_uint(num_threads), ctypes.c_uint(0))
        is_ready.set()
        release.wait()

    def run(self) -> None:
        """Measure and decide, for the rest of the process."""
        last = self._seconds()
        while True:
            time.sleep(INTERVAL_SECONDS)
            now = self._seconds()
            elapsed, busy, own = (after - before for after, before in zip(now, last, strict=True))
            self.decide((busy - own) / elapsed)
            last = now

    def _seconds(self) -> tuple[float, float, float]:
        """Return the wall time of the cores that this process may use, and their busy time, all and of this process."""
        times = psutil.cpu_times(percpu=True)
        used = [times[core] for core in self._cores]
        idle = sum(core.idle + core.iowait for core in used)
        total = sum(sum(core) - core.guest - core.guest_nice for core in used)
        own = psutil.Process().cpu_times()
        return total / len(used), total - idle, own.user + own.system
