"""Calling transforms on the documents of a batch, and counting what each of them did.

Entries (a record, its text, its number among the texts of the record) go in with a list of transforms, the entries
that are left come out. Provenance never moves: whatever a transform makes of a record is still at the place of the
record. Invariant: what becomes of a record depends on the record, its place and the transforms, not on its neighbours
(duplicates are decided before, see ``first_pass``, or inside of a unit, see ``UnitDuplicates``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError, VoroxError
from vorox.data.documents import Document, SourceFile, TokenDocument
from vorox.data.transforms.identity import generator_at
from vorox.data.transforms.registry import Transform

Ids = npt.NDArray[Any]
IsDuplicate = Callable[["Entry"], bool]


@dataclass(frozen=True, slots=True)
class Entry:
    """One text on its way from a record to rows.

    Attributes:
        record: Where it comes from.
        text: The text; None where the record is tokens.
        copy: Its number among the texts that were made of the record.
    """

    record: Document | TokenDocument
    text: str | None
    copy: int = 0


@dataclass(slots=True)
class TransformCount:
    """What a transform did.

    Attributes:
        taken: Documents that it was given.
        removed: Documents of which it left nothing.
        added: Documents that it made beyond one of each.
    """

    taken: int = 0
    removed: int = 0
    added: int = 0

    def to_json(self) -> list[int]:
        return [self.taken, self.removed, self.added]

    def add(self, other: TransformCount) -> None:
        self.taken += other.taken
        self.removed += other.removed
        self.added += other.added


Counts = dict[str, TransformCount]
"""By the transform's place in the list and its name: ``0/length``."""


def add_counts(total: Counts, more: Mapping[str, TransformCount]) -> None:
    for name, count in more.items():
        total.setdefault(name, TransformCount()).add(count)


def place_of(record: Document | TokenDocument, files: Sequence[SourceFile]) -> str:
    return f"{files[record.file_index].uri}, record {record.ordinal + 1} at byte {record.byte_offset}"


@dataclass(frozen=True)
class Applier:
    """The transforms of a unit work with what they are given.

    Attributes:
        transforms: In order.
        seed: ``data.transform_seed``.
        files: The source's files.
        tokenizer: For those that ask for it.
    """

    transforms: tuple[Transform, ...]
    seed: int
    files: Sequence[SourceFile]
    tokenizer: Any = field(repr=False)

    def texts(
        self,
        entries: Iterable[Entry],
        duplicates: Mapping[int, IsDuplicate],
        counts: Counts,
    ) -> list[Entry]:
        """What is left of some texts.

        Args:
            entries: All texts of their records, in order.
            duplicates: By the number of a transform of that kind: whether a text was there before.
            counts: Added to.

        Raises:
            DataError: A function failed or gave something else than text, with the document's place.
        """
        left = list(entries)
        for transform in self.transforms:
            if transform.kind == "tokens":
                break
            if transform.kind == "duplicates":
                is_duplicate = duplicates[transform.number]
                made = [[] if is_duplicate(entry) else [entry] for entry in left]
            else:
                made = [self._texts_of(transform, entry) for entry in left]
            _count(counts, transform, [len(texts) for texts in made])
            left = list(_renumbered(entry for texts in made for entry in texts))
        return left

    def tokens(self, entries: Sequence[Entry], tokens: Sequence[Ids], counts: Counts) -> tuple[list[Entry], list[Ids]]:
        """What is left of some documents' ids.

        Raises:
            DataError: A function failed or gave something else than ids, with the document's place.
        """
        left, ids = list(entries), list(tokens)
        for transform in self.transforms:
            if transform.kind != "tokens":
                continue
            made = [self._tokens_of(transform, entry, array) for entry, array in zip(left, ids, strict=True)]
            _count(counts, transform, [int(array is not None) for array in made])
            left = [entry for entry, array in zip(left, made, strict=True) if array is not None]
            ids = [array for array in made if array is not None]
        return left, ids

    def token_sequences(
        self, record: Document | TokenDocument, encode: Callable[[str], Ids]
    ) -> list[Ids]:  # fmt: skip
        """All ids that a record comes to, one array for each document made of it; nothing of it is a duplicate.

        For checks of what is in a cache, where what was there before is not.
        """
        entry = Entry(record, None if isinstance(record, TokenDocument) else record.text)
        kept: dict[int, IsDuplicate] = {transform.number: lambda _: False for transform in self.transforms}
        entries = self.texts([entry], kept, {})
        ids = [record.tokens if isinstance(record, TokenDocument) else encode(entry.text or "") for entry in entries]
        return self.tokens(entries, ids, {})[1]

    def _texts_of(self, transform: Transform, entry: Entry) -> list[Entry]:
        result = self._call(transform, entry, entry.text)
        texts = list(cast("Sequence[object]", result)) if isinstance(result, list | tuple) else [result]
        if texts == [None]:
            return []
        for text in texts:
            if not isinstance(text, str):
                raise self._wrong(transform, entry, f"gave {type(text).__name__} instead of text")
        if texts == [entry.text]:
            return [entry]
        return [Entry(entry.record, cast("str", text), entry.copy) for text in texts]

    def _tokens_of(self, transform: Transform, entry: Entry, tokens: Ids) -> Ids | None:
        result = self._call(transform, entry, tokens)
        if result is None:
            return None
        array = np.asarray(result)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise self._wrong(transform, entry, f"gave {array.dtype} of shape {array.shape} instead of a list of ids")
        return array if array.size else array.astype(np.int64)

    def _call(self, transform: Transform, entry: Entry, subject: object) -> object:
        given: dict[str, Any] = {}
        if "rng" in transform.given:
            record = entry.record
            version = self.files[record.file_index].version
            given["rng"] = generator_at(self.seed, transform.purpose, version, record.ordinal, entry.copy)
        if "tokenizer" in transform.given:
            given["tokenizer"] = self.tokenizer
        if "text" in transform.given:
            given["text"] = entry.text
        try:
            return transform.function(subject, **given, **transform.args)
        except VoroxError:
            raise
        except Exception as error:
            raise self._wrong(transform, entry, f"failed: {type(error).__name__}: {error}") from error

    def _wrong(self, transform: Transform, entry: Entry, what: str) -> DataError:
        return DataError(
            f"the transform {transform.name} {what}", where=place_of(entry.record, self.files),
            hint=f"mend {transform.identity['function']}; the units that were built stay",
        )  # fmt: skip


def _renumbered(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The same with the texts of each record numbered from 0."""
    record: object = None
    copy = 0
    for entry in entries:
        copy = copy + 1 if entry.record is record else 0
        record = entry.record
        yield entry if entry.copy == copy else Entry(entry.record, entry.text, copy)


def _count(counts: Counts, transform: Transform, made: Sequence[int]) -> None:
    """Add how many documents were made of each that was taken."""
    removed = sum(number == 0 for number in made)
    count = counts.setdefault(transform.purpose, TransformCount())
    count.add(TransformCount(len(made), removed, sum(made) - (len(made) - removed)))
