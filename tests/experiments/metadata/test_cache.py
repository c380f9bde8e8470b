"""The metadata database: the same rows, the same answers, in SQLite and in a real PostgreSQL."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from postgres_server import Postgres
from vorox.core.errors import ConfigError, DataError
from vorox.core.platform.installation import install_command
from vorox.experiments.metadata import MetadataCache, Replacement
from vorox.experiments.metadata import databases as databases_module
from vorox.experiments.metadata.tables import CACHE_TABLES, RUN_TABLES, SCHEMA, VERSION, VERSION_TABLE

TABLES = RUN_TABLES | CACHE_TABLES


class Row(NamedTuple):
    """A row, whose first cell is its owner: the run or the cache."""

    table: str
    cells: tuple[Any, ...]


def write(cache: MetadataCache, rows: Sequence[Row]) -> None:
    """Replace all rows of the owners that the rows name, in the tables that they name."""
    owned: dict[str, dict[str, list[tuple[Any, ...]]]] = defaultdict(lambda: defaultdict(list))
    for table, cells in rows:
        owned[cells[0]][table].append(cells)
    for owner, tables in owned.items():
        of = {table: "run_id" if table in RUN_TABLES else "cache" for table in tables}
        cache.replace(
            owner, [Replacement(table, f"{of[table]} = ?", (owner,), cells) for table, cells in tables.items()]
        )


def rows_of(target: Path | str, table: str) -> list[tuple[Any, ...]]:
    return MetadataCache.query(target, f"SELECT * FROM {table}").rows


def run(run_id: str = "r") -> Row:
    return Row("run", (run_id, "/runs/r", 7, 4, "d"))


def attempt(number: int, first: int, kept: int, last: int, *, newest: bool = False, run: str = "r", parent: Any = None):
    return Row("attempt", (run, number, parent, first, first * 4, kept, kept * 4, last, last * 4, int(newest)))


def segment(number: int, first_epoch: int, num_epochs: int, num_rows: int, source: int = 0) -> Row:
    return Row("segment", ("r", source, number, first_epoch, num_epochs, num_rows, 0))


def sample(position: int, part: int, *, uri: str = "a.txt", num_tokens: int = 5, ordinal: int = 3) -> Row:
    place = (position // 4 + 1, position % 4, "s", 0, 1)
    return Row("sample", ("r", position, part, *place, uri, ordinal, 10, 90, 0, num_tokens, 0, 0))


def everything() -> list[Row]:
    """A run that crashed once, in all its tables."""
    return [
        run(),
        Row("run_source", ("r", 0, "s", "s-train-1")),
        Row("source_file", ("s-train-1", 0, "a.txt", "v", 100)),
        Row("source_file", ("s-train-1", 1, "größe '%s?\t\\.txt", "v", 1 << 50)),
        Row("unit", ("s-train-1", 0, 5, 6, 7, 0, 0, 9)),
        Row("chunk", ("s-train-1", 0, 0, 9, 7, 2, 5, 99, "c")),
        Row("plan_event", ("r", 1, "start", None, '{"kind":"start"}', "x")),
        attempt(1, 0, 8, 10),
        attempt(2, 8, 12, 13, newest=True, parent=1),
        Row("exception", ("r", 2, "nonfinite_step", 11, 11, 40, 44, "loss nan")),
        *(
            Row("logged_step", ("r", number, step, 1.5, step / 8, float("inf"), 1e-3, 64.0, None))
            for number, step in ((1, 8), (1, 10), (2, 10), (2, 13))
        ),
        Row("evaluation", ("r", 2, 8, 2.5, 0.25, 1.25, 0.5)),
        segment(0, 0, 2, 30),
        segment(1, 2, 1, 50),
        segment(2, 2, 1, 10),
        *(sample(position, part) for position in range(32, 40) for part in range(2)),
        *(Row("abandoned_sample", ("r", 1, *sample(36, part, ordinal=9).cells[1:])) for part in range(2)),
    ]


QUESTIONS = {
    "consumed": "SELECT * FROM consumed ORDER BY attempt, first_step",
    "epochs": "SELECT * FROM epochs ORDER BY epoch",
    "samples": "SELECT position, part, attempt, outcome FROM samples ORDER BY position, part, attempt",
    "abandoned": "SELECT part, ordinal, attempt, outcome FROM samples WHERE position = 36 ORDER BY attempt, part",
    "epoch_samples": "SELECT * FROM epoch_samples ORDER BY epoch, outcome",
    "logged_steps": "SELECT * FROM logged_steps ORDER BY attempt, step",
    "evaluations": "SELECT step, outcome FROM evaluations",
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
        write(cache, everything())
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
    assert answers["abandoned"] == [
        (0, 9, 1, "rolled_back"), (1, 9, 1, "rolled_back"), (0, 3, 2, "kept"), (1, 3, 2, "kept"),
    ]  # fmt: skip
    assert answers["epoch_samples"] == [
        ("r", "s", 0, "kept", 8, 1, 80, 9, 10),
        ("r", "s", 0, "rolled_back", 8, 1, 80, 9, 10),
    ]
    assert [(*row[1:3], row[-1]) for row in answers["logged_steps"]] == [
        (1, 8, "kept"), (1, 10, "rolled_back"), (2, 10, "kept"), (2, 13, "open"),
    ]  # fmt: skip
    assert answers["evaluations"] == [(8, "kept")], "of the state that the attempt started from"
    assert answers["sum"] == [("kept", 12), ("open", 1), ("rolled_back", 2)]
    assert answers["nothing"] == []


def test_both_answer_alike(target: Path | str, answers: dict[str, Any]) -> None:
    with MetadataCache(target) as cache:
        write(cache, everything())
    for name, question in QUESTIONS.items():
        found = MetadataCache.query(target, question)
        assert found.rows == answers[name], name
        kinds = [[list(map(type, row)) for row in rows] for rows in (found.rows, answers[name])]
        assert kinds[0] == kinds[1] or name == "average"
        assert all(list(record) == list(found.columns) for record in found.records())


def test_every_table_gives_back_what_it_took(target: Path | str) -> None:
    with MetadataCache(target) as cache:
        write(cache, everything())
    found = [Row(table, cells) for table in TABLES for cells in rows_of(target, table)]
    assert sorted(found, key=repr) == sorted(everything(), key=repr)
    assert {row.table for row in everything()} == set(TABLES)


def test_texts_and_numbers_that_a_database_cannot_store_are_stored_alike(target: Path | str) -> None:
    """Records of a run may come from anyone; one of their values must not keep all others out."""
    logged = ("r", 1, 5, float("nan"), float("-inf"), 1e308, 5e-324, float("nan"), None)
    hostile = [("r", 1, "a\0b", 1 << 70, "'); DROP TABLE run; --", "\udcff%s?"), ("r", 2, "", -(1 << 70), "", "\n")]
    with MetadataCache(target) as cache:
        write(cache, [run(), Row("logged_step", logged), *(Row("plan_event", cells) for cells in hostile)])
    limit = (1 << 63) - 1
    assert sorted(rows_of(target, "plan_event")) == [
        ("r", 1, "a\ufffdb", limit, "'); DROP TABLE run; --", "?%s?"), ("r", 2, "", -limit, "", "\n"),
    ]  # fmt: skip
    assert rows_of(target, "logged_step") == [("r", 1, 5, None, float("-inf"), 1e308, 5e-324, None, None)]
    assert rows_of(target, "run") == [run().cells]


def test_writing_again_changes_nothing_and_newer_rows_take_the_place(target: Path | str) -> None:
    rows = everything()
    with MetadataCache(target) as cache:
        for seed in range(3):
            random.Random(seed).shuffle(rows)
            write(cache, rows)
        assert {table: len(rows_of(target, table)) for table in TABLES} == {
            table: sum(row.table == table for row in rows) for table in TABLES
        }
        write(cache, [attempt(1, 0, 8, 10), attempt(2, 8, 20, 20, newest=True, parent=1)])
    found = MetadataCache.query(target, "SELECT attempt, last_step, outcome FROM consumed ORDER BY 1, 2").rows
    assert found == [(1, 8, "kept"), (1, 10, "rolled_back"), (2, 20, "kept")]


def test_a_write_counts_whole_or_not_at_all(target: Path | str) -> None:
    with MetadataCache(target) as cache:
        with pytest.raises(MetadataCache.errors(target)):
            write(cache, [run(), Row("attempt", ("r", 3, *(None,) * 8))])
        assert rows_of(target, "run") == []
        write(cache, [run()])
        assert len(rows_of(target, "run")) == 1


def test_replacements_are_computed_by_one_writer_of_an_owner_at_a_time(target: Path | str) -> None:
    """A writer that has read older records and is slow does not take newer rows away."""
    record, is_read, go_on = [1], threading.Event(), threading.Event()

    def export(waits: bool) -> None:
        def replacements() -> Any:
            step = record[0]
            if waits:
                is_read.set()
                go_on.wait(20)
            yield Replacement("attempt", "run_id = ?", ("r",), [attempt(1, 0, step, step, newest=True).cells])

        with MetadataCache(target) as cache:
            cache.replace("r", replacements())

    MetadataCache(target).close()
    slow = threading.Thread(target=export, args=(True,))
    slow.start()
    assert is_read.wait(20)
    record[0] = 2
    fast = threading.Thread(target=export, args=(False,))
    fast.start()
    fast.join(0.2)  # it waits for the slow one
    go_on.set()
    slow.join()
    fast.join()
    assert MetadataCache.query(target, "SELECT last_step FROM attempt").rows == [(2,)]


def test_materialised_samples_replace_those_of_their_positions_only(target: Path | str) -> None:
    def insert(cache: MetadataCache, first: int, end: int, rows: list[Row]) -> None:
        condition = "run_id = ? AND position >= ? AND position < ?"
        cache.replace("r", [Replacement("sample", condition, ("r", first, end), (row.cells for row in rows))])

    with MetadataCache(target) as cache:
        write(cache, [run(), attempt(1, 0, 25, 25, newest=True)])
        insert(cache, 0, 100, [sample(p, 0, uri="old") for p in range(100)])
        insert(cache, 40, 60, [sample(p, part) for p in range(40, 60) for part in range(3)])
    found = MetadataCache.query(
        target, "SELECT uri, COUNT(*) AS n, MIN(position) AS a FROM samples GROUP BY uri ORDER BY 1"
    )
    assert found.rows == [("a.txt", 60, 40), ("old", 80, 0)]


def test_replace_and_remove_touch_one_run_only(target: Path | str) -> None:
    with MetadataCache(target) as cache:
        write(cache, [*everything(), attempt(1, 0, 3, 3, run="other"), run("other")])
        write(cache, [segment(0, 0, 1, 11)])
        assert rows_of(target, "segment") == [segment(0, 0, 1, 11).cells]
        cache.remove_run("r")
    left = {table: len(rows_of(target, table)) for table in TABLES}
    assert {table: count for table, count in left.items() if count} == {
        "run": 1, "attempt": 1, "source_file": 2, "unit": 1, "chunk": 1,
    }  # fmt: skip


# Versions


def execute(target: Path | str, *statements: str) -> None:
    """Execute statements, as another program does."""
    if isinstance(target, Path):
        with sqlite3.connect(target) as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()
    else:
        import psycopg

        with psycopg.connect(target) as connection:
            connection.execute("CREATE SCHEMA IF NOT EXISTS vorox")
            connection.execute("SET search_path TO vorox")
            for statement in statements:
                connection.execute(statement.encode())


@pytest.mark.parametrize("version", [3, 99])
def test_a_database_of_another_version_is_refused_and_left_alone(target: Path | str, version: int) -> None:
    execute(target, VERSION_TABLE, f"INSERT INTO metadata_version VALUES ({version})", "CREATE TABLE run (run_id TEXT)",
            "INSERT INTO run VALUES ('old')")  # fmt: skip
    with pytest.raises(ConfigError, match=f"has version {version}; this Vorox supports {VERSION}") as refused:
        MetadataCache(target)
    assert "vorox data sql RUN --refresh" in refused.value.hint
    assert MetadataCache.query(target, "SELECT run_id FROM run").rows == [("old",)]


def test_a_creation_that_fails_leaves_an_empty_database(target: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(databases_module, "SCHEMA", (*SCHEMA[:3], "CREATE TABLE run (again BIGINT)"))
        with pytest.raises(MetadataCache.errors(target)):
            MetadataCache(target)
    with pytest.raises(ConfigError):
        rows_of(target, "run")
    MetadataCache(target).close()
    assert rows_of(target, "metadata_version") == [(VERSION,)]


def test_many_open_an_empty_database_at_once(target: Path | str) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with MetadataCache(target) as cache:
                for step in range(5):
                    write(cache, [attempt(1, 0, step, step, newest=True, run=f"run {number}")])
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
        write(cache, [run()])
    for statement in WRITES:
        with pytest.raises(ConfigError) as refused:
            MetadataCache.query(target, statement)
        assert refused.value.exit_code == 2, statement
    assert rows_of(target, "run") == [run().cells]


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
        write(cache, everything())
    assert len(MetadataCache.query(target, "SELECT * FROM sample", max_rows=3).rows) == 3


def test_a_reader_does_not_keep_the_writer_out(target: Path | str) -> None:
    with MetadataCache(target) as cache:
        for number in range(20):
            write(cache, [attempt(1, 0, number, number, newest=True)])
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
