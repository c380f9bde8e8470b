"""Waiting in tests for what another thread or process does: for the thing itself, never for a number of seconds."""

from __future__ import annotations

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
