"""The metadata database: the same rows, the same answers, in SQLite and in a real PostgreSQL."""

from __future__ import annotations

import random
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from postgres_server import Postgres
from vorox.core.errors import ConfigError, DataError
from vorox.core.installation import install_command
from vorox.experiments.metadata import MetadataCache, Row
from vorox.experiments.metadata import databases as databases_module
from vorox.experiments.metadata.tables import CURRENT_VERSION, MIGRATIONS, TABLES

RUN = {"run_id": "r", "directory": "/runs/r", "seed": 7, "global_batch_sequences": 4, "plan_digest": "d"}


def attempt(number: int, first: int, kept: int, last: int, *, newest: bool = False, run: str = "r", parent: Any = None):
    counts = {"first_state": first, "kept_until": kept, "last_step": last}
    places = {"first_position": first * 4, "kept_position": kept * 4, "last_position": last * 4}
    named = {"run_id": run, "attempt": number, "parent": parent, "is_newest": int(newest)}
    return Row("attempt", {**named, **counts, **places})


def segment(number: int, first_epoch: int, num_epochs: int, num_rows: int, source: int = 0) -> Row:
    key = {"run_id": "r", "source_index": source, "number": number}
    return Row("segment", {**key, "first_epoch": first_epoch, "num_epochs": num_epochs, "num_rows": num_rows,
                           "start_draw": 0})  # fmt: skip


def sample(position: int, part: int, *, uri: str = "a.txt", num_tokens: int = 5, epoch: int = 0) -> Row:
    place = {"run_id": "r", "position": position, "part": part, "step": position // 4 + 1, "slot": position % 4}
    document = {"uri": uri, "ordinal": 3, "byte_offset": 10, "byte_length": 90, "first_token": 0, "row_token": 0}
    return Row("sample", {**place, **document, "source": "s", "epoch": epoch, "cache_row": 1, "num_tokens": num_tokens})


def everything() -> list[Row]:
    """A run that crashed once, in all its tables."""
    cache = {"cache": "s-train-1"}
    event = {"run_id": "r", "number": 1, "kind": "start", "start_position": None, "payload": '{"kind":"start"}'}
    exception = {"run_id": "r", "attempt": 2, "kind": "nonfinite_step", "first_step": 11, "last_step": 11}
    unit = {"documents": 5, "text_bytes": 6, "tokens": 7, "quarantined": 0, "first_row": 0, "num_rows": 9}
    chunk = {"num_rows": 9, "tokens": 7, "padding_tokens": 2, "documents": 5, "size_bytes": 99, "content": "c"}
    return [
        Row("run", RUN),
        Row("run_source", {"run_id": "r", "source_index": 0, "name": "s", "cache": "s-train-1"}),
        Row("source_file", {**cache, "file_index": 0, "uri": "a.txt", "version": "v", "size_bytes": 100}),
        Row(
            "source_file",
            {**cache, "file_index": 1, "uri": "größe '%s?\t\\.txt", "version": "v", "size_bytes": 1 << 50},
        ),
        Row("unit", {**cache, "unit": 0, **unit}),
        Row("chunk", {**cache, "unit": 0, "part": 0, **chunk}),
        Row("plan_event", {**event, "digest": "x"}),
        attempt(1, 0, 8, 10),
        attempt(2, 8, 12, 13, newest=True, parent=1),
        Row("exception", {**exception, "first_position": 40, "end_position": 44, "detail": "loss nan"}),
        segment(0, 0, 2, 30),
        segment(1, 2, 1, 50),
        segment(2, 2, 1, 10),
        *(sample(position, part) for position in range(32, 40) for part in range(2)),
    ]


QUESTIONS = {
    "consumed": "SELECT * FROM consumed ORDER BY attempt, first_step",
    "epochs": "SELECT * FROM epochs ORDER BY epoch",
    "samples": "SELECT position, part, attempt, outcome FROM samples ORDER BY position, part, attempt",
    "epoch_samples": "SELECT * FROM epoch_samples ORDER BY epoch, outcome",
    "sum": "SELECT outcome, SUM(last_step - first_step + 1) AS steps FROM consumed GROUP BY outcome ORDER BY outcome",
    "files": "SELECT uri, size_bytes FROM source_file WHERE uri LIKE '%txt' ORDER BY uri DESC",
    "null": "SELECT start_position FROM plan_event",
    "detail": "SELECT detail FROM exception WHERE first_step BETWEEN 9 AND 13",
    "nothing": "SELECT run_id FROM run WHERE seed = 8",
    "with": "WITH done AS (SELECT * FROM consumed WHERE outcome = 'kept') SELECT COUNT(*) AS n FROM done",
    "values": "VALUES (1, 'a')",
    "average": "SELECT AVG(num_rows) AS mean FROM segment",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Any, ...]]]:
    """What SQLite says."""
    path = tmp_path_factory.mktemp("answers") / "metadata.sqlite"
    with MetadataCache(path) as cache:
        cache.write(everything())
    return {name: MetadataCache.query(path, question).rows for name, question in QUESTIONS.items()}


