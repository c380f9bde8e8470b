"""Build units of a cache: read their text, then filter, tokenize and pack it into the bytes of chunks.

A ``UnitBuilder`` holds all inputs of a cache's units; ``run`` takes units and yields ``BuiltUnit``s in the same order.
Its stages are fetch, decode, filter, tokenize, augment, gather and pack: units become ``DocumentBatch``es, these become
``TokenizedDocuments``; those of a unit are joined and packed. Nothing is written here: the build scheduler commits the
bytes. Invariants: every stage is a pure function of its input, so any number of threads may run it; the content of a
unit is a function of the builder and the unit alone, independent of order, process and threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from vorox.core.schema.data import BuildPipelineConfig
from vorox.data.cache.files.format import (
    ChunkContent,
    ChunkOrigin,
    ChunkRecord,
    encode_chunk,
    source_set_digest,
    unit_key,
)
from vorox.data.cache.files.manifest import UnitStatistics
from vorox.data.cache.pipeline.pipeline import BuildPipeline, BuildStage, Flow, run_serial
from vorox.data.cache.pipeline.statistics import BuildStatistics
from vorox.data.cache.units.document_tokens import (
    Encoder,
    TokenizedDocuments,
    encode,
    finish_documents,
    unit_statistics,
)
from vorox.data.cache.units.duplicates import duplicate_check, removed_digest
from vorox.data.cache.units.packing import chunk_contents
from vorox.data.documents import BadRecord, SourceFile, Unit
from vorox.data.images.reading import ImageStore
from vorox.data.images.tokens import find_images
from vorox.data.recipe import Recipe
from vorox.data.rows import TokenArray
from vorox.data.text.unit_reader import (
    TEXT_OVERHEAD_BYTES,
    DocumentBatch,
    DuplicateChecks,
    FetchedUnit,
    FetchingReader,
    ReadUnit,
    read_batches,
)
from vorox.data.transforms.apply import Applier, Counts, TransformCount
from vorox.data.transforms.registry import Transform

OnDocuments = Callable[[int, int, int], None]
"""Called with the numbers of documents, UTF-8 bytes and tokens added, in unit order."""

_UNITS_AHEAD = 2
"""One unit that is read while others are tokenised and packed, and one that the caller writes."""


@dataclass(frozen=True, slots=True)
class BuiltUnit:
    """A built unit that is not yet written to disk.

    Attributes:
        unit: The unit.
        key: Its key (``unit_store.unit_key``).
        chunks: The bytes and the manifest record of each chunk file, in the order of parts.
        statistics: Counts of the unit.
        bad_records: Unreadable records.
        records_read: Records of the unit, including bad and removed ones; the limit on bad ones is a fraction of it.
        aborted: Reading stopped after too many consecutive bad records; the unit must not be committed.
        transforms: Counts of each transform, by its index and name: ``0/length``.
        images: Hashes of the images in its rows.
    """

    unit: Unit
    key: str
    chunks: tuple[tuple[bytes | bytearray, ChunkRecord], ...]
    statistics: UnitStatistics
    bad_records: tuple[BadRecord, ...]
    records_read: int
    aborted: bool
    transforms: Mapping[str, TransformCount] = field(default_factory=dict[str, TransformCount])
    images: tuple[int, ...] = ()

    @property
    def unit_id(self) -> int:
        return self.unit.unit_id

    @property
    def size_bytes(self) -> int:
        return sum(record.size_bytes for _, record in self.chunks)

    @property
    def place(self) -> str:
        return f"unit {self.unit_id}"


@dataclass(frozen=True)
class UnitBuilder:
    """All inputs that the units of a cache are a pure function of.

    It can be pickled if ``read_unit`` and ``tokenizer`` can, so other processes and machines can run it.

    Attributes:
        files: The source files.
        read_unit: Yields the records of a unit, in order.
        tokenizer: The recipe's tokenizer.
        recipe: The recipe of the cache.
        codec: Compression of the chunks; changes their bytes, never their content.
        block_rows: Rows per compressed block; None: about a thousand tokens.
        transforms: Transforms applied to documents before packing; their identities are in the recipe.
        transform_seed: Seed of their random draws.
        pipeline: How the work is staged; no setting in it changes a byte.
        bad_record_fraction: Fraction of a unit's records, rounded up, that may be unreadable and quarantined.
        directory: The cache, which holds the duplicates found by the first pass; set by ``with_directory``.
    """

    files: Sequence[SourceFile]
    read_unit: ReadUnit
    tokenizer: Encoder
    recipe: Recipe
    codec: str = "lz4"
    block_rows: int | None = None
    transforms: tuple[Transform, ...] = ()
    transform_seed: int = 0
    pipeline: BuildPipelineConfig = field(default_factory=BuildPipelineConfig)
    bad_record_fraction: float = 0.001
    directory: Path | None = None

    def with_directory(self, directory: Path) -> UnitBuilder:
        """Return the builder for the cache in a directory."""
        return replace(self, directory=directory)

    @property
    def cache_directory(self) -> Path:
        """The directory of ``with_directory``."""
        assert self.directory is not None, "call UnitBuilder.with_directory first"
        return self.directory

    def run(
        self,
        units: Iterable[Unit],
        *,
        on_documents: OnDocuments | None = None,
        on_statistics: Callable[[BuildStatistics], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Generator[BuiltUnit]:
        """Build units in the given order, with read-ahead.

        A unit during which the tokenizer's fast path was disabled may contain its faulty ids, so it is built again. No
        other code of a build handles this.

        Args:
            units: Consumed one by one when there is room for another, so they may be leased as they are consumed; by a
                thread of the pipeline if the work is staged.
            on_documents: Called as documents are tokenised, in the iterating thread.
            on_statistics: Called with the pipeline's counters likewise, and at the end; never if the work is not
                staged.
            stop: Called before every unit; once it returns true, no more are consumed and those in flight are
                finished.

        Raises:
            DataError: A text cannot be read or tokenised. The units before it have been yielded.
        """

        in_progress: deque[tuple[Unit, int]] = deque()

        def tracked() -> Iterator[Unit]:
            for unit in units:
                in_progress.append((unit, self._fallbacks()))
                yield unit

        if self.pipeline.staged:
            results = self._run_staged(tracked(), on_documents, on_statistics, stop)
        else:
            taken = tracked() if stop is None else _take_until(tracked(), stop)
            results = run_serial(taken, self.stages(on_documents))
        with contextlib.closing(results):
            for built in results:
                unit, before = in_progress.popleft()
                while before != self._fallbacks():
                    before = self._fallbacks()
                    built = next(run_serial([unit], self.stages()))
                yield built

    def _fallbacks(self) -> int:
        """Return how often the fast path of the tokenizer was disabled."""
        return getattr(self.tokenizer, "fast_path_fallbacks", 0)

    def _run_staged(
        self,
        units: Iterable[Unit],
        on_documents: OnDocuments | None,
        on_statistics: Callable[[BuildStatistics], None] | None,
        stop: Callable[[], bool] | None,
    ) -> Generator[BuiltUnit]:
        progress = _Progress()

        def poll() -> None:
            added = progress.drain()
            if added is None:
                return
            if on_statistics is not None:
                on_statistics(pipeline.statistics())
            if on_documents is not None:
                on_documents(*added)

        stages = self.stages(progress.add)
        # Units are leased when they are consumed: only enough to keep every thread busy, so other builders find some.
        most_in_flight = _UNITS_AHEAD + sum(stage.threads for stage in stages if isinstance(stage, BuildStage))
        pipeline = BuildPipeline(
            units, stages, queue_bytes=self.pipeline.queue_bytes, stop=stop, most_in_flight=most_in_flight, poll=poll
        )  # fmt: skip
        with contextlib.closing(iter(pipeline)) as built:
            yield from built
        if on_statistics is not None:
            on_statistics(pipeline.statistics())

    def stages(self, on_documents: OnDocuments | None = None) -> tuple[BuildStage | Flow, ...]:
        """Return the stages in order, omitting those that would do nothing.

        Args:
            on_documents: Called by ``gather`` for every batch, in its thread.
        """
        config = self.pipeline
        stages = [*self.sources(), *self.filters(), BuildStage("tokenize", self.tokenize, config.tokenize_threads)]
        if self._transforms_tokens:
            stages.append(BuildStage("augment", self.augment, config.augment_threads))
        gather = partial(self.gather, on_documents=on_documents)
        return (*stages, Flow("gather", gather), BuildStage("pack", self.pack, config.pack_threads))

    def sources(self) -> list[BuildStage | Flow]:
        """Return the stages up to the records; fetching is a stage of its own if the source supports it."""
        read, decode = self.read_unit, Flow("decode", self.decode)
        if isinstance(read, FetchingReader) and read.fetches:
            return [
                BuildStage("fetch", self.fetch, self.pipeline.fetch_threads, reserve_bytes=read.fetched_bytes),
                decode,
            ]
        return [decode]

    def filters(self) -> list[BuildStage | Flow]:
        """Return the stage that applies transforms of text, if there are any."""
        if any(transform.kind == "duplicates" and transform.scope == "unit" for transform in self.transforms):
            return [Flow("filter", partial(map, self.filter))]  # depends on the earlier texts of the unit
        if any(transform.kind != "tokens" for transform in self.transforms):
            return [BuildStage("filter", self.filter, self.pipeline.filter_threads)]
        return []

    @property
    def _transforms_tokens(self) -> bool:
        return any(transform.kind == "tokens" for transform in self.transforms)

    @property
    def _applier(self) -> Applier:
        return Applier(self.transforms, self.transform_seed, self.files, self.tokenizer)

    def fetch(self, unit: Unit) -> FetchedUnit:
        """Fetch the bytes of a unit ahead of decoding."""
        assert isinstance(self.read_unit, FetchingReader)
        return FetchedUnit(unit, self.read_unit.fetch(unit))

    def decode(self, units: Iterator[Unit | FetchedUnit]) -> Iterator[DocumentBatch]:
        """Yield the records of units in batches."""
        return read_batches(units, self.read_unit, self.files, self._duplicate_checks)

    def _duplicate_checks(self, unit: Unit) -> DuplicateChecks:
        removers = [transform for transform in self.transforms if transform.kind == "duplicates"]
        return {remover.number: duplicate_check(self.directory, self.files, remover, unit) for remover in removers}

    def filter(self, batch: DocumentBatch) -> DocumentBatch:
        """Apply the text transforms."""
        counts: Counts = {}
        documents = self._applier.texts(batch.documents, batch.duplicates, counts)
        size_bytes = sum(len(document.text or "") + TEXT_OVERHEAD_BYTES for document in documents)
        return replace(batch, documents=documents, counts=counts, size_bytes=size_bytes)

    def tokenize(self, batch: DocumentBatch) -> DocumentBatch | TokenizedDocuments:
        """Encode the documents and convert them to stored form, unless token transforms follow."""
        found, bad = batch.documents, ()
        if self.recipe.images is not None:
            found, bad = ImageStore(self.cache_directory, self.recipe.images).keep(batch.documents)
        batch = replace(batch, bad_records=(*batch.bad_records, *bad)) if bad else batch
        documents, tokens = encode(found, self.files, self.tokenizer, images=self.recipe.images)
        if self._transforms_tokens:
            batch = replace(batch, documents=documents)
            return replace(batch, tokens=tokens, size_bytes=batch.size_bytes + sum(ids.nbytes for ids in tokens))
        return finish_documents(batch, documents, tokens, self.files, self.recipe)

    def augment(self, batch: DocumentBatch) -> TokenizedDocuments:
        """Apply the token transforms."""
        counts = dict(batch.counts)
        documents, tokens = self._applier.tokens(batch.documents, batch.tokens, counts)
        return finish_documents(replace(batch, counts=counts), documents, tokens, self.files, self.recipe)

    def gather(
        self, parts: Iterator[TokenizedDocuments], on_documents: OnDocuments | None = None
    ) -> Iterator[TokenizedDocuments]:
        """Join the batches of each unit, and report progress per batch."""
        unit_parts: list[TokenizedDocuments] = []
        for part in parts:
            unit_parts.append(part)
            if on_documents is not None and len(part.documents_D):
                text_bytes = int(part.documents_D["text_bytes"].sum(dtype=np.int64))
                on_documents(len(part.documents_D), text_bytes, len(part.tokens))
            if part.is_last:
                yield _join(unit_parts)
                unit_parts = []

    def source_set(self, unit: Unit) -> bytes:
        """Return the digest of a unit's ranges of records and of the versions of their files."""
        return source_set_digest(unit, self.files, uses_paths=self.recipe.uses_paths)

    def key_of(self, unit: Unit) -> str:
        """Return the key under which caches share a unit.

        Raises:
            DataError: The first pass for duplicates has not reached the unit.
        """
        duplicates = [
            removed_digest(self.cache_directory, transform, unit)
            for transform in self.transforms
            if transform.kind == "duplicates" and transform.scope == "corpus"
        ]
        if self.recipe.images is not None:  # the records name images by paths relative to their file
            duplicates += [self.files[index].uri for index in unit.file_indexes]
        return unit_key(self.recipe.digest, self.source_set(unit), duplicates)

    def origins(self, unit: Unit, num_parts: int) -> list[ChunkOrigin]:
        """Return the origin recorded in the header of each chunk of a unit."""
        recipe, source_set = bytes.fromhex(self.recipe.digest), self.source_set(unit)
        return [ChunkOrigin(part, num_parts, recipe, source_set) for part in range(num_parts)]

    def pack(self, gathered: TokenizedDocuments) -> BuiltUnit:
        """Pack a gathered unit into the bytes of its chunks."""
        unit, documents_D = gathered.unit, gathered.documents_D
        contents: list[ChunkContent] = []
        if not gathered.aborted:
            masks = (gathered.loss_mask, gathered.rejected_starts_D)
            contents = chunk_contents(gathered.tokens, documents_D, self.recipe, *masks)
        chunks = [
            encode_chunk(content, origin, unit=unit.unit_id, codec=self.codec, block_rows=self.block_rows)
            for content, origin in zip(contents, self.origins(unit, len(contents)), strict=True)
        ]
        images: list[int] = []
        if self.recipe.images is not None:
            images = [digest for content in contents for digest in find_images(content.tokens_RC)[1]]
        return BuiltUnit(
            unit=unit,
            key=self.key_of(unit),
            chunks=tuple(chunks),
            statistics=unit_statistics(unit.unit_id, documents_D, len(gathered.bad_records), contents),
            bad_records=gathered.bad_records,
            records_read=gathered.records_read,
            aborted=gathered.aborted,
            transforms=gathered.counts,
            images=tuple(dict.fromkeys(images)),
        )


