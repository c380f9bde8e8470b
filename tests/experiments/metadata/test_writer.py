"""The background writer: it costs a step nothing, loses nothing, and never raises into the run."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from eventually import wait_until
from postgres_server import Postgres
from processor_cost import cost
from vorox.core import atomic
from vorox.core.atomic import FileOperation
from vorox.experiments.metadata import MetadataCache, MetadataWriter, Row, databases
from vorox.experiments.metadata.spool import Spool

WAIT_SECONDS = 20.0


def row(attempt: int, last_step: int) -> Row:
    steps = {"first_state": 0, "kept_until": last_step, "last_step": last_step}
    places = {"first_position": 0, "kept_position": last_step, "last_position": last_step}
    return Row("attempt", {"run_id": "r", "attempt": attempt, "parent": None, "is_newest": 1, **steps, **places})


class Away(Exception):
    pass


class Database:
    """Stands in for ``MetadataCache``: can be away, and can hang."""

    def __init__(self) -> None:
        self.is_away = False
        self.gate = threading.Event()
        self.gate.set()
        self.rows: dict[tuple[Any, ...], Row] = {}
        self.batches: list[list[Row]] = []
        self.opened = 0

    def open(self) -> Any:
        self.opened += 1
        if self.is_away:
            raise Away("nobody answers\n\tIs the server running?")
        return self

    def write(self, rows: Iterable[Row]) -> None:
        found = list(rows)
        self.gate.wait(WAIT_SECONDS)
        if self.is_away:
            raise Away("went away\n\tIs the server running?")
        self.batches.append(found)
        self.rows.update((entry.key, entry) for entry in found)

    def close(self) -> None:
        pass

    def steps(self) -> dict[int, int]:
        return {entry.values["attempt"]: entry.values["last_step"] for entry in self.rows.values()}


class Observed:
    """Rows that the writer asks for, and what it told."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.events: list[tuple[str, str, str]] = []
        self.rounds = 0

    def look(self) -> list[Row]:
        self.rounds += 1
        return list(self.rows)

    def next_round(self) -> None:
        """Wait until the writer has done one whole round from now on."""
        seen = self.rounds
        wait_until(lambda: self.rounds >= seen + 2)

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.events]


def start(directory: Path, database: Any, observed: Observed, **options: Any) -> MetadataWriter:
    return MetadataWriter(
        directory, database.open, initial_sync=options.pop("initial_sync", lambda cache: None),
        collect=observed.look, report=lambda *event: observed.events.append(event),
        **{"interval_seconds": 0.01, **options},
    )  # fmt: skip


def test_rows_arrive_in_batches_and_what_is_observed_only_when_it_changes(tmp_path: Path) -> None:
    database, observed = Database(), Observed()
    observed.rows = [row(1, 0)]
    writer = start(tmp_path, database, observed)
    wait_until(lambda: database.steps() == {1: 0})
    observed.next_round()
    assert len(database.batches) == 1, "nothing changed, nothing is written"
    observed.rows = [row(1, 5)]
    for number in range(2, 50):
        writer.put(row(number, number))
    writer.close()
    writer.close()
    assert database.steps() == {1: 5, **{number: number for number in range(2, 50)}}
    assert not (tmp_path / "metadata.spool").exists()
    assert observed.events == []


def test_putting_is_quick_while_the_database_hangs_and_what_does_not_fit_is_spooled(tmp_path: Path) -> None:
    database, observed = Database(), Observed()
    database.gate.clear()
    writer = start(tmp_path, database, observed, max_pending=10)
    writer.put(row(1, 1))
    wait_until(lambda: database.opened == 1)
    for number in range(2, 101):
        writer.put(row(number, number))
    assert not database.batches, "it hangs still"
    assert Spool(tmp_path).size_bytes > 0
    database.gate.set()
    wait_until(lambda: len(database.rows) == 100)
    writer.close()
    assert database.steps() == {number: number for number in range(1, 101)}
    assert Spool(tmp_path).size_bytes == 0


def test_a_spooled_row_is_not_overwritten_by_an_older_one_of_its_key(tmp_path: Path) -> None:
    """While the database opens, memory for one row is full: the newest value of the other goes to the spool."""
    observed, opened, release = Observed(), threading.Event(), threading.Event()

    class Opening(Database):
        def open(self) -> Any:
            opened.set()
            release.wait(WAIT_SECONDS)
            return super().open()

    database = Opening()
    observed.rows = [row(1, 1)]
    writer = start(tmp_path, database, observed, max_pending=1)
    assert opened.wait(WAIT_SECONDS)
    writer.put(row(2, 2))
    writer.put(row(1, 9))
    release.set()
    wait_until(lambda: len(database.steps()) == 2)
    observed.next_round()
    writer.close()
    assert database.steps() == {1: 9, 2: 2}


