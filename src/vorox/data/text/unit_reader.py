"""Reading the units of a source as documents and bad records, for one split or for both in one pass.

A source and a split go in once, then units one by one; records come out. ``UnitReader`` can be pickled, so that worker
processes and other machines read the same records. Invariants: records depend only on the configuration and the content
of the files; prefetching changes when bytes are read, never which; each split gets the records that a reader of its own
would yield, in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from vorox.core.schema.data import ValidationConfig
from vorox.data.chat_template import rendered
from vorox.data.documents import BadRecord, Record, Unit
from vorox.data.images import placed
from vorox.data.storage import PrefetchedRanges, RetryPolicy, StoredFile, iterate_in_budget, open_range, retry_budget
from vorox.data.text.file_content import SequentialReads
from vorox.data.text.file_signatures import compression_by_suffix
from vorox.data.text.formats import has_many_records, has_row_groups, read_records
from vorox.data.text.holdout import NO_HOLDOUT, Split, document_filter
from vorox.data.text.sources import Source

_PLAIN_FORMATS = frozenset({"txt", "jsonl", "csv", "bin"})


def read_unit(source: Source, unit: Unit, split: Split, validation: ValidationConfig) -> Iterator[Record]:
    """Yield the records of one unit that belong to the split, in order.

    Raises:
        DataError: A file cannot be read, or changed since it was listed.
    """
    yield from iterate_in_budget(_read_unit(source, unit, split, validation), RetryPolicy.from_source(source.config))


def read_units(
    source: Source, units: Iterable[Unit], split: Split, validation: ValidationConfig
) -> Iterator[Record]:  # fmt: skip
    """Yield the records of consecutive units; a compressed file is decoded once for all of them."""
    with contextlib.closing(SequentialReads()) as reads:
        for unit in units:
            yield from reads.iterate(read_unit(source, unit, split, validation))


def _read_unit(source: Source, unit: Unit, split: Split, validation: ValidationConfig) -> Iterator[Record]:
    for span in unit.spans:
        accept = document_filter(validation, split, source.relative_paths[span.file_index])
        records = read_records(source.config, source.stored[span.file_index], span, accept)
        if source.chat_template or source.config.images_field:
            records = (placed(rendered(record, source.chat_template)) for record in records)
        yield from records


@dataclass(frozen=True, slots=True)
class UnitReader:
    """A ``ReadUnit`` of one split of a source."""

    source: Source
    split: Split
    validation: ValidationConfig

    def __call__(self, unit: Unit) -> Iterator[Record]:
        return read_unit(self.source, unit, self.split, self.validation)

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
        with retry_budget(RetryPolicy.from_source(self.source.config)):
            for span in unit.spans:
                file = self.source.stored[span.file_index]
                if self._is_plain(file):
                    with open_range(file, span.start_byte, span.end_byte) as reader:
                        ranges.append((file, span.start_byte, reader.read(span.end_byte - span.start_byte)))
        return PrefetchedRanges(tuple(ranges))

    def _is_plain(self, file: StoredFile) -> bool:
        plain = self.source.config.format in _PLAIN_FORMATS and compression_by_suffix(file.uri) is None
        return plain and file.scheme is not None


def splits_share_units(source: Source) -> bool:
    """Return whether both splits consist of the same units: single records are held out, not files or file tails."""
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
        self._wanted: set[int] = set()
        self._kept: dict[int, list[Record]] = {}

    def __call__(self, unit: Unit) -> Iterator[Record]:
        source, rule = self._source, self._source.holdout
        kept: list[Record] = []
        is_own = {
            span.file_index: document_filter(rule, self._split, source.relative_paths[span.file_index])
            for span in unit.spans
        }
        by_ordinal = has_row_groups(source.config.format)
        for record in self._all_records(unit):
            rest_of_file = isinstance(record, BadRecord) and record.is_rest_of_file
            own = is_own[record.file_index](record.ordinal if by_ordinal else record.byte_offset)
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
