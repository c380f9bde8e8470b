"""Being asked to stop: what SIGTERM and SIGINT do to a run.

While data and engine are prepared, a signal ends the run at once: everything built so far stays. Inside ``deferred``,
between the first and the last step, it becomes a flag that the loop looks at after each step; the state is saved and
the run ends with exit code 75. A second SIGINT ends the process as a kill would; what was being written stays unseen.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Generator
from types import FrameType, TracebackType
from typing import Protocol

from vorox.core.errors import Preempted

INTERRUPTED_EXIT_CODE = 130


class Stop(Protocol):
    """Whether a run is asked to stop.

    Attributes:
        requested: By what; empty if nothing asks for it.
    """

    requested: str


class StopRequest:
    """Catches the signals while it is entered.

    Attributes:
        requested: Name of the signal that asked to stop; empty if none did.
    """

    def __init__(self) -> None:
        self.requested = ""
        self._deferred = False
        self._previous: dict[signal.Signals, object] = {}

    @contextlib.contextmanager
    def deferred(self) -> Generator[None]:
        """While inside, a signal only sets ``requested``."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested and number == signal.SIGINT:
            os.write(2, b"\nInterrupted again: leaving at once, without saving.\n")
            os._exit(INTERRUPTED_EXIT_CODE)
        first, self.requested = not self.requested, self.requested or name
        if first and not self._deferred:
            raise Preempted(
                f"{name}: stopped while preparing",
                saved="what was built of the cache, and every checkpoint of before",
                hint="run the same command again to go on",
            )
        if first and sys.stderr.isatty():
            text = f"{name}: finishing the step and saving; Ctrl-C again leaves at once."
            # In the last line of a live display, which is drawn again: a line more would leave a part of it behind.
            os.write(2, (f"\r{text}\x1b[K" if sys.stdout.isatty() else f"\n{text}\n").encode())

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()
