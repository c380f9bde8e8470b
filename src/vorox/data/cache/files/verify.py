"""Verify a cache: find units with lost or damaged chunks, or check every file of the cache.

A ``quick`` check looks at a chunk's size and compares its header, index and segments with their hashes and the
manifest; ``full`` reads every byte. ``verify`` is a full check of all files: recipe, files, units, manifest, chunks and
quarantine. Nothing is changed; damaged units can be rebuilt from the source. One thread per core checks chunks (hashing
and decompression release the GIL); results are in the manifest's order, as from a single thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from vorox.core.errors import DataError
from vorox.core.platform.environment import usable_cores
from vorox.data.cache.files.chunk import REMEDY, Chunk
from vorox.data.cache.files.format import ChunkRecord, source_set_digest
from vorox.data.cache.files.manifest import Manifest, check_contained, chunk_path
from vorox.data.cache.files.quarantine import verify_quarantine
from vorox.data.documents import SourceFile, Unit
from vorox.data.prefetch import map_ordered
from vorox.data.recipe import UNITS_NAME, Recipe, check_recipe, read_files, read_recipe, read_units

Depth = Literal["quick", "full"]

MAX_BYTES_HELD = 1 << 29
"""Memory limit for the chunks that are checked concurrently."""
_COPIES_HELD = 3
"""Copies of a chunk in memory: the decompressed blocks, the joined ones, and values computed from them."""


def damaged_units(
    directory: Path,
    manifest: Manifest,
    depth: Depth,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[int, DataError]:
    """Return the committed units with a lost or damaged chunk, each with its first error.

    Args:
        directory: The cache.
        manifest: Its state.
        depth: How thoroughly to check.
        on_progress: Called after each chunk with (bytes checked, total bytes).
    """
    found: dict[int, DataError] = {}

    def check(record: ChunkRecord) -> DataError | None:
        return find_damage(directory, record, depth, manifest.erased_in(record.unit))

    for record, problem in _check_chunks(manifest, check, on_progress):
        if problem is not None:
            found.setdefault(record.unit, problem)
    return found


def _check_chunks(
    manifest: Manifest,
    check: Callable[[ChunkRecord], DataError | None],
    on_progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[ChunkRecord, DataError | None]]:
    """Yield every chunk with its error or None, in the manifest's order."""
    done, total = 0, int(manifest.chunks["size_bytes"].sum())
    records = map(manifest.chunk, range(len(manifest.chunks)))
    for record, problem in map_ordered(check, records, check_threads(manifest)):
        done += record.size_bytes
        if on_progress is not None:
            on_progress(done, total)
        yield record, problem


def check_threads(manifest: Manifest) -> int:
    """Return the number of checking threads: one per core, fewer for large chunks."""
    chunks = manifest.chunks
    if not len(chunks):
        return 1
    positions = int((chunks["tokens"] + chunks["padding_tokens"]).max())
    held_bytes = int(chunks["size_bytes"].max()) + _COPIES_HELD * positions * np.dtype(np.uint32).itemsize
    return max(1, min(usable_cores(), MAX_BYTES_HELD // held_bytes))


def is_intact(directory: Path, manifest: Manifest, unit: int, depth: Depth) -> bool:
    """Whether all chunks of a unit match the manifest."""
    erased = manifest.erased_in(unit)
    return all(find_damage(directory, record, depth, erased) is None for record in manifest.unit_chunks(unit))


def find_damage(
    directory: Path, record: ChunkRecord, depth: Depth, erased: Collection[tuple[int, int]] = ()
) -> DataError | None:
    """Return the error of a chunk, or None if it is intact; ``erased`` names documents that it must not hold."""
    path = chunk_path(directory, record.unit, record.part)
    try:
        check_contained(directory, path)
        chunk = Chunk.open(path)
        if depth == "full":
            chunk.verify()
            matches = chunk.record(record.unit) == record
        else:
            matches = chunk.matches(record)
        _check_erased(chunk, erased)
    except DataError as error:
        return error
    return None if matches else DataError("The file is not the chunk that the manifest names", where=str(path))


def _check_erased(chunk: Chunk, erased: Collection[tuple[int, int]]) -> None:
    if erased and chunk.documents_to_erase(erased).any():
        raise DataError("The chunk still holds a document that was erased", where=str(chunk.path), hint=REMEDY)


def verify(
    directory: Path, recipe: Recipe, manifest: Manifest, on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Check every byte of every chunk file and every line of the manifest and the lists.

    Args:
        directory: The cache.
        recipe: Its recipe when it was opened.
        manifest: Its manifest when it was opened.
        on_progress: Called after each chunk with (bytes checked, total bytes).

    Raises:
        DataError: Something is damaged; the message lists it.
    """
    check_recipe(directory, read_recipe(directory), recipe)
    now, planned = Manifest.read_log(directory), manifest.planned_units
    now.check_recipe(directory, recipe.digest)
    if not manifest.contents <= now.contents:
        raise DataError(
            "The manifest has changed since the cache was opened", where=str(directory), hint="verify again"
        )
    files, units = read_files(directory), read_units(directory)
    if len(units) < planned:
        raise DataError(
            f"The manifest has {planned:,} units, but the list of units has {len(units):,}",
            where=str(directory / UNITS_NAME), hint="restore the file from a copy, or build the cache again",
        )  # fmt: skip

    def check(record: ChunkRecord) -> DataError | None:
        try:
            _verify_chunk(directory, recipe, record, units, files, now.erased_in(record.unit))
        except DataError as error:
            return error
        return None

    problems = [problem for _, problem in _check_chunks(manifest, check, on_progress) if problem is not None]
    if problems:
        raise DataError(
            f"{len(problems):,} of {len(manifest.chunks):,} chunks are damaged; the first error: {problems[0].what}",
            where=", ".join(problem.where for problem in problems[:10]), hint=REMEDY,
        )  # fmt: skip
    for unit, quarantined in manifest.units[["unit", "quarantined"]].tolist():
        if quarantined:
            verify_quarantine(directory, unit, quarantined)


def _verify_chunk(
    directory: Path,
    recipe: Recipe,
    record: ChunkRecord,
    units: Sequence[Unit],
    files: Sequence[SourceFile],
    erased: Collection[tuple[int, int]],
) -> None:
    path = chunk_path(directory, record.unit, record.part)
    check_contained(directory, path)
    chunk = Chunk.open(path)
    content = chunk.verify()
    found = chunk.record(record.unit)
    if found != record:
        raise DataError(f"The manifest has {record}, but the file is {found}", where=str(path), hint=REMEDY)
    _check_erased(chunk, erased)
    largest = int(content.tokens_RC.max())
    if largest >= recipe.num_ids:
        raise DataError(
            f"Token id {largest} exceeds the vocabulary of {recipe.num_ids} tokens", where=str(path), hint=REMEDY
        )
    unit = units[record.unit]
    known = max(span.file_index for span in unit.spans) < len(files)
    if not known or chunk.origin.source_set != source_set_digest(unit, files, uses_paths=recipe.uses_paths):
        raise DataError(
            f"The chunk does not match the listed files and spans of unit {record.unit}",
            where=str(path), hint="restore the lists from a copy, or run `vorox data build --force-rebuild`",
        )  # fmt: skip
    if chunk.origin.recipe.hex() != recipe.digest:
        raise DataError("The chunk was built by another recipe", where=str(path), hint=REMEDY)
