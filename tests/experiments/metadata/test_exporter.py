"""The background exporter: it waits for nothing, loses nothing, and never raises into the run."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eventually import wait_until
from postgres_server import Postgres
from vorox.experiments.metadata import BackgroundExporter, MetadataCache, Replacement, databases

WAIT_SECONDS = 20.0


class Away(Exception):
    pass


class Records:
    """The records of a run, here its last step, and what became of its database."""

    def __init__(self) -> None:
        self.step = 0
        self.events: list[tuple[str, str, str]] = []

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.events]

    def rows(self) -> list[tuple[Any, ...]]:
        return [("r", 1, None, 0, 0, self.step, self.step, self.step, self.step, 1), ("r", 2, *(0,) * 8)]


class Database:
    """Stands in for an export: can be away, and can hang. ``written`` are the steps that arrived, in order."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.is_away = False
        self.gate = threading.Event()
        self.gate.set()
        self.written: list[int] = []
        self.connections = self.updates = 0

    def connect(self) -> Any:
        self.connections += 1
        self._check()
        return self

    def update(self) -> None:
        self.gate.wait(WAIT_SECONDS)
        self._check()
        self.updates += 1
        if self.written[-1:] != [self._records.step]:
            self.written.append(self._records.step)

    def _check(self) -> None:
        if self.is_away:
            raise Away("nobody answers\n\tIs the server running?")

    def close(self) -> None:
        pass


class RealExport:
    """An export of the records to a real database."""

    def __init__(self, target: Path | str, records: Records) -> None:
        self._records, self._cache = records, MetadataCache(target)

    def update(self) -> None:
        self._cache.replace("r", self._replacements())

    def _replacements(self) -> Iterator[Replacement]:
        yield Replacement("attempt", "run_id = ?", ("r",), self._records.rows())

    def close(self) -> None:
        self._cache.close()


def start(connect: Callable[[], Any], records: Records, interval_seconds: float = 0.01) -> BackgroundExporter:
    return BackgroundExporter(
        connect, report=lambda *event: records.events.append(event), interval_seconds=interval_seconds
    )


def last_step(target: Path | str) -> int:
    return MetadataCache.query(target, "SELECT MAX(last_step) FROM attempt").rows[0][0]


def test_records_arrive_while_the_run_goes_on_and_at_its_end() -> None:
    records = Records()
    database = Database(records)
    exporter = start(database.connect, records)
    for step in (1, 2):
        records.step = step
        wait_until(lambda step=step: step in database.written)
    records.step = 3
    exporter.close()
    exporter.close()
    assert database.written[-1] == 3
    assert database.written == sorted(database.written)
    assert (database.connections, records.events) == (1, [])


def test_a_run_that_ends_at_once_is_exported() -> None:
    records = Records()
    database = Database(records)
    records.step = 7
    start(database.connect, records, interval_seconds=60.0).close()
    assert database.written == [7]


def test_closing_does_not_wait_for_a_database_that_hangs() -> None:
    records = Records()
    database = Database(records)
    database.gate.clear()
    exporter = start(database.connect, records)
    wait_until(lambda: database.connections == 1)
    began = time.monotonic()
    exporter.close(timeout_seconds=0.2)
    assert time.monotonic() - began < WAIT_SECONDS / 2
    assert not database.written, "it hangs still"
    database.gate.set()
    exporter._thread.join(WAIT_SECONDS)
    assert not exporter._thread.is_alive()


