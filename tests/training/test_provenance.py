"""Metadata of whole runs: true to what the run did, and without any influence on it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eventually import PATIENCE_SECONDS, wait_until
from numpy_engine import NumpyEngine
from postgres_server import Postgres, running_postgres
from tiny_runs import at_step, configuration, run, use_numpy_engine
from vorox.cli.runs import removal
from vorox.core.engine import StepValues
from vorox.core.errors import ConfigError, DataError
from vorox.core.files.json_lines import read_lines
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.experiments.metadata import MetadataCache, databases
from vorox.experiments.metadata.tables import CACHE_TABLES, RUN_TABLES, VIEWS
from vorox.records.attempts import read_attempts
from vorox.records.replay_chain import read_chain
from vorox.training.loop import provenance_recorder as provenance_module
from vorox.training.loop.metadata_export import RunExport, run_identity
from vorox.training.reports.metadata_database import existing_target, refresh_database

CONSUMED = (
    "SELECT attempt, parent, first_step, last_step, outcome FROM consumed WHERE run_id LIKE ? ORDER BY attempt, 3"
)

TABLES = RUN_TABLES | CACHE_TABLES
RARE = {"exception", "abandoned_sample"}
"""Tables that only some runs have rows in."""


class Killed(BaseException):
    pass


@pytest.fixture(autouse=True)
def _numpy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture
def dsn(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty database, named in the environment."""
    dsn = postgres.new_database()
    monkeypatch.setenv("VOROX_METADATA_DSN", dsn)
    return dsn


def kill() -> None:
    raise Killed


