"""The SQLite and PostgreSQL backends of ``MetadataCache``, behind one interface.

Opening a database migrates it to the current version, under a lock, so that many runs can open one concurrently. Writes
are transactional; user queries run on a separate read-only connection. Invariant: both backends return the same Python
values for the same rows and query.
"""

from __future__ import annotations

import contextlib
import decimal
import re
import sqlite3
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from vorox.core.errors import ConfigError, DataError
from vorox.core.installation import install_command
from vorox.core.redaction import redact
from vorox.experiments.metadata.tables import CURRENT_VERSION, MIGRATIONS, TABLES, VERSION_TABLE, Table

SCHEMA_NAME = "vorox"
"""PostgreSQL schema of the tables, separate from those of other applications."""

_CONNECT_SECONDS = 5
_STATEMENT_MILLISECONDS = 60_000
_BUSY_SECONDS = 5.0
_MIGRATION_LOCK = 0x766F726F78  # "vorox"
_READING = re.compile(r"(?:\s|--[^\n]*(?:\n|\Z)|/\*.*?\*/|\()*(select|with|values)\b", re.IGNORECASE | re.DOTALL)

Cells = Sequence[Any]
Result = tuple[tuple[str, ...], list[tuple[Any, ...]]]


class Database(Protocol):
    """An open database at the current version."""

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        """Commit all writes inside together, or none."""
        ...

    def execute(self, statement: str, values: Cells = ()) -> list[tuple[Any, ...]]:
        """Execute a statement with ``?`` placeholders and return its rows."""
        ...

    def upsert(self, table: Table, rows: Iterable[Cells]) -> int:
        """Insert or replace rows by key. Keys must be unique within a call."""
        ...

    def load(self, table: Table, rows: Iterable[Cells]) -> int:
        """Bulk-insert rows with new keys."""
        ...

    def close(self) -> None: ...


class SqliteDatabase:
    """A SQLite file. One writer at a time; readers are blocked at most for a commit."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            self._connection.execute("PRAGMA synchronous = NORMAL")  # rows lost in a power failure are written again
            with self.transaction():
                _migrate(self, str(path))
        except BaseException:
            self._connection.close()
            raise

    @contextlib.contextmanager
    def transaction(self) -> Generator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def execute(self, statement: str, values: Cells = ()) -> list[tuple[Any, ...]]:
        return self._connection.execute(statement, tuple(values)).fetchall()

    def upsert(self, table: Table, rows: Iterable[Cells]) -> int:
        return self._connection.executemany(_upsert(table, "?"), rows).rowcount

    def load(self, table: Table, rows: Iterable[Cells]) -> int:
        columns, marks = ", ".join(table.columns), ", ".join("?" * len(table.columns))
        return self._connection.executemany(f"INSERT INTO {table.name} ({columns}) VALUES ({marks})", rows).rowcount  # noqa: S608

    def close(self) -> None:
        self._connection.close()


class PostgresDatabase:
    """A PostgreSQL server. Its connection string is never shown."""

    def __init__(self, dsn: str) -> None:
        self._connection = _connect(dsn)
        try:
            with self.transaction():
                self._connection.execute("SELECT pg_advisory_xact_lock(%s)", (_MIGRATION_LOCK,))
                self._connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA_NAME}")
                _migrate(self, "the PostgreSQL database")
        except BaseException:
            self._connection.close()
            raise

    @contextlib.contextmanager
    def transaction(self) -> Generator[None]:
        with self._connection.transaction():
            yield

    def execute(self, statement: str, values: Cells = ()) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(statement.replace("?", "%s"), tuple(values) or None)
        return cursor.fetchall() if cursor.description else []

    def upsert(self, table: Table, rows: Iterable[Cells]) -> int:
        """Insert or replace rows: COPY into a temporary table, then one INSERT."""
        columns = ", ".join(table.columns)
        with self._connection.cursor() as cursor:
            cursor.execute(f"CREATE TEMP TABLE incoming (LIKE {table.name}) ON COMMIT DROP")
            count = self._copy(cursor, "incoming", table, rows)
            insert = _upsert(table, "").partition(" VALUES ")[0]
            conflict = _upsert(table, "").partition(" ON CONFLICT ")[2]
            cursor.execute(f"{insert} SELECT {columns} FROM incoming ON CONFLICT {conflict}")  # noqa: S608
            cursor.execute("DROP TABLE incoming")
        return count

    def load(self, table: Table, rows: Iterable[Cells]) -> int:
        with self._connection.cursor() as cursor:
            return self._copy(cursor, table.name, table, rows)

    def _copy(self, cursor: Any, target: str, table: Table, rows: Iterable[Cells]) -> int:
        count = 0
        with cursor.copy(f"COPY {target} ({', '.join(table.columns)}) FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
                count += 1
        return count

    def close(self) -> None:
        self._connection.close()


def require_psycopg() -> Any:
    """Return the PostgreSQL client.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import psycopg
    except ImportError as error:
        raise ConfigError(
            "The metadata database is PostgreSQL, but its client is not installed", where="log.metadata",
            hint=install_command("postgres"),
        ) from error  # fmt: skip
    return psycopg


def _connect(dsn: str, *, options: str = "") -> Any:
    """Open a connection with timeouts on every operation.

    Raises:
        ConfigError: The connection string is invalid.
    """
    psycopg = require_psycopg()
    try:
        given = psycopg.conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        raise ConfigError(
            "The PostgreSQL connection string is invalid (it is not shown, since it may contain a password)",
            where="log.metadata_dsn_variable", hint="write it as postgresql://USER:PASSWORD@HOST:5432/DATABASE",
        ) from None  # fmt: skip
    ours = f"-c search_path={SCHEMA_NAME} -c statement_timeout={_STATEMENT_MILLISECONDS} {options}"
    defaults = {"connect_timeout": _CONNECT_SECONDS, "keepalives_idle": 10, "keepalives_interval": 5,
                "keepalives_count": 3, "tcp_user_timeout": 30_000, "application_name": "vorox"}  # fmt: skip
    settings = {**defaults, **given, "options": f"{given.get('options', '')} {ours}".strip()}
    return psycopg.connect(**settings, autocommit=True)