def test_closing_does_not_wait_for_a_database_that_hangs(tmp_path: Path) -> None:
    database, observed = Database(), Observed()
    database.gate.clear()
    writer = start(tmp_path, database, observed)
    observed.rows = [row(1, 1)]
    wait_until(lambda: len(writer._in_flight) == 1)
    observed.rows = [row(1, 9)]
    writer.put(row(2, 2))
    writer.close(timeout_seconds=0.2)
    assert not database.batches, "it hangs still"
    assert {entry.values["attempt"]: entry.values["last_step"] for entry in Spool(tmp_path).read().rows} == {1: 9, 2: 2}
    database.gate.set()
    writer._thread.join(WAIT_SECONDS)
    second = Database()
    start(tmp_path, second, Observed()).close()
    assert {**database.steps(), **second.steps()} == {1: 9, 2: 2}


def test_nothing_is_lost_while_the_database_comes_and_goes(tmp_path: Path) -> None:
    database, observed = Database(), Observed()
    writer = start(tmp_path, database, observed)
    for number in range(1, 401):
        observed.rows = [row(0, number)]
        writer.put(row(number, number))
        if number % 50 == 0:
            database.is_away = not database.is_away
            writer.wake()
            kind = "metadata_away" if database.is_away else "metadata_back"
            wait_until(lambda kind=kind, count=(number + 50) // 100: observed.kinds().count(kind) == count)
    database.is_away = False
    wait_until(lambda: len(database.rows) == 401 and Spool(tmp_path).size_bytes == 0)
    writer.close()
    assert database.steps() == {0: 400, **{number: number for number in range(1, 401)}}
    assert "metadata_away" in observed.kinds()
    assert "metadata_back" in observed.kinds()
    assert observed.kinds().count("metadata_away") == observed.kinds().count("metadata_back")
    assert not any("\n" in text or "\t" in text for _, text, _ in observed.events)


def test_older_rows_never_take_the_place_of_newer_ones(tmp_path: Path) -> None:
    """What was spooled is drained before anything newer, also by the next process."""
    database = Database()
    database.is_away = True
    for life in range(3):
        observed = Observed()
        writer = start(tmp_path, database, observed)
        for step in range(life * 10, life * 10 + 10):
            observed.rows = [row(1, step)]
            writer.wake()
            observed.next_round()
        database.is_away = life < 1
        writer.close()
    assert database.steps() == {1: 29}
    steps = [entry.values["last_step"] for batch in database.batches for entry in batch]
    assert steps == sorted(steps)


def test_the_next_process_drains_what_a_killed_one_left(tmp_path: Path) -> None:
    Spool(tmp_path).append([(5, row(1, 7)), (6, row(2, 8))], sync=True)
    database, observed = Database(), Observed()
    start(tmp_path, database, observed).close()
    assert database.steps() == {1: 7, 2: 8}
    assert Spool(tmp_path).size_bytes == 0


def test_killed_between_the_commit_and_the_removal_of_the_spool(tmp_path: Path) -> None:
    """Draining twice is the same as draining once."""
    Spool(tmp_path).append([(1, row(1, 7))], sync=True)
    content = (tmp_path / "metadata.spool").read_bytes()
    path = tmp_path / "metadata.sqlite"

    class Real:
        def open(self) -> MetadataCache:
            return MetadataCache(path)

    for _ in range(2):
        (tmp_path / "metadata.spool").write_bytes(content)
        start(tmp_path, Real(), Observed()).close()
    assert MetadataCache.query(path, "SELECT attempt, last_step FROM attempt").rows == [(1, 7)]


def test_rows_wait_while_another_session_holds_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "_BUSY_SECONDS", 0.05)
    path = tmp_path / "metadata.sqlite"
    MetadataCache(path).close()

    class Real:
        def open(self) -> MetadataCache:
            return MetadataCache(path)

    observed = Observed()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        writer = start(tmp_path, Real(), observed)
        for number in range(1, 20):
            writer.put(row(number, number))
        wait_until(lambda: "metadata_away" in observed.kinds())
        assert "locked" in observed.events[0][1]
        other.execute("ROLLBACK")
    wait_until(lambda: "metadata_back" in observed.kinds())
    writer.close()
    found = MetadataCache.query(path, "SELECT attempt, last_step FROM attempt ORDER BY attempt").rows
    assert found == [(number, number) for number in range(1, 20)]
    assert Spool(tmp_path).size_bytes == 0


def test_a_connection_that_broke_unnoticed_is_opened_again_at_the_end(tmp_path: Path) -> None:
    database, observed = Database(), Observed()
    writer = start(tmp_path, database, observed, interval_seconds=60.0)
    wait_until(lambda: database.opened == 1)
    write, broken = database.write, []

    def write_once_broken(rows: Iterable[Row]) -> None:
        if not broken:
            broken.append(1)
            raise Away("the connection was reset")
        write(rows)

    database.write = write_once_broken  # type: ignore[method-assign]
    writer.put(row(1, 1))
    writer.close()
    assert database.steps() == {1: 1}
    assert database.opened == 2
    assert Spool(tmp_path).size_bytes == 0
    assert observed.kinds() == ["metadata_away", "metadata_back"]


