"""What condition the chunks of a cache are in: which units have one that is lost or not what was committed.

``quick`` looks whether each file is there, has its size, and has a header, index and segments that match their hashes
and the manifest; ``full`` reads every byte. Nothing is changed; what is found can be built again from the source.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from vorox.core.errors import DataError
from vorox.data.cache.chunk import Chunk
from vorox.data.cache.format import ChunkRecord
from vorox.data.cache.manifest import Manifest, check_contained, chunk_path

Depth = Literal["quick", "full"]


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
        on_progress: Told (chunks looked at, chunks) after each.
    """
    found: dict[int, DataError] = {}
    for index in range(len(manifest.chunks)):
        record = manifest.chunk(index)
        problem = what_is_wrong(directory, record, depth)
        if problem is not None:
            found.setdefault(record.unit, problem)
        if on_progress is not None:
            on_progress(index + 1, len(manifest.chunks))
    return found


def is_intact(directory: Path, manifest: Manifest, unit: int, depth: Depth) -> bool:
    """Whether the chunks of a unit are what was committed."""
    return all(what_is_wrong(directory, record, depth) is None for record in manifest.unit_chunks(unit))


def what_is_wrong(directory: Path, record: ChunkRecord, depth: Depth) -> DataError | None:
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
