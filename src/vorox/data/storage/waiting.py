"""Whether this process waits for data just now, since when and why: a state that anybody may read.

Readers of stores say when a try failed or an answer is late, and when bytes flow again; a watchdog or a progress line
asks ``waiting_for_data()``. The state is shown at once; the log tells of it only when it lasts, once at its start and
once at its end. Invariant: it is waiting exactly as long as somebody is between a failed or late try and its success
or its end.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from vorox.core.redaction import redact

LOG_AFTER_SECONDS = 5.0
"""A wait that is over sooner is not worth a line: two faults in a hundred requests are everyday."""

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
        return f"waiting for data since {since} because {self.reason} [{self.uri}]"


class _State:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waits: dict[int, WaitingForData] = {}
        self.numbers = itertools.count()
        self.began_unix_seconds = 0.0
        self.failed_tries = 0
        self.told = False


_state = _State()


def waiting_for_data() -> WaitingForData | None:
    """The wait that lasts longest, or ``None`` while data flows."""
    with _state.lock:
        return next(iter(_state.waits.values()), None)


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
        with _state.lock:
            if not _state.waits:
                _state.began_unix_seconds, _state.failed_tries, _state.told = time.time(), 0, False
            if self._number is None:
                self._number = next(_state.numbers)
                _state.waits[self._number] = WaitingForData(time.time(), redact(self._uri), reason, 0)
            known = _state.waits[self._number]
            _state.failed_tries += failed
            _state.waits[self._number] = replace(known, reason=reason, failed_tries=known.failed_tries + failed)
            tell = not _state.told and time.time() - _state.began_unix_seconds >= LOG_AFTER_SECONDS
            _state.told = _state.told or tell
            oldest = next(iter(_state.waits.values()))
        if tell:
            _log.warning("%s", oldest)

    def over(self) -> None:
        """The bytes came, or nobody waits for them any more."""
        with _state.lock:
            if self._number is None:
                return
            del _state.waits[self._number]
            self._number = None
            tell = _state.told and not _state.waits
            waited, failed = time.time() - _state.began_unix_seconds, _state.failed_tries
        if tell:
            _log.warning("data flows again after %.0f s and %d failed tries [%s]", waited, failed, redact(self._uri))


@contextmanager
def may_wait(uri: str) -> Generator[Wait]:
    """A wait that is over when the block is left, however that happens."""
    wait = Wait(uri)
    try:
        yield wait
    finally:
        wait.over()
