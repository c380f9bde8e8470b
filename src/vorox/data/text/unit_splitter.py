"""Units of work: a listed source divided at its records, all at once or as far as somebody needs.

A source goes in, units come out in their order, each ready before the text behind it is read (but for one piece, which
tells whether it still fits). Invariant: a unit is a function of the source's files up to its end and of the size asked
for, so that who begins behind units that are known goes on with those that who began at the start would have cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from vorox.core.errors import DataError
from vorox.core.pluralize import pluralize
from vorox.core.schema.data import ValidationConfig
from vorox.data.batching import batch_by_size
from vorox.data.documents import Unit, UnitSpan
from vorox.data.storage import retry_budget
from vorox.data.text.file_content import Limits, compressed_length_bytes
from vorox.data.text.formats import count_records, first_block, has_many_records, measure, split_blocks
from vorox.data.text.holdout import SPLITS, Split, document_filter, file_split, holds_out_files, tail_start
from vorox.data.text.signatures import compression_by_suffix
from vorox.data.text.sources import Source, patience, read_units

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UnitSplitter:
    """Divides a split of a source into units of about ``unit_bytes`` of its text.

    Files larger than a unit are cut at record boundaries. Records are only ever counted, nothing is parsed: where
    single records are held out, the units of both splits cover all of them and ``read_unit`` tells them apart.
    """

    source: Source
    split: Split
    validation: ValidationConfig
    unit_bytes: int

    def units_after(self, known: Sequence[Unit] = ()) -> Iterator[tuple[Unit, bool]]:
        """The units behind those that are known, each with whether it is the last one.

        To go on behind known units, the records of the last of them are counted; nothing before it is read.

        Raises:
            DataError: A file cannot be read or is not what the source says.
        """
        if self.split == "validation" and self.validation.held_out_fraction == 0:
            return
        pieces = _Noted(self.pieces(known[-1].spans[-1] if known else None))
        unit_id = len(known)
        for group in batch_by_size(pieces, self.group_bytes):
            yield Unit(unit_id, tuple(group)), pieces.has_ended
            unit_id += 1

    def has_records(self, units: Iterable[Unit]) -> bool:
        """Whether any of some units has a record of the split."""
        return any(True for _ in read_units(self.source, units, self.split, self.validation))

    def estimated_bytes(self, first: Sequence[Unit]) -> int:
        """Bytes that all units will span, by what the first of them span of what is stored.

        Exact where text is what is stored, as in jsonl that is not compressed.
        """
        if not first:
            return 0
        last, limits = first[-1].spans[-1], Limits.from_source(self.source.config)
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
        """Bytes of a file that belong to the split, as they are stored."""
        source, validation = self.source, self.validation
        if holds_out_files(validation) and file_split(validation, source.places[index]) != self.split:
            return 0
        end = source.end_bytes[index]
        size = source.files[index].size_bytes if end is None else end
        if validation.split != "tail":
            return size
        start = tail_start(validation, size)
        return start if self.split == "train" else size - start

    @property
    def group_bytes(self) -> int:
        """Text of a unit, at most: more of a source that shares its units with the other split."""
        validation = self.validation
        if self.split == "validation" and validation.split == "document" and has_many_records(self.source.config):
            return int(self.unit_bytes / Fraction(str(validation.held_out_fraction)))
        return self.unit_bytes

    def pieces(self, after: UnitSpan | None = None) -> Iterator[tuple[UnitSpan, int]]:
        """The pieces of all files behind a span, and the text in each; each has a retry budget of its own."""
        first = 0 if after is None else after.file_index
        for index in range(first, len(self.source.files)):
            pieces = self._pieces_of(index, after if after is not None and index == first else None)
            yield from _patiently(pieces, self.source)

    def _pieces_of(self, index: int, after: UnitSpan | None) -> Iterator[tuple[UnitSpan, int]]:
        """The pieces of one file that belong to the split, and the text in each."""
        source, validation = self.source, self.validation
        config, file, end = source.config, source.stored[index], source.end_bytes[index]
        if holds_out_files(validation) and file_split(validation, source.places[index]) != self.split:
            return
        if after is not None and after.start_byte == after.end_byte:
            return  # the rest of the file cannot be read, which that span says
        start, ordinal = (0, 0) if after is None else (after.end_byte, after.first_ordinal)
        if validation.split == "tail":
            middle = _tail_boundary(source, index, validation)
            if self.split == "train":
                end = middle
            elif after is None and middle > 0:
                for piece in split_blocks(config, file, 0, middle, self.unit_bytes):
                    start, ordinal = piece.start_byte, piece.first_ordinal
                ordinal += count_records(config, file, start, middle)
                start = middle
        if end is not None and end <= start:
            return
        if after is not None:
            ordinal += count_records(config, file, after.start_byte, after.end_byte)
        accept = document_filter(validation, self.split, source.places[index])
        for piece in split_blocks(config, file, start, end, self.unit_bytes, ordinal):
            if has_many_records(config) or accept(piece.start_byte):
                yield UnitSpan(index, piece.start_byte, piece.end_byte, piece.first_ordinal), piece.text_bytes


class _Noted(Iterator[T]):
    """The same items; it remembers whether there were no more."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self.has_ended = False

    def __next__(self) -> T:
        try:
            return next(self._items)
        except StopIteration:
            self.has_ended = True
            raise


