"""Whether this process waits for data just now, since when and why: a state that anybody may read, or be told of.

Readers of stores say when a try failed or an answer is late, and when bytes flow again; a watchdog asks
``waiting_for_data()``, a progress line is told by ``told_of_waits``. The state is there at once; the log tells of it
when it lasts, again while it goes on (after one minute, two, four ... at most every ten), and at its end. Waits that
follow each other within a minute are one matter in the log, so that a store which stumbles all day does not fill it.
Invariant: it is waiting exactly as long as somebody is between a failed or late try and its success or its end.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol

from vorox.core.redaction import redact

LOG_AFTER_SECONDS = 5.0
"""A wait that is over sooner is not worth a line: two faults in a hundred requests are everyday."""
LOG_AGAIN_SECONDS = 60.0
"""Between the first two lines about waits that go on; doubled each time."""
LONGEST_LOG_AGAIN_SECONDS = 600.0
SHOW_AFTER_SECONDS = 1.0
"""A wait that is over sooner would only flicker."""
TICK_SECONDS = 0.5
"""How often it is looked whether a wait goes on."""

_log = logging.getLogger("vorox.data.storage")


@dataclass(frozen=True, slots=True)
class WaitingForData:
    """What this process waits for.

    Attributes:
        since_unix_seconds: When the wait began.
        uri: The file or location.
        reason: What went wrong last: ``HTTP 503``, ``no byte for 20 s``.
        failed_tries: How many tries failed so far.
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
"""Told of a wait again and again while it lasts, and ``None`` once when data flows again. A thread of its own calls."""


class _LogTimes:
    """When the log is told: a series of waits that follow each other closely is one matter, told ever more rarely."""

    def __init__(self) -> None:
        self._due = self._again_seconds = self._began = 0.0
        self._ended = float("-inf")

    def begin(self, now: float) -> None:
        if now - self._ended > LOG_AGAIN_SECONDS:
            self._due, self._again_seconds = 0.0, LOG_AGAIN_SECONDS
        self._began, self._due = now, max(self._due, now + LOG_AFTER_SECONDS)

    def is_due(self, now: float) -> bool:
        if now < self._due:
            return False
        self._due = now + self._again_seconds
        self._again_seconds = min(2 * self._again_seconds, LONGEST_LOG_AGAIN_SECONDS)
        return True

    def end(self, now: float) -> None:
        if now - self._began >= LOG_AFTER_SECONDS:
            self._ended = now


class _State:
    """Invariant, under ``changed``: somebody narrates exactly if there are waits, or were at its last look."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waits: dict[int, WaitingForData] = {}
        self.numbers = itertools.count()
        self.failed_tries = 0
        self.listeners: list[Listener] = []
        self.log_times = _LogTimes()
        self.narrates = False
        self.narrator: threading.Thread | None = None

    def narrate(self) -> None:
        """Have the waits told by a thread, which ends with the last of them."""
        if self.narrator is None or not self.narrates or not self.narrator.is_alive():
            self.narrates, self.failed_tries = True, 0
            self.narrator = threading.Thread(target=_narrate, name="vorox-waiting", daemon=True)
            self.narrator.start()


_state = _State()


def waiting_for_data() -> WaitingForData | None:
    """The wait that lasts longest, or ``None`` while data flows."""
    with _state.changed:
        return next(iter(_state.waits.values()), None)


@contextmanager
def told_of_waits(listener: Listener) -> Generator[None]:
    """While inside, somebody is told of every wait that lasts long enough to be seen."""
    with _state.changed:
        _state.listeners.append(listener)
    try:
        yield
    finally:
        with _state.changed:
            narrator = None if _state.waits else _state.narrator
        if narrator is not None and narrator is not threading.current_thread():
            narrator.join()  # nothing is waited for, which it says before it ends
        with _state.changed:
            _state.listeners.remove(listener)


class Waiter(Protocol):
    """Who is told why something does not come yet."""

    def because(self, reason: str, *, failed: bool = True) -> None:
        """Say why: a try failed, or is only late."""
        ...


class _Nobody:
    def because(self, reason: str, *, failed: bool = True) -> None:
        pass


@contextmanager
def untold(_uri: str) -> Generator[Waiter]:
    """A wait that nobody is told of: what is done in the background is nothing that the run waits for."""
    yield _Nobody()


class Wait:
    """One reader's wait. It begins with the first ``because`` and ends with ``over``; both may be called again."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._number: int | None = None

    def because(self, reason: str, *, failed: bool = True) -> None:
        """Say why there are no bytes yet.

        Args:
            reason: For a person.
            failed: Whether a try failed, rather than only being late.
        """
        reason = redact(reason)
        with _state.changed:
            _state.narrate()
            if self._number is None:
                self._number = next(_state.numbers)
                _state.waits[self._number] = WaitingForData(time.time(), redact(self._uri), reason, 0)
            known = _state.waits[self._number]
            _state.waits[self._number] = replace(known, reason=reason, failed_tries=known.failed_tries + failed)
            _state.failed_tries += failed

    def over(self) -> None:
        """The bytes came, or nobody waits for them any more."""
        with _state.changed:
            if self._number is None:
                return
            del _state.waits[self._number]
            self._number = None
            if not _state.waits:
                _state.changed.notify_all()


@contextmanager
def may_wait(uri: str) -> Generator[Wait]:
    """A wait that is over when the block is left, however that happens."""
    wait = Wait(uri)
    try:
        yield wait
    finally:
        wait.over()


def _narrate() -> None:
    began, shown, told, last = time.monotonic(), False, False, None
    with _state.changed:
        _state.log_times.begin(began)
    while True:
        with _state.changed:
            _state.changed.wait_for(lambda: not _state.waits, timeout=TICK_SECONDS)
            now = time.monotonic()
            wait = next(iter(_state.waits.values()), None)
            listeners, failed_tries = list(_state.listeners), _state.failed_tries
            tell = wait is not None and _state.log_times.is_due(now)
            if wait is None:
                _state.narrates = False
                _state.log_times.end(now)
        if wait is None:
            break
        told, shown, last = told or tell, shown or now - began >= SHOW_AFTER_SECONDS, wait
        if tell:
            _log.warning("%s", wait, extra=_as_event("waiting_for_data", wait, wait.waited_seconds, wait.failed_tries))
        for listener in listeners if shown else ():
            listener(wait)
    for listener in listeners if shown else ():
        listener(None)
    if told and last is not None:
        text = f"data flows again after {now - began:.0f} s and {failed_tries:,} failed tries [{last.uri}]"
        _log.warning("%s", text, extra=_as_event("data_flows_again", last, now - began, failed_tries))


def _as_event(kind: str, wait: WaitingForData, waited_seconds: float, failed_tries: int) -> dict[str, object]:
    """What ``core.log`` makes an event of, beside the words."""
    fields = {
        "uri": wait.uri,
        "reason": wait.reason,
        "since_unix_seconds": wait.since_unix_seconds,
        "waited_seconds": round(waited_seconds, 3),
        "failed_tries": failed_tries,
    }
    return {"event_kind": kind, "event_fields": fields}
