"""A real PostgreSQL, and both databases for tests that must not know which one they have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from postgres_server import Postgres, running_postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """An empty database, as ``MetadataCache`` takes it."""
    if request.param == "sqlite":
        return tmp_path / "metadata.sqlite"
    return request.getfixturevalue("postgres").new_database()
