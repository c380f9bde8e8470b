"""``MetadataCache``: the metadata database of one or many runs, in SQLite or PostgreSQL.

Writes replace the rows of a run or a cache, so repeating them is harmless; SQL queries return columns and rows. The
database is derived data: no run reads it, and it can be rebuilt from run directories and caches.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from vorox.experiments.metadata.databases import (
    Cells,
    PostgresDatabase,
    SqliteDatabase,
    query_postgres,
    query_sqlite,
    require_psycopg,
)
from vorox.experiments.metadata.tables import RUN_TABLES


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


class Replacement(NamedTuple):
    """New rows of a table, in place of those that a condition selects.

    Attributes:
        table: The table.
        condition: In SQL, with ``?`` placeholders.
        values: Values of the placeholders.
        rows: Cells in the order of the columns.
    """

    table: str
    condition: str
    values: Cells
    rows: Iterable[Cells]


class MetadataCache:
    """An open metadata database. Use it as a context manager, from one thread.

    Args:
        target: The path of a SQLite file, created if missing; or a PostgreSQL connection string.

    Raises:
        ConfigError: The connection string is invalid, the client is not installed, or the database has another version.
        Exception: One of ``errors`` if the database is unavailable.
    """

    def __init__(self, target: Path | str) -> None:
        self._database = SqliteDatabase(target) if isinstance(target, Path) else PostgresDatabase(target)

    @staticmethod
    def errors(target: Path | str | None) -> tuple[type[Exception], ...]:
        """Return the exceptions that an unavailable database raises."""
        return (require_psycopg().Error,) if isinstance(target, str) else (sqlite3.Error,)

    def replace(self, owner: str, replacements: Iterable[Replacement]) -> None:
        """Replace rows in one transaction.

        The replacements are computed inside it, by one writer of an owner at a time: a slow writer cannot replace rows
        by older ones.

        Args:
            owner: The run or cache that owns the rows.
            replacements: What to replace.
        """
        with self._database.transaction(owner):
            for table, condition, values, rows in replacements:
                self._database.execute(f"DELETE FROM {table} WHERE {condition}", values)  # noqa: S608
                self._database.insert(table, rows)

    def directory_of(self, run_id: str) -> Path | None:
        """Return the recorded directory of a run, or ``None`` for an unknown run."""
        found = self._database.execute("SELECT directory FROM run WHERE run_id = ?", (run_id,))
        return Path(found[0][0]) if found else None

    def remove_run(self, run_id: str) -> None:
        """Remove a run's rows. Rows of token caches are kept, since other runs may use them."""
        self.replace(run_id, (Replacement(table, "run_id = ?", (run_id,), ()) for table in RUN_TABLES))

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