def _patiently(pieces: Iterator[T], source: Source) -> Iterator[T]:
    """The same items, each read out of a budget of its own."""
    while True:
        with retry_budget(patience(source.config)):
            try:
                piece = next(pieces)
            except StopIteration:
                return
        yield piece


def split_into_units(source: Source, split: Split, validation: ValidationConfig, unit_bytes: int) -> tuple[Unit, ...]:
    """All units of a split of a source.

    Raises:
        DataError: A file cannot be read or is not what the source says, or no file of the source holds any text.
    """
    return first_units(source, split, validation, unit_bytes)[0]


def units_of_both_splits(source: Source, unit_bytes: int) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
    """The units of both splits of a source where single records are held out, from one pass.

    Raises:
        DataError: As ``split_into_units``.
    """
    splitters = [UnitSplitter(source, split, source.holdout, unit_bytes) for split in SPLITS]
    pieces = list(splitters[0].pieces())
    if not pieces:
        reject_empty_source(source)
    train, validation = (
        tuple(Unit(unit_id, tuple(group)) for unit_id, group in enumerate(batch_by_size(pieces, splitter.group_bytes)))
        for splitter in splitters
    )
    return train, validation


def first_units(
    source: Source, split: Split, validation: ValidationConfig, unit_bytes: int, limit_bytes: int | None = None
) -> tuple[tuple[Unit, ...], bool]:
    """The units of the first ``limit_bytes`` of a split, and whether that is all of it; little more is read."""
    if split == "validation" and validation.held_out_fraction == 0:
        return (), True
    splitter = UnitSplitter(source, split, validation, unit_bytes)
    pieces: list[tuple[UnitSpan, int]] = []
    is_all, size_bytes = True, 0
    for piece in splitter.pieces():
        if limit_bytes is not None and size_bytes >= limit_bytes:
            is_all = False
            break
        pieces.append(piece)
        size_bytes += piece[1]
    if not pieces:
        reject_empty_source(source)
    groups = batch_by_size(pieces, splitter.group_bytes)
    return tuple(Unit(unit_id, tuple(group)) for unit_id, group in enumerate(groups)), is_all


def reject_empty_source(source: Source) -> None:
    """Refuse a source whose files have bytes, but no records.

    Raises:
        DataError: No file has any.
    """
    for stored, end in zip(source.stored, source.end_bytes, strict=True):
        if next(split_blocks(source.config, stored, 0, end, 1), None) is not None:
            return
    raise DataError(
        f"source {source.config.name!r} is empty: {pluralize(len(source.files), 'file')} without a record",
        where=source.files[0].uri, hint=f"check {source.key}.paths",
    )  # fmt: skip


def _tail_boundary(source: Source, index: int, validation: ValidationConfig) -> int:
    """Where the held-out tail of a file begins: the last end of a record before it, else the first one behind."""
    config, file, end = source.config, source.stored[index], source.end_bytes[index]
    size = measure(config, file, end)
    start = tail_start(validation, size)
    first = first_block(config, file, end, start)
    return 0 if first is None else first.end_byte