def run_until(step: int, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of a step."""
    with monkeypatch.context() as patch:
        at_step(patch, step, kill)
        with pytest.raises(Killed):
            run(config)


def consumed(target: Path | str, run_name: str = "") -> list[tuple[Any, ...]]:
    statement = CONSUMED.replace("?", f"'{run_name}%'")
    return MetadataCache.query(target, statement).rows


def has_rows(dsn: str) -> bool:
    """Whether a run has recorded rows; false also while it has created no tables, or a statement took too long."""
    with contextlib.suppress(ConfigError, DataError):
        return consumed(dsn) != []
    return False


def chain(directory: Path) -> list[str]:
    return [entry.chain for entry in read_chain(directory).values()]


def test_a_run_says_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path)
    run_until(7, config, monkeypatch)
    directory = next((tmp_path / "runs").iterdir())
    database = directory / "metadata.sqlite"
    assert consumed(database) == [(1, None, 1, 4, "kept"), (1, None, 5, 6, "open")]
    run(config)
    assert consumed(database) == [
        (1, None, 1, 4, "kept"), (1, None, 5, 6, "rolled_back"), (2, 1, 5, 12, "kept"),
    ]  # fmt: skip
    run(config, resume_from=RunLayout(directory).checkpoint(8))
    assert consumed(database) == [
        (1, None, 1, 4, "kept"), (1, None, 5, 6, "rolled_back"), (2, 1, 5, 8, "kept"),
        (2, 1, 9, 12, "rolled_back"), (3, 2, 9, 12, "kept"),
    ]  # fmt: skip
    lost = "SELECT attempt, step FROM logged_steps WHERE outcome = 'rolled_back' ORDER BY 1, 2"
    assert MetadataCache.query(database, lost).rows == [(1, 6), (2, 10), (2, 12)]
    positions = MetadataCache.query(database, "SELECT first_position, end_position FROM consumed ORDER BY attempt, 1")
    assert positions.rows == [(0, 16), (16, 24), (16, 32), (32, 48), (32, 48)]
    (one,) = MetadataCache.query(database, "SELECT * FROM run").records()
    assert one["run_id"] == run_identity(directory)
    assert one["run_id"].startswith(directory.name)
    assert (one["seed"], one["global_batch_sequences"]) == (config.run.seed, 4)
    events = MetadataCache.query(database, "SELECT kind, payload FROM plan_event ORDER BY number").rows
    written = [json.loads(line)["body"] for line in (directory / "plan.jsonl").read_bytes().splitlines()]
    assert [(kind, json.loads(payload)) for kind, payload in events] == [(body["kind"], body) for body in written]


def test_steps_that_changed_nothing_are_exceptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = NumpyEngine.train_step

    def train_step(self: NumpyEngine, batch: Any, **kwargs: float) -> Any:
        result = original(self, batch, **kwargs)
        if batch.step + 1 in {3, 9}:
            return type(result)(StepValues(np.nan, 1.0, False, {}))
        return result

    monkeypatch.setattr(NumpyEngine, "train_step", train_step)
    directory = run(configuration(tmp_path)).run_directory
    found = MetadataCache.query(
        directory / "metadata.sqlite", "SELECT first_step, last_step, first_position, end_position, kind FROM exception"
    )
    assert sorted(found.rows) == [(3, 3, 8, 12, "nonfinite_step"), (9, 9, 32, 36, "nonfinite_step")]


def test_metrics_are_exported_from_where_the_last_update_ended(tmp_path: Path) -> None:
    directory, database = run(configuration(tmp_path, ["log.every_steps=1"])).run_directory, tmp_path / "other.sqlite"
    metrics = directory / "metrics.jsonl"

    def steps() -> list[int]:
        return [step for (step,) in MetadataCache.query(database, "SELECT step FROM logged_step ORDER BY 1").rows]

    def line(step: int, name: str = "loss") -> bytes:
        return json.dumps({"step": step, "attempt": 1, "time": 1.0, "values": {name: "NaN"}}).encode() + b"\n"

    with (
        RunDataIndex.open(directory) as run_data,
        RunExport(database, directory, run_data.plan, run_data.readers) as export,
    ):
        export.update()
        assert steps() == [*range(1, 13)]
        with contextlib.closing(sqlite3.connect(database)) as other, other:
            other.execute("DELETE FROM logged_step WHERE step = 3")
        whole = metrics.read_bytes()
        metrics.write_bytes(whole + line(13) + line(14)[:20])  # in place, as a run that is being killed
        export.update()
        assert steps() == [1, 2, *range(4, 14)], "only what is new is read, and no torn line"
        metrics.write_bytes(whole + line(13) + line(14) + line(14) + line(14, "eval/loss"))
        export.update()
        export.update()
        assert steps() == [1, 2, *range(4, 15)]
        assert MetadataCache.query(database, "SELECT step, loss FROM evaluations WHERE step = 14").rows == [(14, None)]
    refresh_database(directory)
    found = MetadataCache.query(existing_target(directory), "SELECT step FROM logged_step ORDER BY 1").rows
    assert [step for (step,) in found] == [*range(1, 15)]


def test_metrics_that_another_process_has_exported_meanwhile_are_replaced(tmp_path: Path) -> None:
    directory, database = run(configuration(tmp_path, ["log.every_steps=1"])).run_directory, tmp_path / "other.sqlite"
    with (
        RunDataIndex.open(directory) as run_data,
        RunExport(database, directory, run_data.plan, run_data.readers) as live,
        RunExport(database, directory, run_data.plan, run_data.readers) as refresh,
    ):
        live.update()
        with (directory / "metrics.jsonl").open("ab") as file:
            file.write(json.dumps({"step": 13, "attempt": 1, "time": 1.0, "values": {"loss": 2.0}}).encode() + b"\n")
        refresh.update()
        live.update()
    found = MetadataCache.query(database, "SELECT step, loss FROM logged_step WHERE step > 11 ORDER BY 1").rows
    assert [step for step, _ in found] == [12, 13]


def test_off_writes_nothing_but_the_record_of_attempts(tmp_path: Path) -> None:
    directory = run(configuration(tmp_path, ["log.metadata=off"])).run_directory
    assert not list(directory.glob("metadata*"))
    assert [attempt.last_step for attempt in read_attempts(directory)] == [12]
    with pytest.raises(ConfigError, match="no metadata database") as missing:
        existing_target(directory)
    assert "--refresh" in missing.value.hint
    refresh_database(directory)
    assert consumed(existing_target(directory)) == [(1, None, 1, 12, "kept")]


def test_a_database_that_was_removed_or_broken_is_written_again(tmp_path: Path) -> None:
    directory = run(configuration(tmp_path)).run_directory
    database = directory / "metadata.sqlite"
    question = "SELECT * FROM plan_event ORDER BY number"
    before, events = consumed(database), MetadataCache.query(database, question).rows
    database.unlink()
    refresh_database(directory)
    assert (consumed(database), MetadataCache.query(database, question).rows) == (before, events)


def test_samples_and_inventory_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path)
    run_until(7, config, monkeypatch)
    directory = run(config).run_directory
    refresh_database(directory, sample_steps=(5, 12), inventory=True)
    refresh_database(directory, sample_steps=(6, 6))
    database = existing_target(directory)
    counted = (
        "SELECT outcome, COUNT(DISTINCT position) AS n, MIN(step), MAX(step) FROM samples GROUP BY outcome ORDER BY 1"
    )
    assert MetadataCache.query(database, counted).rows == [("kept", 32, 5, 12), ("rolled_back", 8, 5, 6)]
    named = "SELECT name, uri FROM source_file JOIN run_source ON run_source.cache = source_file.cache"
    assert MetadataCache.query(database, named).rows == [("text", str(tmp_path / "text" / "text.jsonl"))]
    ((rows, units),) = MetadataCache.query(database, "SELECT SUM(num_rows), COUNT(DISTINCT unit) FROM chunk").rows
    assert MetadataCache.query(database, "SELECT SUM(num_rows), COUNT(*) FROM unit").rows == [(rows, units)]
    assert MetadataCache.query(database, "SELECT DISTINCT num_rows FROM epochs").rows == [(rows,)]
    with pytest.raises(ConfigError, match="is not in the run's data plan"):
        refresh_database(directory, sample_steps=(5, 10**9))


def test_a_broken_sqlite_file_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = run(configuration(tmp_path / "straight", ["log.metadata=off"])).run_directory
    config = configuration(tmp_path / "broken")
    run_until(7, config, monkeypatch)
    directory = next((tmp_path / "broken" / "runs").iterdir())
    (directory / "metadata.sqlite").write_bytes(b"no database" * 99)
    run(config)
    assert chain(directory) == chain(straight)
    told = [event["kind"] for event in read_lines(directory / "events.jsonl")]
    assert told.count("metadata_away") == 1
    (directory / "metadata.sqlite").unlink()
    run(config)
    assert consumed(directory / "metadata.sqlite")[-1] == (2, 1, 5, 12, "kept")


# PostgreSQL


def test_a_run_in_postgres_answers_as_in_sqlite(tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path, ["log.metadata=postgres"])
    run_until(7, config, monkeypatch)
    directory = run(config).run_directory
    assert existing_target(directory) == dsn
    refresh_database(directory, sample_steps=(1, 12), inventory=True)
    with monkeypatch.context() as patch:
        patch.setattr(provenance_module, "metadata_target", lambda directory, config: directory / "metadata.sqlite")
        patch.setattr(
            "vorox.training.reports.metadata_database.metadata_target",
            lambda directory, config: directory / "metadata.sqlite",
        )
        refresh_database(directory, sample_steps=(1, 12), inventory=True)
    check_documented_queries(directory, directory / "metadata.sqlite", dsn)
    for table in (*TABLES, *VIEWS):
        question = f"SELECT * FROM {table}"
        found = MetadataCache.query(dsn, question), MetadataCache.query(directory / "metadata.sqlite", question)
        assert found[0].columns == found[1].columns
        assert sorted(found[0].rows, key=repr) == sorted(found[1].rows, key=repr)
        assert found[0].rows or table in RARE


def check_documented_queries(directory: Path, *targets: Path | str) -> None:
    """The queries of the page answer what the records of the run say, in every database."""
    page = (Path(__file__).parents[2] / "docs" / "provenance.md").read_text()
    losses, intervals_, files = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    evaluations, run_id = list(read_lines(directory / "evaluations.jsonl")), run_identity(directory)
    logged = {record["step"]: record["values"]["loss"] for record in read_lines(directory / "metrics.jsonl")
              if "loss" in record.get("values", ())}  # fmt: skip
    worst = max(logged, key=lambda step: logged[step])
    for target in targets:
        best = min(one["loss"] for one in evaluations if "loss" in one)
        assert MetadataCache.query(target, losses).rows == [(run_id, best, 12)]
        assert MetadataCache.query(target, intervals_).rows == [
            (run_id, "kept", 12, 48), (run_id, "rolled_back", 2, 8),
        ]  # fmt: skip
        first = MetadataCache.query(target, files).rows[0]
        assert first[:3] == (worst, logged[worst], "text")
        assert first[3].endswith("text.jsonl")
        steps = MetadataCache.query(target, "SELECT attempt, step, loss FROM logged_steps WHERE outcome = 'kept'").rows
        assert {step: loss for _, step, loss in steps} == logged, (
            "of a step that two attempts logged, the one that counts"
        )
        assert {attempt for attempt, step, _ in steps if step > 4} == {2}


def test_removing_a_run_removes_its_rows_from_a_shared_database(
    tmp_path: Path, dsn: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remove = functools.partial(removal.remove, failed=False, root="runs", keep_metadata=False, mirror=False)

    def known() -> dict[str, set[str]]:
        rows = {name: MetadataCache.query(dsn, f"SELECT run_id FROM {name}").rows for name in RUN_TABLES}
        return {name: {run_id for (run_id,) in found} for name, found in rows.items()}

    made = [
        run(configuration(tmp_path / name, ["log.metadata=postgres", f"run.name={name}"])).run_directory
        for name in ("kept", "lost", "left")
    ]
    for directory in made:
        refresh_database(directory, sample_steps=(1, 2), inventory=True)
    _, lost, left = made
    ids = [run_identity(directory) for directory in made]
    assert known()["sample"] == known()["attempt"] == set(ids)

    copy = tmp_path / "copy" / lost.name
    shutil.copytree(lost, copy)
    remove([str(copy)], yes=True)
    assert "stay, because" in capsys.readouterr().out
    assert known()["run"] == set(ids), "a copy is not the run that wrote them"

    postgres.stop()
    try:
        with pytest.raises(DataError, match="is not available") as caught:
            remove([str(lost)], yes=True)
    finally:
        postgres.start()
    assert "--keep-metadata" in caught.value.hint
    assert "hunter2" not in str(caught.value)
    assert (lost / "run.json").exists()
    with monkeypatch.context() as patch:
        patch.delenv("VOROX_METADATA_DSN")
        with pytest.raises(ConfigError, match="VOROX_METADATA_DSN is not set") as refused:
            remove([str(lost)], yes=True)
        assert "--keep-metadata" in refused.value.hint
        assert lost.exists()

    moved = lost.rename(tmp_path / lost.name)
    shutil.copytree(left, lost)  # another run in its place
    remove([str(moved)], yes=True)
    assert "Removed its rows from the metadata database." in capsys.readouterr().out
    assert not moved.exists()
    assert all(ids[1] not in found for found in known().values())
    assert all({ids[0], ids[2]} <= found for name, found in known().items() if name not in RARE)
    remove([str(left)], yes=True, keep_metadata=True)
    assert not left.exists()
    assert known()["run"] == {ids[0], ids[2]}


def test_nothing_of_the_connection_string_is_written_down(tmp_path: Path, dsn: str, postgres: Postgres) -> None:
    config = configuration(tmp_path, ["log.metadata=postgres"])
    postgres.stop()
    try:
        directory = run(config).run_directory
    finally:
        postgres.start()
    assert "metadata_away" in {event["kind"] for event in read_lines(directory / "events.jsonl")}
    for path in directory.rglob("*"):
        assert not path.is_file() or b"hunter2secret" not in path.read_bytes(), path


def test_a_missing_connection_string_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.delenv("VOROX_METADATA_DSN", raising=False)
    at_step(monkeypatch, 1, lambda: pytest.fail("a step was done"))
    with pytest.raises(ConfigError, match="VOROX_METADATA_DSN is not set"):
        run(configuration(tmp_path, ["log.metadata=postgres"]))
    with pytest.raises(ConfigError, match="MY_DSN is not set"):
        run(configuration(tmp_path, ["log.metadata=postgres", "log.metadata_dsn_variable=MY_DSN"]))
    with pytest.raises(ConfigError, match="has no effect"):
        configuration(tmp_path, ["log.metadata_dsn_variable=MY_DSN"])


@pytest.mark.slow
def test_postgres_stopped_in_mid_run_and_started_again(
    tmp_path: Path, dsn: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a crash while it is away: training is unaffected, and every interval is there in the end."""
    straight = run(configuration(tmp_path / "straight", ["log.metadata=off", "train.num_steps=60"])).run_directory
    monkeypatch.setattr("vorox.training.loop.provenance_recorder.INTERVAL_SECONDS", 0.05)
    config = configuration(tmp_path / "other", ["log.metadata=postgres", "train.num_steps=60"])
    directory = lambda: next((tmp_path / "other" / "runs").iterdir())  # noqa: E731

    def told(kind: str) -> bool:
        return any(event["kind"] == kind for event in read_lines(directory() / "events.jsonl"))

    def stop() -> None:
        wait_until(lambda: has_rows(dsn))
        postgres.stop()

    try:
        with monkeypatch.context() as patch:
            at_step(patch, 22, stop)
            at_step(patch, 26, lambda: wait_until(lambda: told("metadata_away")))  # steps since then want to be written
            run_until(31, config, patch)
        with monkeypatch.context() as patch:
            at_step(patch, 50, lambda: (postgres.start(), wait_until(lambda: told("metadata_back")))[1])
            run(config)
    finally:
        postgres.start()
    assert chain(directory()) == chain(straight)
    assert consumed(dsn) == [
        (1, None, 1, 28, "kept"), (1, None, 29, 30, "rolled_back"), (2, 1, 29, 60, "kept"),
    ]  # fmt: skip


@pytest.mark.parametrize("released_in_mid_run", [True, False])
def test_a_second_session_that_holds_a_lock_stops_no_run(
    tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch, released_in_mid_run: bool
) -> None:
    """A lock wait, and then rows that are there already: bounded, training goes on, every row arrives once."""
    import psycopg

    straight = run(configuration(tmp_path / "straight", ["log.metadata=off", "train.num_steps=60"])).run_directory
    monkeypatch.setattr("vorox.training.loop.provenance_recorder.INTERVAL_SECONDS", 0.05)
    patience = databases._STATEMENT_MILLISECONDS
    monkeypatch.setattr(databases, "_STATEMENT_MILLISECONDS", 300)
    config = configuration(tmp_path / "other", ["log.metadata=postgres", "train.num_steps=60"])
    other = psycopg.connect(dsn)

    def told(kind: str) -> bool:
        directory = next((tmp_path / "other" / "runs").iterdir())
        return any(event["kind"] == kind for event in read_lines(directory / "events.jsonl"))

    def hold() -> None:
        wait_until(lambda: has_rows(dsn))
        other.execute("LOCK TABLE vorox.attempt IN ACCESS EXCLUSIVE MODE")

    def free() -> None:
        other.rollback()
        monkeypatch.setattr(databases, "_STATEMENT_MILLISECONDS", patience)  # a busy machine may need it to catch up

    def release() -> None:
        wait_until(lambda: told("metadata_away"))
        free()
        wait_until(lambda: told("metadata_back"))

    began = time.monotonic()
    at_step(monkeypatch, 22, hold)
    if released_in_mid_run:
        at_step(monkeypatch, 40, release)
    outcome = run(config)
    # The time is the subject: a statement gives up the lock after 0.3 s, and a run that waited for it would never end.
    assert time.monotonic() - began < PATIENCE_SECONDS
    assert chain(outcome.run_directory) == chain(straight)
    if not released_in_mid_run:
        free()
        run(config)
    other.close()
    assert consumed(dsn)[0] == (1, None, 1, 60, "kept")
    before = consumed(dsn)
    refresh_database(outcome.run_directory)
    assert consumed(dsn) == before, "what is there already is not written a second time"


def test_a_deadlock_with_a_second_session_stops_no_run(
    tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server breaks the deadlock at our cost: training goes on, and the rows of that transaction arrive once."""
    import psycopg

    from vorox.experiments.metadata.databases import PostgresDatabase

    straight = run(configuration(tmp_path / "straight", ["log.metadata=off", "train.num_steps=60"])).run_directory
    monkeypatch.setattr("vorox.training.loop.provenance_recorder.INTERVAL_SECONDS", 0.05)
    other = psycopg.connect(dsn)
    waiting, granted = threading.Event(), threading.Event()
    insert = PostgresDatabase.insert

    def lock_in_the_other_order() -> None:
        other.execute("LOCK TABLE vorox.attempt IN ACCESS EXCLUSIVE MODE")
        granted.set()

    def deadlocking(self: Any, table: str, rows: Any) -> None:
        insert(self, table, rows)
        if table == "attempt" and held.is_set() and not waiting.is_set():
            waiting.set()
            threading.Thread(target=lock_in_the_other_order, daemon=True).start()
            self.execute("LOCK TABLE vorox.exception IN ACCESS EXCLUSIVE MODE")

    held = threading.Event()

    def hold() -> None:
        wait_until(lambda: has_rows(dsn))
        other.execute("SET LOCAL deadlock_timeout = '5min'")  # so that it is ours that is chosen
        other.execute("LOCK TABLE vorox.exception IN ACCESS EXCLUSIVE MODE")
        held.set()

    def go_on() -> None:
        assert granted.wait(PATIENCE_SECONDS), "the server ended our transaction"
        other.rollback()

    monkeypatch.setattr(PostgresDatabase, "insert", deadlocking)
    at_step(monkeypatch, 22, hold)
    at_step(monkeypatch, 40, go_on)
    outcome = run(configuration(tmp_path / "other", ["log.metadata=postgres", "train.num_steps=60"]))
    other.close()
    assert chain(outcome.run_directory) == chain(straight)
    events = [event for event in read_lines(outcome.run_directory / "events.jsonl") if "metadata" in event["kind"]]
    assert any("deadlock" in str(event) for event in events), events
    assert consumed(dsn) == [(1, None, 1, 60, "kept")]


@pytest.mark.slow
def test_killed_without_its_database_the_next_start_exports_all_records(
    tmp_path: Path, dsn: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of a real process whose database never answered."""
    config = configuration(tmp_path, ["log.metadata=postgres"])
    program = """
        import os, pytest, signal, sys
        from tiny_runs import configuration, run, use_numpy_engine
        from eventually import wait_until
        from numpy_engine import NumpyEngine
        from pathlib import Path
        from vorox.core.run_layout import RunLayout
        from vorox.training.loop import provenance_recorder as provenance
        provenance.INTERVAL_SECONDS = 0.01
        use_numpy_engine(pytest.MonkeyPatch())
        directory, original = Path(sys.argv[1]), NumpyEngine.train_step
        def train_step(self, batch, **kwargs):
            if batch.step + 1 == 7:
                run_directory = next((directory / "runs").iterdir())
                wait_until(lambda: b"metadata_away" in (run_directory / "events.jsonl").read_bytes())
                wait_until(RunLayout(run_directory).checkpoint(4).exists)  # it is written while training goes on
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(self, batch, **kwargs)
            if batch.step + 1 == 3:
                from vorox.core.engine import StepValues
                result = type(result)(StepValues(float("nan"), 1.0, False, {}))
            return result
        NumpyEngine.train_step = train_step
        run(configuration(directory, ["log.metadata=postgres"]))
    """
    postgres.stop()
    try:
        child = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], check=False, capture_output=True,
            timeout=PATIENCE_SECONDS, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )  # fmt: skip
        assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    finally:
        postgres.start()
    run(config)
    assert consumed(dsn) == [
        (1, None, 1, 4, "kept"), (1, None, 5, 6, "rolled_back"), (2, 1, 5, 12, "kept"),
    ]  # fmt: skip
    found = MetadataCache.query(dsn, "SELECT attempt, kind, first_step FROM exception").rows
    assert found == [(1, "nonfinite_step", 3)], "of an attempt that never reached the database"


