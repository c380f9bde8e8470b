"""Background writer of a run's metadata, which never blocks the run and loses no rows.

In: rows that the run puts in constant time, and rows that the writer collects every few seconds. Out: one transaction
per round. While the database is unavailable, rows go to the spool in the run directory, as do rows that exceed the
memory limit; afterwards the spool is drained before anything newer is written. Rows are keyed, so repeated writes are
harmless. Nothing here raises into the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Literal

from vorox.core.redaction import redact
from vorox.experiments.metadata.cache import MetadataCache
from vorox.experiments.metadata.spool import Spool
from vorox.experiments.metadata.tables import Row

CLOSE_SECONDS = 5.0
_LONGEST_RETRY_SECONDS = 30.0
_MAX_PENDING = 10_000

ReportEvent = Callable[[str, str, Literal["info", "warning"]], None]
"""Reports (kind, message, level) when the database becomes unavailable or available again."""


class MetadataWriter:
    """The background writer of a run.

    Args:
        run_directory: Directory of the spool.
        open_cache: Opens the database; retried if it fails.
        initial_sync: Writes the current state to a newly opened database, after the spool is drained and before
            anything newer is written. May raise exceptions of the database.
        collect: Returns rows of the current state; called every round.
        report: Reports changes of the database's availability.
        interval_seconds: Time between two rounds.
        max_pending: Maximum number of keys in memory; further rows go to the spool.
    """

    def __init__(
        self,
        run_directory: Path,
        open_cache: Callable[[], MetadataCache],
        *,
        initial_sync: Callable[[MetadataCache], None],
        collect: Callable[[], Iterable[Row]],
        report: ReportEvent,
        interval_seconds: float = 5.0,
        max_pending: int = _MAX_PENDING,
    ) -> None:
        self._open_cache, self._initial_sync, self._collect, self._report_event = (
            open_cache,
            initial_sync,
            collect,
            report,
        )
        self._interval_seconds, self._max_pending = interval_seconds, max_pending
        self._spool = Spool(run_directory)
        self._number = self._spool.read().last_number
        self._pending: dict[tuple[Any, ...], tuple[int, Row]] = {}
        self._in_flight: dict[tuple[Any, ...], tuple[int, Row]] = {}
        self._last_collected: dict[tuple[Any, ...], Row] = {}
        self._lock = threading.Lock()
        self._spool_lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._cache: MetadataCache | None = None
        self._failures = 0
        self._reported_spool_failure = False
        self._retry_at = 0.0
        self._thread = threading.Thread(target=self._work, name="vorox-metadata", daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        """Enqueue a row, in constant time and without waiting for the database."""
        with self._lock:
            self._number += 1
            entry = (self._number, row)
            fits = row.key in self._pending or len(self._pending) < self._max_pending
            if fits:
                self._pending[row.key] = entry
        if not fits:
            self._spool_rows([entry], sync=False)

    def wake(self) -> None:
        """Wake the writer thread, so that it writes pending rows now."""
        self._wake.set()

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Write the remaining rows, or spool them if the database is too slow."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():  # blocked in the database; rows in flight may be written twice, or not at all
            self._collect_changes()
            self._spool_pending()
            self._spool_rows(list(self._in_flight.values()), sync=True)

    def _work(self) -> None:
        while True:
            closing = self._closing
            self._round()
            if closing and self._failures == 1:
                self._round()  # the first failure may be only a lost connection
            if closing:
                if self._cache is not None:
                    self._cache.close()
                return
            self._wake.wait(self._interval_seconds)
            self._wake.clear()

    def _round(self) -> None:
        try:
            self._write_round()
        except Exception as error:  # an unexpected error must not stop the training
            self._report("metadata_failed", f"The metadata writer failed: {type(error).__name__}: {error}", "warning")

    def _write_round(self) -> None:
        self._collect_changes()
        if not self._closing and time.monotonic() < self._retry_at:
            self._spool_pending()
            return
        try:
            cache = self._opened()
            self._drain(cache)  # before rows are taken: a row may be spooled after an older one of its key was taken
            with self._lock:
                self._in_flight, self._pending = self._pending, {}
            if self._in_flight:
                cache.write(row for _, row in sorted(self._in_flight.values(), key=lambda entry: entry[0]))
        except Exception as error:
            self._handle_failure(error)
            return
        self._in_flight = {}
        if self._failures:
            self._report("metadata_back", "The metadata database is available again; no rows were lost", "info")
        self._failures = 0

    def _collect_changes(self) -> None:
        for row in self._collect():
            if self._last_collected.get(row.key) != row:
                self.put(row)
                self._last_collected[row.key] = row

    def _opened(self) -> MetadataCache:
        """Return the database; a newly opened one has received the spooled rows and the current state."""
        if self._cache is None:
            cache = self._open_cache()
            try:
                self._drain(cache)
                self._initial_sync(cache)
            except BaseException:
                cache.close()
                raise
            self._cache = cache
        return self._cache

    def _drain(self, cache: MetadataCache) -> None:
        """Write the spooled rows, without holding the spool's lock: spooling must not wait for the database."""
        with self._spool_lock:
            size_bytes = self._spool.size_bytes
            spooled = self._spool.read() if size_bytes else None
        if spooled is None:
            return
        if spooled.damaged_lines:
            text = f"{spooled.damaged_lines} damaged lines of {self._spool.path.name} were skipped"
            self._report("metadata_spool_damaged", text, "warning")
        cache.write(spooled.rows)
        with self._spool_lock:
            if self._spool.size_bytes == size_bytes:
                self._spool.clear()  # else it is drained again, together with the new rows, which is harmless

    def _handle_failure(self, error: Exception) -> None:
        cache, self._cache = self._cache, None
        if cache is not None:
            try:
                cache.close()
            except Exception as closing:  # the connection is already broken
                del closing
        self._failures += 1
        self._retry_at = time.monotonic() + min(_LONGEST_RETRY_SECONDS, self._interval_seconds * self._failures)
        self._spool_rows(self._in_flight.values(), sync=True)
        self._in_flight = {}
        self._spool_pending()
        if self._failures == 1:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            text = f"The metadata database is unavailable ({reason}); training continues, rows are spooled in "
            self._report("metadata_away", f"{text}{self._spool.path.name}", "warning")

    def _spool_pending(self) -> None:
        with self._lock:
            taken, self._pending = self._pending, {}
        self._spool_rows(taken.values(), sync=True)

    def _spool_rows(self, entries: Collection[tuple[int, Row]], *, sync: bool) -> None:
        """Append rows to the spool; if that fails, keep them in memory up to the limit."""
        try:
            with self._spool_lock:
                self._spool.append(entries, sync=sync)
        except OSError as error:
            with self._lock:
                for entry in entries:
                    if len(self._pending) < self._max_pending:
                        self._pending.setdefault(entry[1].key, entry)
            if not self._reported_spool_failure:
                self._reported_spool_failure = True
                text = f"{self._spool.path.name} cannot be written; rows are kept in memory: {error.strerror}"
                self._report("metadata_spool_failed", text, "warning")

    def _report(self, kind: str, text: str, level: Literal["info", "warning"]) -> None:
        self._report_event(kind, redact(text), level)
