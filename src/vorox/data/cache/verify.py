"""What condition a cache is in: which units have a chunk that is lost or not what was committed, and the rest of it.

``quick`` looks whether each chunk is there, has its size, and has a header, index and segments that match their hashes
and the manifest; ``full`` reads every byte. ``verify`` is ``full`` for all files of a cache: recipe, files, units,
manifest, chunks and quarantine. Nothing is changed; what is found can be built again from the source. A thread for each
core reads chunks (hashing and decompressing need no interpreter lock), which are told in the manifest's order, so that
the verdict is that of one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from vorox.core.environment import usable_cores
from vorox.core.errors import DataError
from vorox.data.cache.chunk import REMEDY, Chunk
from vorox.data.cache.format import ChunkRecord
from vorox.data.cache.manifest import Manifest, check_contained, chunk_path
from vorox.data.cache.quarantine import verify_quarantine
from vorox.data.cache.recipe import (
    UNITS_NAME,
    Recipe,
    check_recipe,
    read_files,
    read_recipe,
    read_units,
    source_set_digest,
)
from vorox.data.documents import SourceFile, Unit
from vorox.data.prefetch import map_ordered

Depth = Literal["quick", "full"]

MOST_BYTES_HELD = 1 << 29
"""What the chunks that are checked at the same time may come to in memory."""
_TIMES_HELD = 3
"""The blocks of a chunk, decompressed, then joined; and what is computed from them."""


def damaged_units(
    directory: Path,
    manifest: Manifest,
    depth: Depth,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[int, DataError]:
    """Units that are done and have a chunk that is lost or damaged, with what is wrong with the first of it.

    Args:
        directory: The cache.
        manifest: Its state.
        depth: How closely to look.
        on_progress: Told (bytes of chunk files looked at, all of them) after each chunk.
    """
    found: dict[int, DataError] = {}
    for record, problem in _checked(manifest, lambda record: find_damage(directory, record, depth), on_progress):
        if problem is not None:
            found.setdefault(record.unit, problem)
    return found


def _checked(
    manifest: Manifest,
    check: Callable[[ChunkRecord], DataError | None],
    on_progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[ChunkRecord, DataError | None]]:
    """Every chunk with what is wrong with it, in the manifest's order."""
    done, total = 0, int(manifest.chunks["size_bytes"].sum())
    records = map(manifest.chunk, range(len(manifest.chunks)))
    for record, problem in map_ordered(check, records, check_threads(manifest)):
        done += record.size_bytes
        if on_progress is not None:
            on_progress(done, total)
        yield record, problem


def check_threads(manifest: Manifest) -> int:
    """Threads that check chunks at the same time: one for each core, fewer where chunks are so large."""
    chunks = manifest.chunks
    if not len(chunks):
        return 1
    positions = int((chunks["tokens"] + chunks["padding_tokens"]).max())
    held_bytes = int(chunks["size_bytes"].max()) + _TIMES_HELD * positions * np.dtype(np.uint32).itemsize
    return max(1, min(usable_cores(), MOST_BYTES_HELD // held_bytes))


def is_intact(directory: Path, manifest: Manifest, unit: int, depth: Depth) -> bool:
    """Whether the chunks of a unit are what was committed."""
    return all(find_damage(directory, record, depth) is None for record in manifest.unit_chunks(unit))


def find_damage(directory: Path, record: ChunkRecord, depth: Depth) -> DataError | None:
    """What is wrong with a chunk; ``None`` if nothing is."""
    path = chunk_path(directory, record.unit, record.part)
    try:
        check_contained(directory, path)
        chunk = Chunk.open(path)
        if depth == "full":
            chunk.verify()
            matches = chunk.record() == record
        else:
            matches = chunk.matches(record)
    except DataError as error:
        return error
    return None if matches else DataError("the file is not the one that the manifest names", where=str(path))


def verify(
    directory: Path, recipe: Recipe, manifest: Manifest, on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Check every byte of every chunk file and every line of the lists beside them.

    Args:
        directory: The cache.
        recipe: What it was opened as.
        manifest: What it was opened with.
        on_progress: Told (bytes of chunk files checked, all of them) after each chunk.

    Raises:
        DataError: Naming everything that is damaged.
    """
    check_recipe(directory, read_recipe(directory), recipe)
    now, planned = Manifest.read_log(directory), manifest.planned_units
    now.check_recipe(directory, recipe.digest)
    if not manifest.contents <= now.contents:
        raise DataError("the manifest changed since the cache was opened", where=str(directory), hint="verify again")
    files, units = read_files(directory), read_units(directory)
    if len(units) < planned:
        raise DataError(
            f"the manifest speaks of {planned:,} units, the list of units has {len(units):,}",
            where=str(directory / UNITS_NAME), hint="restore the file from a copy, or build the cache again",
        )  # fmt: skip

    def check(record: ChunkRecord) -> DataError | None:
        try:
            _verify_chunk(directory, recipe, record, units, files)
        except DataError as error:
            return error
        return None

    problems = [problem for _, problem in _checked(manifest, check, on_progress) if problem is not None]
    if problems:
        raise DataError(
            f"{len(problems):,} of {len(manifest.chunks):,} chunks are damaged; the first: {problems[0].what}",
            where=", ".join(problem.where for problem in problems[:10]), hint=REMEDY,
        )  # fmt: skip
    for unit, quarantined in manifest.units[["unit", "quarantined"]].tolist():
        if quarantined:
            verify_quarantine(directory, unit, quarantined)


def _verify_chunk(
    directory: Path, recipe: Recipe, record: ChunkRecord, units: Sequence[Unit], files: Sequence[SourceFile]
) -> None:
    path = chunk_path(directory, record.unit, record.part)
    check_contained(directory, path)
    chunk = Chunk.open(path)
    content = chunk.verify()
    found = chunk.record()
    if found != record:
        raise DataError(f"the manifest says {record}, the file is {found}", where=str(path), hint=REMEDY)
    largest = int(content.tokens_RC.max())
    if largest >= recipe.vocab_size:
        raise DataError(f"token id {largest} in a cache of {recipe.vocab_size} tokens", where=str(path), hint=REMEDY)
    unit = units[record.unit]
    known = max(span.file_index for span in unit.spans) < len(files)
    if not known or chunk.origin.source_set != source_set_digest(unit, files):
        raise DataError(
            f"the chunk was not built from what the lists of files and units say of unit {record.unit}",
            where=str(path), hint="restore the lists from a copy, or `vorox data build --force-rebuild`",
        )  # fmt: skip
    if chunk.origin.recipe.hex() != recipe.digest:
        raise DataError("the chunk was built by another recipe", where=str(path), hint=REMEDY)
