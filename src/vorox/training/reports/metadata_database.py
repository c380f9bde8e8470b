"""Update, locate and clean the metadata database of a run, outside of the run itself.

In: a run directory. Out: the location of its database, and its rows updated from the run directory, the plan and the
caches, with samples and cache inventory on request; or a shared database without the rows of the run. A live run may
write the same rows at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vorox.core.errors import ConfigError, DataError
from vorox.core.redaction import redact
from vorox.core.run_layout import RunLayout
from vorox.data.cache.reader import CacheReader
from vorox.data.order.difficulty_buckets import cache_of
from vorox.data.provenance.queries import RowOrigin, RunDataIndex, abandoned_rows, rows_at
from vorox.experiments.metadata import MetadataCache, Replacement
from vorox.records.executed_steps import executed_attempts
from vorox.records.run_context import recorded_config
from vorox.training.loop.metadata_export import RunExport, run_identity
from vorox.training.loop.provenance_recorder import metadata_target

_WINDOW_POSITIONS = 4096


def existing_target(run_directory: Path) -> Path | str:
    """Return the location of a run's metadata, for ``MetadataCache.query``.

    Raises:
        ConfigError: There is no database, or the connection string is not in the environment.
    """
    target = metadata_target(run_directory, recorded_config(run_directory).log)
    target = RunLayout(run_directory).metadata_database if target is None else target
    if isinstance(target, Path) and not target.exists():
        raise ConfigError(
            "Run has no metadata database", where=str(target),
            hint="add --refresh to create one from the run directory and the caches",
        )  # fmt: skip
    return target


def refresh_database(
    run_directory: Path, *, inventory: bool = False, sample_steps: tuple[int, int] | None = None
) -> None:
    """Write the rows of a run into its database; create it if there is none.

    Args:
        run_directory: The run.
        inventory: Also write the files, units and chunks of its caches.
        sample_steps: Also write the rows of these steps, first and last, into the table ``sample``.

    Raises:
        ConfigError: The run does not have these steps, or the settings of the database are not usable.
        DataError: A cache is missing, or the database is not available.
    """
    target = metadata_target(run_directory, recorded_config(run_directory).log)
    target = RunLayout(run_directory).metadata_database if target is None else target
    away: tuple[type[Exception], ...] = MetadataCache.errors(target)
    try:
        with (
            RunDataIndex.open(run_directory) as run_data,
            RunExport(target, run_directory, run_data.plan, run_data.readers, executed_attempts) as export,
        ):
            span = None if sample_steps is None else _span(run_data, *sample_steps)
            export.update()
            if inventory:
                for reader in {whole.directory: whole for whole in map(cache_of, run_data.readers)}.values():
                    export.cache.replace(reader.directory.name, _inventory(reader))
            if span is not None:
                export.cache.replace(export.run_id, _samples(export.run_id, run_data, *span))
    except away as error:
        where = str(target) if isinstance(target, Path) else "PostgreSQL"
        raise DataError(
            f"Metadata database is not available: {redact(str(error))}", where=where, hint="try again later"
        ) from error


def forget_run(run_directory: Path) -> str:
    """Remove the rows of a run from a shared database, before the run itself is removed.

    The database does not distinguish copies of a run directory: while another copy exists, the rows stay.

    Returns:
        The result as a sentence; empty if the run does not use a shared database.

    Raises:
        ConfigError: The connection string is not in the environment, or the client is not installed.
        DataError: The database is not available.
    """
    try:
        config = recorded_config(run_directory)
    except ConfigError:
        return "Its configuration cannot be read; rows in a shared metadata database, if any, stay."
    try:
        target = metadata_target(run_directory, config.log)
    except ConfigError as error:
        error.hint += "; or add --keep-metadata to keep the rows of the run"
        raise
    if not isinstance(target, str):
        return ""  # its database is in its own directory
    away: tuple[type[Exception], ...] = MetadataCache.errors(target)
    run_id = run_identity(run_directory)
    try:
        with MetadataCache(target) as cache:
            directory = cache.directory_of(run_id)
            if directory is None:
                return "The metadata database has no rows of it."
            is_elsewhere = directory != run_directory.resolve() and directory.is_dir()
            if is_elsewhere and run_identity(directory) == run_id:
                return f"Its rows in the metadata database stay, because {directory} is a copy of the same run."
            cache.remove_run(run_id)
    except away as error:
        raise DataError(
            f"Metadata database is not available: {redact(str(error))}", where="PostgreSQL",
            hint="try again when it is available, or add --keep-metadata to keep the rows of the run",
            saved="nothing was removed",
        ) from error  # fmt: skip
    return "Removed its rows from the metadata database."


def _span(run_data: RunDataIndex, first_step: int, last_step: int) -> tuple[int, int]:
    """Return the first and end position of consecutive steps."""
    return run_data.positions_of_step(first_step).start, run_data.positions_of_step(last_step).stop


def _origins(run_data: RunDataIndex, first_position: int, end_position: int) -> Iterator[RowOrigin]:
    for start in range(first_position, end_position, _WINDOW_POSITIONS):
        yield from rows_at(run_data, np.arange(start, min(start + _WINDOW_POSITIONS, end_position)))


def _inventory(reader: CacheReader) -> Iterator[Replacement]:
    """Yield the files, units and chunks of a cache; many rows, so only on request."""
    manifest, cache = reader.manifest, reader.directory.name
    files = ((cache, index, file.uri, file.version, file.size_bytes) for index, file in enumerate(reader.files))
    starts, numbers = manifest.unit_row_starts, manifest.units["unit"].astype(np.int64)
    units = (
        (cache, *record.item()[:5], first_row, end_row - first_row)
        for record, first_row, end_row in zip(
            manifest.units, starts[numbers].tolist(), starts[numbers + 1].tolist(), strict=True
        )
    )
    chunks = (
        (
            cache, chunk.unit, chunk.part, chunk.rows, chunk.tokens, chunk.padding_tokens, chunk.documents,
            chunk.size_bytes, chunk.content,
        )
        for chunk in map(manifest.chunk, range(len(manifest.chunks)))
    )  # fmt: skip
    for table, rows in (("source_file", files), ("unit", units), ("chunk", chunks)):
        yield Replacement(table, "cache = ?", (cache,), rows)


def _samples(run_id: str, run_data: RunDataIndex, first_position: int, end_position: int) -> Iterator[Replacement]:
    """Yield a row per piece of a document in a row of data, and the same of what abandoned attempts read there."""
    pieces = (
        (run_id, *piece) for origin in _origins(run_data, first_position, end_position) for piece in _pieces(origin)
    )
    abandoned = (
        (run_id, attempt, *piece)
        for attempt, origin in abandoned_rows(run_data, first_position, end_position)
        for piece in _pieces(origin)
    )
    for table, rows in (("sample", pieces), ("abandoned_sample", abandoned)):
        condition = "run_id = ? AND position >= ? AND position < ?"
        yield Replacement(table, condition, (run_id, first_position, end_position), rows)


def _pieces(origin: RowOrigin) -> Iterator[tuple[str | int, ...]]:
    for part, document in enumerate(origin.documents):
        yield (
            origin.position, part, origin.step, origin.slot, origin.source, origin.epoch, origin.row, document.uri,
            document.ordinal, document.byte_offset, document.byte_length, document.first_token, document.num_tokens,
            document.row_token, int(document.is_masked),
        )  # fmt: skip
