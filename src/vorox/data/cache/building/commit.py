"""Commit built units to a cache, and units of other caches, safely with any number of concurrent builders.

A built unit goes in, a manifest that names its chunks comes out. The order is: the quarantine list; the chunk files,
durable under temporary names; then, under the manifest's lock, the renames and the log entry. A crash at any point
leaves a readable cache; renamed chunks without a log entry are verified and adopted. A unit that another cache has
published (``unit_store``) is linked in instead of being built. Invariants: the log never names a chunk that is not
durable; a committed chunk is only replaced by one with the same content, because a second builder of the unit finds it
committed and drops its own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vorox.core.errors import DataError
from vorox.core.files.atomic import discard_staged, is_disk_full, make_directory, rename, stage_file, sync_directory
from vorox.core.files.disk_errors import disk_error, room_text
from vorox.data.cache.files.chunk import Chunk
from vorox.data.cache.files.format import ChunkRecord
from vorox.data.cache.files.manifest import Manifest, UnitStatistics, check_contained, chunk_path, unit_entry
from vorox.data.cache.files.quarantine import check_budget, count_quarantined, report_damaged_files, write_quarantine
from vorox.data.cache.units.document_tokens import unit_statistics
from vorox.data.cache.units.record_texts import documents_of_unit
from vorox.data.cache.units.unit_builder import BuiltUnit, UnitBuilder
from vorox.data.cache.upkeep.erasure import erased_unit
from vorox.data.cache.upkeep.unit_store import UnitStore
from vorox.data.documents import Unit


def commit_unit(
    manifest: Manifest,
    directory: Path,
    built: BuiltUnit,
    builder: UnitBuilder,
    *,
    replace: bool,
) -> tuple[Manifest, bool]:
    """Write and commit a unit.

    Args:
        manifest: A recent state of the cache.
        directory: The cache.
        built: The unit.
        builder: The builder that built it.
        replace: Rewrite the lost chunks of a committed unit; else a committed unit stays as it is. The log gets an
            entry only if the new files differ in any byte.

    Returns:
        The new manifest, and whether this call committed the unit.

    Raises:
        DataError: Too many records are bad, or the manifest has different content for the unit.
    """
    if built.bad_records:
        write_quarantine(directory, built.unit_id, built.bad_records, builder.files)
        check_budget(
            directory, built.unit_id, built.bad_records, built.records_read, builder.files, builder.bad_record_fraction,
            aborted=built.aborted,
        )  # fmt: skip
    unit, filler_id = built.unit_id, builder.recipe.filler_id
    while True:
        erased = manifest.erased_in(unit)
        kept = erased_unit(built, erased, filler_id) if erased else built
        now, is_done = _append_built(manifest, directory, kept, replace=replace)
        if is_done or now.erased_in(unit) == erased:
            break
        manifest = now  # documents were erased meanwhile
    if is_done and built.bad_records:
        report_damaged_files(directory, unit, built.bad_records, builder.files)
    return now, is_done


def _append_built(manifest: Manifest, directory: Path, built: BuiltUnit, *, replace: bool) -> tuple[Manifest, bool]:
    records = [record for _, record in built.chunks]
    check_same_content(directory, manifest, built.unit_id, records)

    def staged() -> Iterator[tuple[Path, Path]]:
        for data, record in built.chunks:
            path = chunk_path(directory, record.unit, record.part)
            make_directory(path.parent)
            check_contained(directory, path.parent)
            yield stage_file(path, data), path

    transforms = {name: count.to_json() for name, count in built.transforms.items()}
    entry = unit_entry(built.statistics, records, transforms)
    return _append(manifest, directory, built.unit_id, records, staged(), entry, replace=replace)


def _append(
    manifest: Manifest,
    directory: Path,
    unit: int,
    records: Sequence[ChunkRecord],
    staged: Iterator[tuple[Path, Path]],
    entry: Mapping[str, Any],
    *,
    replace: bool,
) -> tuple[Manifest, bool]:
    """Give the staged chunks of a unit their names and append its entry.

    Does nothing if it is committed, or documents of it were erased since ``manifest``.
    """
    waiting: list[tuple[Path, Path]] = []
    temporaries: list[Path] = []
    try:
        for temporary, path in staged:
            waiting.append((temporary, path))
            temporaries.append(temporary)
        with manifest.exclusive(directory) as current:
            check_same_content(directory, current, unit, records)
            if (current.has_unit(unit) and not replace) or current.erased_in(unit) != manifest.erased_in(unit):
                return current, False
            for temporary, path in waiting:
                rename(temporary, path)
            if current.has_unit(unit) and current.unit_chunks(unit) == records:
                return current, True
            return current.append(directory, [entry]), True
    finally:
        for temporary in temporaries:
            discard_staged(temporary)  # also where it is a second link to its own target, which a rename keeps


def check_same_content(directory: Path, manifest: Manifest, unit: int, records: Sequence[ChunkRecord]) -> None:
    """Refuse a unit whose rows differ from the committed ones.

    Raises:
        DataError: The manifest has different content for the unit.
    """
    committed = [record.content for record in manifest.unit_chunks(unit)]
    if manifest.has_unit(unit) and committed != [record.content for record in records]:
        raise DataError(
            f"Rebuilding unit {unit} gives different rows than were committed", where=str(directory),
            hint="the source or the tokenizer library has changed: build into another data.cache.directory, "
            "or run `vorox data build --force-rebuild` to replace the whole cache",
        )  # fmt: skip


def link_unit(
    manifest: Manifest, directory: Path, unit: Unit, builder: UnitBuilder, store: UnitStore, *, replace: bool = False
) -> tuple[Manifest, bool]:
    """Commit a unit that another cache has built, by links to its chunks.

    Args:
        manifest: A recent state of the cache.
        directory: The cache.
        unit: The unit.
        builder: The builder of the cache.
        store: The units of other caches.
        replace: The chunks of the unit are lost or damaged; every byte of those in the store is checked.

    Returns:
        The new manifest, and whether this call committed the unit.

    Raises:
        DataError: Too many records are bad, or the manifest has different content for the unit.
    """
    if manifest.erased_in(unit.unit_id):
        return manifest, False  # the store has the unit with the documents, if at all
    key = builder.key_of(unit)
    found = store.find(key, builder.origins(unit, 1)[0])
    if found is None or (replace and not store.is_intact(key, found)):
        return manifest, False
    unit_id, records, bad = unit.unit_id, found.records(unit.unit_id), found.bad_records_of(unit)
    if replace and [one.content for one in manifest.unit_chunks(unit_id)] != [one.content for one in records]:
        return manifest, False
    if bad:
        write_quarantine(directory, unit_id, bad, builder.files)
        check_budget(directory, unit_id, bad, found.records_read, builder.files, builder.bad_record_fraction)
    check_contained(directory, chunk_path(directory, unit_id, 0).parent)
    entry = unit_entry(dataclasses.replace(found.statistics, unit=unit_id), records, found.transforms)
    try:
        staged = store.stage(key, found, directory, unit_id)
        now, is_done = _append(manifest, directory, unit_id, records, staged, entry, replace=replace)
    except FileNotFoundError:
        return manifest, False  # collected meanwhile
    if is_done and bad:
        report_damaged_files(directory, unit_id, bad, builder.files)
    return now, is_done


def adopt_unit(manifest: Manifest, directory: Path, unit: Unit, builder: UnitBuilder) -> tuple[Manifest, bool]:
    """Commit a unit whose chunks were written by a builder that died before the log entry.

    Returns:
        The new manifest, and whether the unit was adopted.
    """
    found = _read_intact(directory, unit, builder)
    if found is None:
        return manifest, False
    records, statistics = found
    sync_directory(chunk_path(directory, unit.unit_id, 0).parent)  # the crash may have preceded the sync of the renames
    with manifest.exclusive(directory) as current:
        if current.has_unit(unit.unit_id) or current.erased_in(unit.unit_id):
            return current, False
        return current.append(directory, [unit_entry(statistics, records)]), True


def _read_intact(directory: Path, unit: Unit, builder: UnitBuilder) -> tuple[list[ChunkRecord], UnitStatistics] | None:
    """Return the chunks of a unit on disk if they are complete, intact and of this recipe and source; else None."""
    first = chunk_path(directory, unit.unit_id, 0)
    if not first.exists():
        return None
    try:
        check_contained(directory, first)
        chunks = [Chunk.open(first)]
        num_parts = chunks[0].header.num_parts
        chunks += [Chunk.open(chunk_path(directory, unit.unit_id, part)) for part in range(1, num_parts)]
        if [chunk.origin for chunk in chunks] != builder.origins(unit, num_parts):
            return None
        contents = [chunk.verify() for chunk in chunks]
    except DataError:
        return None
    if any(chunk.is_erased for chunk in chunks):
        return None
    records = [chunk.record(unit.unit_id) for chunk in chunks]
    documents_D = documents_of_unit(
        [chunk.documents() for chunk in chunks], [chunk.segment_table() for chunk in chunks]
    )
    statistics = unit_statistics(unit.unit_id, documents_D, count_quarantined(directory, unit.unit_id), contents)
    return records, statistics


def cache_write_error(error: OSError, directory: Path, *, saved: str, needed_bytes: int) -> DataError:
    """Return the error for a failed write to a cache."""
    where = str(error.filename or directory)
    if not is_disk_full(error):
        known = disk_error(error, where)
        return DataError(
            f"Cannot write to the cache: {os.strerror(error.errno) if error.errno else error}", where=where,
            saved=saved,
            hint=known.hint if known else "grant write permission, or set data.cache.directory to a writable path",
        )  # fmt: skip
    return DataError(
        f"No space left for the rest of the cache: {room_text(needed_bytes, directory, error)}",
        where=where, saved=saved,
        hint="free some space, or set data.cache.directory to another disk, and run the same command again",
    )  # fmt: skip