def _upsert(table: Table, mark: str) -> str:
    columns, marks = ", ".join(table.columns), ", ".join([mark] * len(table.columns))
    changes = ", ".join(f"{name} = excluded.{name}" for name in table.others)
    key = ", ".join(table.key)
    return f"INSERT INTO {table.name} ({columns}) VALUES ({marks}) ON CONFLICT ({key}) DO UPDATE SET {changes}"  # noqa: S608


def _migrate(database: Database, name: str) -> None:
    """Migrate a database to the current version, inside a transaction and one process at a time.

    Raises:
        ConfigError: It was created by a newer version of Vorox.
    """
    database.execute(VERSION_TABLE)
    found = database.execute("SELECT version FROM metadata_version")
    version = int(found[0][0]) if found else 0
    if version > CURRENT_VERSION:
        raise ConfigError(
            f"The metadata database has version {version}; this Vorox supports {CURRENT_VERSION}", where=name,
            hint="use the version of Vorox that created it, or another database",
        )  # fmt: skip
    if version == CURRENT_VERSION:
        return
    for statements in MIGRATIONS[version:]:
        for statement in statements:
            database.execute(statement)
    database.execute("DELETE FROM metadata_version")
    database.execute("INSERT INTO metadata_version (version) VALUES (?)", (CURRENT_VERSION,))


# User queries


def query_sqlite(path: Path, statement: str, max_rows: int | None = None) -> Result:
    """Run one read-only statement on a SQLite file.

    Raises:
        ConfigError: The statement is invalid or not read-only.
        DataError: The database cannot be read.
    """
    _check_read_only(statement)
    try:
        connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, timeout=_BUSY_SECONDS)
    except sqlite3.OperationalError as error:
        raise DataError(f"The metadata database cannot be read: {error}", where=str(path)) from error
    try:
        connection.execute("PRAGMA query_only = ON")
        connection.set_authorizer(_authorize_reading)
        cursor = connection.execute(statement)
        rows = cursor.fetchall() if max_rows is None else cursor.fetchmany(max_rows)
        return tuple(column[0] for column in cursor.description), rows
    except sqlite3.Warning as error:
        raise _refusal(str(error)) from error
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise DataError(f"The metadata database cannot be read: {error}", where=str(path)) from error
        raise _refusal(str(error)) from error
    except sqlite3.ProgrammingError as error:
        raise _refusal(str(error)) from error
    except sqlite3.DatabaseError as error:
        if "not authorized" in str(error) or "prohibited" in str(error):
            raise _refusal("it is not read-only") from error
        raise DataError(
            f"The metadata database is damaged: {error}", where=str(path),
            hint="remove the file; `vorox data sql RUN --refresh` rebuilds it from the run directory",
        ) from error  # fmt: skip
    finally:
        connection.close()


_READING_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_REFUSED_FUNCTIONS = {"load_extension", "writefile", "edit"}


def _authorize_reading(action: int, first: str | None, second: str | None, *_: object) -> int:
    if action == sqlite3.SQLITE_FUNCTION and (second or first or "").lower() in _REFUSED_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in _READING_ACTIONS else sqlite3.SQLITE_DENY


def query_postgres(dsn: str, statement: str, max_rows: int | None = None) -> Result:
    """Run one read-only statement on PostgreSQL, in a read-only transaction.

    Raises:
        ConfigError: The statement is invalid or not read-only.
        DataError: The server cannot be reached.
    """
    _check_read_only(statement)
    psycopg = require_psycopg()
    try:
        connection = _connect(dsn, options="-c default_transaction_read_only=on")
    except psycopg.OperationalError as error:
        raise DataError(
            f"The metadata database cannot be reached: {redact(str(error))}", where="PostgreSQL",
            hint="start the server, or correct the connection string",
        ) from error  # fmt: skip
    try:
        with connection, connection.transaction(force_rollback=True):
            connection.execute("SET TRANSACTION READ ONLY")
            cursor = connection.execute(statement, prepare=True)  # prepared statements hold one statement only
            columns = tuple(column.name for column in cursor.description)
            rows = cursor.fetchall() if max_rows is None else cursor.fetchmany(max_rows)
            return columns, [tuple(map(_plain, row)) for row in rows]
    except psycopg.errors.ReadOnlySqlTransaction as error:
        raise _refusal("it is not read-only") from error
    except psycopg.OperationalError as error:
        raise DataError(f"The query failed: {redact(str(error))}", where="PostgreSQL") from error
    except psycopg.Error as error:
        raise _refusal(redact(str(error))) from error


def _plain(value: Any) -> Any:
    """Convert a decimal, which PostgreSQL returns for sums, to the ``int`` or ``float`` that SQLite returns."""
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value


def _check_read_only(statement: str) -> None:
    if _READING.match(statement) is None:
        raise _refusal("it must be read-only and start with SELECT, WITH or VALUES")


def _refusal(what: str) -> ConfigError:
    tables = ", ".join([*TABLES, "consumed", "epochs", "samples", "epoch_samples"])
    return ConfigError(
        f"The statement is refused: {what}", where="vorox data sql", hint=f"tables and views: {tables}",
        saved="nothing was changed",
    )  # fmt: skip
