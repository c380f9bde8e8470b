"""Standard output and error that may be closed, full, or a pipe whose reader has gone.

A run outlives whoever reads it: what cannot be shown is dropped, and the exit code says how the run ended. Any other
command has nothing to do without its reader, so it ends quietly; only a disk that does not take its output is an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Generator
from typing import Any, NoReturn, TextIO

from vorox.core.errors import CheckpointError


class OutlivingStream:
    """A stream whose failures do not reach the program that writes to it.

    Args:
        stream: The real one.
        is_needed: Whether the command ends with the first failure.
    """

    def __init__(self, stream: TextIO, *, is_needed: bool) -> None:
        self._stream, self._is_needed, self._has_failed = stream, is_needed, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if text != "":  # whoever only looks what kind of stream this is writes nothing
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
            self._discard_the_rest()
            if self._is_needed:
                self._end_command(error)

    def _end_command(self, error: OSError | ValueError) -> NoReturn:
        number = error.errno if isinstance(error, OSError) else errno.EPIPE
        if number in {errno.EPIPE, errno.EBADF, errno.ECONNRESET}:
            raise SystemExit(0) from None
        raise CheckpointError(
            f"the output cannot be written: {os.strerror(number or 0)}", where="standard output",
            hint="send it to a place that has room",
        ) from error  # fmt: skip

    def _discard_the_rest(self) -> None:
        """Let what is buffered go nowhere, or Python complains about it when it exits."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._stream.flush()


@contextlib.contextmanager
def outliving_streams(*, outlives_reader: bool) -> Generator[None]:
    """While inside, ``sys.stdout`` and ``sys.stderr`` can be written to whatever becomes of them.

    Args:
        outlives_reader: Whether the command goes on when nobody reads its output.
    """
    for number in range(3):  # a closed one would become whatever file is opened next
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: PTH123 - no path
        sys.stdout = OutlivingStream(before[0] or nowhere, is_needed=not outlives_reader)  # pyright: ignore
        sys.stderr = OutlivingStream(before[1] or nowhere, is_needed=False)  # pyright: ignore
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
