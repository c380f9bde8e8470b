"""Record which steps an attempt trained, so that their data can be queried later.

In: started steps and committed checkpoints. Out: the attempt's record in ``attempts.bin``, from which ``vorox data
when`` reads which steps count and which were rolled back; and, in the background, the records of the run as rows of a
metadata database. A step costs one write to memory. No run reads the database or depends on it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence
from pathlib import Path

from vorox.core.batch import Progress
from vorox.core.errors import ConfigError
from vorox.core.redaction import held_secret
from vorox.core.run_layout import RunLayout
from vorox.core.schema import LogConfig
from vorox.data.order.difficulty_buckets import SourceReader
from vorox.data.order.plan import DataPlan
from vorox.experiments.metadata import BackgroundExporter
from vorox.experiments.metadata.databases import require_psycopg
from vorox.records.attempts import AttemptRecord
from vorox.records.executed_steps import PLAN_NOTE, STEPS_NOTE, end_note, lost_attempts, start_note
from vorox.records.log import RunLog
from vorox.records.run_context import RunContext
from vorox.training.loop.metadata_export import RunExport

INTERVAL_SECONDS = 5.0
"""Time between two updates of the metadata database."""


def metadata_target(run_directory: Path, config: LogConfig) -> Path | str | None:
    """Return where the metadata of a run goes: a SQLite file, a connection string, or ``None``.

    Raises:
        ConfigError: The connection string is not in the environment, or the client is not installed.
    """
    match config.metadata:
        case "off":
            return None
        case "sqlite":
            return RunLayout(run_directory).metadata_database
        case "postgres":
            require_psycopg()
            dsn = held_secret(config.metadata_dsn_variable) or os.environ.get(config.metadata_dsn_variable)
            if not dsn:
                raise ConfigError(
                    f"Environment variable {config.metadata_dsn_variable} is not set; it has the connection string of "
                    "the metadata database",
                    where="log.metadata_dsn_variable",
                    hint=f"export {config.metadata_dsn_variable}=postgresql://USER:PASSWORD@HOST:5432/DATABASE, "
                    "or set log.metadata=sqlite",
                )
            return dsn


@contextlib.contextmanager
def open_provenance(
    run: RunContext,
    config: LogConfig,
    progress: Progress,
    plan: DataPlan,
    readers: Sequence[SourceReader | None],
    log: RunLog,
) -> Generator[AttemptRecord]:
    """Open the record of this attempt, which starts from ``progress``, and the export to the metadata database.

    Raises:
        ConfigError: The settings of the metadata database are not usable.
    """
    target = metadata_target(run.directory, config)
    step, position = progress.step, progress.cursor.position
    if run.is_main and (lost := lost_attempts(run.directory)):
        log.event("attempts_lost", lost, level="warning")
    with AttemptRecord(run.directory, run.attempt, step, position, writes=run.is_main) as attempt:
        # After the record, so that a note proves that there was one.
        run.note(**{STEPS_NOTE: start_note(attempt.attempt), PLAN_NOTE: _plan_note(plan)})
        exporter: BackgroundExporter | None = None
        if target is not None and run.is_main:
            exporter = BackgroundExporter(
                lambda: RunExport(target, run.directory, plan, readers),
                report=lambda kind, text, level: log.event(kind, text, level=level),
                interval_seconds=INTERVAL_SECONDS,
            )
        try:
            yield attempt
        finally:
            run.note_later(**{STEPS_NOTE: end_note(attempt.attempt), PLAN_NOTE: _plan_note(plan)})
            if exporter is not None:
                exporter.close()


def _plan_note(plan: DataPlan) -> dict[str, int | str]:
    return {"events": plan.num_events, "digest": plan.digest}
