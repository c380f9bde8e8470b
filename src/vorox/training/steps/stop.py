"""Stop requests: how SIGTERM, SIGINT and SIGHUP (the terminal was closed) end a run.

While data and engine are prepared, a signal ends the run immediately; what is built so far stays. Inside ``deferred``,
between the first and the last step, it sets a flag that the loop checks after each step, once all ranks have agreed on
it (``step_sync``); the state is saved and the run ends with exit code 75. A second SIGINT ends the process like a kill;
unfinished writes stay invisible. A SIGHUP that is ignored, as under ``nohup``, stays ignored.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from types import FrameType, TracebackType
from typing import Protocol

from vorox.core.errors import INTERRUPTED_EXIT_CODE, Preempted
from vorox.core.processes.signals import stop_signals


class Stop(Protocol):
    """Whether a stop was requested.

    Attributes:
        requested: What requested it; empty if nothing did.
        requested_at: When, by ``time.monotonic``.
    """

    requested: str
    requested_at: float


def seconds_left(notice_seconds: float | None, stop: Stop) -> float:
    """Return the time until the process is ended; infinite without a signal or a notice."""
    if notice_seconds is None or not stop.requested:
        return math.inf
    return max(0.0, notice_seconds - (time.monotonic() - stop.requested_at))


class StopRequest:
    """Handles the signals that stop a run inside its context.

    Attributes:
        requested: Name of the signal that requested a stop; empty if none did.
        requested_at: When it came, by ``time.monotonic``.
    """

    def __init__(self) -> None:
        self.requested, self.requested_at = "", 0.0
        self._deferred = False
        self._previous: dict[signal.Signals, object] = {}

    @contextlib.contextmanager
    def deferred(self) -> Generator[None]:
        """Inside the block, a signal only sets ``requested``; after an error in it too, which is on its way out."""
        self._deferred = True
        yield
        self._deferred = False

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested and number == signal.SIGINT:
            with contextlib.suppress(OSError):
                os.write(2, b"\nInterrupted again: exiting without saving.\n")
            os._exit(INTERRUPTED_EXIT_CODE)
        first, self.requested = not self.requested, self.requested or name
        if first:
            self.requested_at = time.monotonic()
        if first and not self._deferred:
            raise Preempted(
                f"{name}: stopped while preparing",
                saved="the built part of the cache, and all earlier checkpoints",
                hint="run the same command again to continue",
            )
        if first and sys.stderr.isatty():
            text = f"{name}: finishing the step and saving; Ctrl-C again exits without saving."
            # Overwrites the last line of a live display; an extra line would leave part of the old display on screen.
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, (f"\r{text}\x1b[K" if sys.stdout.isatty() else f"\n{text}\n").encode())

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only in the main thread
            for number in stop_signals():
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()
