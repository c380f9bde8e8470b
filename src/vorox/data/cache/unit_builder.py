"""Build units of a cache: read their text, then filter, tokenize and pack it into the bytes of chunks.

A ``UnitBuilder`` holds all inputs of a cache's units; ``run`` takes units and yields ``BuiltUnit``s in the same order.
Nothing is written here: the build scheduler commits the bytes. Invariant: the content of a unit is a function of the
builder and the unit alone, independent of order, process and threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from vorox.core.schema.data import PipelineConfig
from vorox.data.cache.document_tokens import Encoder, unit_statistics
from vorox.data.cache.format import ChunkContent, ChunkOrigin, ChunkRecord, encode_chunk
from vorox.data.cache.manifest import UnitStatistics
from vorox.data.cache.recipe import Recipe, source_set_digest
from vorox.data.cache.report import TransformCount
from vorox.data.documents import BadRecord, SourceFile, Unit
from vorox.data.images import ImageStore
from vorox.data.packing import chunk_contents
from vorox.data.pipeline.duplicates import FirstPass, corpus_wide, duplicate_check, find_duplicates
from vorox.data.pipeline.pipeline import Pipeline, PipelineStatistics, Stage, run_serial
from vorox.data.pipeline.stages import OnDocuments, ReadUnit, TokenizedDocuments, UnitStages
from vorox.data.transforms.apply import Applier
from vorox.data.transforms.registry import Transform

_UNITS_AHEAD = 2
"""One unit that is read while others are tokenised and packed, and one that the caller writes."""


@dataclass(frozen=True, slots=True)
class BuiltUnit:
    """A built unit that is not yet written to disk.

    Attributes:
        unit_id: The unit.
        chunks: The bytes and the manifest record of each chunk file, in the order of parts.
        statistics: Counts of the unit.
        bad_records: Unreadable records.
        records_read: Records of the unit, including bad and removed ones; the limit on bad ones is a fraction of it.
        aborted: Reading stopped after too many consecutive bad records; the unit must not be committed.
        transforms: Counts of each transform, by its index and name: ``0/length``.
    """

    unit_id: int
    chunks: tuple[tuple[bytes | bytearray, ChunkRecord], ...]
    statistics: UnitStatistics
    bad_records: tuple[BadRecord, ...]
    records_read: int
    aborted: bool
    transforms: Mapping[str, TransformCount] = field(default_factory=dict[str, TransformCount])

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
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    bad_record_fraction: float = 0.001
    directory: Path | None = None

    def with_directory(self, directory: Path) -> UnitBuilder:
        """Return the builder for the cache in a directory."""
        return replace(self, directory=directory)

    def find_duplicates(
        self,
        units: Sequence[Unit],
        *,
        on_compared: Callable[[int], None] | None = None,
        stop: Callable[[], bool] | None = None,
        passes: dict[int, FirstPass] | None = None,
    ) -> None:
        """Run the first pass, or the rest of it, if a transform removes duplicates across the whole source.

        Args:
            units: All units of the cache, in order.
            on_compared: Called after every unit with the bytes of text compared so far.
            stop: Called before every unit.
            passes: State of earlier calls with fewer units; pass the same dictionary again.

        Raises:
            DataError: A text cannot be read, or the earlier results belong to a different source.
        """
        if corpus_wide(self.transforms):
            assert self.directory is not None, "call UnitBuilder.with_directory first"
            stages = self.stages()
            find_duplicates(
                self.directory, stages, units, self.pipeline, on_compared=on_compared, stop=stop, passes=passes
            )  # fmt: skip

    def run(
        self,
        units: Iterable[Unit],
        *,
        on_documents: OnDocuments | None = None,
        on_statistics: Callable[[PipelineStatistics], None] | None = None,
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
            results = run_serial(taken, self.stages(on_documents).stages(self.pipeline))
        with contextlib.closing(results):
            for built in results:
                unit, before = in_progress.popleft()
                while before != self._fallbacks():
                    before = self._fallbacks()
                    built = next(run_serial([unit], self.stages().stages(self.pipeline)))
                yield built

    def _fallbacks(self) -> int:
        """Return how often the fast path of the tokenizer was disabled."""
        return getattr(self.tokenizer, "fast_path_fallbacks", 0)

    def _run_staged(
        self,
        units: Iterable[Unit],
        on_documents: OnDocuments | None,
        on_statistics: Callable[[PipelineStatistics], None] | None,
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

        stages = self.stages(progress.add).stages(self.pipeline)
        # Units are leased when they are consumed: only enough to keep every thread busy, so other builders find some.
        most_in_flight = _UNITS_AHEAD + sum(stage.threads for stage in stages if isinstance(stage, Stage))
        pipeline = Pipeline(
            units, stages, queue_bytes=self.pipeline.queue_bytes, stop=stop, most_in_flight=most_in_flight, poll=poll
        )  # fmt: skip
        with contextlib.closing(iter(pipeline)) as built:
            yield from built
        if on_statistics is not None:
            on_statistics(pipeline.statistics())

    def stages(self, on_documents: OnDocuments | None = None) -> UnitStages:
        """Return the stages from a unit to its chunks; ``on_documents`` is called in one of their threads."""
        applier = Applier(self.transforms, self.transform_seed, self.files, self.tokenizer)
        stages = UnitStages(
            self.files,
            self.read_unit,
            self.tokenizer,
            self.recipe,
            applier,
            partial(duplicate_check, self.directory, self.files),
            self._pack,
            images=self._image_store(),
        )
        return stages if on_documents is None else replace(stages, on_documents=on_documents)

    def _image_store(self) -> ImageStore | None:
        if self.recipe.images is None:
            return None
        assert self.directory is not None, "call UnitBuilder.with_directory first"
        return ImageStore(self.directory, self.recipe.images)

    def origins(self, unit: Unit, num_parts: int) -> list[ChunkOrigin]:
        """Return the origin recorded in the header of each chunk of a unit."""
        recipe, source_set = bytes.fromhex(self.recipe.digest), source_set_digest(unit, self.files)
        return [ChunkOrigin(unit.unit_id, part, num_parts, recipe, source_set) for part in range(num_parts)]

    def _pack(self, gathered: TokenizedDocuments) -> BuiltUnit:
        unit, documents_D = gathered.unit, gathered.documents_D
        contents: list[ChunkContent] = []
        if not gathered.aborted:
            masks = (gathered.loss_mask, gathered.rejected_starts_D)
            contents = chunk_contents(unit.unit_id, gathered.tokens, documents_D, self.recipe, *masks)
        chunks = [
            encode_chunk(content, origin, codec=self.codec, block_rows=self.block_rows)
            for content, origin in zip(contents, self.origins(unit, len(contents)), strict=True)
        ]
        return BuiltUnit(
            unit_id=unit.unit_id,
            chunks=tuple(chunks),
            statistics=unit_statistics(unit.unit_id, documents_D, len(gathered.bad_records)),
            bad_records=gathered.bad_records,
            records_read=gathered.records_read,
            aborted=gathered.aborted,
            transforms=gathered.counts,
        )


def _take_until(units: Iterable[Unit], stop: Callable[[], bool]) -> Iterator[Unit]:
    iterator = iter(units)
    while not stop() and (unit := next(iterator, None)) is not None:
        yield unit


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
