"""``--max-restarts``: whether a failed run starts again, and from where.

In: the run directory, and how often it may restart. Out, after each failure: the arguments of the next start, or none.
A restart makes progress if it completes a step that no start before it completed (``attempts.bin``). The job files of
``vorox launch`` restart by exit code alone, which is decided here as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vorox.core.errors import (
    INTERRUPTED_EXIT_CODE,
    ConfigError,
    DataError,
    DoesNotFitError,
    NumericalError,
    StalledError,
)
from vorox.core.pluralize import pluralize
from vorox.records.attempts import read_attempts
from vorox.records.run_lookup import is_run

FINAL_EXIT_CODES = (
    ConfigError.exit_code, DoesNotFitError.exit_code, NumericalError.exit_code, INTERRUPTED_EXIT_CODE,
)  # fmt: skip
"""Never start again: a new start would end the same way, or is not wanted. All others may be faults of a machine."""
JOB_FINAL_EXIT_CODES = tuple(sorted((*FINAL_EXIT_CODES, DataError.exit_code)))
"""Those of a job. Its scheduler does not know whether a restart made progress, and would claim machines K times for a
damaged source. ``--max-restarts`` has its machine anyway and gives up without progress, so it tries again: the source
may only be unreachable for a moment."""
MAX_WITHOUT_PROGRESS = 3
"""Consecutive restarts without progress after which a run is given up."""


class Restarts:
    """The restarts of one command.

    Args:
        limit: Restarts in total.
        directory: The run directory; it need not exist yet.
        resume: Value of ``--resume`` of the first start.
        command: Returns the arguments of a start with a value of ``--resume``.
    """

    def __init__(self, limit: int, directory: Path, resume: str, command: Callable[[str], Sequence[str]]) -> None:
        self._limit, self._directory, self._resume, self._command = limit, directory, resume, command
        before = read_attempts(directory)
        self._num_before, self._last_before = len(before), before[-1].last_step if before else 0
        self._used = self._without_progress = 0
        self._reached = -1

    def after_failure(self, text: str) -> Sequence[str] | None:
        """Return the arguments of the next start; ``None`` if there is none.

        Args:
            text: What happened, printed with the restart; empty if the ranks have printed it.

        Raises:
            StalledError: The last restarts made no progress, and no more follow.
        """
        attempts = read_attempts(self._directory)[self._num_before :]
        reached = max((attempt.last_step for attempt in attempts), default=-1)
        if self._used:
            self._without_progress = 0 if reached > self._reached else self._without_progress + 1
        self._reached = reached
        if self._without_progress >= (1 if self._used == self._limit else MAX_WITHOUT_PROGRESS):
            raise self._stalled()
        if self._used == self._limit:
            return None
        self._used += 1
        what = f"{text}. " if text else ""
        sys.stderr.write(f"{what}Restarting ({self._used} of {self._limit}) from the newest checkpoint.\n")
        return self._command(self._resume_from(has_started=bool(attempts)))

    def _resume_from(self, *, has_started: bool) -> str:
        """Return the value of ``--resume``: a new run, or a named checkpoint, is resumed from its own checkpoints."""
        if self._resume == "never":
            return "auto" if is_run(self._directory) else "never"
        return str(self._directory) if has_started and self._resume != "auto" else self._resume

    def _stalled(self) -> StalledError:
        step = self._last_before if self._reached < 0 else self._reached
        return StalledError(
            f"No progress after {pluralize(self._without_progress, 'restart')} at step {step:,}",
            where=str(self._directory), saved="the checkpoints of the run are unchanged",
            hint="correct the failure that the ranks report above, then run the same command again",
        )  # fmt: skip
