"""Reading a cache: rows by number, each checked, and the documents behind them.

Rows are numbered in unit order, whatever order they were built in. Chunk files are mapped when they are first needed
and stay mapped, up to a limit; reading takes no lock, so any number of threads may. Invariant: what ``read_rows``
returns is what was written, or it raises.

Legend: N rows asked for, C tokens of a row.
"""

from __future__ import annotations

import errno
import itertools
import sys
import threading
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.core.pluralize import pluralize
from vorox.data.cache.chunk import REMEDY, Chunk
from vorox.data.cache.format import SEGMENT_BYTES
from vorox.data.cache.manifest import Manifest, check_contained, chunk_path
from vorox.data.cache.recipe import Recipe, check_recipe, read_files, read_recipe, read_units
from vorox.data.cache.verify import is_intact, verify
from vorox.data.documents import DocumentSpan, SourceFile, Unit
from vorox.data.rows import RowBlock

if TYPE_CHECKING:
    from vorox.data.cache.scheduler import BuildScheduler

_MOST_OPEN_CHUNKS = 4096
_WAITS_FOR_A_DIRECTORY = 50
_MENDS = 3


class CacheReader:
    """An open cache. Make one with ``open``; it sees what was committed by then.

    Attributes:
        directory: The cache.
        recipe: What its rows are a function of.
        manifest: Its chunks and units.
        mend: Builds a unit again of which a chunk turned out to be lost or damaged; None: that is an error.
        background: Builds what is missing meanwhile; what it meets is raised where its units are awaited.
    """

    def __init__(self, directory: Path, recipe: Recipe, manifest: Manifest, max_open_chunks: int) -> None:
        self.directory = directory
        self.recipe = recipe
        self.manifest = manifest
        self._max_open_chunks = max_open_chunks
        self._chunk_row_starts = manifest.chunk_row_starts
        self._dtype = np.dtype(f"<u{recipe.token_bytes}")
        self._open_chunks: dict[int, Chunk] = {}
        self._changing = threading.Lock()
        self._mending = threading.Lock()
        self.mend: Callable[[int, DataError], None] | None = None
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
        """Open a cache directory; no chunk is touched.

        Args:
            directory: The cache.
            expected_recipe: Refuse a cache of another recipe.
            complete: Refuse a cache of which units are missing.
            max_open_chunks: Chunk files mapped at a time. None: as many as the system lets a process open.

        Raises:
            DataError: There is no cache, it is of another recipe, incomplete, or its manifest is damaged.
        """
        recipe = read_recipe(directory)
        if expected_recipe is not None:
            check_recipe(directory, recipe, expected_recipe)
        manifest = Manifest.open(directory)
        manifest.check_recipe(directory, recipe.digest)
        missing = manifest.missing_units()
        if complete and (len(missing) or manifest.planned_units == 0):
            raise DataError(
                f"the cache is incomplete: {len(missing):,} of {pluralize(manifest.planned_units, 'unit')} "
                f"{'is' if len(missing) == 1 else 'are'} missing",
                where=str(directory), hint="`vorox data build` with the same configuration completes it",
            )  # fmt: skip
        return cls(directory, recipe, manifest, max_open_chunks or _open_files_allowed())

    @property
    def num_rows(self) -> int:
        return self.manifest.num_rows

    @property
    def generation(self) -> int:  # how many times the cache had changed when it was opened
        return self.manifest.generation

    @property
    def row_tokens(self) -> int:
        return self.recipe.row_tokens

    @property
    def token_bytes(self) -> int:
        return self.recipe.token_bytes

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The planned units, ``unit_id`` being the index."""
        return tuple(read_units(self.directory)[: self.manifest.planned_units])

    @cached_property
    def files(self) -> tuple[SourceFile, ...]:
        """The files of the source."""
        return tuple(read_files(self.directory))

    @cached_property
    def _spans_5S(self) -> npt.NDArray[np.int64]:
        """Unit, file, first byte, end and first ordinal of every span of every unit."""
        spans = [
            (unit.unit_id, span.file_index, span.start_byte, span.end_byte, span.first_ordinal)
            for unit in self.units
            for span in unit.spans
        ]
        return np.array(spans, np.int64).reshape(-1, 5).T

    @property
    def unit_row_starts(self) -> npt.NDArray[np.int64]:
        """First row of each unit, and the number of rows at the end."""
        return self.manifest.unit_row_starts

    def rows_in(self, unit_start: int, unit_end: int, /) -> int:
        """Rows of the units ``[unit_start, unit_end)``.

        Raises:
            DataError: One of them is missing.
        """
        self._expect_units(unit_start, unit_end)
        return int(self.unit_row_starts[unit_end] - self.unit_row_starts[unit_start])

    def content_digest(self, unit_start: int, unit_end: int, /) -> str:
        """SHA-256 over the content of the units ``[unit_start, unit_end)``, in unit order.

        Raises:
            DataError: One of them is missing.
        """
        self._expect_units(unit_start, unit_end)
        return self.manifest.content_digest(unit_start, unit_end)

    def missing_units(self, unit_start: int, unit_end: int, /) -> npt.NDArray[np.int64]:
        """Those of the units ``[unit_start, unit_end)`` that are planned and not built."""
        return self.manifest.missing_units(unit_start, unit_end)

    @property
    def units_final(self) -> bool:
        return self.manifest.units_final  # a stream's may not be

    @property
    def is_building(self) -> bool:  # by this process
        return self.background is not None and self.background.is_running

    def refreshed(self, *, awaited_units: int = 0) -> CacheReader:
        """A reader of what is committed by now; this one if that is no more. Chunks that are open are shared.

        Args:
            awaited_units: The asker waits for all units below this one; for caches that are built on demand.
        """
        del awaited_units
        if self.background is not None:
            self.background.check()
        manifest = self.manifest.refreshed(self.directory)
        if manifest is self.manifest:
            return self
        reader = CacheReader(self.directory, self.recipe, manifest, self._max_open_chunks)
        reader.mend, reader.background = self.mend, self.background
        places = {(unit, part): at for at, (unit, part) in enumerate(manifest.chunks[["unit", "part"]].tolist())}
        with self._changing:  # chunks are numbered in unit order, so that filled gaps move them
            reader._open_chunks = {
                places[chunk.header.unit, chunk.header.part]: chunk for chunk in self._open_chunks.values()
            }
        return reader

    @property
    def digest(self) -> str:
        """The dataset digest: the content of all units."""
        return self.content_digest(0, self.manifest.planned_units)

    def _expect_units(self, start: int, end: int) -> None:
        planned = self.manifest.planned_units
        missing = self.manifest.missing_units(start, end)
        if not 0 <= start <= end <= planned or len(missing):
            what = f"unit {missing[0]} is not built" if len(missing) else f"there are {planned:,} units"
            raise DataError(
                f"units {start} to {end} of the cache are not all there: {what}", where=str(self.directory),
                hint="`vorox data build` with the same configuration completes the cache",
            )  # fmt: skip

    def read_rows(self, rows: npt.NDArray[np.int64], /) -> RowBlock:
        """Read rows, every block of them checked, in the order given.

        Raises:
            DataError: A chunk is missing or damaged; names file and row.
        """
        for _ in range(_MENDS):
            try:
                return self._read_rows(rows)
            except DataError as error:
                self._mend(rows, error)
        return self._read_rows(rows)

    def _read_rows(self, rows: npt.NDArray[np.int64]) -> RowBlock:
        chunk_N, row_N = self.addresses(rows)
        tokens: list[memoryview | bytes] = []
        segments: list[memoryview] = []
        open_chunks, now = self._open_chunks, next(self._clock)
        for index, row in zip(chunk_N.tolist(), row_N.tolist(), strict=True):
            chunk = open_chunks.get(index) or self._open(index)
            chunk.last_used = now
            tokens.append(chunk.row(row))
            segments.append(chunk.segments(row))
        flat = np.frombuffer(b"".join(tokens), self._dtype)
        segments_3S = np.ascontiguousarray(np.frombuffer(b"".join(segments), "<i4").reshape(-1, 3).T)
        row_ptr = np.zeros(len(segments) + 1, np.int64)
        np.cumsum([len(view) // SEGMENT_BYTES for view in segments], out=row_ptr[1:])
        return RowBlock(
            tokens_NC=flat.reshape(len(tokens), self.row_tokens),
            row_ptr=row_ptr,
            segment_lengths=segments_3S[2],
            segment_document_offsets=segments_3S[1],
        )

    def documents_of(self, row: int) -> list[DocumentSpan]:
        """Where the tokens of a row come from, segment by segment.

        Raises:
            DataError: The chunk is missing or damaged.
        """
        (chunk_index,), (row_in_chunk,) = self.addresses(np.array([row]))
        chunk = self._open_chunks.get(int(chunk_index)) or self._open(int(chunk_index))
        documents_D = chunk.documents()
        segments_S3 = np.frombuffer(chunk.segments(int(row_in_chunk)), "<u4").reshape(-1, 3)
        spans: list[DocumentSpan] = []
        for document_index, token_offset, length in segments_S3.tolist():
            file, ordinal, offset, size, num_tokens, _, text_xxh3 = documents_D[document_index].item()
            place = (self.files[file].uri, offset, size, token_offset, length)
            spans.append(DocumentSpan(*place, file, ordinal, num_tokens, text_xxh3))
        return spans

    def rows_of_document(
        self, file_index: int, byte: int | None = None, ordinal: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Rows that hold tokens of the documents of a file, ascending: the inverse of ``documents_of``.

        Args:
            file_index: The file, by its place in ``files``.
            byte: Only of documents whose record has this byte: one, or in Parquet those of a row group.
            ordinal: Only of the document with this number within the file.

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
            for index in range(int(low), int(high)):
                chunk = self._open_chunks.get(index) or self._open(index)
                found.append(chunk.rows_of(file_index, byte, ordinal) + self._chunk_row_starts[index])
        return np.concatenate(found)

    def _mend(self, rows: npt.NDArray[np.int64], error: DataError) -> None:
        """Have the units of some rows built again that are not whole.

        Raises:
            DataError: Nobody can build them; ``error`` itself then.
        """
        if self.mend is None:
            raise error
        with self._mending:
            for unit in np.unique(self.manifest.chunks["unit"][self.addresses(rows)[0]]).tolist():
                if not is_intact(self.directory, self.manifest.refreshed(self.directory), unit, "full"):
                    self.mend(unit, error)
                with self._changing:
                    for index in [index for index, chunk in self._open_chunks.items() if chunk.header.unit == unit]:
                        del self._open_chunks[index]

    def addresses(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Chunk, by its place in the manifest, and row in it."""
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
        found = (header.unit, header.part, *shape, header.content.hex(), header.recipe.hex())
        shape = (record.rows, self.row_tokens, self.token_bytes)
        expected = (record.unit, record.part, *shape, record.content, self.recipe.digest)
        if found != expected:
            raise DataError(
                f"the file is not the chunk that the manifest names: it has {found}, expected {expected}",
                where=str(chunk.path), hint=REMEDY,
            )  # fmt: skip
        chunk.last_used = next(self._clock)
        with self._changing:
            if len(self._open_chunks) >= self._max_open_chunks:
                self._close_oldest()
            self._open_chunks[index] = chunk
        return chunk

    def _map(self, path: Path) -> Chunk:
        for _ in range(_WAITS_FOR_A_DIRECTORY):
            try:
                return Chunk.open(path)
            except DataError as error:
                if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EMFILE:
                    with self._changing:
                        self._close_oldest()  # the process has used up its files
                elif self.directory.exists():
                    raise
                time.sleep(0.01)  # a rebuilt cache is about to take the place of this one
        return Chunk.open(path)

    def _close_oldest(self) -> None:
        """Let go of an eighth of the open chunks; so many at a time that finding the oldest costs nothing per chunk."""
        oldest = sorted(self._open_chunks.items(), key=lambda entry: entry[1].last_used)
        for index, _ in oldest[: -(-len(oldest) // 8)]:
            del self._open_chunks[index]

    def verify(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Check every byte of every chunk file and every line of the lists beside them.

        Args:
            on_progress: Told (chunks checked, chunks) after each.

        Raises:
            DataError: Naming everything that is damaged.
        """
        verify(self.directory, self.recipe, self.manifest, on_progress)

    def close(self) -> None:
        """Unmap the chunks. What was read stays valid."""
        self._open_chunks = {}


def _open_files_allowed() -> int:
    """How many chunks may be mapped: before Python 3.13 each holds a file descriptor, of which others need some."""
    if sys.version_info >= (3, 13) or sys.platform == "win32":
        return _MOST_OPEN_CHUNKS
    import resource

    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(_MOST_OPEN_CHUNKS, soft_limit // 4)) if soft_limit > 0 else _MOST_OPEN_CHUNKS
