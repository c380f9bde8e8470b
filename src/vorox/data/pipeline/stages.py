"""Pipeline stages from a unit's text to chunk bytes.

The stages: fetch, decode, filter, tokenize, augment, gather, pack. Units become ``DocumentBatch``es, these become
``TokenizedDocuments``; those of a unit are joined and packed. Every stage is a pure function of its input, so any
number of threads may run it. Invariant: a batch has documents of one unit only, and the last batch of a unit is marked.
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
from vorox.data.cache.document_tokens import Encoder, encode, finish_documents, reject_unfit, rejected_starts
from vorox.data.cache.recipe import Recipe
from vorox.data.cache.report import Counts, add_counts
from vorox.data.documents import (
    BAD_RECORDS_IN_A_ROW,
    AnyDocument,
    BadRecord,
    Document,
    Record,
    SourceFile,
    TokenDocument,
    Unit,
)
from vorox.data.images import ImageStore
from vorox.data.pipeline.pipeline import Flow, Item, Stage
from vorox.data.rows import TokenArray
from vorox.data.storage import PrefetchedRanges, read_prefetched
from vorox.data.text.file_content import SequentialReads
from vorox.data.transforms.apply import Applier, IsDuplicate
from vorox.data.transforms.registry import Transform

ReadUnit = Callable[[Unit], Iterable[Record]]
"""Returns the records of a unit, in order. ``text.UnitReader`` can be pickled and fetches ahead of decoding."""

OnDocuments = Callable[[int, int, int], None]
"""Called with the numbers of documents, UTF-8 bytes and tokens added, in unit order."""

DuplicateCheck = Callable[[Transform, Unit], IsDuplicate]
"""Returns the check by which a transform finds the duplicates of a unit."""

_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 4096
_TEXT_OVERHEAD_BYTES = 64


@dataclass(frozen=True)
class DocumentBatch:
    """A batch of documents of one unit, before they are stored.

    Attributes:
        unit: The unit.
        documents: The documents.
        size_bytes: Approximate size in memory.
        bad_records: Unreadable records in this part of the unit.
        records_read: Records of the batch, including bad and removed ones.
        is_last: Whether this is the unit's last batch.
        aborted: Reading stopped after too many consecutive bad records.
        tokens: Token ids of the documents, if transforms of tokens follow.
        counts: Counts of each transform.
        duplicates: Duplicate checks of the unit, by the number of the transform.
    """

    unit: Unit
    documents: Sequence[AnyDocument]
    size_bytes: int
    bad_records: tuple[BadRecord, ...] = ()
    records_read: int = 0
    is_last: bool = False
    aborted: bool = False
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
    """Documents of one unit in stored form: those of a batch, or, after ``gather``, all of them.

    Attributes:
        unit: The unit.
        tokens: The concatenated documents, each with its end-of-text token.
        documents_D: ``DOCUMENT`` records.
        loss_mask: Whether each token is trained on; ``None``: all are.
        bad_records: Unreadable records.
        records_read: Records read, including bad and removed ones.
        is_last: Whether these are the unit's last documents.
        aborted: Reading stopped after too many consecutive bad records.
        counts: Counts of each transform.
    """

    unit: Unit
    tokens: TokenArray
    documents_D: npt.NDArray[np.void]
    loss_mask: npt.NDArray[np.bool_] | None
    rejected_starts_D: npt.NDArray[np.int64] | None
    bad_records: tuple[BadRecord, ...]
    records_read: int
    is_last: bool
    aborted: bool
    counts: Counts

    @property
    def size_bytes(self) -> int:
        return self.tokens.nbytes + self.documents_D.nbytes

    @property
    def place(self) -> str:
        return self.unit.place


@runtime_checkable
class FetchingReader(Protocol):
    """A ``ReadUnit`` that can fetch bytes ahead of decoding."""

    def __call__(self, unit: Unit, /) -> Iterable[Record]: ...
    @property
    def fetches(self) -> bool: ...
    def fetched_bytes(self, unit: Unit, /) -> int: ...
    def fetch(self, unit: Unit, /) -> PrefetchedRanges: ...


@dataclass(frozen=True, slots=True)
class FetchedUnit:
    """A unit and its fetched bytes."""

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
    """The stages and their inputs.

    Attributes:
        files: The source files.
        read_unit: Yields the records of a unit.
        tokenizer: The tokenizer.
        recipe: The recipe of the cache.
        applier: The transforms.
        duplicate_check: ``duplicates.duplicate_check`` of the cache.
        pack: Packs a gathered unit.
        on_documents: Called by ``gather`` for every batch, in its thread.
        images: Keeps the images of documents; ``None`` without images.
    """

    files: Sequence[SourceFile]
    read_unit: ReadUnit
    tokenizer: Encoder
    recipe: Recipe
    applier: Applier
    duplicate_check: DuplicateCheck
    pack: Callable[[TokenizedDocuments], Item]
    on_documents: OnDocuments = _ignore_documents
    images: ImageStore | None = None

    def stages(self, config: PipelineConfig) -> tuple[Stage | Flow, ...]:
        """Return the stages in order, omitting those that would do nothing."""
        stages = [*self.sources(config), *self.filters(config)]
        stages.append(Stage("tokenize", self.tokenize, config.tokenize_threads))
        if self._transforms_tokens:
            stages.append(Stage("augment", self.augment, config.augment_threads))
        return (*stages, Flow("gather", self.gather), Stage("pack", self.pack, config.pack_threads))

    def sources(self, config: PipelineConfig) -> list[Stage | Flow]:
        """Return the stages up to the records; fetching is a stage of its own if the source supports it."""
        read = self.read_unit
        decode = Flow("decode", self.decode)
        if isinstance(read, FetchingReader) and read.fetches:
            return [Stage("fetch", self.fetch, config.fetch_threads, reserve_bytes=read.fetched_bytes), decode]
        return [decode]

    def filters(self, config: PipelineConfig) -> list[Stage | Flow]:
        """Return the stage that applies transforms of text, if there are any."""
        transforms = self.applier.transforms
        if any(transform.kind == "duplicates" and transform.scope == "unit" for transform in transforms):
            return [
                Flow("filter", lambda batches: map(self.filter, batches))
            ]  # depends on the earlier texts of the unit
        if any(transform.kind != "tokens" for transform in transforms):
            return [Stage("filter", self.filter, config.filter_threads)]
        return []

    def only_before(self, number: int) -> UnitStages:
        """Return a copy with only the transforms before a given one."""
        transforms = tuple(transform for transform in self.applier.transforms if transform.number < number)
        return replace(self, applier=replace(self.applier, transforms=transforms))

    @property
    def _transforms_tokens(self) -> bool:
        return any(transform.kind == "tokens" for transform in self.applier.transforms)

    def fetch(self, unit: Unit) -> FetchedUnit:
        """Fetch the bytes of a unit ahead of decoding."""
        assert isinstance(self.read_unit, FetchingReader)
        return FetchedUnit(unit, self.read_unit.fetch(unit))

    def decode(self, units: Iterator[Unit | FetchedUnit]) -> Iterator[DocumentBatch]:
        """Yield the records of units in batches."""
        with contextlib.closing(SequentialReads()) as reads:
            for item in units:
                unit = item.unit if isinstance(item, FetchedUnit) else item
                try:
                    records = reads.iterate(iter(self.read_unit(unit)))
                    if isinstance(item, FetchedUnit):
                        records = read_prefetched(records, item.ranges)
                    yield from self._batches(unit, records)
                except OSError as error:
                    raise DataError(
                        f"Cannot read unit {unit.unit_id} of the source: {error.strerror or error}",
                        where=str(error.filename or self.files[unit.spans[0].file_index].uri),
                        hint="check that the file exists and is readable, then run the same command again",
                    ) from error

    def _batches(self, unit: Unit, records: Iterator[Record]) -> Iterator[DocumentBatch]:
        removers = [transform for transform in self.applier.transforms if transform.kind == "duplicates"]
        duplicates = {transform.number: self.duplicate_check(transform, unit) for transform in removers}
        documents: list[AnyDocument] = []
        bad_records: list[BadRecord] = []
        size_bytes = consecutive_bad = 0

        def batch(*, is_last: bool, aborted: bool = False) -> DocumentBatch:
            records_read = len(documents) + len(bad_records)
            return DocumentBatch(
                unit, documents, size_bytes, tuple(bad_records), records_read, is_last, aborted, duplicates=duplicates
            )  # fmt: skip

        for record in records:
            if isinstance(record, BadRecord):
                bad_records.append(record)
                consecutive_bad += not record.is_rest_of_file
                if consecutive_bad == BAD_RECORDS_IN_A_ROW:
                    break
                continue
            consecutive_bad = 0
            if size_bytes >= _BATCH_BYTES or len(documents) >= _BATCH_DOCUMENTS:
                yield batch(is_last=False)
                documents, bad_records, size_bytes = [], [], 0
            documents.append(record)
            text_bytes = record.tokens.nbytes if isinstance(record, TokenDocument) else len(record.text)
            if isinstance(record, Document) and record.images:
                text_bytes += sum(len(image.content) for image in record.images)
            size_bytes += text_bytes + _TEXT_OVERHEAD_BYTES
        yield batch(is_last=True, aborted=consecutive_bad == BAD_RECORDS_IN_A_ROW)

    def filter(self, batch: DocumentBatch) -> DocumentBatch:
        """Apply the text transforms."""
        counts: Counts = {}
        documents = self.applier.texts(batch.documents, batch.duplicates, counts)
        size_bytes = sum(len(document.text or "") + _TEXT_OVERHEAD_BYTES for document in documents)
        return replace(batch, documents=documents, counts=counts, size_bytes=size_bytes)

    def tokenize(self, batch: DocumentBatch) -> DocumentBatch | TokenizedDocuments:
        """Encode the documents and convert them to stored form, unless token transforms follow."""
        found, bad = batch.documents, ()
        if self.images is not None:
            found, bad = self.images.keep(batch.documents, self.files)
        batch = replace(batch, bad_records=(*batch.bad_records, *bad)) if bad else batch
        documents, tokens = encode(found, self.files, self.tokenizer, images=self.recipe.images)
        if self._transforms_tokens:
            batch = replace(batch, documents=documents)
            return replace(batch, tokens=tokens, size_bytes=batch.size_bytes + sum(ids.nbytes for ids in tokens))
        return self._finish(batch, documents, tokens, batch.counts)

    def augment(self, batch: DocumentBatch) -> TokenizedDocuments:
        """Apply the token transforms."""
        counts = dict(batch.counts)
        documents, tokens = self.applier.tokens(batch.documents, batch.tokens, counts)
        return self._finish(batch, documents, tokens, counts)

    def _finish(
        self,
        batch: DocumentBatch,
        documents: Sequence[AnyDocument],
        tokens: Sequence[npt.NDArray[Any]],
        counts: Counts,
    ) -> TokenizedDocuments:
        """Convert documents to stored form, which lets their texts be freed."""
        documents, tokens, unfit = reject_unfit(documents, tokens, self.recipe.row_tokens)
        flat, documents_D, loss_mask = finish_documents(documents, tokens, self.files, self.recipe)
        return TokenizedDocuments(
            unit=batch.unit,
            tokens=flat,
            documents_D=documents_D,
            loss_mask=loss_mask,
            rejected_starts_D=rejected_starts(documents),
            bad_records=(*batch.bad_records, *unfit),
            records_read=batch.records_read,
            is_last=batch.is_last,
            aborted=batch.aborted,
            counts=counts,
        )

    def gather(self, parts: Iterator[TokenizedDocuments]) -> Iterator[TokenizedDocuments]:
        """Join the batches of each unit, and report progress per batch."""
        unit_parts: list[TokenizedDocuments] = []
        for part in parts:
            unit_parts.append(part)
            if len(part.documents_D):
                text_bytes = int(part.documents_D["text_bytes"].sum(dtype=np.int64))
                self.on_documents(len(part.documents_D), text_bytes, len(part.tokens))
            if part.is_last:
                yield _join(unit_parts)
                unit_parts = []


def _join(parts: Sequence[TokenizedDocuments]) -> TokenizedDocuments:
    counts: Counts = {}
    for part in parts:
        add_counts(counts, part.counts)
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