def test_a_database_that_is_wiped_in_mid_run_gets_everything_again(
    tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    monkeypatch.setattr("vorox.training.loop.provenance_recorder.INTERVAL_SECONDS", 0.02)
    config = configuration(tmp_path, ["log.metadata=postgres"])

    def wipe() -> None:
        made = "SELECT to_regclass('vorox.sample') IS NOT NULL AS made"
        wait_until(lambda: MetadataCache.query(dsn, made).rows[0][0])
        with psycopg.connect(dsn) as connection:
            connection.execute("SET LOCAL deadlock_timeout = '5min'")  # so that the run's transaction is chosen
            connection.execute("DROP SCHEMA vorox CASCADE")

    run_until(7, config, monkeypatch)
    at_step(monkeypatch, 9, wipe)
    run(config)
    assert consumed(dsn) == [
        (1, None, 1, 4, "kept"), (1, None, 5, 6, "rolled_back"), (2, 1, 5, 12, "kept"),
    ]  # fmt: skip
    for table in ("run", "run_source", "plan_event", "segment"):
        assert MetadataCache.query(dsn, f"SELECT * FROM {table}").rows


def test_two_runs_into_one_database_at_the_same_time(tmp_path: Path, dsn: str) -> None:
    """Two processes' worth of runs, of one configuration in two places and of another one."""
    places = [("first", "1"), ("second", "1"), ("first", "2")]
    configs = [
        configuration(tmp_path / place, ["log.metadata=postgres", "train.num_steps=40", f"run.seed={seed}"])
        for place, seed in places
    ]
    failures: list[BaseException] = []
    directories: list[Path] = []

    def work(config: Any) -> None:
        try:
            directories.append(run(config).run_directory)
        except BaseException as error:
            failures.append(error)

    run(configs[0])  # the cache of the first place; two builders at once are another test
    threads = [threading.Thread(target=work, args=(config,)) for config in configs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    names = {run_identity(directory) for directory in directories}
    assert len(names) == 3, "also of one configuration in two places"
    for name in names:
        kept = MetadataCache.query(
            dsn, f"SELECT MIN(first_step), MAX(last_step) FROM consumed WHERE run_id = '{name}' AND outcome = 'kept'"
        )
        assert kept.rows == [(1, 40)]