def test_a_full_disk_under_the_spool_loses_nothing_that_fits_into_memory(tmp_path: Path) -> None:
    def no_room(operation: FileOperation) -> None:
        if operation.path.name == "metadata.spool":
            raise OSError(28, "No space left on device", str(operation.path))

    database, observed = Database(), Observed()
    database.is_away = True
    with atomic.observe(no_room):
        writer = start(tmp_path, database, observed)
        for number in range(100):
            writer.put(row(number, number))
        wait_until(lambda: "metadata_spool_failed" in observed.kinds())
        database.is_away = False
        wait_until(lambda: len(database.rows) == 100)
        writer.close()
    assert observed.kinds().count("metadata_spool_failed") == 1


def test_a_damaged_spool_is_said(tmp_path: Path) -> None:
    Spool(tmp_path).append([(1, row(1, 7)), (2, row(2, 8))], sync=True)
    path = tmp_path / "metadata.spool"
    path.write_bytes(path.read_bytes().replace(b'"last_step":7', b'"last_step":9'))
    database, observed = Database(), Observed()
    start(tmp_path, database, observed).close()
    assert database.steps() == {2: 8}
    assert observed.kinds() == ["metadata_spool_damaged"]


def test_whatever_observing_raises_stays_inside(tmp_path: Path) -> None:
    database, observed = Database(), Observed()

    def broken() -> list[Row]:
        raise RuntimeError("a bug")

    writer = MetadataWriter(
        tmp_path, database.open, initial_sync=lambda cache: None, collect=broken,
        report=lambda *event: observed.events.append(event), interval_seconds=0.01,
    )  # fmt: skip
    writer.put(row(1, 1))
    wait_until(lambda: len(observed.events) > 0)
    writer.close()
    assert set(observed.kinds()) == {"metadata_failed"}


def test_a_put_takes_microseconds(tmp_path: Path) -> None:
    database = Database()
    writer = start(tmp_path, database, Observed(), interval_seconds=5.0)
    assert cost(lambda: [writer.put(row(1, number)) for number in range(20_000)]) / 20_000 < 0.02
    writer.close()
    assert database.steps() == {1: 19_999}


def test_postgres_stopped_and_started_again(tmp_path: Path, postgres: Postgres) -> None:
    dsn = postgres.new_database()

    class Real:
        def open(self) -> MetadataCache:
            return MetadataCache(dsn)

    observed = Observed()
    writer = start(tmp_path, Real(), observed, interval_seconds=0.05)
    writer.put(row(1, 1))
    wait_until(lambda: MetadataCache.query(dsn, "SELECT to_regclass('vorox.attempt') IS NOT NULL").rows == [(True,)])
    postgres.stop()
    try:
        for number in range(2, 20):
            writer.put(row(number, number))
        wait_until(lambda: "metadata_away" in observed.kinds())
    finally:
        postgres.start()
    for number in range(20, 30):
        writer.put(row(number, number))
    wait_until(lambda: "metadata_back" in observed.kinds())
    writer.close()
    found = MetadataCache.query(dsn, "SELECT attempt, last_step FROM attempt ORDER BY attempt").rows
    assert found == [(number, number) for number in range(1, 30)]
    assert not any("hunter2secret" in text for _, text, _ in observed.events)
    assert Spool(tmp_path).size_bytes == 0


@pytest.mark.parametrize("conflict", ["statement timeout", "deadlock detected"])
def test_another_session_of_postgres_holds_a_row(
    conflict: str, tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer waits for a bounded time, or loses a deadlock; then it writes the same rows again."""
    psycopg = pytest.importorskip("psycopg")
    dsn = postgres.new_database()
    MetadataCache(dsn).close()
    own = f"{dsn}&options=-c%20deadlock_timeout%3D2s"
    if conflict == "statement timeout":
        monkeypatch.setattr(databases, "_STATEMENT_MILLISECONDS", 200)

    class Real:
        def open(self) -> MetadataCache:
            return MetadataCache(own)

    with contextlib.closing(MetadataCache(dsn)) as cache:
        cache.write([row(1, 1), row(2, 2)])
    observed = Observed()
    lock = "SELECT 1 FROM vorox.attempt WHERE attempt = %s FOR UPDATE"
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with (
        psycopg.connect(dsn, options="-c deadlock_timeout=1h") as other,
        psycopg.connect(dsn, autocommit=True) as third,
    ):
        other.execute(lock, (2,))
        writer = start(tmp_path, Real(), observed)
        with writer._lock:  # both rows in one transaction
            writer._pending = {row(n, 7).key: (n, row(n, 7)) for n in (1, 2)}
        if conflict == "deadlock detected":
            wait_until(lambda: third.execute(waiting).fetchone() == (1,))
            other.execute(lock, (1,))  # goes on once the writer has lost
        wait_until(lambda: "metadata_away" in observed.kinds())
        other.rollback()
    wait_until(lambda: "metadata_back" in observed.kinds())
    writer.close()
    assert conflict in observed.events[0][1]
    found = MetadataCache.query(dsn, "SELECT attempt, last_step FROM attempt ORDER BY attempt").rows
    assert found == [(1, 7), (2, 7)]
    assert Spool(tmp_path).size_bytes == 0
