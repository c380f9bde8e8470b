"""Splitting a source into units of whole records, lazily or all together.

A listed source goes in; units come out in order. Lazily, each comes before the text after it is read, except for one
block of look-ahead; all together, remote files are split concurrently. Invariant: a unit depends only on the unit size
and the source's files up to its end, so that splitting can continue after known units with the same result.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from vorox.core.errors import DataError
from vorox.core.pluralize import pluralize
from vorox.core.schema.data import ValidationConfig
from vorox.data.documents import Unit, UnitSpan
from vorox.data.prefetch import map_ordered
from vorox.data.size_groups import batch_by_size
from vorox.data.storage import RetryPolicy, retry_budget
from vorox.data.text.file_content import compressed_length_bytes, compression_by_suffix, limits_of
from vorox.data.text.formats import count_records, first_block, has_many_records, measure, split_blocks
from vorox.data.text.holdout import SPLITS, Split, document_filter, file_split, holds_out_files, tail_start
from vorox.data.text.sources import Source
from vorox.data.text.unit_reader import read_units

T = TypeVar("T")

_FILES_AT_ONCE = 4
"""Remote files that are split concurrently, to hide the latency of their requests."""


@dataclass(frozen=True, slots=True)
class UnitSplitter:
    """Splits one split of a source into units of about ``unit_bytes`` of text.

    Files larger than a unit are split at record boundaries. Records are counted, never parsed: where single records
    are held out, the units of both splits cover all records and ``read_unit`` filters them.
    """

    source: Source
    split: Split
    validation: ValidationConfig
    unit_bytes: int

    def units_after(self, known: Sequence[Unit] = ()) -> Iterator[tuple[Unit, bool]]:
        """Yield the units after the known ones, each with whether it is the last.

        Only the last known unit is read again, to count its records.

        Raises:
            DataError: A file cannot be read or is not in the source's format.
        """
        if self.split == "validation" and self.validation.held_out_fraction == 0:
            return
        blocks = _EndTracker(self.spans(known[-1].spans[-1] if known else None))
        unit_id = len(known)
        for group in batch_by_size(blocks, self.max_unit_bytes):
            yield Unit(unit_id, tuple(group)), blocks.has_ended
            unit_id += 1

    def has_records(self, units: Iterable[Unit]) -> bool:
        """Whether any of the units has a record of the split."""
        return any(True for _ in read_units(self.source, units, self.split, self.validation))

    def estimated_bytes(self, first: Sequence[Unit]) -> int:
        """Estimate the bytes that all units span, from the first of them; exact for uncompressed text formats."""
        if not first:
            return 0
        last, limits = first[-1].spans[-1], limits_of(self.source.config)
        file = self.source.stored[last.file_index]
        passed = sum(self._stored_bytes(index) for index in range(last.file_index))
        if compression_by_suffix(file.uri) is None or self.source.end_bytes[last.file_index] is not None:
            passed += last.end_byte
        else:
            passed += compressed_length_bytes(file, last.end_byte, limits)
        every = sum(self._stored_bytes(index) for index in range(len(self.source.files)))
        spanned = sum(unit.size_bytes for unit in first)
        return max(spanned, every * spanned // max(passed, 1))

    def _stored_bytes(self, index: int) -> int:
        """Return the stored bytes of a file that belong to the split."""
        source, validation = self.source, self.validation
        if holds_out_files(validation) and file_split(validation, source.relative_paths[index]) != self.split:
            return 0
        end = source.end_bytes[index]
        size = source.files[index].size_bytes if end is None else end
        if validation.split != "tail":
            return size
        start = tail_start(validation, size)
        return start if self.split == "train" else size - start

    @property
    def max_unit_bytes(self) -> int:
        """Maximum text of a unit; larger for validation where single records are held out."""
        validation = self.validation
        if self.split == "validation" and validation.split == "document" and has_many_records(self.source.config):
            return int(self.unit_bytes / Fraction(str(validation.held_out_fraction)))
        return self.unit_bytes

    def spans(self, after: UnitSpan | None = None) -> Iterator[tuple[UnitSpan, int]]:
        """Yield the spans of all files after a known span, and the text in each; each has its own retry budget."""
        first = 0 if after is None else after.file_index
        for index in range(first, len(self.source.files)):
            spans = self._spans_of_file(index, after if after is not None and index == first else None)
            yield from _with_retry_budgets(spans, self.source)

    def all_spans(self) -> list[tuple[UnitSpan, int]]:
        """Return what ``spans`` yields; files of a store are read several at a time."""
        is_over = threading.Event()

        def split(index: int) -> list[tuple[UnitSpan, int]]:
            spans = _with_retry_budgets(self._spans_of_file(index, None), self.source)
            return list(itertools.takewhile(lambda _: not is_over.is_set(), spans))

        is_remote = any(file.scheme is not None for file in self.source.stored)
        num_threads = _FILES_AT_ONCE if is_remote else 0
        spans = map_ordered(split, range(len(self.source.files)), num_threads, on_close=is_over.set)
        return [span for _, found in spans for span in found]

    def _spans_of_file(self, index: int, after: UnitSpan | None) -> Iterator[tuple[UnitSpan, int]]:
        """Yield the spans of one file that belong to the split, and the text in each."""
        source, validation = self.source, self.validation
        config, file, end = source.config, source.stored[index], source.end_bytes[index]
        if holds_out_files(validation) and file_split(validation, source.relative_paths[index]) != self.split:
            return
        if after is not None and after.start_byte == after.end_byte:
            return  # an empty span: the rest of the file is unreadable
        start, ordinal = (0, 0) if after is None else (after.end_byte, after.first_ordinal)
        if validation.split == "tail":
            middle = _tail_boundary(source, index, validation)
            if self.split == "train":
                end = middle
            elif after is None and middle > 0:
                for block in split_blocks(config, file, 0, middle, self.unit_bytes):
                    start, ordinal = block.start_byte, block.first_ordinal
                ordinal += count_records(config, file, start, middle)
                start = middle
        if end is not None and end <= start:
            return
        if after is not None:
            ordinal += count_records(config, file, after.start_byte, after.end_byte)
        accept = document_filter(validation, self.split, source.relative_paths[index])
        for block in split_blocks(config, file, start, end, self.unit_bytes, ordinal):
            if has_many_records(config) or accept(block.start_byte):
                yield UnitSpan(index, block.start_byte, block.end_byte, block.first_ordinal), block.text_bytes


class _EndTracker(Iterator[T]):
    """An iterator that records whether it is exhausted."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self.has_ended = False

    def __next__(self) -> T:
        try:
            return next(self._items)
        except StopIteration:
            self.has_ended = True
            raise


