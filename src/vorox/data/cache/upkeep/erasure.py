"""Erase documents from a cache: their tokens become the filler of masked documents, everything else stays.

Documents go in, by version of their file and index of their record; new chunk files come out. The content digest of a
chunk identifies the rows as they were built, so plans and views stay valid, and a run that masks the documents computes
the same bits. Reading an erased document without a mask is refused (``order/document_masks.py: check_erased``).

The order is: new chunks, durable under temporary names; then, under the manifest's lock, a log entry that names the
documents, the shared units of other caches, the renames, and an entry with the new files. From the first entry on, a
unit that is built or repaired is erased before it is committed (``erased_unit``); the same call, or a repair, finishes
an erasure that a crash interrupted. The loss mask stays, because the number of targets of a row is the divisor of the
loss; so do the place and the size of the documents. The hash of their text becomes zero, because it can confirm a text.

Not erased here, and returned by path: other caches that hold the documents, and the signatures of the search for
duplicates. A process that has a chunk open reads the old file until it closes it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from vorox.core.errors import ConfigError, DataError
from vorox.core.files.atomic import discard_staged, remove_file, rename, stage_file, sweep_temporary
from vorox.data.cache.files.chunk import Chunk
from vorox.data.cache.files.format import CODECS, ChunkContent, ChunkRecord, ErasedDocuments, encode_chunk
from vorox.data.cache.files.manifest import Manifest, check_contained, chunk_path, erased_entry
from vorox.data.cache.units.duplicates import DIRECTORY_NAME as DUPLICATES_NAME
from vorox.data.cache.units.unit_builder import BuiltUnit
from vorox.data.cache.upkeep.gc import caches_beside
from vorox.data.cache.upkeep.replacement import refuse_builders
from vorox.data.cache.upkeep.unit_store import UnitStore
from vorox.data.documents import SourceFile, Unit, units_with
from vorox.data.recipe import Recipe, read_files, read_recipe, read_units

Record = tuple[str, int]
"""Version of a file, and index of a record in it."""
_Places = dict[int, frozenset[tuple[int, int]]]
"""Of each unit: number of a file in the unit, and index of a record in the file."""
_CODEC_NAMES = {number: name for name, number in CODECS.items()}


@dataclass(frozen=True, slots=True)
class Erased:
    """What an erasure did.

    Attributes:
        chunks: The chunk files that were replaced.
        awaited: Documents whose unit is not on disk; they are erased when it is built.
        remaining: Other files beside the cache that hold a document, or a signature of its text.
    """

    chunks: tuple[Path, ...]
    awaited: tuple[Record, ...]
    remaining: tuple[Path, ...]


def check_erasable(directory: Path) -> Recipe:
    """Return the recipe of a cache that documents can be erased from.

    Raises:
        ConfigError: It has images.
        DataError: The cache is damaged.
    """
    recipe = read_recipe(directory)
    if recipe.images is not None:
        raise ConfigError(
            "Documents cannot be erased from a cache with images", where=str(directory), saved="the cache is unchanged",
            hint="remove them from the source, and set data.cache.directory to another directory",
        )  # fmt: skip
    return recipe


def erase_documents(directory: Path, records: Collection[Record]) -> Erased:
    """Erase documents from a cache, durably. Erasing them again does nothing, or finishes an interrupted erasure.

    Args:
        directory: The cache.
        records: Version of the file, and index of the record in it, of each document. All texts that transforms made of
            a record are erased.

    Raises:
        ConfigError: The cache has no such document, it has images, or it is being built. Nothing is written.
        DataError: The cache is damaged. Nothing is written.
        OSError: A file cannot be written.
    """
    recipe = check_erasable(directory)
    refuse_builders(directory, "erase the documents")
    with Manifest.open(directory).exclusive(directory) as manifest:
        manifest.check_recipe(directory, recipe.digest)
        files, units = read_files(directory), read_units(directory)[: manifest.planned_units]
        places = _places(records, files, units)
        awaited = _check_known(directory, manifest, records, places, files, units)
        staged: list[tuple[Path, Path, ChunkRecord]] = []
        try:
            for unit, documents in places.items():
                for record in manifest.unit_chunks(unit):
                    staged += _stage(directory, record, documents, recipe.filler_id)
            added = [record for _, _, record in staged] + _interrupted(directory, manifest, places, staged)
            manifest = _record_erasures(directory, manifest, places)
            _forget_copies(directory, manifest, places)
            for temporary, path, _ in staged:
                rename(temporary, path)
            if added:
                manifest.append(directory, [{"add": [asdict(record) for record in added]}])
        finally:
            for temporary, _, _ in staged:
                discard_staged(temporary)
    return Erased(tuple(path for _, path, _ in staged), awaited, tuple(_remaining(directory, records, places)))


def erased_unit(built: BuiltUnit, documents: Collection[tuple[int, int]], filler_id: int) -> BuiltUnit:
    """Return a built unit without the tokens of some documents.

    Args:
        built: The unit.
        documents: Number of the file in the unit, and index of the record, of each.
        filler_id: The token in their place.
    """
    chunks: list[tuple[bytes | bytearray, ChunkRecord]] = []
    for data, record in built.chunks:
        chunk = Chunk(Path(f"<{built.place}>"), memoryview(data))
        chunks.append(_erased(chunk, documents, filler_id, record.unit) or (data, record))
    return replace(built, chunks=tuple(chunks))


def inherit_erasures(directory: Path, rebuilt: Path, manifest: Manifest) -> Manifest:
    """Record the erased documents of a cache in the one that is built to replace it; the caller holds its lock.

    Raises:
        DataError: The lists of the cache are damaged, so that its erased documents are not known.
    """
    before = _erased_so_far(directory)
    if not before:
        return manifest
    files, units = read_files(directory), read_units(directory)
    records = {
        (files[units[unit].file_indexes[number]].version, ordinal)
        for unit, number, ordinal in before
        if unit < len(units) and number < len(units[unit].file_indexes)
    }
    places = _places(records, read_files(rebuilt), read_units(rebuilt)[: manifest.planned_units])
    return _record_erasures(rebuilt, manifest, places)


def _erased_so_far(directory: Path) -> set[tuple[int, int, int]]:
    """Return the erased documents of a cache: unit, number of the file in the unit, and index of the record of each.

    The chunks say it as well as the manifest, which may be damaged or lost: then the cache is rebuilt because of it.
    """
    found = set[tuple[int, int, int]]()
    with contextlib.suppress(DataError):
        found |= Manifest.open(directory).erased
    for path in sorted((directory / "chunks").glob("*/u*.psc")):
        with contextlib.suppress(DataError, ValueError):
            chunk, unit = Chunk.open(path), int(path.name[1:].partition("-")[0])
            documents: list[tuple[int, int]] = chunk.documents()[["file", "ordinal"]][chunk.erased()].tolist()
            found |= {(unit, *document) for document in documents}
    return found


def _record_erasures(directory: Path, manifest: Manifest, places: _Places) -> Manifest:
    """Append the documents that the manifest does not name yet as erased."""
    fresh = [(unit, *one) for unit in places for one in sorted(places[unit] - manifest.erased_in(unit))]
    return manifest.append(directory, [erased_entry(fresh)]) if fresh else manifest


def _places(records: Collection[Record], files: Sequence[SourceFile], units: Sequence[Unit]) -> _Places:
    found: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    for record in records:
        holding: list[int] = units_with([record], files, units).tolist()
        for unit in holding:
            for number, index in enumerate(units[unit].file_indexes):
                if files[index].version == record[0]:
                    found[unit].add((number, record[1]))
    return {unit: frozenset(found[unit]) for unit in sorted(found)}


def _check_known(
    directory: Path,
    manifest: Manifest,
    records: Collection[Record],
    places: _Places,
    files: Sequence[SourceFile],
    units: Sequence[Unit],
) -> tuple[Record, ...]:
    """Refuse documents that the cache does not have; return those whose unit is not on disk."""
    found, awaited = set[Record](), set[Record]()
    for unit, documents in places.items():
        chunks = manifest.unit_chunks(unit)
        paths = [chunk_path(directory, unit, record.part) for record in chunks]
        by_number = {number: files[index].version for number, index in enumerate(units[unit].file_indexes)}
        if not chunks or not all(path.exists() for path in paths):
            awaited |= {(by_number[number], ordinal) for number, ordinal in documents}
        for path in filter(Path.exists, paths):
            stored = set(Chunk.open(path).documents()[["file", "ordinal"]].tolist())
            found |= {(by_number[number], ordinal) for number, ordinal in documents & stored}
    unknown = sorted(set(records) - found - awaited)
    if unknown:
        version, ordinal = unknown[0]
        names = [file.uri for file in files if file.version == version]
        raise ConfigError(
            f"The cache has no record {ordinal:,} of {names[0]}" if names
            else f"The cache has no file of version {version}",
            where=str(directory), saved="the cache is unchanged",
            hint="records count from 0; one may have been filtered out, or be in the cache of the other split: "
            "`vorox data where RUN --step N` shows those of a step",
        )  # fmt: skip
    return tuple(sorted(awaited - found))


def _stage(
    directory: Path, record: ChunkRecord, documents: Collection[tuple[int, int]], filler_id: int
) -> Iterator[tuple[Path, Path, ChunkRecord]]:
    """Yield temporary name, name and record of the new file of a chunk, unless there is nothing to erase in it."""
    path = chunk_path(directory, record.unit, record.part)
    check_contained(directory, path)
    if not path.exists():
        return
    chunk = Chunk.open(path)
    if not chunk.documents_to_erase(documents).any():
        return
    chunk.verify()
    if chunk.header.content.hex() != record.content:
        raise DataError(
            "The file is not the chunk that the manifest names", where=str(path), saved="the cache is unchanged",
            hint="run `vorox data repair` with the same configuration, then erase the documents",
        )  # fmt: skip
    made = _erased(chunk, documents, filler_id, record.unit)
    assert made is not None, "the chunk has a document to erase"
    data, new_record = made
    yield stage_file(path, data), path, new_record


def _erased(
    chunk: Chunk, documents: Collection[tuple[int, int]], filler_id: int, unit: int
) -> tuple[bytearray, ChunkRecord] | None:
    """Return a chunk without the tokens of some documents; ``None`` if it has none of them."""
    wanted_D = chunk.documents_to_erase(documents)
    if not wanted_D.any():
        return None
    content = chunk.content()
    is_erased_D = wanted_D | chunk.erased()
    tokens_RC, documents_D = content.tokens_RC.copy(), content.documents_D.copy()
    row_ptr, segments_S3 = content.row_ptr, content.segments_S3
    for row in chunk.rows_with(is_erased_D).tolist():
        parts_S3 = segments_S3[row_ptr[row] : row_ptr[row + 1]]
        is_erased_C = np.repeat(is_erased_D[parts_S3[:, 0]], parts_S3[:, 2])
        tokens_RC[row, : len(is_erased_C)][is_erased_C] = filler_id
    documents_D["text_xxh3"][is_erased_D] = 0
    made = ChunkContent(
        tokens_RC, row_ptr, segments_S3, documents_D, content.loss_mask_RC,
        ErasedDocuments(is_erased_D, chunk.header.content),
    )  # fmt: skip
    header = chunk.header
    return encode_chunk(
        made, chunk.origin, unit=unit, codec=_CODEC_NAMES[header.codec], block_rows=header.rows_per_block
    )


def _interrupted(
    directory: Path, manifest: Manifest, places: _Places, staged: Sequence[tuple[Path, Path, ChunkRecord]]
) -> list[ChunkRecord]:
    """Return the records of erased chunks that a crash kept from the manifest."""
    done = {path for _, path, _ in staged}
    found: list[ChunkRecord] = []
    for record in [record for unit in places for record in manifest.unit_chunks(unit)]:
        path = chunk_path(directory, record.unit, record.part)
        if path not in done and path.exists() and (chunk := Chunk.open(path)).is_erased:
            chunk.verify()
            now = chunk.record(record.unit)
            found += [now] if now != record and now.content == record.content else []
    return found


def _forget_copies(directory: Path, manifest: Manifest, places: _Places) -> None:
    """Remove what else of the cache holds the documents: temporary files, uncommitted chunks, shared units."""
    for folder in (directory, *sorted((directory / "chunks").glob("*"))):
        sweep_temporary(folder)
    records = [record for unit in places for record in manifest.unit_chunks(unit)]
    paths = {chunk_path(directory, record.unit, record.part) for record in records}
    for unit in places:
        for path in sorted(chunk_path(directory, unit, 0).parent.glob(f"u{unit:09d}-*.psc")):
            if path not in paths:  # of a builder that died before the log entry
                remove_file(path)
    store = UnitStore.of_cache(directory)
    if store is not None:
        store.forget({record.content for record in records}, [path for path in paths if path.exists()])


def _remaining(directory: Path, records: Collection[Record], places: _Places) -> Iterator[Path]:
    """Yield the files beside a cache that hold some documents, or signatures of their texts."""
    for unit in places:
        yield from sorted((directory / DUPLICATES_NAME).glob(f"*/u{unit:09d}.bin"))
    versions = {version for version, _ in records}
    chunks: list[Path] = []
    for other in caches_beside(directory):
        try:
            files, units = read_files(other), read_units(other)
            if not versions & {file.version for file in files}:
                continue
            manifest = Manifest.open(other)
            found = _places(records, files, units[: manifest.planned_units])
            for unit, documents in found.items():
                for record in manifest.unit_chunks(unit):
                    path = chunk_path(other, unit, record.part)
                    if path.exists() and Chunk.open(path).documents_to_erase(documents).any():
                        chunks.append(path)
        except (DataError, OSError):
            yield other  # it cannot be read: it may hold them
    store = UnitStore.of_cache(directory)
    yield from [*chunks, *(store.names_of(chunks) if store is not None else ())]
