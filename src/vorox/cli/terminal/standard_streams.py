"""Standard output and error: without control characters, and surviving a closed descriptor, a full disk, a broken pipe.

Names, errors and texts that are printed may come from anyone, so every write passes one filter: no control sequence
reaches a terminal, also not through a pipe to a pager. Colours pass on a terminal; what moves the cursor is written to
``raw_stream`` by the displays, which filter what they show.

A run outlives its reader: output that cannot be written is dropped, and the exit code reports how the run ended. Any
other command exits quietly on a broken pipe; an output that cannot be written for another reason is an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable, Generator
from typing import Any, NoReturn, TextIO, cast

from vorox.cli.terminal.humanize import printable
from vorox.core.errors import CheckpointError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_COLOUR = re.compile(r"(\x1b\[(?:(?:[0-79]|[1-9][0-9]{1,2})(?:;(?:[0-79]|[1-9][0-9]{1,2}))*)?m)")
"""Colours and emphasis, but not the sequence that hides text."""


class ResilientStream:
    """A stream that hides its write failures from the program.

    Args:
        stream: The real stream.
        is_needed: Whether the first failure ends the command.
    """

    def __init__(self, stream: TextIO, *, is_needed: bool) -> None:
        self._stream, self._is_needed, self._has_failed = stream, is_needed, False
        self._has_colours, self._mark = _is_terminal(stream), _mark_of(stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if text != "":  # libraries probe the stream with an empty write
            self._attempt(lambda: self._stream.write(self._filter(text)))
        return len(text)

    @property
    def raw(self) -> RawStream:
        """The stream without the filter, for displays."""
        return RawStream(self)

    def write_raw(self, text: str) -> int:
        if text != "":
            self._attempt(lambda: self._stream.write(text))
        return len(text)

    def _filter(self, text: str) -> str:
        if text.isprintable():
            return text
        parts = _COLOUR.split(text) if self._has_colours else [text]
        return "".join(
            part if number % 2 else printable(part).replace(_REPLACEMENT, self._mark)
            for number, part in enumerate(parts)
        )

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


class RawStream:
    """A view of a resilient stream without its filter."""

    def __init__(self, stream: ResilientStream) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._stream.write_raw(text)


def raw_stream(stream: TextIO) -> TextIO:
    """Return a standard stream without its filter, for a display that moves the cursor."""
    return cast("TextIO", stream.raw) if isinstance(stream, ResilientStream) else stream


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (OSError, ValueError):  # it is closed
        return False


def _mark_of(stream: TextIO) -> str:
    """Return what the stream can show in place of a control character."""
    try:
        _REPLACEMENT.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "?"
    return _REPLACEMENT


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
