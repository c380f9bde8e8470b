"""Progress of cache builds and other long commands: phase, share done, rates, time left.

Progress callbacks go in. On a terminal, one line is redrawn in place; elsewhere a line is printed when a phase takes
more than half a second, every ten seconds, and when it ends. Shorter phases print nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from vorox.cli.terminal.humanize import count, duration, eta, percent, printable
from vorox.cli.terminal.standard_streams import raw_stream
from vorox.core.pluralize import pluralize
from vorox.records.log import Level
from vorox.training.loop.display import Display, StepView

_QUIET_SECONDS = 0.5
_LINE_EVERY_SECONDS = 10.0
_REDRAW_EVERY_SECONDS = 0.1
_PLAIN_COLUMNS = 119
_DURATION_COLUMNS = 11
"""Columns reserved for the duration at the end of a line: ``, 59m 59s``."""
_VERBS = {
    "list": "reading",
    "build": "packing",
    "wait": "waiting for",
    "check": "checking",
    "compare": "deduplicating",
    "tokenizer": "training the tokenizer",
}


class BuildDisplay:
    """A display of progress, callable as ``PrepareProgress``; ``close`` ends the line.

    Args:
        stream: Default: standard error, so that standard output holds only the results.
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = raw_stream(stream or sys.stderr)
        self._live = self._stream.isatty() and os.environ.get("TERM") not in {"dumb", "unknown"}
        self._clock = clock
        self._lock = threading.Lock()
        self._phase = ""
        self._began = self._shown_at = 0.0
        self._last = ""
        self._done_at_first: int | None = None

    def __call__(self, phase: str, done: int, total: int, rates: Mapping[str, float]) -> None:
        now = self._clock()
        if phase != self._phase:
            self._finish_phase(now)
            self._phase, self._began, self._shown_at, self._last = phase, now, 0.0, ""
            self._done_at_first = done
        if now - self._began < _QUIET_SECONDS:
            return
        every = _REDRAW_EVERY_SECONDS if self._live else _LINE_EVERY_SECONDS
        if self._done_at_first is None or done < self._done_at_first:
            self._done_at_first = done
        if phase.startswith("check "):  # in bytes
            rates = {"text_mb_per_second": (done - self._done_at_first) / (now - self._began) / 1e6}
        columns = shutil.get_terminal_size().columns - 1 if self._live else _PLAIN_COLUMNS
        eta_seconds = self._eta_seconds(done, total, now) if rates else None
        self._last = _line(phase, done, total, rates, eta_seconds, max_columns=columns - _DURATION_COLUMNS)
        if not self._shown_at or now - self._shown_at >= every:
            self._shown_at = now
            self._write(self._last, "" if self._live else "\n")

    def _eta_seconds(self, done: int, total: int, now: float) -> float | None:
        """Return the seconds left at this phase's average rate; ``None`` before the first progress and at the end."""
        made = done - (self._done_at_first or 0)
        if made <= 0 or done >= total:
            return None
        return (total - done) * (now - self._began) / made

    def step(self, what: str, done: int, total: int) -> None:
        """Show progress of a job without rates."""
        self(what, done, total, {})

    def message(self, text: str) -> None:
        """Print a line above the progress line."""
        self._write(text, "\n")

    def close(self) -> None:
        """End the line. Idempotent."""
        self._finish_phase(self._clock())
        self._phase = ""

    def _finish_phase(self, now: float) -> None:
        if self._phase and self._shown_at:
            self._write(f"{self._last}, {duration(now - self._began)}", "\n")
        self._shown_at = 0.0

    def _write(self, text: str, end: str) -> None:
        """Replace the current line; it stays if ``end`` is a newline."""
        before, erase = ("\r", "\x1b[K") if self._live else ("", "")
        with self._lock, contextlib.suppress(OSError, ValueError):  # the reader has gone
            self._stream.write(f"{before}{printable(text)}{erase}{end}")
            self._stream.flush()


def _line(
    phase: str, done: int, total: int, rates: Mapping[str, float], eta_seconds: float | None, *, max_columns: int
) -> str:
    """Return the line of a phase with as many rates as fit; the time left is kept and a long name is truncated."""
    verb, _, rest = phase.partition(" ")
    left = [] if eta_seconds is None else [f"{eta(eta_seconds)} left"]
    share = f" {100 * done / total:3.0f}%" if total else ""
    room = max_columns - len(share) - len(f" ({left[0]})" if left else "")
    words = " ".join([_VERBS.get(verb, verb), rest]).strip()[: max(0, room)] + share
    figures = _figures(rates)
    while figures and len(words) + len(f" ({', '.join([*figures, *left])})") > max_columns:
        figures.pop()
    return f"{words} ({', '.join([*figures, *left])})" if figures or left else words


def _figures(rates: Mapping[str, float]) -> list[str]:
    """Return the rates of a phase, most important first."""
    figures: list[str] = []
    if rates.get("documents_per_second", 0) >= 1:
        figures.append(f"{count(rates['documents_per_second'])} documents/s")
    if rates.get("text_mb_per_second"):
        figures.append(f"{rates['text_mb_per_second']:.1f} MB/s")
    if rates.get("tokens_per_second"):
        figures.append(f"{count(rates['tokens_per_second'])} tokens/s")
    if rates.get("chunks"):
        figures.append(pluralize(rates["chunks"], "chunk"))
        figures.append(f"{percent(rates['utilisation_fraction'], 2)} full")
        smaller = (percent(rates[f"ratio_to_{name}"]) for name in ("uint32", "uint16"))
        figures.append("size {} of uint32, {} of uint16".format(*smaller))
    return figures


class RunScreen:
    """The display of a run, which closes the build display before it prints."""

    def __init__(self, display: Display, build_display: BuildDisplay) -> None:
        self._display, self._build_display = display, build_display

    def step(self, view: StepView) -> None:
        self._build_display.close()
        self._display.step(view)

    def message(self, text: str, level: Level = "info") -> None:
        self._build_display.close()
        self._display.message(text, level)

    def sample(self, prompt: str, completion: str) -> None:
        self._display.sample(prompt, completion)

    def waiting(self, text: str | None) -> None:
        self._display.waiting(text)

    def close(self) -> None:
        self._build_display.close()
        self._display.close()
