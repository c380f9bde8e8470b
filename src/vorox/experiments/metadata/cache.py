"""``MetadataCache``: the metadata database of one or many runs, in SQLite or in PostgreSQL.

Rows go in by natural key, so that writing again changes nothing; questions in SQL come back as columns and rows. The
database observes: no run reads it, and all of it but materialised samples can be written again from run directories
and caches.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from vorox.experiments.metadata.databases import (
    Database,
    PostgresDatabase,
    SqliteDatabase,
    query_postgres,
    query_sqlite,
    require_psycopg,
)
from vorox.experiments.metadata.tables import TABLES, Row


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The answer to a question.

    Attributes:
        columns: Their names.
        rows: Their values.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def records(self) -> list[dict[str, Any]]:
        """The rows by name of column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class MetadataCache:
    """An open metadata database. Use it as a context manager, from one thread.

    Args:
        target: The path of a SQLite file, made if it is not there; or a PostgreSQL connection string.

    Raises:
        ConfigError: The connection string cannot be read, the client is not installed, or the database is of a newer
            version.
        Exception: One of ``errors`` if the database cannot be had.
    """

    def __init__(self, target: Path | str) -> None:
        self._database: Database = SqliteDatabase(target) if isinstance(target, Path) else PostgresDatabase(target)

    @staticmethod
    def errors(target: Path | str | None) -> tuple[type[Exception], ...]:
        """What a database raises when it cannot be had."""
        return (require_psycopg().Error,) if isinstance(target, str) else (sqlite3.Error,)

    def write(self, rows: Iterable[Row]) -> int:
        """Insert rows, or replace those of the same natural key, in one transaction. Returns how many keys."""
        by_table: dict[str, dict[tuple[Any, ...], Row]] = {}
        for row in rows:
            by_table.setdefault(row.table, {})[row.key] = row  # the last of a key counts
        with self._database.transaction():
            for name, keyed in by_table.items():
                self._database.upsert(TABLES[name], (row.cells() for row in keyed.values()))
        return sum(map(len, by_table.values()))

    def replace(self, table: str, run_id: str, rows: Iterable[Row]) -> None:
        """Make these the only rows of a run in a table, in one transaction."""
        with self._database.transaction():
            self._database.execute(f"DELETE FROM {TABLES[table].name} WHERE run_id = ?", (run_id,))  # noqa: S608
            self._database.load(TABLES[table], (row.cells() for row in rows))

    def insert_samples(self, run_id: str, first_position: int, end_position: int, rows: Iterable[Row]) -> int:
        """Write real rows of ``sample`` for the positions ``[first_position, end_position)``, in one transaction.

        By COPY into PostgreSQL. What was there for these positions is replaced. Returns how many rows.
        """
        table = TABLES["sample"]
        with self._database.transaction():
            self._database.execute(
                "DELETE FROM sample WHERE run_id = ? AND position >= ? AND position < ?",
                (run_id, first_position, end_position),
            )
            return self._database.load(table, (row.cells() for row in rows))

    def directory_of(self, run_id: str) -> Path | None:
        """Where a run was when it was written here; ``None`` if nothing is known of it."""
        found = self._database.execute("SELECT directory FROM run WHERE run_id = ?", (run_id,))
        return Path(found[0][0]) if found else None

    def remove_run(self, run_id: str) -> None:
        """Forget a run. Token caches, which other runs may read, stay."""
        with self._database.transaction():
            for table in TABLES.values():
                if "run_id" in table.key:
                    self._database.execute(f"DELETE FROM {table.name} WHERE run_id = ?", (run_id,))  # noqa: S608

    def rows_of(self, table: str) -> Iterator[Row]:
        """All rows of a table, by key."""
        known = TABLES[table]
        statement = f"SELECT {', '.join(known.columns)} FROM {known.name} ORDER BY {', '.join(known.key)}"  # noqa: S608
        for cells in self._database.execute(statement):
            yield Row(table, dict(zip(known.columns, cells, strict=True)))

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> MetadataCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def query(target: Path | str, statement: str, *, max_rows: int | None = None) -> QueryResult:
        """Ask one question, on a connection that can write nothing.

        Args:
            target: The path of a SQLite file, or a PostgreSQL connection string.
            statement: One statement that begins with SELECT, WITH or VALUES.
            max_rows: Only the first rows.

        Raises:
            ConfigError: The statement would write, or makes no sense.
            DataError: The database cannot be had.
        """
        ask = query_sqlite if isinstance(target, Path) else query_postgres
        return QueryResult(*ask(target, statement, max_rows))  # pyright: ignore[reportArgumentType]
