"""Standard output and error that survive a closed descriptor, a full disk or a broken pipe.

A run outlives its reader: output that cannot be written is dropped, and the exit code reports how the run ended. Any
other command exits quietly on a broken pipe; an output that cannot be written for another reason is an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Generator
from typing import Any, NoReturn, TextIO

from vorox.core.errors import CheckpointError


class ResilientStream:
    """A stream that hides its write failures from the program.

    Args:
        stream: The real stream.
        is_needed: Whether the first failure ends the command.
    """

    def __init__(self, stream: TextIO, *, is_needed: bool) -> None:
        self._stream, self._is_needed, self._has_failed = stream, is_needed, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if text != "":  # libraries probe the stream with an empty write
            self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._has_failed:
            return
        try:
            action()
        except (OSError, ValueError) as error:  # ValueError: it was closed in Python
            self._has_failed = True
            self._discard_buffer()
            if self._is_needed:
                self._end_command(error)

    def _end_command(self, error: OSError | ValueError) -> NoReturn:
        number = error.errno if isinstance(error, OSError) else errno.EPIPE
        if number in {errno.EPIPE, errno.EBADF, errno.ECONNRESET}:
            raise SystemExit(0) from None
        raise CheckpointError(
            f"Output cannot be written: {os.strerror(number or 0)}", where="standard output",
            hint="redirect it to a disk with free space",
        ) from error  # fmt: skip

    def _discard_buffer(self) -> None:
        """Discard the buffer, or Python reports an error when it exits."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._stream.flush()


@contextlib.contextmanager
def resilient_streams(*, survives_reader: bool) -> Generator[None]:
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams that survive write failures.

    Args:
        survives_reader: Whether the command continues when its output has no reader.
    """
    for number in range(3):  # else the next file to be opened gets the number of a closed one
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: PTH123 - no path
        sys.stdout = ResilientStream(before[0] or nowhere, is_needed=not survives_reader)  # pyright: ignore
        sys.stderr = ResilientStream(before[1] or nowhere, is_needed=False)  # pyright: ignore
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
