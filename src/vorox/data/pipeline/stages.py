"""The stages from a unit of text to the bytes of its chunks: fetch, decode, filter, tokenize, augment, gather, pack.

Units go in, ``Batch``es of documents travel through the first stages, a unit's documents are gathered again and packed
at the end. Every stage is a pure function of what it is given, so threads may run it in any order; where the work is
staged, ``run`` gives the same as where it is not. Invariant: batches never mix units, and the last of a unit says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.core.schema.data import PipelineConfig
from vorox.data.cache.assemble import Encoder, UnitText, encode, finished
from vorox.data.cache.recipe import Recipe
from vorox.data.documents import BAD_RECORDS_IN_A_ROW, BadRecord, Document, SourceFile, TokenDocument, Unit
from vorox.data.pipeline.duplicates import duplicates_of
from vorox.data.pipeline.pipeline import Flow, Item, Stage
from vorox.data.records import TokenArray
from vorox.data.storage import Fetched, reading_from
from vorox.data.transforms.apply import Applier, Counts, Entry, IsDuplicate, add_counts

Record = Document | TokenDocument | BadRecord
ReadUnit = Callable[[Unit], Iterable[Record]]
"""The records of a unit, in order. One that other processes can have and that fetches apart: ``text.UnitReader``."""
_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 4096
_TEXT_OVERHEAD_BYTES = 64


@dataclass(frozen=True)
class Batch:
    """Some documents of one unit.

    Attributes:
        unit: The unit.
        entries: The documents.
        tokens: Their ids, once they have some and until they are finished.
        text: The documents as they are stored, once they are finished; the others are let go then.
        bad_records: Records of this part of the unit that could not be read.
        records_read: Records that the batch was made of, bad and removed ones included.
        is_last: No other batch of the unit follows.
        gave_up: Reading stopped because record after record was bad.
        counts: What each transform did.
        path_changes: What the tokenizer said of itself before it made the ids.
        duplicates: By the number of the transform, whether a text of the unit was there before.
        size_bytes: About what it takes in memory.
    """

    unit: Unit
    entries: Sequence[Entry]
    size_bytes: int
    tokens: Sequence[npt.NDArray[Any]] = ()
    text: UnitText | None = None
    bad_records: tuple[BadRecord, ...] = ()
    records_read: int = 0
    is_last: bool = False
    gave_up: bool = False
    counts: Counts = field(default_factory=dict[str, Any])
    path_changes: int = 0
    duplicates: Mapping[int, IsDuplicate] = field(default_factory=dict[int, Any], repr=False)

    @property
    def place(self) -> str:
        if not self.entries:
            return f"unit {self.unit.unit_id}"
        first, last = self.entries[0].record, self.entries[-1].record
        return (
            f"unit {self.unit.unit_id}, record {first.ordinal + 1} of file {first.file_index} "
            f"to record {last.ordinal + 1} of file {last.file_index}"
        )


@runtime_checkable
class Fetching(Protocol):
    """A ``ReadUnit`` that can read bytes ahead of decoding them."""

    def __call__(self, unit: Unit, /) -> Iterable[Record]: ...
    @property
    def fetches(self) -> bool: ...
    def fetched_bytes(self, unit: Unit, /) -> int: ...
    def fetch(self, unit: Unit, /) -> Fetched: ...


@dataclass(frozen=True, slots=True)
class FetchedUnit:
    """A unit and its bytes."""

    unit: Unit
    fetched: Fetched

    @property
    def size_bytes(self) -> int:
        return self.fetched.size_bytes

    @property
    def place(self) -> str:
        return self.unit.place


@dataclass(frozen=True, slots=True)
class GatheredUnit:
    """All documents of a unit as tokens."""

    unit: Unit
    text: UnitText
    bad_records: tuple[BadRecord, ...]
    records_read: int
    gave_up: bool
    counts: Counts

    @property
    def size_bytes(self) -> int:
        return self.text.tokens.nbytes + self.text.documents_D.nbytes

    @property
    def place(self) -> str:
        return f"unit {self.unit.unit_id}"


@dataclass(frozen=True, slots=True)
class Told:
    """Documents that were tokenised, on their way to whoever shows progress."""

    documents: int
    text_bytes: int
    tokens: int
    size_bytes: int = 0
    place: str = ""
    is_word: bool = True
    """Not an item of work: it is not counted as one."""


@dataclass(frozen=True)
class UnitStages:
    """What the stages are functions of.

    Attributes:
        files: The source's files.
        read_unit: Gives the records of a unit.
        tokenizer: Text to ids.
        recipe: What the rows are a function of.
        applier: The transforms.
        directory: Where the first pass left what it found of duplicates.
        pack: Makes what is kept of a gathered unit.
    """

    files: Sequence[SourceFile]
    read_unit: ReadUnit
    tokenizer: Encoder
    recipe: Recipe
    applier: Applier
    directory: Path | None
    pack: Callable[[GatheredUnit], Item]

    def stages(self, config: PipelineConfig) -> tuple[Stage | Flow, ...]:
        """The stages in order; those that would do nothing are left out."""
        stages = [*self.sources(config), *self.filters(config)]
        stages.append(Stage("tokenize", self.tokenize, config.tokenize_threads))
        if any(transform.kind == "tokens" for transform in self.applier.transforms):
            stages.append(Stage("augment", self.augment, config.augment_threads))
        return (*stages, Flow("gather", self.gather), Stage("pack", self._packed, config.pack_threads))

    def sources(self, config: PipelineConfig) -> list[Stage | Flow]:
        """The stages up to the records; bytes are fetched apart where the source can do so."""
        read = self.read_unit
        decode = Flow("decode", self.decode)
        if isinstance(read, Fetching) and read.fetches:
            return [Stage("fetch", self.fetch, config.fetch_threads, reserve_bytes=read.fetched_bytes), decode]
        return [decode]

    def filters(self, config: PipelineConfig) -> list[Stage | Flow]:
        """The stage that applies transforms of text, if there are any."""
        transforms = self.applier.transforms
        if any(transform.kind == "duplicates" and transform.scope == "unit" for transform in transforms):
            return [Flow("filter", lambda batches: map(self.filter, batches))]  # what came before in the unit decides
        if any(transform.kind != "tokens" for transform in transforms):
            return [Stage("filter", self.filter, config.filter_threads)]
        return []

    def before(self, number: int) -> UnitStages:
        """The same with the transforms before one of them only."""
        transforms = tuple(transform for transform in self.applier.transforms if transform.number < number)
        return replace(self, applier=replace(self.applier, transforms=transforms))

    def fetch(self, unit: Unit) -> FetchedUnit:
        """Read what can be read before it is decoded."""
        assert isinstance(self.read_unit, Fetching)
        return FetchedUnit(unit, self.read_unit.fetch(unit))

    def decode(self, units: Iterator[Unit | FetchedUnit]) -> Iterator[Batch]:
        """The records of units in batches."""
        for item in units:
            unit = item.unit if isinstance(item, FetchedUnit) else item
            try:
                records = iter(self.read_unit(unit))
                if isinstance(item, FetchedUnit):
                    records = reading_from(records, item.fetched)
                yield from self._decoded(unit, records)
            except OSError as error:
                raise DataError(
                    f"unit {unit.unit_id} of the source cannot be read: {error.strerror or error}",
                    where=str(error.filename or self.files[unit.spans[0].file_index].uri),
                    hint="check that the file is there and may be read, then run the same command again",
                ) from error

    def _decoded(self, unit: Unit, records: Iterator[Record]) -> Iterator[Batch]:
        entries: list[Entry] = []
        bad_records: list[BadRecord] = []
        size_bytes = bad_in_a_row = 0
        duplicates = duplicates_of(self.directory, self.files, self.applier.transforms, unit)
        for record in records:
            if isinstance(record, BadRecord):
                bad_records.append(record)
                bad_in_a_row += not record.is_rest_of_file
                if bad_in_a_row == BAD_RECORDS_IN_A_ROW:
                    break
                continue
            bad_in_a_row = 0
            if size_bytes >= _BATCH_BYTES or len(entries) >= _BATCH_DOCUMENTS:
                yield replace(_batch(unit, entries, size_bytes, bad_records), duplicates=duplicates)
                entries, bad_records, size_bytes = [], [], 0
            if isinstance(record, TokenDocument):
                entries.append(Entry(record, None))
                size_bytes += record.tokens.nbytes + _TEXT_OVERHEAD_BYTES
            else:
                entries.append(Entry(record, record.text))
                size_bytes += len(record.text) + _TEXT_OVERHEAD_BYTES
        gave_up = bad_in_a_row == BAD_RECORDS_IN_A_ROW
        last = _batch(unit, entries, size_bytes, bad_records)
        yield replace(last, duplicates=duplicates, is_last=True, gave_up=gave_up)

    def filter(self, batch: Batch) -> Batch:
        """Apply the transforms of text."""
        counts: Counts = {}
        entries = self.applier.texts(batch.entries, batch.duplicates, counts)
        size_bytes = sum(len(entry.text or "") + _TEXT_OVERHEAD_BYTES for entry in entries)
        return replace(batch, entries=entries, counts=counts, size_bytes=size_bytes)

    def tokenize(self, batch: Batch) -> Batch:
        path_changes = self._path_changes()
        tokens = encode(batch.entries, self.files, self.tokenizer)
        batch = replace(batch, path_changes=path_changes)
        if any(transform.kind == "tokens" for transform in self.applier.transforms):
            return replace(batch, tokens=tokens, size_bytes=batch.size_bytes + sum(ids.nbytes for ids in tokens))
        return self._finished(batch, batch.entries, tokens)

    def augment(self, batch: Batch) -> Batch:
        """Apply the transforms of tokens."""
        counts = dict(batch.counts)
        entries, tokens = self.applier.tokens(batch.entries, batch.tokens, counts)
        return replace(self._finished(batch, entries, tokens), counts=counts)

    def _finished(self, batch: Batch, entries: Sequence[Entry], tokens: Sequence[npt.NDArray[Any]]) -> Batch:
        """The documents as they are stored; their texts are let go."""
        text = finished(entries, tokens, self.files, self.recipe)
        size_bytes = text.tokens.nbytes + text.documents_D.nbytes
        return replace(batch, entries=(), tokens=(), text=text, size_bytes=size_bytes)

    def gather(self, batches: Iterator[Batch]) -> Iterator[GatheredUnit | Told]:
        """Whole units, and word of every batch on the way.

        A tokenizer that left its fast path in the middle of a unit makes the unit anew: some of its ids may be wrong.
        """
        parts: list[Batch] = []
        for batch in batches:
            parts.append(batch)
            if batch.is_last and any(part.path_changes != self._path_changes() for part in parts):
                parts = self._made_anew(batch.unit)
            if batch.text is not None and len(batch.text.documents_D):
                documents_D = batch.text.documents_D
                text_bytes = int(documents_D["text_bytes"].sum(dtype=np.int64))
                yield Told(len(documents_D), text_bytes, len(batch.text.tokens))
            if batch.is_last:
                yield self._gathered(parts)
                parts = []

    def _path_changes(self) -> int:
        return int(getattr(self.tokenizer, "path_changes", 0))

    def _made_anew(self, unit: Unit) -> list[Batch]:
        stages = self.stages(PipelineConfig())
        changes = -1
        parts: list[Batch] = []
        while changes != self._path_changes():
            changes = self._path_changes()
            parts = list(one_after_the_other([unit], stages[: [stage.name for stage in stages].index("gather")]))
        return parts

    def _gathered(self, parts: Sequence[Batch]) -> GatheredUnit:
        counts: Counts = {}
        for part in parts:
            add_counts(counts, part.counts)
        texts = [part.text for part in parts if part.text is not None]
        return GatheredUnit(
            unit=parts[0].unit,
            text=UnitText(
                cast("TokenArray", np.concatenate([text.tokens for text in texts])),
                np.concatenate([text.documents_D for text in texts]),
            ),
            bad_records=tuple(chain.from_iterable(part.bad_records for part in parts)),
            records_read=sum(part.records_read for part in parts),
            gave_up=parts[-1].gave_up,
            counts=counts,
        )

    def _packed(self, item: GatheredUnit | Told) -> Item:
        return item if isinstance(item, Told) else self.pack(item)


def _batch(unit: Unit, entries: Sequence[Entry], size_bytes: int, bad_records: Sequence[BadRecord]) -> Batch:
    records_read = len(entries) + len(bad_records)
    return Batch(unit, entries, size_bytes, bad_records=tuple(bad_records), records_read=records_read)


def one_after_the_other(items: Iterable[Any], stages: Sequence[Stage | Flow]) -> Iterator[Any]:
    """What a pipeline of the same stages gives, made in the calling thread."""
    flow = iter(items)
    for stage in stages:
        flow = stage.work(flow) if isinstance(stage, Flow) else map(stage.work, flow)
    return flow
