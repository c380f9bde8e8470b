"""The log of a run: ``log.txt`` for people, ``events.jsonl`` for programs, and the terminal.

In: events (a kind, a sentence, plain fields) and errors. Out: a line in both files and on the terminal, without
secrets: everything passes ``redact`` before it leaves this module. Every process of a run writes files of its own
(``log-00003.txt``); only the first one speaks on the terminal, the others only when something is wrong. Logging never
stops a run: what cannot be written waits in memory, and is complained about once.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from vorox.core.distributed_context import DistributedContext
from vorox.core.errors import VoroxError
from vorox.core.json_lines import LineFile, encode
from vorox.core.redaction import redact, redact_arguments, redact_value
from vorox.core.run_layout import RunLayout

__all__ = ["Echo", "Level", "RunLog", "redact", "redact_arguments", "redact_value", "to_stderr"]

Level = Literal["info", "warning", "error"]
Echo = Callable[[str, Level], None]
"""Shows one message to the person at the terminal. The text has no secrets left."""


def to_stderr(text: str, level: Level = "info") -> None:  # noqa: ARG001 - the shape of an Echo
    """The echo of a process without a progress display."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _to_nobody(text: str, level: Level) -> None:
    """The echo of a process whose own one has failed."""


class RunLog:
    """The log of one process of a run.

    Args:
        directory: The run directory; ``None`` writes no files.
        distributed: Who this process is.
        attempt: Number of the attempt, written into every event.
        echo: Where messages are shown. May be replaced later (``log.echo = display.message``).
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        distributed: DistributedContext | None = None,
        attempt: int = 1,
        echo: Echo = to_stderr,
    ) -> None:
        self.echo = echo
        self._distributed = distributed or DistributedContext()
        self._attempt = attempt
        self._complained = False
        self._text = self._events = None
        if directory is not None:
            layout, rank = RunLayout(directory), self._distributed.process_index
            self._text = LineFile(layout.of_rank(layout.log, rank))
            self._events = LineFile(layout.of_rank(layout.events, rank))

    def event(self, kind: str, message: str, *, level: Level = "info", **fields: Any) -> None:
        """Record that something happened.

        Args:
            kind: Short name in snake_case that programs look for (``checkpoint_saved``).
            message: A sentence for people.
            level: How bad it is.
            fields: Plain values that belong to it.
        """
        record = {"time": _now(), "attempt": self._attempt, "kind": kind, "level": level, "message": redact(message)}
        if self._distributed.process_count > 1:
            record["process"] = self._distributed.process_index
        if fields:
            record["fields"] = redact_value(fields)
        self._write(self._events, encode(record))
        self._say(message, level)

    def info(self, message: str) -> None:
        """A message for people only."""
        self._say(message, "info")

    def warning(self, message: str) -> None:
        self._say(message, "warning")

    def error(self, message: str) -> None:
        self._say(message, "error")

    def quiet(self, message: str) -> None:
        """A message for ``log.txt`` alone, such as a line of progress that the terminal shows in another form."""
        self._write_text(message, "info")

    def exception(self, error: BaseException) -> None:
        """Record an error with its traceback. Nothing is shown: whoever ends the process prints it."""
        trace = redact("".join(traceback.format_exception(error)))
        record = {
            "time": _now(),
            "attempt": self._attempt,
            "kind": "error",
            "level": "error",
            "message": redact(str(error)),
            "fields": {
                "error": type(error).__name__,
                "exit_code": error.exit_code if isinstance(error, VoroxError) else 1,
                "traceback": trace,
            },
        }
        self._write(self._events, encode(record))
        self._write_text(trace.rstrip("\n"), "error")

    @contextlib.contextmanager
    def capture(self) -> Generator[None]:
        """While inside, warnings of Python and of other libraries' loggers go to this log and nowhere else."""
        handler, root = _Bridge(self), logging.getLogger()
        before = root.handlers[:]
        root.handlers[:] = [handler]
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            root.handlers[:] = before

    def flush(self, *, sync: bool = False) -> None:
        """Write what waits."""
        for file in (self._text, self._events):
            if file is not None:
                self._complain(file, file.flush(sync=sync))

    def close(self) -> None:
        """Write what waits, durably. The log can still be used."""
        self.flush(sync=True)

    def _say(self, message: str, level: Level) -> None:
        self._write_text(redact(message), level)
        if self._distributed.is_main or level != "info":
            who = "" if self._distributed.is_main else f"process {self._distributed.process_index}: "
            self._show(who + redact(message), level)

    def _show(self, text: str, level: Level) -> None:
        """Show a message; whatever shows it may fail, and the run goes on without it."""
        try:
            self.echo(text, level)
        except Exception:
            self.echo = _to_nobody

    def _write_text(self, message: str, level: Level) -> None:
        text = f"{_now()} {level:7s} {redact(message)}"
        self._write(self._text, text.replace("\n", "\n    ").encode(errors="backslashreplace"))

    def _write(self, file: LineFile | None, line: bytes) -> None:
        if file is not None:
            self._complain(file, file.append(line))

    def _complain(self, file: LineFile, error: OSError | None) -> None:
        if error is not None and not self._complained:
            self._complained = True
            self._show(
                f"{file.path.name} cannot be written, what it misses waits in memory: {error.strerror}", "warning"
            )


class _Bridge(logging.Handler):
    """Carries what is logged elsewhere into the run's log: warnings and worse.

    Rooms of Vorox that know of no run name their event by ``extra={"event_kind": ..., "event_fields": {...}}``.
    """

    def __init__(self, log: RunLog) -> None:
        super().__init__(level=logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage().strip()
            if record.exc_info and record.exc_info[1] is not None:
                text += "\n" + "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
            level: Level = "error" if record.levelno >= logging.ERROR else "warning"
            kind: str = getattr(record, "event_kind", "library_message")
            fields: dict[str, Any] = getattr(record, "event_fields", {"logger": record.name})
            self._log.event(kind, text, level=level, **fields)
        except Exception:  # a library's broken message must not stop anything
            self.handleError(record)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
