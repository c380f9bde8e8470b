"""``MetadataCache``: the metadata database of one or many runs, in SQLite or PostgreSQL.

Rows are written by natural key, so writes are idempotent; SQL queries return columns and rows. The database is derived
data: no run reads it, and everything but inserted samples can be rebuilt from run directories and caches.
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
    """The result of a query.

    Attributes:
        columns: Column names.
        rows: Values of each row.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def records(self) -> list[dict[str, Any]]:
        """Return the rows as mappings by column name."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class MetadataCache:
    """An open metadata database. Use it as a context manager, from one thread.

    Args:
        target: The path of a SQLite file, created if missing; or a PostgreSQL connection string.

    Raises:
        ConfigError: The connection string is invalid, the client is not installed, or the database has a newer version.
        Exception: One of ``errors`` if the database is unavailable.
    """

    def __init__(self, target: Path | str) -> None:
        self._database: Database = SqliteDatabase(target) if isinstance(target, Path) else PostgresDatabase(target)

    @staticmethod
    def errors(target: Path | str | None) -> tuple[type[Exception], ...]:
        """Return the exceptions that an unavailable database raises."""
        return (require_psycopg().Error,) if isinstance(target, str) else (sqlite3.Error,)

    def write(self, rows: Iterable[Row]) -> int:
        """Insert or replace rows by natural key, in one transaction. Returns the number of keys."""
        by_table: dict[str, dict[tuple[Any, ...], Row]] = {}
        for row in rows:
            by_table.setdefault(row.table, {})[row.key] = row  # the last row of a key counts
        with self._database.transaction():
            for name, keyed in by_table.items():
                self._database.upsert(TABLES[name], (row.cells() for row in keyed.values()))
        return sum(map(len, by_table.values()))

    def replace(self, table: str, run_id: str, rows: Iterable[Row]) -> None:
        """Replace all rows of a run in a table, in one transaction."""
        with self._database.transaction():
            self._database.execute(f"DELETE FROM {TABLES[table].name} WHERE run_id = ?", (run_id,))  # noqa: S608
            self._database.load(TABLES[table], (row.cells() for row in rows))

    def insert_samples(self, run_id: str, first_position: int, end_position: int, rows: Iterable[Row]) -> int:
        """Replace the rows of ``sample`` for positions ``[first_position, end_position)``, in one transaction.

        PostgreSQL uses COPY. Returns the number of rows.
        """
        table = TABLES["sample"]
        with self._database.transaction():
            self._database.execute(
                "DELETE FROM sample WHERE run_id = ? AND position >= ? AND position < ?",
                (run_id, first_position, end_position),
            )
            return self._database.load(table, (row.cells() for row in rows))

    def directory_of(self, run_id: str) -> Path | None:
        """Return the recorded directory of a run, or ``None`` for an unknown run."""
        found = self._database.execute("SELECT directory FROM run WHERE run_id = ?", (run_id,))
        return Path(found[0][0]) if found else None

    def remove_run(self, run_id: str) -> None:
        """Remove a run's rows. Rows of token caches are kept, since other runs may use them."""
        with self._database.transaction():
            for table in TABLES.values():
                if "run_id" in table.key:
                    self._database.execute(f"DELETE FROM {table.name} WHERE run_id = ?", (run_id,))  # noqa: S608

    def rows_of(self, table: str) -> Iterator[Row]:
        """Yield all rows of a table, by key."""
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
        """Run a query on a read-only connection.

        Args:
            target: The path of a SQLite file, or a PostgreSQL connection string.
            statement: One SELECT, WITH or VALUES statement.
            max_rows: Return only the first rows.

        Raises:
            ConfigError: The statement is invalid or not read-only.
            DataError: The database is unavailable.
        """
        run = query_sqlite if isinstance(target, Path) else query_postgres
        return QueryResult(*run(target, statement, max_rows))  # pyright: ignore[reportArgumentType]