def _with_retry_budgets(items: Iterator[T], source: Source) -> Iterator[T]:
    """Yield the items, each computed under its own retry budget."""
    while True:
        with retry_budget(RetryPolicy.from_source(source.config)):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def split_into_units(source: Source, split: Split, validation: ValidationConfig, unit_bytes: int) -> tuple[Unit, ...]:
    """Return all units of one split of a source.

    Raises:
        DataError: A file cannot be read or is not in the source's format, or the source has no text.
    """
    if split == "validation" and validation.held_out_fraction == 0:
        return ()
    splitter = UnitSplitter(source, split, validation, unit_bytes)
    return _group(source, splitter.all_spans(), splitter.max_unit_bytes)


def units_of_both_splits(source: Source, unit_bytes: int) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
    """Return the units of both splits of a source whose records are held out individually, from one pass.

    Raises:
        DataError: See ``split_into_units``.
    """
    train, validation = (UnitSplitter(source, split, source.holdout, unit_bytes) for split in SPLITS)
    spans = train.all_spans()
    return _group(source, spans, train.max_unit_bytes), _group(source, spans, validation.max_unit_bytes)


def first_units(
    source: Source, split: Split, validation: ValidationConfig, unit_bytes: int, limit_bytes: int
) -> tuple[tuple[Unit, ...], bool]:
    """Return the units of the first ``limit_bytes`` of a split, and whether they are all; little more is read."""
    if split == "validation" and validation.held_out_fraction == 0:
        return (), True
    splitter = UnitSplitter(source, split, validation, unit_bytes)
    spans: list[tuple[UnitSpan, int]] = []
    is_all, size_bytes = True, 0
    for span in splitter.spans():
        if size_bytes >= limit_bytes:
            is_all = False
            break
        spans.append(span)
        size_bytes += span[1]
    return _group(source, spans, splitter.max_unit_bytes), is_all


def _group(source: Source, spans: Sequence[tuple[UnitSpan, int]], max_unit_bytes: int) -> tuple[Unit, ...]:
    if not spans:
        reject_empty_source(source)
    return tuple(Unit(unit_id, tuple(group)) for unit_id, group in enumerate(batch_by_size(spans, max_unit_bytes)))


def reject_empty_source(source: Source) -> None:
    """Reject a source whose files have bytes but no records.

    Raises:
        DataError: No file has a record.
    """
    for stored, end in zip(source.stored, source.end_bytes, strict=True):
        if next(split_blocks(source.config, stored, 0, end, 1), None) is not None:
            return
    raise DataError(
        f"Source {source.config.name!r} is empty: {pluralize(len(source.files), 'file')} without a record",
        where=source.files[0].uri, hint=f"check {source.key}.paths",
    )  # fmt: skip


def tail_bytes(source: Source, index: int, validation: ValidationConfig) -> tuple[int, int]:
    """Return the bytes of text in the held-out tail of a file, and in all of the file; a compressed file is read once.

    Raises:
        DataError: The file cannot be read.
    """
    config, file, end = source.config, source.stored[index], source.end_bytes[index]
    with retry_budget(RetryPolicy.from_source(config)):
        size = measure(config, file, end)
        boundary = _tail_boundary(source, index, validation)
        return max(0, size - (measure(config, file, boundary) if boundary else 0)), size


def _tail_boundary(source: Source, index: int, validation: ValidationConfig) -> int:
    """Return the start of the held-out tail: the last record boundary before it, else the first one after it."""
    config, file, end = source.config, source.stored[index], source.end_bytes[index]
    size = measure(config, file, end)
    start = tail_start(validation, size)
    first = first_block(config, file, end, start)
    return 0 if first is None else first.end_byte
