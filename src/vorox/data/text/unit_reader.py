"""Reading the units of a source as documents and bad records, for one split or for both in one pass.

A source and a split go in once, then units one by one; records come out, for a build in ``DocumentBatch``es.
``UnitReader`` can be pickled, so that worker processes and other machines read the same records. Invariants: records
depend only on the configuration and the content of the files; prefetching changes when bytes are read, never which;
each split gets the records that a reader of its own would yield, in the same order; a batch has documents of one unit
only, and the last batch of a unit is marked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt

from vorox.core.errors import DataError
from vorox.core.schema.data import Split, ValidationConfig
from vorox.core.schema.source_formats import source_format
from vorox.data.chat.template import rendered_all
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
from vorox.data.images.reading import ImageFolder, placed
from vorox.data.storage import (
    PrefetchedRanges,
    RetryPolicy,
    StoredFile,
    iterate_in_budget,
    open_range,
    read_prefetched,
    retry_budget,
)
from vorox.data.text.file_content import SequentialReads, is_stored_as_read, limits_of
from vorox.data.text.formats import has_many_records, has_row_groups, records_reader
from vorox.data.text.holdout import NO_HOLDOUT, document_filter
from vorox.data.text.sources import Source
from vorox.data.transforms.apply import Counts, IsDuplicate

ReadUnit = Callable[[Unit], Iterable[Record]]
"""Returns the records of a unit, in order. ``UnitReader`` can be pickled and fetches ahead of decoding."""

DuplicateChecks = Mapping[int, IsDuplicate]
"""The checks by which transforms find the duplicates of a unit, by the number of the transform."""

_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 4096
TEXT_OVERHEAD_BYTES = 64
"""Approximate size of a document in memory, beyond its text."""


class UnitReader:
    """A ``ReadUnit`` of one split of a source.

    Args:
        source: The source.
        split: The split.
        validation: The holdout rule, which divides the records of a unit between the splits.
    """

    def __init__(self, source: Source, split: Split, validation: ValidationConfig) -> None:
        self.source, self._validation = source, validation
        self._split: Split = split
        self._read_records = records_reader(source.config)
        self._retries = RetryPolicy.from_source(source.config)

    def __call__(self, unit: Unit) -> Iterator[Record]:
        """Yield the records of a unit that belong to the split, in order.

        Raises:
            DataError: A file cannot be read, or changed since it was listed.
        """
        return iterate_in_budget(self._read(unit), self._retries)

    def _read(self, unit: Unit) -> Iterator[Record]:
        source = self.source
        for span in unit.spans:
            accept = document_filter(self._validation, self._split, source.relative_paths[span.file_index])
            records = self._read_records(source.config, source.stored[span.file_index], span, accept)
            records = rendered_all(records, source.chat_template)
            if source.config.images_field:
                folder = ImageFolder.of(source.stored[span.file_index].uri, source.relative_paths[span.file_index])
                records = (placed(record, folder) for record in records)
            yield from records

    @property
    def fetches(self) -> bool:
        """Whether text can be fetched before it is decoded: true for plain files in remote stores.

        Compressed files and Parquet determine while decoding which bytes they need.
        """
        return any(self._is_plain(file) for file in self.source.stored)

    def fetched_bytes(self, unit: Unit) -> int:
        """Return how many bytes ``fetch`` would hold."""
        files = self.source.stored
        return sum(span.end_byte - span.start_byte for span in unit.spans if self._is_plain(files[span.file_index]))

    def fetch(self, unit: Unit) -> PrefetchedRanges:
        """Read the bytes of a unit that can be read without decoding.

        Raises:
            DataError: A file cannot be read, or changed since it was listed.
        """
        ranges: list[tuple[StoredFile, int, bytes]] = []
        with retry_budget(self._retries):
            for span in unit.spans:
                file = self.source.stored[span.file_index]
                if self._is_plain(file):
                    with open_range(file, span.start_byte, span.end_byte) as reader:
                        ranges.append((file, span.start_byte, reader.read(span.end_byte - span.start_byte)))
        return PrefetchedRanges(tuple(ranges))

    def _is_plain(self, file: StoredFile) -> bool:
        config = self.source.config
        plain = source_format(config.format).is_stored_plainly and is_stored_as_read(file, limits_of(config))
        return plain and file.scheme is not None


def read_units(
    source: Source, units: Iterable[Unit], split: Split, validation: ValidationConfig
) -> Iterator[Record]:  # fmt: skip
    """Yield the records of consecutive units; a compressed file is decoded once for all of them."""
    read_unit = UnitReader(source, split, validation)
    with contextlib.closing(SequentialReads()) as reads:
        for unit in units:
            yield from reads.iterate(read_unit(unit))


def splits_share_units(source: Source) -> bool:
    """Return whether both splits consist of the same units: single records are held out, not files or spans."""
    return source.holdout.split == "document" and has_many_records(source.config)


class SplitPairReader:
    """A ``ReadUnit`` of one split that keeps the records of the other split for later.

    Args:
        source: A source with ``splits_share_units``.
        split: The split whose records it yields.
    """

    def __init__(self, source: Source, split: Split) -> None:
        self._source = source
        self._split: Split = split
        self._all_records = UnitReader(source, split, NO_HOLDOUT)
        self._by_ordinal = has_row_groups(source.config.format)
        self._wanted: set[int] = set()
        self._kept: dict[int, list[Record]] = {}

    def __call__(self, unit: Unit) -> Iterator[Record]:
        source, rule = self._source, self._source.holdout
        kept: list[Record] = []
        is_own = {
            span.file_index: document_filter(rule, self._split, source.relative_paths[span.file_index])
            for span in unit.spans
        }
        for record in self._all_records(unit):
            rest_of_file = isinstance(record, BadRecord) and record.is_rest_of_file
            own = is_own[record.file_index](record.ordinal if self._by_ordinal else record.byte_offset)
            if rest_of_file or not own:
                kept.append(record)
            if rest_of_file or own:
                yield record
        if unit.unit_id in self._wanted:
            self._kept[unit.unit_id] = kept

    @property
    def fetches(self) -> bool:
        return self._all_records.fetches

    def fetched_bytes(self, unit: Unit) -> int:
        return self._all_records.fetched_bytes(unit)

    def fetch(self, unit: Unit) -> PrefetchedRanges:
        return self._all_records.fetch(unit)

    def hold(self, unit_id: int) -> None:
        """Keep the other split's records of a unit when it is read."""
        self._wanted.add(unit_id)

    def take(self, unit_id: int) -> Sequence[Record] | None:
        """Return and forget the kept records of a unit; ``None`` if the unit was not read to its end."""
        self._wanted.discard(unit_id)
        return self._kept.pop(unit_id, None)


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
        duplicates: Duplicate checks of the unit.
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
    duplicates: DuplicateChecks = field(default_factory=dict[int, Any], repr=False)

    @property
    def place(self) -> str:
        if not self.documents:
            return self.unit.place
        first, last = self.documents[0], self.documents[-1]
        return (
            f"{self.unit.place}, record {first.ordinal + 1} of file {first.file_index} "
            f"to record {last.ordinal + 1} of file {last.file_index}"
        )


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


