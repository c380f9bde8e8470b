"""A unit of a cache, built: its text read, filtered, tokenized and packed into the bytes of its chunks.

A ``UnitBuilder`` is what the units of one cache are a function of; ``run`` takes units and gives ``BuiltUnit``s in the
same order. Nothing is written here: the caller (the build scheduler, a worker process, a Ray task, a stream) keeps the
bytes or drops them. Invariant: a unit's content is a function of the work and of the unit
alone, not of what else is run, where, in which order or by how many threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from vorox.core.schema.data import PipelineConfig
from vorox.data.cache.assemble import Encoder, chunk_contents, unit_statistics
from vorox.data.cache.format import ChunkContent, ChunkOrigin, ChunkRecord, encode_chunk
from vorox.data.cache.manifest import UnitStatistics
from vorox.data.cache.recipe import Recipe, source_set_digest
from vorox.data.documents import BadRecord, SourceFile, Unit
from vorox.data.pipeline.duplicates import FirstPass, corpus_wide, duplicate_checks, find_duplicates
from vorox.data.pipeline.pipeline import Pipeline, PipelineStatistics, Stage, run_serial
from vorox.data.pipeline.stages import OnDocuments, ReadUnit, TokenizedDocuments, UnitStages
from vorox.data.tokenizers.fast_path import rebuild_after_fallback
from vorox.data.transforms.apply import Applier, TransformCount
from vorox.data.transforms.registry import Transform

_UNITS_AHEAD = 2
"""One that is read while others are tokenised and packed, and one that the caller writes."""


@dataclass(frozen=True, slots=True)
class BuiltUnit:
    """All that a unit came to; nothing of it is written yet.

    Attributes:
        unit_id: The unit.
        chunks: The bytes of each chunk file and what the manifest says of it, in the order of their parts.
        statistics: What is in the chunks.
        bad_records: Records that could not be read.
        records_read: Records of the unit, bad and removed ones included: what the budget of bad ones is a share of.
        gave_up: Reading stopped because record after record was bad; the unit must not be committed.
        transforms: What each transform did, by its place in the list and its name: ``0/length``.
    """

    unit_id: int
    chunks: tuple[tuple[bytes | bytearray, ChunkRecord], ...]
    statistics: UnitStatistics
    bad_records: tuple[BadRecord, ...]
    records_read: int
    gave_up: bool
    transforms: Mapping[str, TransformCount] = field(default_factory=dict[str, TransformCount])

    @property
    def size_bytes(self) -> int:
        return sum(record.size_bytes for _, record in self.chunks)

    @property
    def place(self) -> str:
        return f"unit {self.unit_id}"


@dataclass(frozen=True)
class UnitBuilder:
    """Everything that the units of a cache are a pure function of.

    It can be pickled where ``read_unit`` and ``tokenizer`` can, so that other processes and machines can run it.

    Attributes:
        files: The source's files.
        read_unit: Gives the records of a unit, in order.
        tokenizer: The recipe's tokenizer.
        recipe: What the rows are a function of.
        codec: Compression of the chunks; it changes their bytes, never their content.
        block_rows: Rows compressed together; None for about a thousand tokens.
        transforms: What happens to documents before they are packed; their identities are in the recipe.
        transform_seed: Seed of their draws.
        pipeline: How the work is staged; nothing in it changes a byte.
        bad_record_fraction: Unreadable records of a unit, rounded up, that are quarantined before the build stops.
        directory: The cache, where the first pass leaves what it found of duplicates; set by ``at``.
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

    def at(self, directory: Path) -> UnitBuilder:
        """The same work for the cache in a directory."""
        return replace(self, directory=directory)

    def find_duplicates(
        self,
        units: Sequence[Unit],
        *,
        on_compared: Callable[[int], None] | None = None,
        stop: Callable[[], bool] | None = None,
        passes: dict[int, FirstPass] | None = None,
    ) -> None:
        """Do the first pass, or what is missing of it, where a transform looks for duplicates in the whole source.

        Args:
            units: All units of the cache, in order.
            on_compared: Told after every unit how many bytes of text have been looked at.
            stop: Asked before every unit.
            passes: What earlier calls with fewer units came to; a dictionary that is given again.

        Raises:
            DataError: A text cannot be read, or what was found before is of another source.
        """
        if corpus_wide(self.transforms):
            assert self.directory is not None, "UnitBuilder.at says where the first pass is kept"
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
    ) -> Iterator[BuiltUnit]:
        """Build units in the order given, reading ahead.

        Args:
            units: Taken one by one when there is room for another, so that they may be leased as they are taken; by a
                thread of the pipeline where the work is staged.
            on_documents: Called as documents are tokenised, in the thread that iterates.
            on_statistics: Called with the pipeline's counters likewise, and at the end; never where the work is not
                staged.
            stop: Asked before every unit; once it says yes, no more are taken and those that were are finished.

        Raises:
            DataError: A text cannot be read or tokenised. The units before it have been given out.
        """

        def build(units: Iterable[Unit]) -> Generator[BuiltUnit]:
            if self.pipeline.staged:
                return self._run_staged(units, on_documents, on_statistics, stop)
            taken = units if stop is None else _until(units, stop)
            return run_serial(taken, self.stages(on_documents).stages(self.pipeline))

        def rebuild(unit: Unit) -> BuiltUnit:
            return next(run_serial([unit], self.stages().stages(self.pipeline)))

        return rebuild_after_fallback(self.tokenizer, units, build, rebuild)

    def _run_staged(
        self,
        units: Iterable[Unit],
        on_documents: OnDocuments | None,
        on_statistics: Callable[[PipelineStatistics], None] | None,
        stop: Callable[[], bool] | None,
    ) -> Generator[BuiltUnit]:
        progress = _Progress()

        def poll() -> None:
            added = progress.take()
            if added is None:
                return
            if on_statistics is not None:
                on_statistics(pipeline.statistics())
            if on_documents is not None:
                on_documents(*added)

        stages = self.stages(progress.add).stages(self.pipeline)
        # Units are leased as they are taken: no more than keep every thread busy, so that others find some too.
        most = _UNITS_AHEAD + sum(stage.threads for stage in stages if isinstance(stage, Stage))
        pipeline = Pipeline(
            units, stages, queue_bytes=self.pipeline.queue_bytes, stop=stop, most_in_flight=most, poll=poll
        )  # fmt: skip
        with contextlib.closing(iter(pipeline)) as built:
            yield from built
        if on_statistics is not None:
            on_statistics(pipeline.statistics())

    def stages(self, on_documents: OnDocuments | None = None) -> UnitStages:
        """The stages from a unit to its chunks; ``on_documents`` is called in one of their threads."""
        applier = Applier(self.transforms, self.transform_seed, self.files, self.tokenizer)
        stages = UnitStages(
            self.files,
            self.read_unit,
            self.tokenizer,
            self.recipe,
            applier,
            partial(duplicate_checks, self.directory, self.files),
            self._pack,
        )
        return stages if on_documents is None else replace(stages, on_documents=on_documents)

    def origin(self, unit: Unit, part: int, num_parts: int) -> ChunkOrigin:
        """What the header of a chunk says that it belongs to."""
        source_set = source_set_digest(unit, self.files)
        return ChunkOrigin(unit.unit_id, part, num_parts, bytes.fromhex(self.recipe.digest), source_set)

    def _pack(self, gathered: TokenizedDocuments) -> BuiltUnit:
        unit, documents_D = gathered.unit, gathered.documents_D
        contents: list[ChunkContent] = []
        if not gathered.gave_up:
            contents = chunk_contents(unit.unit_id, gathered.tokens, documents_D, self.recipe)
        chunks = [
            encode_chunk(content, self.origin(unit, part, len(contents)), codec=self.codec, block_rows=self.block_rows)
            for part, content in enumerate(contents)
        ]
        return BuiltUnit(
            unit_id=unit.unit_id,
            chunks=tuple(chunks),
            statistics=unit_statistics(unit.unit_id, documents_D, len(gathered.bad_records)),
            bad_records=gathered.bad_records,
            records_read=gathered.records_read,
            gave_up=gathered.gave_up,
            transforms=gathered.counts,
        )


def _until(units: Iterable[Unit], stop: Callable[[], bool]) -> Iterator[Unit]:
    iterator = iter(units)
    while not stop() and (unit := next(iterator, None)) is not None:
        yield unit


class _Progress:
    """Counts of documents, text bytes and tokens, added by one thread and taken by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = (0, 0, 0)

    def add(self, documents: int, text_bytes: int, tokens: int) -> None:
        with self._lock:
            before = self._counts
            self._counts = (before[0] + documents, before[1] + text_bytes, before[2] + tokens)

    def take(self) -> tuple[int, int, int] | None:
        """Return what was added since the last call; None if nothing was."""
        with self._lock:
            taken, self._counts = self._counts, (0, 0, 0)
        return taken if any(taken) else None
