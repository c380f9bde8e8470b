"""Waiting in tests for what another thread or process does: for the thing itself, never for a number of seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

PATIENCE_SECONDS = 120.0
"""Long enough for a machine that does ten other things; a test that passes never waits for it."""


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until something is so; fail if it never is."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


def wait_until_blocked(thread: threading.Thread) -> None:
    """Wait until a thread waits for a condition or an event."""

    def is_blocked() -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        return frame is not None and frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "wait"

    wait_until(is_blocked)
