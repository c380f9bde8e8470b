"""One pass over a unit for both splits: its records are read once, and each split gets its own.

The reader of one split goes in. It yields the records of that split; those of the other one are held, for the units
that somebody asked to hold, until they are taken. Invariant: each split gets the records, in the order, that a reader
of its own would yield.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vorox.data.documents import BadRecord, Record, Unit
from vorox.data.storage import Fetched
from vorox.data.text.formats import has_many_records, has_row_groups
from vorox.data.text.holdout import NO_HOLDOUT, Split, document_filter
from vorox.data.text.sources import Source
from vorox.data.text.unit_reader import UnitReader


def splits_share_units(source: Source) -> bool:
    """Whether both splits are made of the same pieces of text: records are held out, not files or their tails."""
    return source.holdout.split == "document" and has_many_records(source.config)


class SharedReader:
    """A ``ReadUnit`` of one split that can hold back the records of the other one.

    Args:
        source: The source; ``splits_share_units``.
        split: The split whose records it yields.
    """

    def __init__(self, source: Source, split: Split) -> None:
        self._source = source
        self._split: Split = split
        self._everything = UnitReader(source, split, NO_HOLDOUT)
        self._wanted: set[int] = set()
        self._held: dict[int, list[Record]] = {}

    def __call__(self, unit: Unit) -> Iterator[Record]:
        source, rule = self._source, self._source.holdout
        held: list[Record] = []
        is_own = {
            span.file_index: document_filter(rule, self._split, source.places[span.file_index]) for span in unit.spans
        }
        by_ordinal = has_row_groups(source.config.format)
        for record in self._everything(unit):
            rest_of_file = isinstance(record, BadRecord) and record.is_rest_of_file
            own = is_own[record.file_index](record.ordinal if by_ordinal else record.byte_offset)
            if rest_of_file or not own:
                held.append(record)
            if rest_of_file or own:
                yield record
        if unit.unit_id in self._wanted:
            self._held[unit.unit_id] = held

    @property
    def fetches(self) -> bool:
        return self._everything.fetches

    def fetched_bytes(self, unit: Unit) -> int:
        return self._everything.fetched_bytes(unit)

    def fetch(self, unit: Unit) -> Fetched:
        return self._everything.fetch(unit)

    def hold(self, unit_id: int) -> None:
        """Hold the other split's records of a unit when it is read."""
        self._wanted.add(unit_id)

    def take(self, unit_id: int) -> Sequence[Record] | None:
        """The held records of a unit, handed out once; None if it was not read to its end."""
        self._wanted.discard(unit_id)
        return self._held.pop(unit_id, None)
