"""Stall tracking: whether this process is waiting for data, since when and why.

Readers report failed or late requests and clear the stall when bytes arrive again. Watchdogs read the state with
``waiting_for_data()``; progress displays observe it with ``observe_stalls``. The state changes immediately. The log
gets a line once a stall lasts, again after one minute, two, four ... at most every ten, and one at its end. Stalls less
than a minute apart share one series of lines, so a store that fails intermittently does not fill the log. Invariant:
the process is waiting exactly while some reader is between a failed or late try and its success or final error.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol

from vorox.core.redaction import redact

LOG_AFTER_SECONDS = 5.0
"""Shorter stalls are not logged: two failures in a hundred requests are normal."""
LOG_AGAIN_SECONDS = 60.0
"""Between the first two lines about a stall; doubled each time."""
LONGEST_LOG_AGAIN_SECONDS = 600.0
SHOW_AFTER_SECONDS = 1.0
"""Shorter stalls would only flicker on a display."""
TICK_SECONDS = 0.5
"""Poll interval of the reporting thread."""

_log = logging.getLogger("vorox.data.storage")


@dataclass(frozen=True, slots=True)
class WaitingForData:
    """What this process is waiting for.

    Attributes:
        since_unix_seconds: Start of the stall.
        uri: The file or location.
        reason: The latest failure: ``HTTP 503``, ``no byte for 20 s``.
        failed_tries: Number of failed tries so far.
    """

    since_unix_seconds: float
    uri: str
    reason: str
    failed_tries: int

    @property
    def waited_seconds(self) -> float:
        return max(0.0, time.time() - self.since_unix_seconds)

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since_unix_seconds, UTC).strftime("%H:%M:%S UTC")
        tries = f" after {self.failed_tries:,} failed tries" if self.failed_tries > 1 else ""
        return f"waiting for data since {since} because {self.reason}{tries} [{self.uri}]"


Listener = Callable[[WaitingForData | None], None]
"""Called repeatedly during a stall, and once with ``None`` when it ends, from a thread of its own."""


class _LogSchedule:
    """When to log: stalls close to each other share one series of lines with growing intervals."""

    def __init__(self) -> None:
        self._due = self._interval_seconds = self._start = 0.0
        self._last_end = float("-inf")

    def start(self, now: float) -> None:
        if now - self._last_end > LOG_AGAIN_SECONDS:
            self._due, self._interval_seconds = 0.0, LOG_AGAIN_SECONDS
        self._start, self._due = now, max(self._due, now + LOG_AFTER_SECONDS)

    def is_due(self, now: float) -> bool:
        if now < self._due:
            return False
        self._due = now + self._interval_seconds
        self._interval_seconds = min(2 * self._interval_seconds, LONGEST_LOG_AGAIN_SECONDS)
        return True

    def end(self, now: float) -> None:
        if now - self._start >= LOG_AFTER_SECONDS:
            self._last_end = now


class _State:
    """Invariant, under ``changed``: ``is_reporting`` if and only if stalls exist or existed at the last poll."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.stalls: dict[int, WaitingForData] = {}
        self.numbers = itertools.count()
        self.failed_tries = 0
        self.is_abandoned = False
        self.listeners: list[Listener] = []
        self.log_schedule = _LogSchedule()
        self.is_reporting = False
        self.reporter: threading.Thread | None = None

    def ensure_reporter(self) -> None:
        """Start the reporting thread unless it runs. It ends with the last stall."""
        if self.reporter is None or not self.is_reporting or not self.reporter.is_alive():
            self.is_reporting, self.failed_tries, self.is_abandoned = True, 0, False
            self.reporter = threading.Thread(target=_report_stalls, name="vorox-waiting", daemon=True)
            self.reporter.start()


_state = _State()


def waiting_for_data() -> WaitingForData | None:
    """Return the oldest stall; ``None`` while data flows."""
    with _state.changed:
        return next(iter(_state.stalls.values()), None)