def _take_until(units: Iterable[Unit], stop: Callable[[], bool]) -> Iterator[Unit]:
    iterator = iter(units)
    while not stop() and (unit := next(iterator, None)) is not None:
        yield unit


def _join(parts: Sequence[TokenizedDocuments]) -> TokenizedDocuments:
    counts: Counts = {}
    for name, count in chain.from_iterable(part.counts.items() for part in parts):
        counts[name] = counts.get(name, TransformCount()) + count
    return TokenizedDocuments(
        unit=parts[0].unit,
        tokens=cast("TokenArray", np.concatenate([part.tokens for part in parts])),
        documents_D=np.concatenate([part.documents_D for part in parts]),
        loss_mask=None
        if all(part.loss_mask is None for part in parts)
        else np.concatenate(
            [np.ones(len(part.tokens), np.bool_) if part.loss_mask is None else part.loss_mask for part in parts]
        ),
        rejected_starts_D=_joined_starts([part.rejected_starts_D for part in parts]),
        bad_records=tuple(chain.from_iterable(part.bad_records for part in parts)),
        records_read=sum(part.records_read for part in parts),
        is_last=True,
        aborted=parts[-1].aborted,
        counts=counts,
    )


def _joined_starts(parts: Sequence[npt.NDArray[np.int64] | None]) -> npt.NDArray[np.int64] | None:
    found = [starts for starts in parts if starts is not None]
    return np.concatenate(found) if found else None


class _Progress:
    """Counts of documents, text bytes and tokens; one thread adds, another one drains them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = (0, 0, 0)

    def add(self, documents: int, text_bytes: int, tokens: int) -> None:
        with self._lock:
            before = self._counts
            self._counts = (before[0] + documents, before[1] + text_bytes, before[2] + tokens)

    def drain(self) -> tuple[int, int, int] | None:
        """Return the counts added since the last call; None if there are none."""
        with self._lock:
            taken, self._counts = self._counts, (0, 0, 0)
        return taken if any(taken) else None