def test_what_is_said_of_a_crashed_run(answers: dict[str, Any]) -> None:
    assert answers["consumed"] == [
        ("r", 1, None, 1, 8, 0, 32, "kept"), ("r", 1, None, 9, 10, 32, 40, "rolled_back"),
        ("r", 2, 1, 9, 12, 32, 48, "kept"), ("r", 2, 1, 13, 13, 48, 52, "open"),
    ]  # fmt: skip
    assert answers["epochs"] == [("r", "s", 0, 30), ("r", "s", 1, 30), ("r", "s", 2, 60)]
    assert answers["samples"][:4] == [
        (32, 0, 1, "rolled_back"), (32, 0, 2, "kept"), (32, 1, 1, "rolled_back"), (32, 1, 2, "kept"),
    ]  # fmt: skip
    assert answers["epoch_samples"] == [
        ("r", "s", 0, "kept", 8, 1, 80, 9, 10),
        ("r", "s", 0, "rolled_back", 8, 1, 80, 9, 10),
    ]
    assert answers["sum"] == [("kept", 12), ("open", 1), ("rolled_back", 2)]
    assert answers["nothing"] == []


def test_both_answer_alike(target: Path | str, answers: dict[str, Any]) -> None:
    with MetadataCache(target) as cache:
        cache.write(everything())
    for name, question in QUESTIONS.items():
        found = MetadataCache.query(target, question)
        assert found.rows == answers[name], name
        kinds = [[list(map(type, row)) for row in rows] for rows in (found.rows, answers[name])]
        assert kinds[0] == kinds[1] or name == "average"
        assert all(list(record) == list(found.columns) for record in found.records())


def test_every_table_gives_back_what_it_took(target: Path | str) -> None:
    with MetadataCache(target) as cache:
        cache.write(everything())
        found = [row for table in TABLES for row in cache.rows_of(table)]
    assert sorted(found, key=lambda row: row.key) == sorted(everything(), key=lambda row: row.key)
    assert {row.table for row in everything()} == set(TABLES)


def test_writing_again_changes_nothing_and_newer_rows_take_the_place(target: Path | str) -> None:
    rows = everything()
    with MetadataCache(target) as cache:
        for seed in range(3):
            random.Random(seed).shuffle(rows)
            assert cache.write(rows) == len(rows)
        assert cache.write([attempt(2, 8, 9, 9, newest=True), attempt(2, 8, 20, 20, newest=True, parent=1)]) == 1
    found = MetadataCache.query(target, "SELECT attempt, last_step, outcome FROM consumed ORDER BY 1, 2").rows
    assert found == [(1, 8, "kept"), (1, 10, "rolled_back"), (2, 20, "kept")]


def test_a_write_counts_whole_or_not_at_all(target: Path | str) -> None:
    with MetadataCache(target) as cache:
        broken = Row("attempt", {"run_id": "r", "attempt": 3})
        with pytest.raises(MetadataCache.errors(target)):
            cache.write([Row("run", RUN), broken])
        assert list(cache.rows_of("run")) == []
        cache.write([Row("run", RUN)])
        assert len(list(cache.rows_of("run"))) == 1


