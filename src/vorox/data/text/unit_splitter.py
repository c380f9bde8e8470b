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
from vorox.core.schema.data import Split, ValidationConfig
from vorox.data.documents import Unit, UnitSpan
from vorox.data.prefetch import map_ordered
from vorox.data.size_groups import batch_by_size
from vorox.data.storage import RetryPolicy, retry_budget
from vorox.data.text.file_content import compressed_length_bytes, is_stored_as_read, limits_of
from vorox.data.text.formats import count_records, first_block, has_many_records, measure, split_blocks
from vorox.data.text.formats.record_blocks import WINDOW_BYTES, read_range
from vorox.data.text.holdout import SPLITS, document_filter, file_split, held_out_spans, holds_out_files
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
        if is_stored_as_read(file, limits) or self.source.end_bytes[last.file_index] is not None:
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
        if validation.split != "span":
            return size
        held_out = sum(end - start for start, end in held_out_spans(validation, source.relative_paths[index], size))
        return held_out if self.split == "validation" else size - held_out

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
        if after is not None:
            ordinal += count_records(config, file, after.start_byte, after.end_byte)
        accept = document_filter(validation, self.split, source.relative_paths[index])
        parts = _parts(source, index, validation) if validation.split == "span" else [(0, end, self.split)]
        for first, last, split in parts:
            if last is not None and last <= start:
                continue
            first, block = max(first, start), None
            for block in split_blocks(config, file, first, last, self.unit_bytes, ordinal):
                if split == self.split and (has_many_records(config) or accept(block.start_byte)):
                    yield UnitSpan(index, block.start_byte, block.end_byte, block.first_ordinal), block.text_bytes
            if block is not None and len(parts) > 1:  # records of the other split count too
                ordinal = block.first_ordinal + count_records(config, file, block.start_byte, block.end_byte)


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


def held_out_bytes_of(source: Source, index: int, validation: ValidationConfig) -> tuple[int, int]:
    """Return the bytes of text in the held-out spans of a file, and in all of the file.

    Raises:
        DataError: The file cannot be read.
    """
    config, file, end = source.config, source.stored[index], source.end_bytes[index]
    with retry_budget(RetryPolicy.from_source(config)):
        size, held_out = measure(config, file, end), 0
        for first, last, split in _parts(source, index, validation):
            if split == "validation":
                before = measure(config, file, first) if first else 0
                held_out += (size if last is None else measure(config, file, last)) - before
        return held_out, size


def _next_boundary(source: Source, index: int, first: int, at: int, size: int) -> int | None:
    """Return the first record boundary from a place on, for a record that begins at ``first``; ``None``: the end."""
    config, file, end = source.config, source.stored[index], source.end_bytes[index]
    if has_many_records(config):
        block = next(split_blocks(config, file, first, end, 1), None)
        return end if block is None else block.end_byte
    newline = read_range(file, at, min(at + WINDOW_BYTES, size), limits_of(config)).find(b"\n")
    return end if newline < 0 else at + newline + 1


def _parts(source: Source, index: int, validation: ValidationConfig) -> list[tuple[int, int | None, Split]]:
    """Return the parts of a file that belong to each split under the rule ``span``, in order, ending at records."""
    config, file, end = source.config, source.stored[index], source.end_bytes[index]
    size = measure(config, file, end)

    def boundary(at: int) -> int | None:
        """Return the last record boundary before a place, else the first one after it."""
        if at <= 0 or at >= size:
            return 0 if at <= 0 else end
        first = first_block(config, file, end, at)
        return end if first is None else first.end_byte

    parts: list[tuple[int, int | None, Split]] = []
    known = 0
    # Each boundary in a compressed or recoded file is found by reading it from its start.
    max_parts = None if is_stored_as_read(file, limits_of(config)) else 1
    for start, last in held_out_spans(validation, source.relative_paths[index], size, max_parts=max_parts):
        first, stop = boundary(start), boundary(last)
        if first is None or (known and first < known):
            first = known
        if stop is not None and stop <= first:  # inside a record
            stop = _next_boundary(source, index, first, last, size)
        if stop is not None and stop <= first:
            continue
        if first > known:
            parts.append((known, first, "train"))
        parts.append((first, stop, "validation"))
        if stop is None or stop == end:
            return parts
        known = stop
    return [*parts, (known, end, "train")]
