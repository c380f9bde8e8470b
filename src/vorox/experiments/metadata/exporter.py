"""Background export of a run's records to its metadata database, which never blocks the run and never raises into it.

In: an export, which brings the database up to date with the records on disk. Every few seconds, a thread updates it in
one transaction. While the database is unavailable, nothing is kept: the records themselves hold what it lacks, and the
next connection exports all of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Literal, Protocol

from vorox.core.redaction import redact

CLOSE_SECONDS = 5.0
_LONGEST_RETRY_SECONDS = 30.0

ReportEvent = Callable[[str, str, Literal["info", "warning"]], None]
"""Reports (kind, message, level) when the database becomes unavailable or available again."""


class Export(Protocol):
    """A connection to the database, which the first update brings up to date, later ones with what has changed."""

    def update(self) -> None: ...

    def close(self) -> None: ...


class BackgroundExporter:
    """Keeps the metadata database of a running run up to date.

    Args:
        connect: Opens an export; retried if it fails, and called again after every failed update.
        report: Reports changes of the database's availability.
        interval_seconds: Time between two updates.
    """

    def __init__(self, connect: Callable[[], Export], *, report: ReportEvent, interval_seconds: float = 5.0) -> None:
        self._connect, self._report, self._interval_seconds = connect, report, interval_seconds
        self._export: Export | None = None
        self._failures = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="vorox-metadata", daemon=True)
        self._thread.start()

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Export the last records; leave them to the next start of the run if the database is too slow."""
        self._closing.set()
        self._thread.join(timeout_seconds)

    def _work(self) -> None:
        wait_seconds = 0.0
        while not self._closing.wait(wait_seconds):
            self._update()
            wait_seconds = min(_LONGEST_RETRY_SECONDS, self._interval_seconds * max(1, self._failures))
        self._update()
        if self._failures == 1:
            self._update()  # the first failure may be only a lost connection
        self._disconnect()

    def _update(self) -> None:
        try:
            if self._export is None:
                self._export = self._connect()
            self._export.update()
        except Exception as error:  # whatever it is, it must not stop the training
            self._disconnect()
            self._failures += 1
            if self._failures == 1:
                reason = redact(" ".join(f"{type(error).__name__}: {error}".split()))
                what = f"The metadata database is unavailable ({reason})"
                self._report("metadata_away", f"{what}; training continues, records are exported later", "warning")
            return
        if self._failures:
            self._report("metadata_back", "The metadata database is available again; no rows were lost", "info")
        self._failures = 0

    def _disconnect(self) -> None:
        export, self._export = self._export, None
        if export is not None:
            with contextlib.suppress(Exception):  # the connection may be broken already
                export.close()