def test_materialised_samples_replace_those_of_their_positions_only(target: Path | str) -> None:
    with MetadataCache(target) as cache:
        cache.write([Row("run", RUN), attempt(1, 0, 25, 25, newest=True)])
        assert cache.insert_samples("r", 0, 100, (sample(p, 0, uri="old") for p in range(100))) == 100
        assert cache.insert_samples("r", 40, 60, [sample(p, part) for p in range(40, 60) for part in range(3)]) == 60
    found = MetadataCache.query(
        target, "SELECT uri, COUNT(*) AS n, MIN(position) AS a FROM samples GROUP BY uri ORDER BY 1"
    )
    assert found.rows == [("a.txt", 60, 40), ("old", 80, 0)]


def test_replace_and_remove_touch_one_run_only(target: Path | str) -> None:
    with MetadataCache(target) as cache:
        cache.write([*everything(), attempt(1, 0, 3, 3, run="other"), Row("run", {**RUN, "run_id": "other"})])
        cache.replace("segment", "r", [segment(0, 0, 1, 11)])
        assert [row.values["num_rows"] for row in cache.rows_of("segment")] == [11]
        cache.remove_run("r")
        left = {table: len(list(cache.rows_of(table))) for table in TABLES}
    assert {table: count for table, count in left.items() if count} == {
        "run": 1, "attempt": 1, "source_file": 2, "unit": 1, "chunk": 1,
    }  # fmt: skip


# Versions


def make_version(target: Path | str, version: int) -> None:
    """A database as an older Vorox left it, with a run in it."""
    statements = [statement for migration in MIGRATIONS[:version] for statement in migration]
    statements += ["CREATE TABLE metadata_version (version BIGINT NOT NULL)",
                   f"INSERT INTO metadata_version VALUES ({version})",
                   "INSERT INTO run VALUES ('old', '/runs/old', 1, 2, 'd')",
                   "INSERT INTO attempt VALUES ('old', 1, NULL, 0, 0, 5, 10, 5, 10, 1)"]  # fmt: skip
    if isinstance(target, Path):
        with sqlite3.connect(target) as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()
    else:
        import psycopg

        with psycopg.connect(target) as connection:
            connection.execute("CREATE SCHEMA vorox")
            connection.execute("SET search_path TO vorox")
            for statement in statements:
                connection.execute(statement.encode())


def test_an_old_database_is_brought_up(target: Path | str) -> None:
    make_version(target, 1)
    with pytest.raises(ConfigError, match="epochs"):
        MetadataCache.query(target, "SELECT * FROM epochs")
    with MetadataCache(target) as cache:
        cache.write(everything())
    assert MetadataCache.query(target, "SELECT version FROM metadata_version").rows == [(CURRENT_VERSION,)]
    assert MetadataCache.query(target, "SELECT last_step FROM consumed WHERE run_id = 'old'").rows == [(5,)]
    assert MetadataCache.query(target, "SELECT COUNT(*) AS n FROM epochs").rows == [(3,)]


def test_a_newer_database_is_refused_and_left_alone(target: Path | str) -> None:
    make_version(target, CURRENT_VERSION)
    if isinstance(target, Path):
        with sqlite3.connect(target) as connection:
            connection.execute("UPDATE metadata_version SET version = 99")
        connection.close()
    else:
        import psycopg

        with psycopg.connect(target) as connection:
            connection.execute("UPDATE vorox.metadata_version SET version = 99")
    with pytest.raises(ConfigError, match="version 99"):
        MetadataCache(target)
    assert MetadataCache.query(target, "SELECT run_id FROM run").rows == [("old",)]


