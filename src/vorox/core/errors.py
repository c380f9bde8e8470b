"""The errors of Vorox, with their exit codes.

An error has four parts: what happened, where, what is saved, and what to do. The command line prints them as four
lines after ``kind`` and exits with ``exit_code``; ``failure.json`` records the same four. ``assert`` is for bugs only.
"""

from __future__ import annotations

INTERRUPTED_EXIT_CODE = 130
"""Of a process that Ctrl-C ended without a save; as in a shell, 128 and the number of the signal."""
KILLED_EXIT_CODE = 137
"""Of a process that was killed, and so could not choose one."""


class VoroxError(Exception):
    """Base class of errors that a user can act on.

    Args:
        what: One sentence: what is wrong, with the offending value.
        where: The place: a file with line, a configuration key, a step.
        hint: What to do about it, a command where there is one.
        saved: What is safe on disk; a caller may fill it in.
    """

    exit_code = 1
    kind = "crash"

    def __init__(self, what: str, *, where: str = "", hint: str = "", saved: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint
        self.saved = saved

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text += f" [{self.where}]"
        if self.hint:
            text += f" -> {self.hint}"
        return text


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that an error ends."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED_EXIT_CODE
    return error.exit_code if isinstance(error, VoroxError) else VoroxError.exit_code


def saved_of(error: BaseException) -> str:
    """Return what is safe on disk, of an error of Vorox or a crash for which ``set_saved`` recorded it."""
    return str(getattr(error, "saved", ""))


def set_saved(error: BaseException, saved: str) -> None:
    """Record on any error what is safe on disk, unless it is known already."""
    if not saved_of(error):
        vars(error)["saved"] = saved


class ConfigError(VoroxError):
    """The configuration, the command line or the run directory is invalid or unsupported."""

    exit_code = 2
    kind = "configuration"


class DoesNotFitError(VoroxError):
    """The run needs more memory or disk than is available."""

    exit_code = 3
    kind = "does not fit"


class DataError(VoroxError):
    """A source, tokenizer or cache is missing, damaged or not the requested one."""

    exit_code = 4
    kind = "data"


class CheckpointError(VoroxError):
    """A checkpoint cannot be written, is corrupt, or belongs to another run."""

    exit_code = 5
    kind = "checkpoint"


class OtherWeightsError(CheckpointError):
    """Weights at a place are not those that the run started from."""


class UnreadableCheckpointError(CheckpointError):
    """The disk failed to read a checkpoint. Its bytes may be intact, so it is not quarantined."""


class StalledError(VoroxError):
    """No progress for too long."""

    exit_code = 6
    kind = "stalled"


class LostRankError(VoroxError):
    """A rank has lost another one, which ended for a reason of its own."""

    kind = "lost rank"


class NumericalError(VoroxError):
    """The loss or a gradient is not finite, or a reported number is impossible."""

    exit_code = 7
    kind = "numerical"


class Preempted(VoroxError):
    """The run stopped on request, saved its state and can be resumed."""

    exit_code = 75
    kind = "stopped"