@contextmanager
def observe_stalls(listener: Listener) -> Generator[None]:
    """Notify a listener of every stall that is long enough to show, until the block ends."""
    with _state.changed:
        _state.listeners.append(listener)
    try:
        yield
    finally:
        with _state.changed:
            reporter = None if _state.stalls else _state.reporter
        if reporter is not None and reporter is not threading.current_thread():
            reporter.join()  # no stall is left, which it reports before it ends
        with _state.changed:
            _state.listeners.remove(listener)


class StallReporter(Protocol):
    """Receives the reasons why data does not arrive."""

    def report(self, reason: str, *, failed: bool = True) -> None:
        """Report that a try failed, or (``failed=False``) that it is late."""
        ...


StallTracker = Callable[[str], AbstractContextManager[StallReporter]]
"""Opens a stall reporter for a uri; leaving the block ends the stall."""


class _SilentReporter:
    def report(self, reason: str, *, failed: bool = True) -> None:
        pass


@contextmanager
def silent(_uri: str) -> Generator[StallReporter]:
    """Track nothing: a ``StallTracker`` for background work that the run does not wait for."""
    yield _SilentReporter()


class Stall:
    """One reader's stall. It starts with the first ``report`` and ends with ``clear``; both may be repeated."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._number: int | None = None

    def report(self, reason: str, *, failed: bool = True) -> None:
        """Report why there are no bytes yet.

        Args:
            reason: For a person.
            failed: Whether a try failed, rather than being late.
        """
        reason = redact(reason)
        with _state.changed:
            _state.ensure_reporter()
            if self._number is None:
                self._number = next(_state.numbers)
                _state.stalls[self._number] = WaitingForData(time.time(), redact(self._uri), reason, 0)
            known = _state.stalls[self._number]
            _state.stalls[self._number] = replace(known, reason=reason, failed_tries=known.failed_tries + failed)
            _state.failed_tries += failed

    def clear(self, *, is_abandoned: bool = False) -> None:
        """End the stall: bytes arrived, or (``is_abandoned=True``) the reader stopped waiting."""
        with _state.changed:
            if self._number is None:
                return
            _state.is_abandoned = is_abandoned
            del _state.stalls[self._number]
            self._number = None
            if not _state.stalls:
                _state.changed.notify_all()


@contextmanager
def track_stall(uri: str) -> Generator[Stall]:
    """Track a stall for the duration of a ``with`` block."""
    stall = Stall(uri)
    try:
        yield stall
    except BaseException:
        stall.clear(is_abandoned=True)
        raise
    stall.clear()


def _report_stalls() -> None:
    start, is_shown, is_logged, last = time.monotonic(), False, False, None
    with _state.changed:
        _state.log_schedule.start(start)
    while True:
        with _state.changed:
            _state.changed.wait_for(lambda: not _state.stalls, timeout=TICK_SECONDS)
            now = time.monotonic()
            stall = next(iter(_state.stalls.values()), None)
            listeners, failed_tries, is_abandoned = list(_state.listeners), _state.failed_tries, _state.is_abandoned
            is_due = stall is not None and _state.log_schedule.is_due(now)
            if stall is None:
                _state.is_reporting = False
                _state.log_schedule.end(now)
        if stall is None:
            break
        is_logged, is_shown, last = is_logged or is_due, is_shown or now - start >= SHOW_AFTER_SECONDS, stall
        if is_due:
            _log.warning("%s", stall, extra=_event("waiting_for_data", stall, stall.waited_seconds, stall.failed_tries))
        for listener in listeners if is_shown else ():
            listener(stall)
    for listener in listeners if is_shown else ():
        listener(None)
    if is_logged and last is not None and not is_abandoned:
        text = f"data flows again after {now - start:.0f} s and {failed_tries:,} failed tries [{last.uri}]"
        _log.warning("%s", text, extra=_event("data_flows_again", last, now - start, failed_tries))


def _event(kind: str, stall: WaitingForData, waited_seconds: float, failed_tries: int) -> dict[str, object]:
    """Return the structured event that ``records.log`` writes besides the text."""
    fields = {
        "uri": stall.uri,
        "reason": stall.reason,
        "since_unix_seconds": stall.since_unix_seconds,
        "waited_seconds": round(waited_seconds, 3),
        "failed_tries": failed_tries,
    }
    return {"event_kind": kind, "event_fields": fields}
