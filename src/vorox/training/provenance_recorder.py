"""Record which steps an attempt trained, so that their data can be queried later.

In: started steps, committed checkpoints, skipped steps. Out: the attempt's record in ``attempts.bin``, from which
``vorox data when`` reads which steps count and which were rolled back; and, in the background, the same as rows of a
metadata database. A step costs one write to memory. No run reads the database or depends on it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vorox.core.attempts import AttemptRecord, read_attempts
from vorox.core.batch import Progress
from vorox.core.errors import ConfigError
from vorox.core.log import RunLog
from vorox.core.redaction import held_secret
from vorox.core.run_context import RunContext
from vorox.core.run_layout import RunLayout
from vorox.core.schema import LogConfig
from vorox.data.difficulty_buckets import SourceReader
from vorox.data.plan import DataPlan
from vorox.experiments.metadata import MetadataCache, MetadataWriter, Row
from vorox.experiments.metadata.databases import require_psycopg
from vorox.training.metadata_rows import attempt_rows, plan_rows, run_identity, run_rows, segment_rows

INTERVAL_SECONDS = 5.0
"""Time between two updates of the metadata database."""


@dataclass(frozen=True, slots=True)
class ProvenanceRecorder:
    """The record of this attempt, and the skipped steps in the metadata database; only the main rank writes."""

    attempt: AttemptRecord
    run_id: str
    batch: int
    writer: MetadataWriter | None

    def skipped(self, progress: Progress, kind: str, detail: str) -> None:
        """Record a step without an update."""
        if self.writer is not None:
            step, position = progress.step, progress.cursor.position
            place = {"run_id": self.run_id, "attempt": self.attempt.number, "kind": kind, "first_step": step}
            span = {"last_step": step, "first_position": position - self.batch, "end_position": position}
            self.writer.put(Row("exception", {**place, **span, "detail": detail}))


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
) -> Generator[ProvenanceRecorder]:
    """Open the record of this attempt, which starts from ``progress``, and the metadata writer.

    Raises:
        ConfigError: The settings of the metadata database are not usable.
    """
    target = metadata_target(run.directory, config)
    projection = Projection(run.directory, plan, tuple(readers))
    step, position = progress.step, progress.cursor.position
    with AttemptRecord(run.directory, run.attempt, step, position, writes=run.is_main) as attempt:
        writer: MetadataWriter | None = None
        if target is not None and run.is_main:
            writer = MetadataWriter(
                run.directory,
                lambda: MetadataCache(target),
                initial_sync=projection.initial_sync,
                collect=projection.collect,
                report=lambda kind, text, level: log.event(kind, text, level=level),
                interval_seconds=INTERVAL_SECONDS,
            )
        try:
            yield ProvenanceRecorder(attempt, projection.run_id, plan.start.global_batch_sequences, writer)
        finally:
            if writer is not None:
                writer.close()


class Projection:
    """Projects a run directory and its caches to rows of a metadata database: all rows, or the changes.

    Args:
        run_directory: The run.
        plan: Its plan, which may grow.
        readers: Its caches; ``None`` for a source that the configuration no longer has.
    """

    def __init__(self, run_directory: Path, plan: DataPlan, readers: tuple[SourceReader | None, ...]) -> None:
        self.run_id = run_identity(run_directory)
        self._directory, self._plan, self._readers = run_directory, plan, readers
        self._num_events = plan.num_events
        self._segments: dict[tuple[object, ...], Row] = {}

    def initial_sync(self, cache: MetadataCache) -> None:
        """Write all rows of the run so far: the database may be new or wiped."""
        self._num_events = self._plan.num_events
        cache.write(run_rows(self.run_id, self._directory, self._plan, self._readers))
        cache.replace("plan_event", self.run_id, plan_rows(self.run_id, self._plan))
        self._segments = {row.key: row for row in segment_rows(self.run_id, self._plan)}
        cache.replace("segment", self.run_id, self._segments.values())
        cache.write(self._attempts())

    def collect(self) -> Iterator[Row]:
        """Yield the rows that may have changed: attempts, and plan events if there are new ones."""
        yield from self._attempts()
        if self._plan.num_events != self._num_events:
            self._num_events = self._plan.num_events
            yield from plan_rows(self.run_id, self._plan)
            before, self._segments = self._segments, {row.key: row for row in segment_rows(self.run_id, self._plan)}
            yield from self._segments.values()
            for key, row in before.items():
                if key not in self._segments:  # replaced, because the cache grew before a step read it
                    yield Row("segment", {**row.values, "num_epochs": 0, "num_rows": 0})

    def _attempts(self) -> Iterator[Row]:
        return attempt_rows(self.run_id, read_attempts(self._directory), self._plan.start.batch_sizes.position_of)
