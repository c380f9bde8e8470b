"""Tables, views and migrations of the metadata database, in SQL for both SQLite and PostgreSQL.

Rows are intervals and therefore few: the data used by a run is one row per attempt. Every table has a natural key, so
writes are idempotent. ``MIGRATIONS`` are applied in order and never change once published; the database records its
version. Steps count from 1, positions (rows of data since the start of the run) from 0; ``end_position`` is exclusive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Value = str | int | float | None


@dataclass(frozen=True, slots=True)
class Table:
    """A table: key columns, then the others."""

    name: str
    key: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.key, *self.others)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table, by column; missing columns are null."""

    table: str
    values: Mapping[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """Table and natural key; a later row replaces an earlier one with the same key."""
        return (self.table, *(self.values[name] for name in TABLES[self.table].key))

    def cells(self) -> tuple[Any, ...]:
        """Return the values in column order."""
        return tuple(self.values.get(name) for name in TABLES[self.table].columns)


TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        Table("run", ("run_id",), ("directory", "seed", "global_batch_sequences", "plan_digest")),
        Table("run_source", ("run_id", "source_index"), ("name", "cache")),
        Table("source_file", ("cache", "file_index"), ("uri", "version", "size_bytes")),
        Table("unit", ("cache", "unit"), ("documents", "text_bytes", "tokens", "quarantined", "first_row", "num_rows")),
        Table(
            "chunk", ("cache", "unit", "part"),
            ("num_rows", "tokens", "padding_tokens", "documents", "size_bytes", "content"),
        ),
        Table("plan_event", ("run_id", "number"), ("kind", "start_position", "payload", "digest")),
        Table(
            "attempt", ("run_id", "attempt"),
            (
                "parent", "first_state", "first_position", "kept_until", "kept_position", "last_step", "last_position",
                "is_newest",
            ),
        ),
        Table(
            "exception", ("run_id", "attempt", "kind", "first_step"),
            ("last_step", "first_position", "end_position", "detail"),
        ),
        Table(
            "segment", ("run_id", "source_index", "number"),
            ("first_epoch", "num_epochs", "num_rows", "start_draw"),
        ),
        Table(
            "sample", ("run_id", "position", "part"),
            (
                "step", "slot", "source", "epoch", "cache_row", "uri", "ordinal", "byte_offset", "byte_length",
                "first_token", "num_tokens", "row_token",
            ),
        ),
    )
}  # fmt: skip

_VERSION_1 = (
    """CREATE TABLE run (
        run_id TEXT NOT NULL PRIMARY KEY, directory TEXT NOT NULL, seed BIGINT NOT NULL,
        global_batch_sequences BIGINT NOT NULL, plan_digest TEXT NOT NULL)""",
    """CREATE TABLE run_source (
        run_id TEXT NOT NULL, source_index BIGINT NOT NULL, name TEXT NOT NULL, cache TEXT NOT NULL,
        PRIMARY KEY (run_id, source_index))""",
    """CREATE TABLE source_file (
        cache TEXT NOT NULL, file_index BIGINT NOT NULL, uri TEXT NOT NULL, version TEXT NOT NULL,
        size_bytes BIGINT NOT NULL, PRIMARY KEY (cache, file_index))""",
    "CREATE INDEX source_file_uri ON source_file (uri)",
    """CREATE TABLE unit (
        cache TEXT NOT NULL, unit BIGINT NOT NULL, documents BIGINT NOT NULL, text_bytes BIGINT NOT NULL,
        tokens BIGINT NOT NULL, quarantined BIGINT NOT NULL, first_row BIGINT NOT NULL, num_rows BIGINT NOT NULL,
        PRIMARY KEY (cache, unit))""",
    """CREATE TABLE chunk (
        cache TEXT NOT NULL, unit BIGINT NOT NULL, part BIGINT NOT NULL, num_rows BIGINT NOT NULL,
        tokens BIGINT NOT NULL, padding_tokens BIGINT NOT NULL, documents BIGINT NOT NULL, size_bytes BIGINT NOT NULL,
        content TEXT NOT NULL, PRIMARY KEY (cache, unit, part))""",
    """CREATE TABLE plan_event (
        run_id TEXT NOT NULL, number BIGINT NOT NULL, kind TEXT NOT NULL, start_position BIGINT,
        payload TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (run_id, number))""",
    """CREATE TABLE attempt (
        run_id TEXT NOT NULL, attempt BIGINT NOT NULL, parent BIGINT, first_state BIGINT NOT NULL,
        first_position BIGINT NOT NULL, kept_until BIGINT NOT NULL, kept_position BIGINT NOT NULL,
        last_step BIGINT NOT NULL, last_position BIGINT NOT NULL, is_newest BIGINT NOT NULL,
        PRIMARY KEY (run_id, attempt))""",
    """CREATE TABLE exception (
        run_id TEXT NOT NULL, attempt BIGINT NOT NULL, kind TEXT NOT NULL, first_step BIGINT NOT NULL,
        last_step BIGINT NOT NULL, first_position BIGINT NOT NULL, end_position BIGINT NOT NULL, detail TEXT,
        PRIMARY KEY (run_id, attempt, kind, first_step))""",
    """CREATE VIEW consumed AS
        SELECT run_id, attempt, parent, first_state + 1 AS first_step, kept_until AS last_step,
               first_position, kept_position AS end_position, 'kept' AS outcome
        FROM attempt WHERE kept_until > first_state
        UNION ALL
        SELECT run_id, attempt, parent, kept_until + 1, last_step, kept_position, last_position,
               CASE WHEN is_newest = 1 THEN 'open' ELSE 'rolled_back' END
        FROM attempt WHERE last_step > kept_until""",
)

