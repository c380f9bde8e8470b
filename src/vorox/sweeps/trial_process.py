"""The process of a trial: ``vorox train`` as a child, followed through the validations that it records.

On Linux the child ends when the process that started it dies, and saves its state first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vorox.core.files.file_holder import lock_holder
from vorox.core.files.json_lines import LineTail
from vorox.core.processes.child_process import child_command
from vorox.core.processes.signals import end_with_parent
from vorox.core.run_layout import RunLayout

_POLL_SECONDS = 0.1
_LOCK_SECONDS = 120.0


class Validation(NamedTuple):
    """A validation of a run: its step, and its loss, which may be NaN or infinite."""

    step: int
    loss: float


class TrialProcess:
    """A running trial.

    Args:
        arguments: Arguments of ``vorox``.
        run_directory: The run that the command trains.
        working_directory: Its working directory.
        output: File for its output, appended.
        environment: Variables to set, or to remove (``None``).
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        run_directory: Path,
        working_directory: Path,
        output: Path,
        environment: Mapping[str, str | None],
    ) -> None:
        self._validations = LineTail(RunLayout(run_directory).evaluations)
        self._queue: deque[Validation] = deque()
        self._last_step = 0
        _wait_for_lock(RunLayout(run_directory).lock)
        variables = {**os.environ, **environment}
        with output.open("ab") as file:
            self._child = subprocess.Popen(
                child_command("vorox", *arguments),
                cwd=working_directory,
                env={name: value for name, value in variables.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the sweep decides how Ctrl-C ends a trial
                preexec_fn=end_with_parent(),
            )

    @property
    def exit_code(self) -> int | None:
        """The exit code; ``None`` while it runs."""
        return self._child.poll()

    def next_validation(self) -> Validation | None:
        """Wait for the next validation, in the order of steps; ``None`` at the end of the process.

        A resumed run repeats validations after its checkpoint, with equal bits; they are skipped.
        """
        while True:
            has_ended = self.exit_code is not None  # before the read, so that nothing is missed
            records, _ = self._validations.read()
            self._queue.extend(
                Validation(record["step"], float(record["loss"])) for record in records if "loss" in record
            )
            while self._queue:
                found = self._queue.popleft()
                if found.step > self._last_step:
                    self._last_step = found.step
                    return found
            if has_ended:
                return None
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Let the run save its state, and wait until it has ended."""
        if self.exit_code is None:
            self._child.send_signal(signal.SIGTERM)
        self._child.wait()


def _wait_for_lock(path: Path) -> None:
    """Wait for the process of a killed sweep, which is still saving; ``vorox train`` names one that does not end."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while lock_holder(path) is not None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