def test_nothing_is_lost_while_the_database_comes_and_goes() -> None:
    records = Records()
    database = Database(records)
    exporter = start(database.connect, records)
    for number in range(1, 9):
        records.step = number
        database.is_away = not database.is_away
        kind = "metadata_away" if database.is_away else "metadata_back"
        wait_until(lambda kind=kind, count=(number + 1) // 2: records.kinds().count(kind) == count)
    exporter.close()
    assert database.written[-1] == 8
    assert database.written == sorted(database.written), "older records never take the place of newer ones"
    assert records.kinds() == ["metadata_away", "metadata_back"] * 4, "each outage is reported once"
    assert not any("\n" in text or "\t" in text for _, text, _ in records.events)


def test_rows_wait_while_another_session_holds_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "_BUSY_SECONDS", 0.05)
    path, records = tmp_path / "metadata.sqlite", Records()
    MetadataCache(path).close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        exporter = start(lambda: RealExport(path, records), records)
        records.step = 19
        wait_until(lambda: "metadata_away" in records.kinds())
        assert "locked" in records.events[0][1]
        other.execute("ROLLBACK")
    wait_until(lambda: "metadata_back" in records.kinds())
    exporter.close()
    assert last_step(path) == 19


def test_a_connection_that_broke_unnoticed_is_opened_again_at_the_end() -> None:
    records = Records()
    database = Database(records)
    exporter = start(database.connect, records, interval_seconds=60.0)
    wait_until(lambda: database.updates == 1)
    update, broken = database.update, []

    def update_once_broken() -> None:
        if not broken:
            broken.append(1)
            raise Away("the connection was reset")
        update()

    database.update = update_once_broken  # type: ignore[method-assign]
    records.step = 1
    exporter.close()
    assert database.written[-1] == 1
    assert database.connections == 2
    assert records.kinds() == ["metadata_away", "metadata_back"]


def test_whatever_the_export_raises_stays_inside() -> None:
    records = Records()

    def broken() -> Any:
        raise RuntimeError("a bug")

    exporter = start(broken, records)
    wait_until(lambda: len(records.events) > 0)
    exporter.close()
    assert records.kinds() == ["metadata_away"]
    assert "RuntimeError: a bug" in records.events[0][1]


def test_postgres_stopped_and_started_again(postgres: Postgres) -> None:
    dsn, records = postgres.new_database(), Records()
    exporter = start(lambda: RealExport(dsn, records), records, interval_seconds=0.05)
    records.step = 1
    made = "SELECT to_regclass('vorox.attempt') IS NOT NULL"
    wait_until(lambda: MetadataCache.query(dsn, made).rows == [(True,)] and last_step(dsn) == 1)
    postgres.stop()
    try:
        records.step = 19
        wait_until(lambda: "metadata_away" in records.kinds())
    finally:
        postgres.start()
    records.step = 29
    wait_until(lambda: "metadata_back" in records.kinds())
    exporter.close()
    assert last_step(dsn) == 29
    assert not any("hunter2secret" in text for _, text, _ in records.events)


@pytest.mark.parametrize("conflict", ["statement timeout", "deadlock detected"])
def test_another_session_of_postgres_holds_a_row(
    conflict: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter waits for a bounded time, or loses a deadlock; then it writes the same rows again."""
    psycopg = pytest.importorskip("psycopg")
    dsn, records = postgres.new_database(), Records()
    own = f"{dsn}&options=-c%20deadlock_timeout%3D2s"
    with contextlib.closing(RealExport(dsn, records)) as export:
        export.update()
    records.step = 7
    if conflict == "statement timeout":
        monkeypatch.setattr(databases, "_STATEMENT_MILLISECONDS", 200)
    lock = "SELECT 1 FROM vorox.attempt WHERE attempt = %s FOR UPDATE"
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with (
        psycopg.connect(dsn, options="-c deadlock_timeout=1h") as other,
        psycopg.connect(dsn, autocommit=True) as third,
    ):
        other.execute(lock, (2,))
        exporter = start(lambda: RealExport(own, records), records)
        if conflict == "deadlock detected":
            wait_until(lambda: third.execute(waiting).fetchone() == (1,))
            other.execute(lock, (1,))  # goes on once the exporter has lost
        wait_until(lambda: "metadata_away" in records.kinds())
        other.rollback()
    wait_until(lambda: "metadata_back" in records.kinds())
    exporter.close()
    assert conflict in records.events[0][1]
    assert last_step(dsn) == 7
