"""The SQLite and PostgreSQL backends of ``MetadataCache``, behind one interface.

Opening an empty database creates the tables, under a lock, so that many runs can open one concurrently. Writes are
transactional; user queries run on a separate read-only connection. Invariant: both backends return the same Python
values for the same rows and query.
"""

from __future__ import annotations

import contextlib
import decimal
import math
import re
import sqlite3
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vorox.core.errors import ConfigError, DataError
from vorox.core.platform.installation import install_command
from vorox.core.redaction import redact
from vorox.experiments.metadata.tables import CACHE_TABLES, RUN_TABLES, SCHEMA, VERSION, VERSION_TABLE, VIEWS

SCHEMA_NAME = "vorox"
"""PostgreSQL schema of the tables, separate from those of other applications."""

_CONNECT_SECONDS = 5
_STATEMENT_MILLISECONDS = 60_000
_BUSY_SECONDS = 5.0
_MAX_INTEGER = (1 << 63) - 1
_READING = re.compile(r"(?:\s|--[^\n]*(?:\n|\Z)|/\*.*?\*/|\()*(select|with|values)\b", re.IGNORECASE | re.DOTALL)

Cells = Sequence[Any]
Result = tuple[tuple[str, ...], list[tuple[Any, ...]]]


class SqliteDatabase:
    """A SQLite file. One writer at a time; readers are blocked at most for a commit."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            self._connection.execute("PRAGMA synchronous = NORMAL")  # rows lost in a power failure are exported again
            with self.transaction(""):
                hint = f"remove {path.name}; `vorox data sql RUN --refresh` rebuilds it from the run directory"
                _create_tables(self, str(path), hint)
        except BaseException:
            self._connection.close()
            raise

    @contextlib.contextmanager
    def transaction(self, owner: str) -> Generator[None]:  # noqa: ARG002 - SQLite has one writer of all rows
        """Commit all writes inside together, or none, as the only writer of an owner's rows."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def execute(self, statement: str, values: Cells = ()) -> list[tuple[Any, ...]]:
        """Execute a statement with ``?`` placeholders and return its rows."""
        return self._connection.execute(statement, tuple(values)).fetchall()

    def insert(self, table: str, rows: Iterable[Cells]) -> None:
        """Insert rows with new keys; cells are in the order of the columns."""
        marks = ", ".join("?" for _ in self._connection.execute(f"SELECT * FROM {table} LIMIT 0").description)  # noqa: S608
        self._connection.executemany(f"INSERT INTO {table} VALUES ({marks})", map(_storable, rows))  # noqa: S608

    def close(self) -> None:
        self._connection.close()


class PostgresDatabase:
    """A PostgreSQL server, with the interface of ``SqliteDatabase``. Its connection string is never shown."""

    def __init__(self, dsn: str) -> None:
        self._connection = _connect(dsn)
        try:
            with self.transaction(SCHEMA_NAME):
                self.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA_NAME}")
                hint = (
                    f"DROP SCHEMA {SCHEMA_NAME} CASCADE; `vorox data sql RUN --refresh` rebuilds the rows of each run"
                )
                _create_tables(self, "the PostgreSQL database", hint)
        except BaseException:
            self._connection.close()
            raise

    @contextlib.contextmanager
    def transaction(self, owner: str) -> Generator[None]:
        with self._connection.transaction():
            self.execute("SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", (owner,))
            yield

    def execute(self, statement: str, values: Cells = ()) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(statement.replace("?", "%s"), tuple(values) or None)
        return cursor.fetchall() if cursor.description else []

    def insert(self, table: str, rows: Iterable[Cells]) -> None:
        with self._connection.cursor() as cursor, cursor.copy(f"COPY {table} FROM STDIN") as copy:
            for row in rows:
                copy.write_row(_storable(row))

    def close(self) -> None:
        self._connection.close()


def _storable(row: Cells) -> list[Any]:
    """Return cells that both databases store alike: no NUL, lone surrogate or NaN, and integers of 64 bits."""
    return [_storable_cell(cell) for cell in row]


def _storable_cell(cell: Any) -> Any:
    if isinstance(cell, str):
        return cell.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    if isinstance(cell, int):
        return max(-_MAX_INTEGER, min(cell, _MAX_INTEGER))
    return None if cell is not None and math.isnan(cell) else cell


def _create_tables(database: SqliteDatabase | PostgresDatabase, name: str, hint: str) -> None:
    """Create the tables of an empty database, inside a transaction and one process at a time.

    Raises:
        ConfigError: It was created by another version of Vorox.
    """
    database.execute(VERSION_TABLE)
    found = database.execute("SELECT version FROM metadata_version")
    if not found:
        for statement in SCHEMA:
            database.execute(statement)
        database.execute("INSERT INTO metadata_version (version) VALUES (?)", (VERSION,))
    elif (version := int(found[0][0])) != VERSION:
        raise ConfigError(
            f"The metadata database has version {version}; this Vorox supports {VERSION}", where=name, hint=hint
        )


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
    tables = ", ".join([*RUN_TABLES, *CACHE_TABLES, *VIEWS])
    return ConfigError(
        f"The statement is refused: {what}", where="vorox data sql", hint=f"tables and views: {tables}",
        saved="nothing was changed",
    )  # fmt: skip
