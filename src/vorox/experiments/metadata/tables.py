"""Tables and views of the metadata database, in SQL for both SQLite and PostgreSQL.

Rows are few: the data used by a run is one row per attempt, and only logged steps have rows of their own. Steps count
from 1, positions (rows of data since the start of the run) from 0; ``end_position`` is exclusive. A change of the
schema raises ``VERSION``.
"""

from __future__ import annotations

VERSION = 5
VERSION_TABLE = "CREATE TABLE IF NOT EXISTS metadata_version (version BIGINT NOT NULL)"

_SAMPLE = """
    step BIGINT NOT NULL, slot BIGINT NOT NULL, source TEXT NOT NULL, epoch BIGINT NOT NULL, cache_row BIGINT NOT NULL,
    uri TEXT NOT NULL, ordinal BIGINT NOT NULL, byte_offset BIGINT NOT NULL, byte_length BIGINT NOT NULL,
    first_token BIGINT NOT NULL, num_tokens BIGINT NOT NULL, row_token BIGINT NOT NULL,
    is_masked BIGINT NOT NULL"""

RUN_TABLES = {
    "run": """
        run_id TEXT NOT NULL PRIMARY KEY, directory TEXT NOT NULL, seed BIGINT NOT NULL,
        global_batch_sequences BIGINT NOT NULL, plan_digest TEXT NOT NULL""",
    "run_source": """
        run_id TEXT NOT NULL, source_index BIGINT NOT NULL, name TEXT NOT NULL, cache TEXT NOT NULL,
        PRIMARY KEY (run_id, source_index)""",
    "plan_event": """
        run_id TEXT NOT NULL, number BIGINT NOT NULL, kind TEXT NOT NULL, start_position BIGINT,
        payload TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (run_id, number)""",
    "segment": """
        run_id TEXT NOT NULL, source_index BIGINT NOT NULL, number BIGINT NOT NULL, first_epoch BIGINT NOT NULL,
        num_epochs BIGINT NOT NULL, num_rows BIGINT NOT NULL, start_draw BIGINT NOT NULL,
        PRIMARY KEY (run_id, source_index, number)""",
    "attempt": """
        run_id TEXT NOT NULL, attempt BIGINT NOT NULL, parent BIGINT, first_state BIGINT NOT NULL,
        first_position BIGINT NOT NULL, kept_until BIGINT NOT NULL, kept_position BIGINT NOT NULL,
        last_step BIGINT NOT NULL, last_position BIGINT NOT NULL, is_newest BIGINT NOT NULL,
        PRIMARY KEY (run_id, attempt)""",
    "exception": """
        run_id TEXT NOT NULL, attempt BIGINT NOT NULL, kind TEXT NOT NULL, first_step BIGINT NOT NULL,
        last_step BIGINT NOT NULL, first_position BIGINT NOT NULL, end_position BIGINT NOT NULL, detail TEXT,
        PRIMARY KEY (run_id, attempt, kind, first_step)""",
    "logged_step": """
        run_id TEXT NOT NULL, attempt BIGINT NOT NULL, step BIGINT NOT NULL, time DOUBLE PRECISION,
        loss DOUBLE PRECISION, grad_norm DOUBLE PRECISION, learning_rate DOUBLE PRECISION,
        tokens_total DOUBLE PRECISION, tokens_per_second DOUBLE PRECISION, PRIMARY KEY (run_id, attempt, step)""",
    "evaluation": """
        run_id TEXT NOT NULL, attempt BIGINT NOT NULL, step BIGINT NOT NULL, time DOUBLE PRECISION,
        loss DOUBLE PRECISION, bits_per_byte DOUBLE PRECISION, accuracy DOUBLE PRECISION,
        PRIMARY KEY (run_id, attempt, step)""",
    "sample": f"""
        run_id TEXT NOT NULL, position BIGINT NOT NULL, part BIGINT NOT NULL, {_SAMPLE},
        PRIMARY KEY (run_id, position, part)""",
    "abandoned_sample": f"""
        run_id TEXT NOT NULL, attempt BIGINT NOT NULL, position BIGINT NOT NULL, part BIGINT NOT NULL, {_SAMPLE},
        PRIMARY KEY (run_id, attempt, position, part)""",
}
"""Columns of the tables with rows of one run, by ``run_id``."""

