"""Making a unit count, however many builders there are.

A built unit goes in, a manifest that names its chunks comes out. In this order: the quarantine list; the chunk files,
durable under temporary names; then, under the manifest's lock, their names and the log entry. A crash anywhere leaves
a readable cache; chunks that have their name and no entry are checked and adopted. Invariants: the log never names a
chunk that is not durable; a chunk that it names is only ever replaced by one of the same content, because who comes
second finds the unit done and drops what it made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from vorox.core.atomic import drop_staged, make_directory, rename, stage_file, sync_directory
from vorox.core.errors import DataError
from vorox.data.cache.assemble import unit_statistics
from vorox.data.cache.chunk import Chunk
from vorox.data.cache.format import ChunkRecord
from vorox.data.cache.manifest import Manifest, UnitStatistics, check_contained, chunk_path, unit_entry
from vorox.data.cache.quarantine import check_budget, count_quarantined, report_damaged_files, write_quarantine
from vorox.data.cache.unit_builder import BuiltUnit, UnitBuilder
from vorox.data.documents import Unit


def commit_unit(
    manifest: Manifest,
    directory: Path,
    built: BuiltUnit,
    builder: UnitBuilder,
    *,
    replace: bool,
    on_written: Callable[[int], None],
) -> tuple[Manifest, bool]:
    """Write a unit and make it count.

    Args:
        manifest: A state of the cache, the newer the better.
        directory: The cache.
        built: The unit.
        builder: What it was built by.
        replace: Write the chunks of a unit that is done again, because they are lost; else what is done stays. The log
            gets an entry only if the files are not the same, byte for byte.
        on_written: Called with the bytes of each chunk file that is durable.

    Returns:
        The manifest now, and whether it was this call that made the unit count.

    Raises:
        DataError: Too many records are bad, or the manifest has other content for the unit.
    """
    write_quarantine(directory, built.unit_id, built.bad_records, builder.files)
    check_budget(directory, built, builder.files, builder.bad_record_fraction)
    records = [record for _, record in built.chunks]
    check_same_content(directory, manifest, built.unit_id, records)
    staged: list[tuple[Path, Path]] = []
    try:
        for data, record in built.chunks:
            path = chunk_path(directory, record.unit, record.part)
            make_directory(path.parent)
            check_contained(directory, path.parent)
            staged.append((stage_file(path, data), path))
            on_written(record.size_bytes)
        with manifest.exclusive(directory) as current:
            check_same_content(directory, current, built.unit_id, records)
            if current.has_unit(built.unit_id) and not replace:
                return current, False
            while staged:
                rename(*staged[0])
                del staged[0]
            if current.has_unit(built.unit_id) and current.unit_chunks(built.unit_id) == records:
                return current, True
            transforms = {name: count.to_json() for name, count in built.transforms.items()}
            now = current.appended(directory, [unit_entry(built.statistics, records, transforms)])
        report_damaged_files(directory, built, builder.files)
        return now, True
    finally:
        for temporary, _ in staged:
            drop_staged(temporary)


def check_same_content(directory: Path, manifest: Manifest, unit: int, records: Sequence[ChunkRecord]) -> None:
    """Refuse rows in the place of others.

    Raises:
        DataError: The manifest has other content for the unit.
    """
    committed = [record.content for record in manifest.unit_chunks(unit)]
    if manifest.has_unit(unit) and committed != [record.content for record in records]:
        raise DataError(
            f"building unit {unit} again gives other rows than were recorded", where=str(directory),
            hint="the source or the tokenizer's library changed: build into another data.cache.directory, "
            "or `vorox data build --force-rebuild` to replace the cache as a whole",
        )  # fmt: skip


def adopt_unit(manifest: Manifest, directory: Path, unit: Unit, builder: UnitBuilder) -> tuple[Manifest, bool]:
    """Make a unit count whose chunks somebody wrote who died before the log named them.

    Returns:
        The manifest now, and whether the unit was adopted.
    """
    found = _whole_chunks(directory, unit, builder)
    if found is None:
        return manifest, False
    records, statistics = found
    sync_directory(chunk_path(directory, unit.unit_id, 0).parent)  # the crash may have come before renames were durable
    with manifest.exclusive(directory) as current:
        if current.has_unit(unit.unit_id):
            return current, False
        return current.appended(directory, [unit_entry(statistics, records)]), True


def _whole_chunks(directory: Path, unit: Unit, builder: UnitBuilder) -> tuple[list[ChunkRecord], UnitStatistics] | None:
    """The chunks of a unit that are on disk, if they are whole and what would be built."""
    first = chunk_path(directory, unit.unit_id, 0)
    if not first.exists():
        return None
    try:
        check_contained(directory, first)
        chunks = [Chunk.open(first)]
        num_parts = chunks[0].header.num_parts
        chunks += [Chunk.open(chunk_path(directory, unit.unit_id, part)) for part in range(1, num_parts)]
        for part, chunk in enumerate(chunks):
            if chunk.origin != builder.origin(unit, part, num_parts):
                return None
            chunk.verify()
    except DataError:
        return None
    records = [chunk.record() for chunk in chunks]
    documents_D = np.unique(np.concatenate([chunk.documents() for chunk in chunks]))
    statistics = unit_statistics(unit.unit_id, documents_D, count_quarantined(directory, unit.unit_id))
    return records, statistics