def read_batches(
    units: Iterator[Unit | FetchedUnit],
    read_unit: ReadUnit,
    files: Sequence[SourceFile],
    duplicate_checks: Callable[[Unit], DuplicateChecks],
) -> Iterator[DocumentBatch]:
    """Yield the records of units in batches; a compressed file is decoded once for consecutive units.

    Args:
        units: The units, with their bytes if those were fetched ahead.
        read_unit: Yields the records of a unit.
        files: The source files.
        duplicate_checks: Returns the duplicate checks of a unit, which its batches carry.

    Raises:
        DataError: A file cannot be read.
    """
    with contextlib.closing(SequentialReads()) as reads:
        for item in units:
            unit = item.unit if isinstance(item, FetchedUnit) else item
            try:
                records = reads.iterate(iter(read_unit(unit)))
                if isinstance(item, FetchedUnit):
                    records = read_prefetched(records, item.ranges)
                yield from _batches(unit, records, duplicate_checks(unit))
            except OSError as error:
                raise DataError(
                    f"Cannot read unit {unit.unit_id} of the source: {error.strerror or error}",
                    where=str(error.filename or files[unit.spans[0].file_index].uri),
                    hint="check that the file exists and is readable, then run the same command again",
                ) from error


def _batches(unit: Unit, records: Iterator[Record], duplicates: DuplicateChecks) -> Iterator[DocumentBatch]:
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
        size_bytes += text_bytes + TEXT_OVERHEAD_BYTES
    yield batch(is_last=True, aborted=consecutive_bad == BAD_RECORDS_IN_A_ROW)
