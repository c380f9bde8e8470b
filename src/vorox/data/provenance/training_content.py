"""Training content: what some steps of a run read, counted by source and by file.

The plan gives the rows of the steps, the chunks give the documents and tokens of a row; no row is decompressed and no
log is trusted. A row that is read again counts again in ``tokens``, and once in ``distinct_tokens``. Padding is not
counted, and neither is the filler in place of a masked document.

Shape legend: R rows of a chunk, S segments, D documents, K documents read in a unit, F files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vorox.data.cache.building.report import transform_counts
from vorox.data.cache.files.chunk import Chunk
from vorox.data.cache.reader import CacheReader
from vorox.data.order.difficulty_buckets import cache_of
from vorox.data.order.document_masks import DocumentMasks, Record
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.data.transforms.apply import TransformCount

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FileContent:
    """The part of a file that was read.

    Attributes:
        uri: The file.
        size_bytes: Size of the whole file.
        version: Identifier of its content: the SHA-256 for local files.
        documents: Distinct documents (records) with tokens in the rows read.
        tokens: Their tokens in the rows read, every reading counted.
    """

    uri: str
    size_bytes: int
    version: str
    documents: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SourceContent:
    """The part of a source that was read.

    Attributes:
        name: Name of the source; its difficulty buckets are added up.
        rows: Rows read, every reading counted, with their fillers.
        distinct_rows: Rows read at least once.
        tokens: Tokens of the rows, including end-of-text tokens, every reading counted.
        distinct_tokens: Tokens of the distinct rows.
        documents: Distinct documents (records) with tokens in them.
        files: The files with such documents, in the order of the source.
        source_files: Files of the whole source.
        source_rows: Rows of its training cache, as far as they are built.
        recipe: The recipe of the cache: source, split and packing, transforms.
        recipe_sha256: Digest of the recipe.
        content_sha256: Dataset digest of the cache; ``None`` if units of it are missing.
        quarantined: Records of the cache's units that could not be read.
        transforms: Counts of each transform over the units of the cache, by its index and name: ``0/length``.
    """

    name: str
    rows: int
    distinct_rows: int
    tokens: int
    distinct_tokens: int
    documents: int
    files: tuple[FileContent, ...]
    source_files: int
    source_rows: int
    recipe: Mapping[str, object]
    recipe_sha256: str
    content_sha256: str | None
    quarantined: int
    transforms: Mapping[str, TransformCount]

    @property
    def epochs(self) -> float:
        """Mean number of readings of a row of the source."""
        return self.rows / max(self.source_rows, 1)


def training_content(run_data: RunDataIndex, steps: Int64Array) -> tuple[SourceContent, ...]:
    """Count what some steps read, by source in the plan's order.

    Args:
        run_data: The run.
        steps: The steps, from 1, ascending. The plan covers them.

    Raises:
        DataError: A chunk is missing or damaged.
    """
    masks = DocumentMasks(run_data.plan.state)
    masked_uses = {
        start: _uses_by_source(run_data, steps[steps >= run_data.step_and_slot(start)[0]])
        for start in {event.start_position for event in masks.events}
    }
    caches: dict[str, CacheReader] = {}
    for source, reader in zip(run_data.plan.sources, run_data.readers, strict=True):
        caches.setdefault(source.configured_name, cache_of(reader))
    found: list[SourceContent] = []
    for name, uses in _uses_by_source(run_data, steps).items():
        masked = {record: masked_uses[start][name] for record, start in masks.starts_of(name).items()}
        found.append(_source_content(name, caches[name], uses, masked))
    return tuple(found)


def _uses_by_source(run_data: RunDataIndex, steps: Int64Array) -> dict[str, Int64Array]:
    """Return how often some steps read each row of the cache of each source."""
    found: dict[str, Int64Array] = {}
    sources = zip(run_data.plan.sources, run_data.readers, run_data.row_uses(steps), strict=True)
    for source, reader, uses in sources:
        total = found.setdefault(source.configured_name, np.zeros(cache_of(reader).num_rows, np.int64))
        if isinstance(reader, CacheReader):
            total += uses
        else:
            rows = np.flatnonzero(uses)
            total[reader.base_rows(rows)] += uses[rows]
    return found


def _source_content(
    name: str, cache: CacheReader, uses: Int64Array, masked: Mapping[Record, Int64Array]
) -> SourceContent:
    """Count what was read of a source; ``masked`` has the uses of rows in which a document was a filler."""
    tokens_F, documents_F = np.zeros((2, len(cache.files)), np.int64)
    distinct_tokens = 0
    manifest, starts = cache.manifest, cache.manifest.chunk_row_starts
    chunks_by_unit: dict[int, list[int]] = {}
    for index in np.flatnonzero(np.add.reduceat(uses, starts[:-1])).tolist():
        chunks_by_unit.setdefault(int(manifest.chunks["unit"][index]), []).append(index)
    for indexes in chunks_by_unit.values():  # a document is in one unit, but may be in several chunks of it
        documents: list[npt.NDArray[np.void]] = []
        for index in indexes:
            rows = slice(starts[index], starts[index + 1])
            here = cache.documents(index)
            fillers = _fillers(here, cache, masked)
            uses_S = _segment_uses(cache.chunk(index), uses[rows], {at: all_[rows] for at, all_ in fillers.items()})
            distinct_tokens += _count_chunk(cache.chunk(index), here, uses_S, tokens_F, documents)
        found_K = np.unique(np.concatenate(documents)[["file", "ordinal"]])
        np.add.at(documents_F, found_K["file"], 1)
    return SourceContent(
        name=name,
        rows=int(uses.sum()),
        distinct_rows=int(np.count_nonzero(uses)),
        tokens=int(tokens_F.sum()),
        distinct_tokens=distinct_tokens,
        documents=int(documents_F.sum()),
        files=tuple(
            FileContent(file.uri, file.size_bytes, file.version, int(documents), int(tokens))
            for file, documents, tokens in zip(cache.files, documents_F, tokens_F, strict=True)
            if documents
        ),
        source_files=len(cache.files),
        source_rows=cache.num_rows,
        recipe=cache.recipe.to_json(),
        recipe_sha256=cache.recipe.digest,
        content_sha256=None if len(manifest.missing_units()) or not manifest.units_final else cache.digest,
        quarantined=int(manifest.units["quarantined"].sum(dtype=np.int64)),
        transforms=transform_counts(cache.directory),
    )


def _fillers(
    documents_D: npt.NDArray[np.void], cache: CacheReader, masked: Mapping[Record, Int64Array]
) -> dict[int, Int64Array]:
    """Return the masked documents of a chunk, by index, with the uses of rows in which they were a filler."""
    if not masked:
        return {}
    places: list[Record] = [
        (cache.files[int(file)].version, int(ordinal))
        for file, ordinal in zip(documents_D["file"], documents_D["ordinal"], strict=True)
    ]
    return {index: masked[record] for index, record in enumerate(places) if record in masked}


def _segment_uses(chunk: Chunk, uses_R: Int64Array, fillers: Mapping[int, Int64Array]) -> Int64Array:
    """Return how often the tokens of each segment were read: with its row, except as a filler."""
    row_ptr, segments_S3 = chunk.segment_table()
    num_segments_R = np.diff(row_ptr.astype(np.int64))
    uses_S = np.repeat(uses_R, num_segments_R)
    for document, filler_R in fillers.items():
        uses_S -= np.where(segments_S3[:, 0] == document, np.repeat(filler_R, num_segments_R), 0)
    return uses_S


def _count_chunk(
    chunk: Chunk,
    documents_D: npt.NDArray[np.void],
    uses_S: Int64Array,
    tokens_F: Int64Array,
    documents: list[npt.NDArray[np.void]],
) -> int:
    """Add the tokens of a chunk to those of its files, and its documents to a list; return its distinct tokens."""
    _, segments_S3 = chunk.segment_table()
    document_S, length_S = segments_S3[:, 0], segments_S3[:, 2].astype(np.int64)
    np.add.at(tokens_F, documents_D["file"][document_S], length_S * uses_S)
    documents.append(documents_D[np.unique(document_S[uses_S > 0])])
    return int(length_S[uses_S > 0].sum())
