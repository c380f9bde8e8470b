"""What a call costs the processor, in units of a fixed piece of work: the same on a slow and on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable


def cost(action: Callable[[], object], repeats: int = 3) -> float:
    """CPU time of this thread in an action, over that of a hundred thousand additions; the least of some tries."""
    return min(_seconds(action) / _seconds(_additions) for _ in range(repeats))


def _additions() -> None:
    total = 0
    for number in range(100_000):
        total += number


def _seconds(action: Callable[[], object]) -> float:
    began = time.thread_time()
    action()
    return time.thread_time() - began