_VERSION_2 = (
    """CREATE TABLE segment (
        run_id TEXT NOT NULL, source_index BIGINT NOT NULL, number BIGINT NOT NULL, first_epoch BIGINT NOT NULL,
        num_epochs BIGINT NOT NULL, num_rows BIGINT NOT NULL, start_draw BIGINT NOT NULL,
        PRIMARY KEY (run_id, source_index, number))""",
    """CREATE TABLE sample (
        run_id TEXT NOT NULL, position BIGINT NOT NULL, part BIGINT NOT NULL, step BIGINT NOT NULL,
        slot BIGINT NOT NULL, source TEXT NOT NULL, epoch BIGINT NOT NULL, cache_row BIGINT NOT NULL,
        uri TEXT NOT NULL, ordinal BIGINT NOT NULL, byte_offset BIGINT NOT NULL, byte_length BIGINT NOT NULL,
        first_token BIGINT NOT NULL, num_tokens BIGINT NOT NULL, row_token BIGINT NOT NULL,
        PRIMARY KEY (run_id, position, part))""",
    "CREATE INDEX sample_uri ON sample (uri, byte_offset)",
    "CREATE INDEX sample_epoch ON sample (run_id, source, epoch)",
    """CREATE VIEW epochs AS
        WITH RECURSIVE passes (run_id, source_index, epoch, last_epoch, num_rows) AS (
            SELECT run_id, source_index, first_epoch, first_epoch + num_epochs - 1, num_rows
            FROM segment WHERE num_epochs > 0
            UNION ALL
            SELECT run_id, source_index, epoch + 1, last_epoch, num_rows FROM passes WHERE epoch < last_epoch)
        SELECT passes.run_id AS run_id, run_source.name AS source, passes.epoch AS epoch,
               CAST(SUM(passes.num_rows) AS BIGINT) AS num_rows
        FROM passes JOIN run_source
            ON run_source.run_id = passes.run_id AND run_source.source_index = passes.source_index
        GROUP BY passes.run_id, run_source.name, passes.epoch""",
    """CREATE VIEW samples AS
        SELECT sample.*, consumed.attempt AS attempt, consumed.outcome AS outcome
        FROM sample JOIN consumed ON consumed.run_id = sample.run_id
            AND sample.step BETWEEN consumed.first_step AND consumed.last_step""",
    """CREATE VIEW epoch_samples AS
        SELECT run_id, source, epoch, outcome, COUNT(DISTINCT position) AS num_rows,
               COUNT(DISTINCT uri) AS num_files, CAST(SUM(num_tokens) AS BIGINT) AS num_tokens,
               MIN(step) AS first_step, MAX(step) AS last_step
        FROM samples GROUP BY run_id, source, epoch, outcome""",
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (_VERSION_1, _VERSION_2)
"""Statements that migrate a database from version i to version i + 1."""

CURRENT_VERSION = len(MIGRATIONS)
VERSION_TABLE = "CREATE TABLE IF NOT EXISTS metadata_version (version BIGINT NOT NULL)"
