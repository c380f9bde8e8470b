"""Read a cache: rows by index, each checked, and the documents they come from.

Rows are numbered in unit order, independent of build order. Chunk files are mapped on first use and stay mapped, up to
a limit; reading is thread-safe and takes no lock. Invariant: ``read_rows`` returns what was written, or raises.

Legend: N requested rows, C tokens of a row.
"""

from __future__ import annotations

import errno
import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.core.pluralize import pluralize
from vorox.data.cache.files.chunk import REMEDY, Chunk, split_rows
from vorox.data.cache.files.format import SEGMENT_BYTES
from vorox.data.cache.files.manifest import Manifest, check_contained, chunk_path
from vorox.data.cache.files.verify import is_intact, verify
from vorox.data.cache.units.record_texts import copies_of_segments
from vorox.data.documents import DocumentSpan, SourceFile, Unit
from vorox.data.images.reading import ImageStore
from vorox.data.recipe import Recipe, check_recipe, read_files, read_recipe, read_units
from vorox.data.rows import RowBlock

if TYPE_CHECKING:
    from vorox.data.cache.building.scheduler import BuildScheduler

_MAX_OPEN_CHUNKS = 4096
_REOPEN_ATTEMPTS = 50
_REPAIR_ATTEMPTS = 3


class CacheReader:
    """An open cache at the state of one manifest. Create it with ``open``.

    Attributes:
        directory: The cache.
        recipe: The recipe of the cache.
        manifest: Its chunks and units.
        repair: Rebuilds a unit with a lost or damaged chunk; None: damage is an error.
        background: Builds missing units meanwhile; its errors are raised where the units are awaited.
    """

    def __init__(self, directory: Path, recipe: Recipe, manifest: Manifest, max_open_chunks: int) -> None:
        self.directory, self.recipe, self.manifest = directory, recipe, manifest
        self._max_open_chunks = max_open_chunks
        self._chunk_row_starts = manifest.chunk_row_starts
        self._dtype = np.dtype(f"<u{recipe.token_bytes}")
        self._open_chunks: dict[int, Chunk] = {}
        self._files_by_unit: dict[int, npt.NDArray[np.int64]] = {}
        self._copies_by_unit: dict[int, list[npt.NDArray[np.int64]]] = {}
        self._chunks_lock = threading.Lock()
        self._repair_lock = threading.Lock()
        self.repair: Callable[[int, DataError], None] | None = None
        self.background: BuildScheduler | None = None
        self._clock = itertools.count(1)

    @classmethod
    def open(
        cls,
        directory: Path,
        expected_recipe: Recipe | None = None,
        *,
        complete: bool = True,
        max_open_chunks: int | None = None,
    ) -> CacheReader:
        """Open a cache directory without opening any chunk.

        Args:
            directory: The cache.
            expected_recipe: Refuse a cache with a different recipe.
            complete: Refuse a cache with missing units.
            max_open_chunks: Limit on mapped chunk files. None: from the system's limit on open files.

        Raises:
            DataError: The cache does not exist, has a different recipe, is incomplete, or its manifest is damaged.
        """
        recipe = read_recipe(directory)
        if expected_recipe is not None:
            check_recipe(directory, recipe, expected_recipe)
        manifest = Manifest.open(directory)
        manifest.check_recipe(directory, recipe.digest)
        missing = manifest.missing_units()
        if complete and (len(missing) or manifest.planned_units == 0):
            raise DataError(
                f"The cache is incomplete: {len(missing):,} of {pluralize(manifest.planned_units, 'unit')} "
                f"{'is' if len(missing) == 1 else 'are'} missing",
                where=str(directory), hint="run `vorox data build` with the same configuration to finish it",
            )  # fmt: skip
        return cls(directory, recipe, manifest, max_open_chunks or _default_open_chunks())

    @property
    def num_rows(self) -> int:
        return self.manifest.num_rows

    @property
    def generation(self) -> int:  # number of changes of the cache when it was opened
        return self.manifest.generation

    @property
    def row_tokens(self) -> int:
        return self.recipe.row_tokens

    @property
    def token_bytes(self) -> int:
        return self._dtype.itemsize

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The planned units, ``unit_id`` being the index."""
        return tuple(read_units(self.directory)[: self.manifest.planned_units])

    @cached_property
    def files(self) -> tuple[SourceFile, ...]:
        """The source files."""
        return tuple(read_files(self.directory))

    @cached_property
    def _spans_5S(self) -> npt.NDArray[np.int64]:
        """Unit, file, start byte, end byte and first ordinal of every span of every unit."""
        spans = [
            (unit.unit_id, span.file_index, span.start_byte, span.end_byte, span.first_ordinal)
            for unit in self.units
            for span in unit.spans
        ]
        return np.array(spans, np.int64).reshape(-1, 5).T

    @property
    def unit_row_starts(self) -> npt.NDArray[np.int64]:
        """First row of each unit, then the total number of rows."""
        return self.manifest.unit_row_starts

    def rows_in(self, unit_start: int, unit_end: int, /) -> int:
        """Return the number of rows of the units ``[unit_start, unit_end)``.

        Raises:
            DataError: One of them is missing.
        """
        self._expect_units(unit_start, unit_end)
        return int(self.unit_row_starts[unit_end] - self.unit_row_starts[unit_start])

    def content_digest(self, unit_start: int, unit_end: int, /) -> str:
        """Return the SHA-256 of the content of the units ``[unit_start, unit_end)``, in unit order.

        Raises:
            DataError: One of them is missing.
        """
        self._expect_units(unit_start, unit_end)
        return self.manifest.content_digest(unit_start, unit_end)

    def missing_units(self, unit_start: int, unit_end: int, /) -> npt.NDArray[np.int64]:
        """Return the missing units of ``[unit_start, unit_end)``."""
        return self.manifest.missing_units(unit_start, unit_end)

    @property
    def units_final(self) -> bool:
        return self.manifest.units_final  # false for a stream that is still being split

    @property
    def is_building(self) -> bool:  # in this process
        return self.background is not None and self.background.is_running

    def refreshed(self, *, awaited_units: int = 0) -> CacheReader:
        """Return a reader of the current state, or this one if nothing changed. Open chunks are shared.

        Args:
            awaited_units: The caller waits for all units below this one; for caches that are built on demand.
        """
        del awaited_units
        if self.background is not None:
            self.background.check()
        manifest = self.manifest.refreshed(self.directory)
        if manifest is self.manifest:
            return self
        reader = CacheReader(self.directory, self.recipe, manifest, self._max_open_chunks)
        reader.repair, reader.background = self.repair, self.background
        places = {address: at for at, address in enumerate(manifest.chunks[["unit", "part"]].tolist())}
        before: list[tuple[int, int]] = self.manifest.chunks[["unit", "part"]].tolist()
        with self._chunks_lock:  # chunk indices follow unit order, so new units shift them
            reader._open_chunks = {places[before[index]]: chunk for index, chunk in self._open_chunks.items()}
        return reader

    @property
    def digest(self) -> str:
        """The dataset digest: SHA-256 of the content of all units."""
        return self.content_digest(0, self.manifest.planned_units)

    def _expect_units(self, start: int, end: int) -> None:
        planned = self.manifest.planned_units
        missing = self.manifest.missing_units(start, end)
        if not 0 <= start <= end <= planned or len(missing):
            what = f"unit {missing[0]} is missing" if len(missing) else f"the cache has {planned:,} units"
            raise DataError(
                f"Units {start} to {end} of the cache are not complete: {what}", where=str(self.directory),
                hint="run `vorox data build` with the same configuration to finish the cache",
            )  # fmt: skip

    def read_rows(self, rows: npt.NDArray[np.int64], /) -> RowBlock:
        """Read rows in the given order; every block is checked.

        Raises:
            DataError: A chunk is missing or damaged; the message has file and row.
        """
        for _ in range(_REPAIR_ATTEMPTS):
            try:
                return self._read_rows(rows)
            except DataError as error:
                self._repair(rows, error)
        return self._read_rows(rows)

    def _read_rows(self, rows: npt.NDArray[np.int64]) -> RowBlock:
        if not rows.size:
            nothing = np.zeros(0, np.int32)
            return RowBlock(np.zeros((0, self.row_tokens), self._dtype), np.zeros(1, np.int64), nothing, nothing)
        chunk_N, row_N = self.addresses(rows)
        stored: list[memoryview | bytes] = []
        segments: list[memoryview] = []
        open_chunks, layout, now, header = self._open_chunks, self.recipe.images, next(self._clock), None
        erased: dict[int, npt.NDArray[np.bool_]] = {}
        for at, (index, row) in enumerate(zip(chunk_N.tolist(), row_N.tolist(), strict=True)):
            chunk = open_chunks.get(index) or self._open(index)
            chunk.last_used = now
            stored.append(chunk.row(row))
            segments.append(chunk.segments(row))
            if chunk.is_erased:
                erased[at] = chunk.erased_tokens(row)
            header = chunk.header  # the chunks of a cache are alike
        assert header is not None
        erased_NC = None
        if any(is_erased_C.any() for is_erased_C in erased.values()):
            erased_NC = np.zeros((len(stored), self.row_tokens), np.bool_)
            erased_NC[list(erased)] = list(erased.values())
        num_start = len(self.recipe.start_ids)
        tokens_NC, loss_mask_NC = split_rows(b"".join(stored), header)
        segments_3S = np.ascontiguousarray(np.frombuffer(b"".join(segments), "<i4").reshape(-1, 3).T)
        row_ptr = np.zeros(len(segments) + 1, np.int64)
        np.cumsum([len(view) // SEGMENT_BYTES for view in segments], out=row_ptr[1:])
        return RowBlock(
            tokens_NC=tokens_NC,
            row_ptr=row_ptr,
            segment_lengths=segments_3S[2],
            segment_document_offsets=segments_3S[1],
            loss_mask_NC=loss_mask_NC,
            images={} if layout is None else ImageStore(self.directory, layout).read_all(tokens_NC),
            segment_start_tokens=np.maximum(num_start - segments_3S[1], 0) if num_start else None,
            erased_NC=erased_NC,
        )

    def documents_of(self, row: int) -> list[DocumentSpan]:
        """Return the source of a row's tokens, one span per segment.

        Raises:
            DataError: The chunk is missing or damaged.
        """
        (chunk_index,), (row_in_chunk,) = self.addresses(np.array([row]))
        chunk = self.chunk(int(chunk_index))
        documents_D, is_erased_D = chunk.documents(), chunk.erased()
        indexes = self._files_of(int(self.manifest.chunks["unit"][chunk_index]))
        segments_S3 = np.frombuffer(chunk.segments(int(row_in_chunk)), "<u4").reshape(-1, 3)
        copies = self._copies_of(int(chunk_index), int(row_in_chunk), len(segments_S3))
        spans: list[DocumentSpan] = []
        for (document_index, token_offset, length), copy in zip(segments_S3.tolist(), copies, strict=True):
            number, ordinal, offset, size, num_tokens, _, text_xxh3 = documents_D[document_index].item()
            file = int(indexes[number])
            place = (self.files[file].uri, offset, size, token_offset, length)
            spans.append(
                DocumentSpan(*place, file, ordinal, num_tokens, text_xxh3, copy, bool(is_erased_D[document_index]))
            )
        return spans

    def _copies_of(self, chunk_index: int, row: int, num_segments: int) -> list[int]:
        """Return which of the texts of its record each segment of a row is of."""
        if not self.recipe.transforms:
            return [0] * num_segments
        unit = int(self.manifest.chunks["unit"][chunk_index])
        indexes = np.flatnonzero(self.manifest.chunks["unit"] == unit).tolist()
        if unit not in self._copies_by_unit:
            chunks = [self.chunk(index) for index in indexes]
            tables = [chunk.segment_table() for chunk in chunks]
            self._copies_by_unit[unit] = copies_of_segments(
                [chunk.documents() for chunk in chunks], tables, self.recipe
            )
        first = self.chunk(chunk_index).segment_table()[0]
        return self._copies_by_unit[unit][indexes.index(chunk_index)][int(first[row]) : int(first[row + 1])].tolist()

    def rows_of_document(
        self, file_index: int, byte: int | None = None, ordinal: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the rows with tokens of a file's documents, ascending: the inverse of ``documents_of``.

        Args:
            file_index: Index of the file in ``files``.
            byte: Only documents whose record contains this byte: one, or in Parquet those of a row group.
            ordinal: Only the document with this number within the file.

        Raises:
            DataError: A chunk is missing or damaged.
        """
        unit_S, file_S, start_S, end_S, first_S = self._spans_5S
        wanted_S = file_S == file_index
        if byte is not None:
            wanted_S &= (start_S <= byte) & (byte < end_S)
        if ordinal is not None:
            before = first_S[wanted_S & (first_S <= ordinal)]
            wanted_S &= first_S == before.max(initial=-1)
        found: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
        for unit in np.unique(unit_S[wanted_S]).tolist():
            low, high = np.searchsorted(self.manifest.chunks["unit"], [unit, unit + 1])
            number = int(np.flatnonzero(self._files_of(unit) == file_index)[0])
            for index in range(int(low), int(high)):
                found.append(self.chunk(index).rows_of(number, byte, ordinal) + self._chunk_row_starts[index])
        return np.concatenate(found)

    def rows_of_text(self, text_hashes: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the rows with tokens of documents whose whole text has one of some xxh3-64, ascending.

        Raises:
            DataError: A chunk is missing or damaged.
        """
        found, wanted = [np.empty(0, np.int64)], np.array(text_hashes, np.uint64)
        for index, first_row in enumerate(self._chunk_row_starts[: len(self.manifest.chunks)].tolist()):
            chunk = self.chunk(index)
            found.append(chunk.rows_with(np.isin(chunk.documents()["text_xxh3"], wanted)) + first_row)
        return np.concatenate(found)

    def chunk(self, index: int) -> Chunk:
        """Return a chunk by its index in the manifest; its content is checked where it is read.

        Raises:
            DataError: The chunk is missing or damaged.
        """
        return self._open_chunks.get(index) or self._open(index)

    def documents(self, index: int) -> npt.NDArray[np.void]:
        """Return the ``DOCUMENT`` records of a chunk, its files as indices into ``files``.

        Raises:
            DataError: The chunk is missing or damaged.
        """
        documents_D = self.chunk(index).documents().copy()
        documents_D["file"] = self._files_of(int(self.manifest.chunks["unit"][index]))[documents_D["file"]]
        return documents_D

    def _files_of(self, unit: int) -> npt.NDArray[np.int64]:
        """Return the files of a unit, as indices into ``files``; its chunks number them in this order."""
        if unit not in self._files_by_unit:
            self._files_by_unit[unit] = np.array(self.units[unit].file_indexes, np.int64)
        return self._files_by_unit[unit]

    def _repair(self, rows: npt.NDArray[np.int64], error: DataError) -> None:
        """Rebuild the damaged units of the given rows.

        Raises:
            DataError: They cannot be rebuilt; this is ``error`` itself if ``repair`` is None.
        """
        if self.repair is None:
            raise error
        with self._repair_lock:
            for unit in np.unique(self.manifest.chunks["unit"][self.addresses(rows)[0]]).tolist():
                if not is_intact(self.directory, self.manifest.refreshed(self.directory), unit, "full"):
                    self.repair(unit, error)
                with self._chunks_lock:
                    low, high = np.searchsorted(self.manifest.chunks["unit"], [unit, unit + 1])
                    for index in range(int(low), int(high)):
                        self._open_chunks.pop(index, None)

    def addresses(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the chunk index in the manifest, and the row within the chunk, of each row."""
        if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= self.num_rows):
            raise IndexError(f"rows {rows.min()} to {rows.max()} are not within [0, {self.num_rows})")
        chunk_N = np.searchsorted(self._chunk_row_starts, rows, side="right") - 1
        return chunk_N, rows - self._chunk_row_starts[chunk_N]

    def _open(self, index: int) -> Chunk:
        record = self.manifest.chunk(index)
        path = chunk_path(self.directory, record.unit, record.part)
        check_contained(self.directory, path)
        chunk = self._map(path)
        header = chunk.header
        shape = (header.num_rows, header.row_tokens, header.token_bytes)
        found = (header.part, *shape, header.content.hex(), header.recipe.hex())
        shape = (record.rows, self.row_tokens, self.token_bytes)
        expected = (record.part, *shape, record.content, self.recipe.digest)
        if found != expected:
            raise DataError(
                f"The file is not the chunk that the manifest names: found {found}, expected {expected}",
                where=str(chunk.path), hint=REMEDY,
            )  # fmt: skip
        chunk.last_used = next(self._clock)
        with self._chunks_lock:
            if len(self._open_chunks) >= self._max_open_chunks:
                self._close_oldest()
            self._open_chunks[index] = chunk
        return chunk

    def _map(self, path: Path) -> Chunk:
        for _ in range(_REOPEN_ATTEMPTS):
            try:
                return Chunk.open(path)
            except DataError as error:
                if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EMFILE:
                    with self._chunks_lock:
                        self._close_oldest()  # the process has reached its limit on open files
                elif self.directory.exists():
                    raise
                time.sleep(0.01)  # a rebuilt cache is about to replace this one
        return Chunk.open(path)

    def _close_oldest(self) -> None:
        """Close the least recently used eighth of the open chunks; a batch amortises the sort."""
        oldest = sorted(self._open_chunks.items(), key=lambda entry: entry[1].last_used)
        for index, _ in oldest[: -(-len(oldest) // 8)]:
            del self._open_chunks[index]

    def verify(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Check every byte of every chunk file and every line of the manifest and the lists.

        Args:
            on_progress: Called after each chunk with (bytes checked, total bytes).

        Raises:
            DataError: Something is damaged; the message lists it.
        """
        verify(self.directory, self.recipe, self.manifest, on_progress)

    def close(self) -> None:
        """Unmap the chunks. Rows already read stay valid."""
        self._open_chunks = {}


def _default_open_chunks() -> int:
    """Return the limit on mapped chunks: before Python 3.13 each holds a file descriptor."""
    if sys.version_info >= (3, 13) or sys.platform == "win32":
        return _MAX_OPEN_CHUNKS
    import resource

    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(_MAX_OPEN_CHUNKS, soft_limit // 4)) if soft_limit > 0 else _MAX_OPEN_CHUNKS
