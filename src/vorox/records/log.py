"""The log of a run: ``log.txt`` for people, ``events.jsonl`` for programs, and the terminal.

Events (a kind, a message, plain fields) and errors go in; a line in both files and on the terminal comes out, after
``redact``. Every rank writes its own files (``log-00003.txt``); rank 0 prints all messages, the others only warnings
and errors. Logging never stops a run: lines that cannot be written wait in memory, with one warning.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from vorox.core.errors import exit_code_of
from vorox.core.files.json_lines import LineFile, encode
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.redaction import redact, redact_value
from vorox.core.run_layout import RunLayout

DATA_READY = "data_ready"
"""The event of an attempt whose data is built or opened, with the ``seconds`` that it took."""
SAVED = "checkpoint_saved"
"""The event of a committed checkpoint, with the ``seconds`` since its state."""

Level = Literal["info", "warning", "error"]
_OWN_LOGGERS = "vorox"
Echo = Callable[[str, Level], None]
"""Prints one message to the terminal. The text is redacted."""


def to_stderr(text: str, level: Level = "info") -> None:  # noqa: ARG001 - the signature of an Echo
    """Print a message to standard error: the echo of a process without a display."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _discard(text: str, level: Level) -> None:
    """Drop a message: the echo after the real one has failed."""


class RunLog:
    """The log of one rank of a run.

    Args:
        directory: The run directory; ``None`` writes no files.
        distributed: The rank of this process.
        attempt: Number of the attempt, recorded in every event.
        is_held: Keep lines in memory until ``release``; without it, they are dropped.
        echo: Prints messages; may be replaced later (``log.echo = display.message``).

    Attributes:
        on_event: Receives every event as it is recorded, from the thread that logs it; may be set later. Never raises.
    """

    on_event: Callable[[Mapping[str, Any]], None] | None = None

    def __init__(
        self,
        directory: Path | None,
        *,
        distributed: DistributedContext | None = None,
        attempt: int = 1,
        is_held: bool = False,
        echo: Echo = to_stderr,
    ) -> None:
        self.echo = echo
        self._distributed = distributed or DistributedContext()
        self._attempt = attempt
        self._has_warned = False
        self._text = self._events = None
        if directory is not None:
            layout, rank = RunLayout(directory), self._distributed.rank
            self._text = LineFile(layout.of_rank(layout.log, rank))
            self._events = LineFile(layout.of_rank(layout.events, rank))
            self._text.is_held = self._events.is_held = is_held

    def event(self, kind: str, message: str, *, level: Level = "info", **fields: Any) -> None:
        """Record an event.

        Args:
            kind: Name in snake_case for programs (``checkpoint_saved``).
            message: A sentence for people.
            level: Severity.
            fields: Plain values.
        """
        record = self._record(kind, message, level, fields)
        self._emit(message, level)
        if self.on_event is not None:
            self.on_event(record)

    def quiet_event(self, kind: str, message: str, **fields: Any) -> None:
        """Record an event without printing it."""
        self._record(kind, message, "info", fields)
        self.quiet(message)

    def _record(self, kind: str, message: str, level: Level, fields: Mapping[str, Any]) -> dict[str, Any]:
        record: dict[str, Any] = {
            "time": time_stamp(),
            "attempt": self._attempt,
            "kind": kind,
            "level": level,
            "message": redact(message),
        }
        if self._distributed.world_size > 1:
            record["process"] = self._distributed.rank
        if fields:
            record["fields"] = redact_value(fields)
        self._write(self._events, encode(record))
        return record

    def info(self, message: str) -> None:
        """Log a message without an event."""
        self._emit(message, "info")

    def warning(self, message: str) -> None:
        self._emit(message, "warning")

    def error(self, message: str) -> None:
        self._emit(message, "error")

    def quiet(self, message: str) -> None:
        """Write a message to ``log.txt`` only, such as a line of progress."""
        self._write_text(message, "info")

    def exception(self, error: BaseException) -> None:
        """Record an error with its traceback, without printing it: the caller that ends the process does."""
        trace = redact("".join(traceback.format_exception(error)))
        record = {
            "time": time_stamp(),
            "attempt": self._attempt,
            "kind": "error",
            "level": "error",
            "message": redact(str(error)),
            "fields": {
                "error": type(error).__name__,
                "exit_code": exit_code_of(error),
                "traceback": trace,
            },
        }
        self._write(self._events, encode(record))
        self._write_text(trace.rstrip("\n"), "error")

    @contextlib.contextmanager
    def capture(self) -> Generator[None]:
        """Redirect Python warnings, the loggers of Vorox and the warnings of libraries to this log."""
        handler, root, own = _Bridge(self), logging.getLogger(), logging.getLogger(_OWN_LOGGERS)
        before, level = root.handlers[:], own.level
        root.handlers[:] = [handler]
        own.setLevel(logging.INFO)
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            own.setLevel(level)
            root.handlers[:] = before

    def flush(self, *, sync: bool = False) -> None:
        """Write pending lines."""
        for file in (self._text, self._events):
            if file is not None:
                self._warn_once(file, file.flush(sync=sync))

    def release(self) -> None:
        """Write the lines held so far; hold no more."""
        for file in (self._text, self._events):
            if file is not None:
                file.is_held = False
        self.flush()

    def close(self) -> None:
        """Write pending lines durably. The log stays usable."""
        self.flush(sync=True)

    def _emit(self, message: str, level: Level) -> None:
        self._write_text(redact(message), level)
        if self._distributed.is_main or level != "info":
            prefix = "" if self._distributed.is_main else f"rank {self._distributed.rank}: "
            self._show(prefix + redact(message), level)

    def _show(self, text: str, level: Level) -> None:
        """Print a message; if the echo fails, later messages are dropped."""
        try:
            self.echo(text, level)
        except Exception:
            self.echo = _discard

    def _write_text(self, message: str, level: Level) -> None:
        text = f"{time_stamp()} {level:7s} {redact(message)}"
        self._write(self._text, text.replace("\n", "\n    ").encode(errors="backslashreplace"))

    def _write(self, file: LineFile | None, line: bytes) -> None:
        if file is not None:
            self._warn_once(file, file.append(line))

    def _warn_once(self, file: LineFile, error: OSError | None) -> None:
        if error is not None and not self._has_warned:
            self._has_warned = True
            self._show(
                f"{file.path.name} cannot be written ({error.strerror}); its lines are kept in memory", "warning"
            )


class _Bridge(logging.Handler):
    """Forwards log records to the run's log: those of Vorox, and of libraries the warnings and errors.

    Modules of Vorox that do not know the run set the event with ``extra={"event_kind": ..., "event_fields": {...}}``.
    """

    def __init__(self, log: RunLog) -> None:
        super().__init__(level=logging.INFO)
        self._log = log

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is forwarded."""
        return record.levelno >= logging.WARNING or record.name.partition(".")[0] == _OWN_LOGGERS

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage().strip()
            if record.exc_info and record.exc_info[1] is not None:
                text += "\n" + "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
            level = _level(record.levelno)
            kind: str = getattr(record, "event_kind", "library_message")
            fields: dict[str, Any] = getattr(record, "event_fields", {"logger": record.name})
            self._log.event(kind, text, level=level, **fields)
        except Exception:  # a library's broken message must not stop anything
            self.handleError(record)


def _level(number: int) -> Level:
    """Return the level of a log record."""
    return "error" if number >= logging.ERROR else "warning" if number >= logging.WARNING else "info"


def time_stamp() -> str:
    """Return the time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
