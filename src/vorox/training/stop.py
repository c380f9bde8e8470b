"""Being asked to stop: SIGTERM and SIGINT become a flag that the loop looks at between two steps.

The first signal lets the step finish, the state be saved and the run end with exit code 75. A second SIGINT ends the
process at once, as a kill would; whatever was being written stays invisible.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType

INTERRUPTED_EXIT_CODE = 130


class StopRequest:
    """Catches the signals while it is entered.

    Attributes:
        requested: Name of the signal that asked to stop; empty if none did.
    """

    def __init__(self) -> None:
        self.requested = ""
        self._previous: dict[signal.Signals, object] = {}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested and number == signal.SIGINT:
            os.write(2, b"\nInterrupted again: leaving at once, without saving.\n")
            os._exit(INTERRUPTED_EXIT_CODE)
        self.requested = self.requested or name
        if sys.stderr.isatty():
            os.write(2, f"\n{name}: finishing the step and saving; Ctrl-C again leaves at once.\n".encode())

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
