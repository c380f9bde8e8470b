"""The stages from a unit to the bytes of its chunks: fetch, decode, filter, tokenize, augment, gather, pack.

Units go in. ``DocumentBatch``es of documents become ``TokenizedDocuments``, those of a unit are joined and packed.
Every stage is a pure function of its input, so threads may run it in any order; ``run_serial`` gives the same as a
``Pipeline``. Invariant: batches never mix units, and the last batch of a unit is marked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.core.schema.data import PipelineConfig
from vorox.data.cache.assemble import Encoder, encode, finish_documents
from vorox.data.cache.recipe import Recipe
from vorox.data.documents import BAD_RECORDS_IN_A_ROW, BadRecord, Record, SourceFile, TokenDocument, Unit
from vorox.data.pipeline.pipeline import Flow, Item, Stage
from vorox.data.rows import TokenArray
from vorox.data.storage import PrefetchedRanges, read_prefetched
from vorox.data.text.file_content import SequentialReads
from vorox.data.transforms.apply import AnyDocument, Applier, Counts, IsDuplicate, add_counts
from vorox.data.transforms.registry import Transform

ReadUnit = Callable[[Unit], Iterable[Record]]
"""The records of a unit, in order. ``text.UnitReader`` is one that can be pickled and that fetches apart."""

OnDocuments = Callable[[int, int, int], None]
"""Called with the documents, UTF-8 bytes of text and tokens that were added, in the order of the units."""

DuplicateChecks = Callable[[Sequence[Transform], Unit], Mapping[int, IsDuplicate]]
"""The duplicate checks of a unit, by the number of the transform that removes duplicates."""

_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 4096
_TEXT_OVERHEAD_BYTES = 64


@dataclass(frozen=True)
class DocumentBatch:
    """Some documents of one unit, before they are finished.

    Attributes:
        unit: The unit.
        documents: The documents.
        size_bytes: About what it takes in memory.
        bad_records: Records of this part of the unit that could not be read.
        records_read: Records that the batch was made of, bad and removed ones included.
        is_last: No other batch of the unit follows.
        gave_up: Reading stopped because record after record was bad.
        tokens: The documents' ids, where transforms of tokens follow.
        counts: What each transform did.
        duplicates: By the number of the transform, whether a text of the unit occurred before.
    """

    unit: Unit
    documents: Sequence[AnyDocument]
    size_bytes: int
    bad_records: tuple[BadRecord, ...] = ()
    records_read: int = 0
    is_last: bool = False
    gave_up: bool = False
    tokens: Sequence[npt.NDArray[Any]] = ()
    counts: Counts = field(default_factory=dict[str, Any])
    duplicates: Mapping[int, IsDuplicate] = field(default_factory=dict[int, Any], repr=False)

    @property
    def place(self) -> str:
        if not self.documents:
            return self.unit.place
        first, last = self.documents[0], self.documents[-1]
        return (
            f"{self.unit.place}, record {first.ordinal + 1} of file {first.file_index} "
            f"to record {last.ordinal + 1} of file {last.file_index}"
        )


@dataclass(frozen=True, slots=True)
class TokenizedDocuments:
    """Documents of one unit as they are stored: those of a batch, or, once gathered, all of them.

    Attributes:
        unit: The unit.
        tokens: All documents one after the other, each with its end-of-text token.
        documents_D: ``DOCUMENT`` records.
        bad_records: Records that could not be read.
        records_read: Records that were read, bad and removed ones included.
        is_last: No other documents of the unit follow.
        gave_up: Reading stopped because record after record was bad.
        counts: What each transform did.
    """

    unit: Unit
    tokens: TokenArray
    documents_D: npt.NDArray[np.void]
    bad_records: tuple[BadRecord, ...]
    records_read: int
    is_last: bool
    gave_up: bool
    counts: Counts

    @property
    def size_bytes(self) -> int:
        return self.tokens.nbytes + self.documents_D.nbytes

    @property
    def place(self) -> str:
        return self.unit.place


@runtime_checkable
class Fetching(Protocol):
    """A ``ReadUnit`` that can read bytes ahead of decoding them."""

    def __call__(self, unit: Unit, /) -> Iterable[Record]: ...
    @property
    def fetches(self) -> bool: ...
    def fetched_bytes(self, unit: Unit, /) -> int: ...
    def fetch(self, unit: Unit, /) -> PrefetchedRanges: ...


@dataclass(frozen=True, slots=True)
class FetchedUnit:
    """A unit and its bytes."""

    unit: Unit
    ranges: PrefetchedRanges

    @property
    def size_bytes(self) -> int:
        return self.ranges.size_bytes

    @property
    def place(self) -> str:
        return self.unit.place


def _ignore_documents(documents: int, text_bytes: int, tokens: int) -> None:
    del documents, text_bytes, tokens


@dataclass(frozen=True)
class UnitStages:
    """The inputs of the stages, and the stages.

    Attributes:
        files: The source's files.
        read_unit: Yields the records of a unit.
        tokenizer: Text to ids.
        recipe: What the rows are a function of.
        applier: The transforms.
        duplicate_checks: Returns the duplicate checks of a unit: ``duplicates.duplicate_checks`` of its cache.
        pack: Makes the result of a gathered unit.
        on_documents: Called by ``gather`` for every batch, in its thread.
    """

    files: Sequence[SourceFile]
    read_unit: ReadUnit
    tokenizer: Encoder
    recipe: Recipe
    applier: Applier
    duplicate_checks: DuplicateChecks
    pack: Callable[[TokenizedDocuments], Item]
    on_documents: OnDocuments = _ignore_documents

    def stages(self, config: PipelineConfig) -> tuple[Stage | Flow, ...]:
        """Return the stages in order, without those that would do nothing."""
        stages = [*self.sources(config), *self.filters(config)]
        stages.append(Stage("tokenize", self.tokenize, config.tokenize_threads))
        if self._transforms_tokens:
            stages.append(Stage("augment", self.augment, config.augment_threads))
        return (*stages, Flow("gather", self.gather), Stage("pack", self.pack, config.pack_threads))

    def sources(self, config: PipelineConfig) -> list[Stage | Flow]:
        """Return the stages up to the records; bytes are fetched apart where the source can do so."""
        read = self.read_unit
        decode = Flow("decode", self.decode)
        if isinstance(read, Fetching) and read.fetches:
            return [Stage("fetch", self.fetch, config.fetch_threads, reserve_bytes=read.fetched_bytes), decode]
        return [decode]

    def filters(self, config: PipelineConfig) -> list[Stage | Flow]:
        """Return the stage that applies transforms of text, if there are any."""
        transforms = self.applier.transforms
        if any(transform.kind == "duplicates" and transform.scope == "unit" for transform in transforms):
            return [Flow("filter", lambda batches: map(self.filter, batches))]  # what came before in the unit decides
        if any(transform.kind != "tokens" for transform in transforms):
            return [Stage("filter", self.filter, config.filter_threads)]
        return []

    def before(self, number: int) -> UnitStages:
        """Return the same with only the transforms before one of them."""
        transforms = tuple(transform for transform in self.applier.transforms if transform.number < number)
        return replace(self, applier=replace(self.applier, transforms=transforms))

    @property
    def _transforms_tokens(self) -> bool:
        return any(transform.kind == "tokens" for transform in self.applier.transforms)

    def fetch(self, unit: Unit) -> FetchedUnit:
        """Read the bytes of a unit that can be read before they are decoded."""
        assert isinstance(self.read_unit, Fetching)
        return FetchedUnit(unit, self.read_unit.fetch(unit))

    def decode(self, units: Iterator[Unit | FetchedUnit]) -> Iterator[DocumentBatch]:
        """Yield the records of units in batches."""
        with contextlib.closing(SequentialReads()) as reads:
            for item in units:
                unit = item.unit if isinstance(item, FetchedUnit) else item
                try:
                    records = reads.during(iter(self.read_unit(unit)))
                    if isinstance(item, FetchedUnit):
                        records = read_prefetched(records, item.ranges)
                    yield from self._batches(unit, records)
                except OSError as error:
                    raise DataError(
                        f"unit {unit.unit_id} of the source cannot be read: {error.strerror or error}",
                        where=str(error.filename or self.files[unit.spans[0].file_index].uri),
                        hint="check that the file is there and may be read, then run the same command again",
                    ) from error

    def _batches(self, unit: Unit, records: Iterator[Record]) -> Iterator[DocumentBatch]:
        duplicates = self.duplicate_checks(self.applier.transforms, unit)
        documents: list[AnyDocument] = []
        bad_records: list[BadRecord] = []
        size_bytes = bad_in_a_row = 0

        def batch(*, is_last: bool, gave_up: bool = False) -> DocumentBatch:
            records_read = len(documents) + len(bad_records)
            return DocumentBatch(
                unit, documents, size_bytes, tuple(bad_records), records_read, is_last, gave_up, duplicates=duplicates
            )  # fmt: skip

        for record in records:
            if isinstance(record, BadRecord):
                bad_records.append(record)
                bad_in_a_row += not record.is_rest_of_file
                if bad_in_a_row == BAD_RECORDS_IN_A_ROW:
                    break
                continue
            bad_in_a_row = 0
            if size_bytes >= _BATCH_BYTES or len(documents) >= _BATCH_DOCUMENTS:
                yield batch(is_last=False)
                documents, bad_records, size_bytes = [], [], 0
            documents.append(record)
            text_bytes = record.tokens.nbytes if isinstance(record, TokenDocument) else len(record.text)
            size_bytes += text_bytes + _TEXT_OVERHEAD_BYTES
        yield batch(is_last=True, gave_up=bad_in_a_row == BAD_RECORDS_IN_A_ROW)

    def filter(self, batch: DocumentBatch) -> DocumentBatch:
        """Apply the transforms of text."""
        counts: Counts = {}
        documents = self.applier.texts(batch.documents, batch.duplicates, counts)
        size_bytes = sum(len(document.text or "") + _TEXT_OVERHEAD_BYTES for document in documents)
        return replace(batch, documents=documents, counts=counts, size_bytes=size_bytes)

    def tokenize(self, batch: DocumentBatch) -> DocumentBatch | TokenizedDocuments:
        """Encode the documents; finish them, unless transforms of tokens follow."""
        tokens = encode(batch.documents, self.files, self.tokenizer)
        if self._transforms_tokens:
            return replace(batch, tokens=tokens, size_bytes=batch.size_bytes + sum(ids.nbytes for ids in tokens))
        return self._finished(batch, batch.documents, tokens, batch.counts)

    def augment(self, batch: DocumentBatch) -> TokenizedDocuments:
        """Apply the transforms of tokens."""
        counts = dict(batch.counts)
        documents, tokens = self.applier.tokens(batch.documents, batch.tokens, counts)
        return self._finished(batch, documents, tokens, counts)

    def _finished(
        self,
        batch: DocumentBatch,
        documents: Sequence[AnyDocument],
        tokens: Sequence[npt.NDArray[Any]],
        counts: Counts,
    ) -> TokenizedDocuments:
        """Return the documents as they are stored; their texts can be freed."""
        flat, documents_D = finish_documents(documents, tokens, self.files, self.recipe)
        return TokenizedDocuments(
            unit=batch.unit,
            tokens=flat,
            documents_D=documents_D,
            bad_records=batch.bad_records,
            records_read=batch.records_read,
            is_last=batch.is_last,
            gave_up=batch.gave_up,
            counts=counts,
        )

    def gather(self, parts: Iterator[TokenizedDocuments]) -> Iterator[TokenizedDocuments]:
        """Join the parts of each unit, and report progress part by part."""
        of_unit: list[TokenizedDocuments] = []
        for part in parts:
            of_unit.append(part)
            if len(part.documents_D):
                text_bytes = int(part.documents_D["text_bytes"].sum(dtype=np.int64))
                self.on_documents(len(part.documents_D), text_bytes, len(part.tokens))
            if part.is_last:
                yield _joined(of_unit)
                of_unit = []


def _joined(parts: Sequence[TokenizedDocuments]) -> TokenizedDocuments:
    counts: Counts = {}
    for part in parts:
        add_counts(counts, part.counts)
    return TokenizedDocuments(
        unit=parts[0].unit,
        tokens=cast("TokenArray", np.concatenate([part.tokens for part in parts])),
        documents_D=np.concatenate([part.documents_D for part in parts]),
        bad_records=tuple(chain.from_iterable(part.bad_records for part in parts)),
        records_read=sum(part.records_read for part in parts),
        is_last=True,
        gave_up=parts[-1].gave_up,
        counts=counts,
    )