CACHE_TABLES = {
    "source_file": """
        cache TEXT NOT NULL, file_index BIGINT NOT NULL, uri TEXT NOT NULL, version TEXT NOT NULL,
        size_bytes BIGINT NOT NULL, PRIMARY KEY (cache, file_index)""",
    "unit": """
        cache TEXT NOT NULL, unit BIGINT NOT NULL, documents BIGINT NOT NULL, text_bytes BIGINT NOT NULL,
        tokens BIGINT NOT NULL, quarantined BIGINT NOT NULL, first_row BIGINT NOT NULL, num_rows BIGINT NOT NULL,
        PRIMARY KEY (cache, unit)""",
    "chunk": """
        cache TEXT NOT NULL, unit BIGINT NOT NULL, part BIGINT NOT NULL, num_rows BIGINT NOT NULL,
        tokens BIGINT NOT NULL, padding_tokens BIGINT NOT NULL, documents BIGINT NOT NULL, size_bytes BIGINT NOT NULL,
        content TEXT NOT NULL, PRIMARY KEY (cache, unit, part)""",
}
"""Columns of the tables with rows of one token cache, which several runs may read."""

_INDEXES = {
    "source_file_uri": "source_file (uri)",
    "sample_uri": "sample (uri, byte_offset)",
    "sample_epoch": "sample (run_id, source, epoch)",
    "abandoned_sample_uri": "abandoned_sample (uri, byte_offset)",
}

_STEPS_WITH_OUTCOME = """
        SELECT {0}.*, CASE WHEN {0}.step <= attempt.kept_until THEN 'kept'
                           WHEN attempt.is_newest = 1 THEN 'open' ELSE 'rolled_back' END AS outcome
        FROM {0} JOIN attempt ON attempt.run_id = {0}.run_id AND attempt.attempt = {0}.attempt"""

VIEWS = {
    "consumed": """
        SELECT run_id, attempt, parent, first_state + 1 AS first_step, kept_until AS last_step,
               first_position, kept_position AS end_position, 'kept' AS outcome
        FROM attempt WHERE kept_until > first_state
        UNION ALL
        SELECT run_id, attempt, parent, kept_until + 1, last_step, kept_position, last_position,
               CASE WHEN is_newest = 1 THEN 'open' ELSE 'rolled_back' END
        FROM attempt WHERE last_step > kept_until""",
    "epochs": """
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
    "logged_steps": _STEPS_WITH_OUTCOME.format("logged_step"),
    "evaluations": _STEPS_WITH_OUTCOME.format("evaluation"),
    "samples": """
        SELECT sample.*, consumed.attempt AS attempt, consumed.outcome AS outcome
        FROM sample JOIN consumed ON consumed.run_id = sample.run_id
            AND sample.step BETWEEN consumed.first_step AND consumed.last_step
        WHERE NOT EXISTS (
            SELECT 1 FROM abandoned_sample WHERE abandoned_sample.run_id = sample.run_id
                AND abandoned_sample.attempt = consumed.attempt AND abandoned_sample.position = sample.position)
        UNION ALL
        SELECT old.run_id, old.position, old.part, old.step, old.slot, old.source, old.epoch, old.cache_row, old.uri,
               old.ordinal, old.byte_offset, old.byte_length, old.first_token, old.num_tokens, old.row_token,
               old.is_masked, consumed.attempt, consumed.outcome
        FROM abandoned_sample old JOIN consumed ON consumed.run_id = old.run_id AND consumed.attempt = old.attempt
            AND old.step BETWEEN consumed.first_step AND consumed.last_step""",
    "epoch_samples": """
        SELECT run_id, source, epoch, outcome, COUNT(DISTINCT position) AS num_rows,
               COUNT(DISTINCT uri) AS num_files, CAST(SUM(num_tokens) AS BIGINT) AS num_tokens,
               MIN(step) AS first_step, MAX(step) AS last_step
        FROM samples GROUP BY run_id, source, epoch, outcome""",
}

SCHEMA: tuple[str, ...] = (
    *(f"CREATE TABLE {name} ({columns})" for name, columns in (RUN_TABLES | CACHE_TABLES).items()),
    *(f"CREATE INDEX {name} ON {place}" for name, place in _INDEXES.items()),
    *(f"CREATE VIEW {name} AS {query}" for name, query in VIEWS.items()),
)
"""Statements that create an empty database."""
