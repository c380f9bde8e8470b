"""Building a cache: whatever is planned and not done gets done, one unit after the other.

Units of text go in, committed chunks come out. A unit is committed in this order: quarantine list, chunk files (each
durable on return), then the log entry that makes them count; a crash anywhere leaves a readable cache that the next
build completes. Chunks that are durable but not in the log are checked and adopted. Invariant: the dataset digest
does not depend on the order of the units, on interruptions, or on the codec.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from vorox.core.atomic import is_disk_full, make_directory, sweep_temporary, sync_directory, write_file
from vorox.core.errors import ConfigError, DataError
from vorox.core.lock import FileLock
from vorox.data.cache import inventory
from vorox.data.cache.assemble import Encoder, chunk_contents, read_text, unit_statistics
from vorox.data.cache.chunk import Chunk
from vorox.data.cache.format import ChunkOrigin, ChunkRecord, encode_chunk
from vorox.data.cache.manifest import (
    SNAPSHOT_INTERVAL_ENTRIES,
    Manifest,
    UnitStatistics,
    chunk_path,
    planned_entry,
    unit_entry,
)
from vorox.data.cache.quarantine import check_budget, count_quarantined, write_quarantine
from vorox.data.cache.recipe import RECIPE_NAME, Recipe, check_recipe, read_recipe, write_recipe
from vorox.data.cache.report import BuildProgress, BuildReport, build_report
from vorox.data.documents import BadRecord, Document, SourceFile, Unit

BUILDING_NAME = "BUILDING"
SNAPSHOT_FROM_ENTRIES = 256
"""A shorter log opens quickly enough without a snapshot."""

_FIRST_GUESS_CACHE_PER_TEXT_BYTE = 0.4

ReadUnit = Callable[[Unit], Iterable[Document | BadRecord]]
OnProgress = Callable[[BuildProgress], None]


def build(
    directory: Path,
    recipe: Recipe,
    files: Sequence[SourceFile],
    units: Sequence[Unit],
    read_unit: ReadUnit,
    tokenizer: Encoder,
    *,
    codec: str = "lz4",
    block_rows: int | None = None,
    bad_record_fraction: float = 0.001,
    repair: bool = False,
    on_progress: OnProgress | None = None,
) -> BuildReport:
    """Bring a cache to completion. A complete one is only looked at, so it may lie on a read-only disk.

    Args:
        directory: The cache; made if need be.
        recipe: What its rows are a function of.
        files: The source's files; those recorded in the cache must be the first of them, unchanged.
        units: The units of work, likewise.
        read_unit: Gives the records of a unit, in order.
        tokenizer: The recipe's tokenizer.
        codec: Compression of chunks built now: ``raw``, ``lz4`` or ``lz4hc``.
        block_rows: Rows compressed together in them; None for about a thousand tokens.
        bad_record_fraction: Unreadable records of a unit, rounded up, that are put aside before the build stops.
        repair: Check every chunk first and build the units of damaged ones again.
        on_progress: Told after every batch of documents and every unit.

    Raises:
        DataError: The cache is of another recipe or source, a text cannot be tokenised, too many records are bad,
            there is no text at all, or the disk is full or refuses to be written to. What was committed stays.
    """
    started = time.perf_counter()
    _check_tokenizer(recipe, tokenizer)
    work = _Build(
        directory, recipe, files, units, read_unit, tokenizer, codec, block_rows, bad_record_fraction, on_progress
    )
    if units and (repair or not work.is_complete()):
        with work.explained(), contextlib.ExitStack() as stack:
            make_directory(directory)
            stack.enter_context(work.only_builder())
            work.prepare()
            if repair:
                work.repair()
            work.build_missing()
    if work.manifest.num_rows == 0:
        raise DataError(
            "there is no text to build a cache from", where=str(directory),
            hint="check the source's paths; for a validation split, hold out a larger fraction",
        )  # fmt: skip
    return build_report(
        work.manifest,
        recipe.row_tokens,
        units_built=work.units_built,
        units_adopted=work.units_adopted,
        built_text_bytes=work.progress.text_bytes,
        seconds=time.perf_counter() - started,
    )


def _check_tokenizer(recipe: Recipe, tokenizer: Encoder) -> None:
    given = (tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.end_of_text_id)
    if given != (recipe.tokenizer, recipe.vocab_size, recipe.end_of_text_id):
        raise DataError(
            f"tokenizer {tokenizer.fingerprint} ({tokenizer.vocab_size} tokens, end of text "
            f"{tokenizer.end_of_text_id}) is not the one of the recipe: {recipe.tokenizer} "
            f"({recipe.vocab_size} tokens, end of text {recipe.end_of_text_id})",
            hint="build with the tokenizer that the recipe was made with",
        )


@dataclass
class _Build:
    """One call of ``build``: its arguments and how far it is."""

    directory: Path
    recipe: Recipe
    files: Sequence[SourceFile]
    units: Sequence[Unit]
    read_unit: ReadUnit
    tokenizer: Encoder
    codec: str
    block_rows: int | None
    bad_record_fraction: float
    on_progress: OnProgress | None
    manifest: Manifest = field(default_factory=Manifest.empty)
    units_built: int = 0
    units_adopted: int = 0
    writing: int | None = None
    """The unit whose chunks are being written."""
    writing_bytes: int = 0
    pending_bytes: int = 0

    def __post_init__(self) -> None:
        self.progress = BuildProgress(0, len(self.units))

    def is_complete(self) -> bool:
        """Whether there is nothing to do.

        Raises:
            DataError: The cache is not of this recipe or source, or is damaged.
        """
        if not (self.directory / RECIPE_NAME).exists():
            return False
        check_recipe(self.directory, read_recipe(self.directory), self.recipe)
        if not inventory.is_recorded(self.directory, self.files, self.units):
            return False
        self.manifest = Manifest.open(self.directory)
        return self.manifest.planned_units == len(self.units) and not len(self.manifest.missing_units())

    @contextlib.contextmanager
    def only_builder(self) -> Generator[None]:
        """Keep other builders of this cache out, if need be after waiting for the one before."""
        path = self.directory / BUILDING_NAME
        lock = FileLock(path)
        try:
            lock = FileLock(path, blocking=False, purpose="building this cache").acquire()
        except ConfigError as error:
            self._tell(waiting_for=error.what)
            lock.acquire()
            self._tell(waiting_for="")
        try:
            yield
        finally:
            lock.release()

    def prepare(self) -> None:
        """Clear away what dead builders left and record what is to be built."""
        chunk_directories = sorted((self.directory / "chunks").glob("*"))
        for place in (self.directory, self.directory / "manifest", self.directory / "quarantine", *chunk_directories):
            sweep_temporary(place)
        if (self.directory / RECIPE_NAME).exists():
            check_recipe(self.directory, read_recipe(self.directory), self.recipe)
        else:
            write_recipe(self.directory, self.recipe)
        inventory.record(self.directory, self.files, self.units)
        make_directory(self.directory / "manifest")
        self.manifest = Manifest.open(self.directory)
        if self.manifest.planned_units < len(self.units):
            self.manifest = self.manifest.commit(self.directory, [planned_entry(len(self.units), self.recipe.digest)])
        self._tell(units_done=len(self.manifest.units))

    def build_missing(self) -> None:
        for count, unit in enumerate(self.manifest.missing_units(), 1):
            self._build_unit(self.units[int(unit)])
            if count % SNAPSHOT_INTERVAL_ENTRIES == 0:
                self.manifest.write_snapshot(self.directory)
        if self.manifest.position.num_entries >= SNAPSHOT_FROM_ENTRIES:
            self.manifest.write_snapshot(self.directory)

    def repair(self) -> None:
        """Build the units again that have a chunk which is not what was committed.

        Raises:
            DataError: Building gives other content than was recorded.
        """
        records = [self.manifest.chunk(index) for index in range(len(self.manifest.chunks))]
        for unit in sorted({record.unit for record in records if not self._is_intact(record)}):
            self._build_unit(self.units[unit])

    def _is_intact(self, record: ChunkRecord) -> bool:
        try:
            chunk = Chunk.open(chunk_path(self.directory, record.unit, record.part))
            chunk.verify()
        except DataError:
            return False
        return chunk.record() == record

    def _build_unit(self, unit: Unit) -> None:
        """Build or adopt one unit and make it count."""
        found = self._adopted(unit)
        if found is not None:
            self.units_adopted += 1
        else:
            found = self._built(unit)
            self.units_built += 1
        chunks, statistics = found
        self.manifest = self.manifest.commit(self.directory, [unit_entry(statistics, chunks)])
        self._tell(units_done=len(self.manifest.units))

    def _adopted(self, unit: Unit) -> tuple[list[ChunkRecord], UnitStatistics] | None:
        """The chunks of a unit that are on disk, if they are whole and what would be built."""
        paths = [chunk_path(self.directory, unit.unit_id, 0)]
        if not paths[0].exists():
            return None
        try:
            chunks = [Chunk.open(paths[0])]
            paths += [chunk_path(self.directory, unit.unit_id, part) for part in range(1, chunks[0].header.num_parts)]
            chunks += [Chunk.open(path) for path in paths[1:]]
            for part, chunk in enumerate(chunks):
                if chunk.origin != self._origin(unit, part, len(chunks)):
                    return None
                chunk.verify()
        except DataError:
            return None
        records = [chunk.record() for chunk in chunks]
        if not self._agrees_with_committed(unit, records):
            return None
        sync_directory(paths[0].parent)  # the crash may have come before the renames were durable
        documents_D = np.unique(np.concatenate([chunk.documents() for chunk in chunks]))
        quarantined = count_quarantined(self.directory, unit.unit_id)
        return records, unit_statistics(unit.unit_id, documents_D, quarantined)

    def _origin(self, unit: Unit, part: int, num_parts: int) -> ChunkOrigin:
        source_set = inventory.source_set_digest(unit, self.files)
        return ChunkOrigin(unit.unit_id, part, num_parts, bytes.fromhex(self.recipe.digest), source_set)

    def _built(self, unit: Unit) -> tuple[list[ChunkRecord], UnitStatistics]:
        """Read, tokenise and pack a unit; its chunks are durable on return."""
        try:
            text = read_text(self.read_unit(unit), self.files, self.tokenizer, self.recipe, self._add_documents)
        except OSError as error:
            raise DataError(
                f"unit {unit.unit_id} of the source cannot be read: {error.strerror or error}",
                where=str(error.filename or self.files[unit.spans[0].file_index].uri),
                hint="check that the file is there and may be read, then run the same command again",
            ) from error
        write_quarantine(self.directory, unit.unit_id, text.bad_records, self.files)
        check_budget(self.directory, unit.unit_id, text, self.files, self.bad_record_fraction)
        contents = chunk_contents(unit.unit_id, text, self.recipe)
        encoded = [
            encode_chunk(content, self._origin(unit, part, len(contents)), codec=self.codec, block_rows=self.block_rows)
            for part, content in enumerate(contents)
        ]
        records = [record for _, record in encoded]
        if not self._agrees_with_committed(unit, records):
            raise DataError(
                f"building unit {unit.unit_id} again gives other rows than were recorded", where=str(self.directory),
                hint="the source or the tokenizer's library changed: build into another data.cache.directory",
            )  # fmt: skip
        self.writing = unit.unit_id
        self.writing_bytes = self.pending_bytes = sum(record.size_bytes for record in records)
        for data, record in encoded:
            path = chunk_path(self.directory, record.unit, record.part)
            make_directory(path.parent)
            write_file(path, data)
            self.pending_bytes -= record.size_bytes
        self.writing, self.writing_bytes = None, 0
        return records, text.statistics(unit.unit_id)

    def _agrees_with_committed(self, unit: Unit, records: Sequence[ChunkRecord]) -> bool:
        """Whether chunks have the content that the manifest has for the unit, if it has any."""
        committed = [record.content for record in self.manifest.unit_chunks(unit.unit_id)]
        return not committed or committed == [record.content for record in records]

    def _add_documents(self, documents: int, text_bytes: int, tokens: int) -> None:
        progress = self.progress
        self._tell(
            documents=progress.documents + documents,
            text_bytes=progress.text_bytes + text_bytes,
            tokens=progress.tokens + tokens,
        )

    def _tell(self, **changes: int | str) -> None:
        self.progress = replace(self.progress, **changes)
        if self.on_progress is not None:
            self.on_progress(self.progress)

    @contextlib.contextmanager
    def explained(self) -> Generator[None]:
        """Say what a refused write means."""
        try:
            yield
        except OSError as error:
            where = str(error.filename or self.directory)
            saved = f"{self.progress.units_done} of {len(self.units)} units; the next build goes on from there"
            if not is_disk_full(error):
                raise DataError(
                    f"the cache cannot be written: {os.strerror(error.errno) if error.errno else error}", where=where,
                    saved=saved, hint="give write permission, or set data.cache.directory to a place that has it",
                ) from error  # fmt: skip
            existing = next(place for place in (self.directory, *self.directory.parents) if place.exists())
            free_bytes = shutil.disk_usage(existing).free
            raise DataError(
                f"the disk is full: the rest of the cache needs about {self._needed_bytes():,} bytes, "
                f"{free_bytes:,} are free",
                where=where, saved=saved,
                hint="make room, or set data.cache.directory to another disk, and run the same command again",
            ) from error  # fmt: skip

    def _needed_bytes(self) -> int:
        """Chunks not yet written; those of units not yet read by what the others came to."""
        known = {*self.manifest.units["unit"].tolist(), self.writing}
        text_bytes = [sum(span.end_byte - span.start_byte for span in unit.spans) for unit in self.units]
        known_text_bytes = sum(size for unit, size in enumerate(text_bytes) if unit in known)
        known_bytes = int(self.manifest.chunks["size_bytes"].sum(dtype=np.int64)) + self.writing_bytes
        rate = known_bytes / known_text_bytes if known_text_bytes else _FIRST_GUESS_CACHE_PER_TEXT_BYTE
        return self.pending_bytes + round(rate * (sum(text_bytes) - known_text_bytes))