def test_a_migration_that_fails_leaves_the_old_version(target: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_version(target, 1)
    broken = (*MIGRATIONS[:1], (*MIGRATIONS[1][:3], "CREATE TABLE run (again BIGINT)"))
    with monkeypatch.context() as patch:
        patch.setattr(databases_module, "MIGRATIONS", broken)
        with pytest.raises(MetadataCache.errors(target)):
            MetadataCache(target)
    assert MetadataCache.query(target, "SELECT version FROM metadata_version").rows == [(1,)]
    with pytest.raises(ConfigError):
        MetadataCache.query(target, "SELECT * FROM segment")
    MetadataCache(target).close()
    assert MetadataCache.query(target, "SELECT COUNT(*) AS n FROM segment").rows == [(0,)]


def test_many_open_an_empty_database_at_once(target: Path | str) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with MetadataCache(target) as cache:
                for step in range(5):
                    cache.write([attempt(1, 0, step, step, newest=True, run=f"run {number}")])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    found = MetadataCache.query(target, "SELECT run_id, last_step FROM attempt ORDER BY run_id").rows
    assert found == [(f"run {number}", 4) for number in range(6)]


# Reading only

WRITES = [
    "DELETE FROM run", "UPDATE run SET seed = 1", "INSERT INTO run VALUES ('x', 'y', 1, 1, 'z')", "DROP TABLE run",
    "CREATE TABLE x (a BIGINT)", "SELECT 1; DELETE FROM run", "SELECT 1; COMMIT; DELETE FROM run", "VACUUM", "",
    "WITH gone AS (DELETE FROM run RETURNING *) SELECT * FROM gone", "ATTACH 'x.sqlite' AS y", "COPY run TO '/tmp/x'",
    "COPY (SELECT 1) TO PROGRAM 'true'", "EXPLAIN ANALYZE DELETE FROM run", "/* SELECT */ DROP TABLE run", "CALL x()",
    "-- SELECT\nDELETE FROM run", "BEGIN", "SET TRANSACTION READ WRITE", "SELECT load_extension('x')",
    "SELECT nothing FROM run", "PRAGMA user_version = 3", "SELECT * INTO other FROM run", "SELECT lo_create(0)",
]  # fmt: skip


def test_writes_are_refused_with_2(target: Path | str) -> None:
    with MetadataCache(target) as cache:
        cache.write([Row("run", RUN)])
    for statement in WRITES:
        with pytest.raises(ConfigError) as refused:
            MetadataCache.query(target, statement)
        assert refused.value.exit_code == 2, statement
    with MetadataCache(target) as cache:
        assert [row.values for row in cache.rows_of("run")] == [RUN]


@pytest.mark.parametrize(
    "statement",
    [
        "select 1 as a",
        "-- why\nSELECT 1 AS a",
        "/* why */ WITH x AS (SELECT 1 AS a) SELECT * FROM x",
    ],
)
def test_reading_may_be_written_in_many_ways(target: Path | str, statement: str) -> None:
    MetadataCache(target).close()
    assert MetadataCache.query(target, statement).rows == [(1,)]


def test_only_the_first_rows(target: Path | str) -> None:
    with MetadataCache(target) as cache:
        cache.write(everything())
    assert len(MetadataCache.query(target, "SELECT * FROM sample", max_rows=3).rows) == 3


def test_a_reader_does_not_keep_the_writer_out(target: Path | str) -> None:
    with MetadataCache(target) as cache:
        for number in range(20):
            cache.write([attempt(1, 0, number, number, newest=True)])
            assert MetadataCache.query(target, "SELECT last_step FROM attempt").rows == [(number,)]


# Trouble


def test_no_database_and_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unable to open"):
        MetadataCache.query(tmp_path / "none.sqlite", "SELECT 1")
    (tmp_path / "broken.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(DataError, match="damaged"):
        MetadataCache.query(tmp_path / "broken.sqlite", "SELECT * FROM run")
    assert not (tmp_path / "none.sqlite").exists()


def test_no_message_shows_the_password(postgres: Postgres) -> None:
    dsn = postgres.new_database()
    nowhere = dsn.replace("host=/", "host=/nowhere/")
    assert "hunter2secret" in nowhere
    with pytest.raises(DataError) as away:
        MetadataCache.query(nowhere, "SELECT 1")
    with pytest.raises(ConfigError) as unreadable:
        MetadataCache("postgresql://user:hunter2secret@host:port/x?what=ever")
    for error in (away.value, unreadable.value):
        chain = [error, error.__cause__, error.__context__ if not error.__suppress_context__ else None]
        assert not any("hunter2secret" in str(one) for one in chain if one is not None)


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match="not installed") as missing:
        MetadataCache("postgresql://localhost/x")
    assert missing.value.hint == install_command("postgres")
