"""Apply transforms to the documents of a batch, and count what each of them did.

Documents and a list of transforms go in, the documents that are left come out. Provenance never moves: whatever a
transform makes of a record keeps the place of the record. Invariant: the result for a record depends on the record, its
place and the transforms, not on its neighbours (duplicates are decided before, by ``pipeline.first_pass`` for a corpus
and by ``pipeline.duplicates`` inside a unit).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError, VoroxError
from vorox.data.documents import Document, SourceFile, TokenDocument
from vorox.data.transforms.identity import generator_at
from vorox.data.transforms.registry import Transform

Ids = npt.NDArray[Any]
AnyDocument = Document | TokenDocument
IsDuplicate = Callable[[AnyDocument], bool]


@dataclass(slots=True)
class TransformCount:
    """Counts of what a transform did.

    Attributes:
        taken: Input documents.
        removed: Documents of which nothing was left.
        added: Output documents beyond one for each input.
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


def place_of(document: AnyDocument, files: Sequence[SourceFile]) -> str:
    return f"{files[document.file_index].uri}, record {document.ordinal + 1} at byte {document.byte_offset}"


@dataclass(frozen=True)
class Applier:
    """The transforms of a source and their inputs.

    Attributes:
        transforms: In order.
        seed: ``data.transform_seed``.
        files: The source's files.
        tokenizer: For transforms that ask for it.
    """

    transforms: tuple[Transform, ...]
    seed: int
    files: Sequence[SourceFile]
    tokenizer: Any = field(repr=False)

    def texts(
        self, documents: Iterable[AnyDocument], duplicates: Mapping[int, IsDuplicate], counts: Counts
    ) -> list[AnyDocument]:
        """Apply the transforms of text.

        Args:
            documents: All texts of their records, in order.
            duplicates: By the number of a transform of that kind: whether a text occurred before.
            counts: Added to.

        Raises:
            DataError: A function failed or returned something else than text, with the document's place.
        """
        left = list(documents)
        for transform in self.transforms:
            if transform.kind == "tokens":
                break
            if transform.kind == "duplicates":
                is_duplicate = duplicates[transform.number]
                made = [[] if is_duplicate(document) else [document] for document in left]
            else:
                made = [self._texts_of(transform, document) for document in left]
            _count(counts, transform, [len(texts) for texts in made])
            left = list(_renumbered(document for texts in made for document in texts))
        return left

    def tokens(
        self, documents: Sequence[AnyDocument], tokens: Sequence[Ids], counts: Counts
    ) -> tuple[list[AnyDocument], list[Ids]]:
        """Apply the transforms of tokens; return the documents that are left, and their ids.

        Raises:
            DataError: A function failed or returned something else than ids, with the document's place.
        """
        left, ids = list(documents), list(tokens)
        for transform in self.transforms:
            if transform.kind != "tokens":
                continue
            made = [self._tokens_of(transform, document, array) for document, array in zip(left, ids, strict=True)]
            _count(counts, transform, [int(array is not None) for array in made])
            left = [document for document, array in zip(left, made, strict=True) if array is not None]
            ids = [array for array in made if array is not None]
        return left, ids

    def token_sequences(self, record: AnyDocument, encode: Callable[[str], Ids]) -> list[Ids]:
        """Return the ids of all documents made of a record, none counted as a duplicate.

        For checks of a cache's content, where earlier documents are not known.
        """
        kept: dict[int, IsDuplicate] = {transform.number: lambda _: False for transform in self.transforms}
        made = self.texts([record], kept, {})
        ids = [record.tokens if isinstance(record, TokenDocument) else encode(document.text or "") for document in made]
        return self.tokens(made, ids, {})[1]

    def _texts_of(self, transform: Transform, document: AnyDocument) -> list[AnyDocument]:
        result = self._call(transform, document, document.text)
        texts = list(cast("Sequence[object]", result)) if isinstance(result, list | tuple) else [result]
        if texts == [None]:
            return []
        for text in texts:
            if not isinstance(text, str):
                raise self._wrong(transform, document, f"gave {type(text).__name__} instead of text")
        if texts == [document.text]:
            return [document]
        assert isinstance(document, Document), "transforms of text are refused for sources of tokens"
        original = document.text if document.original is None else document.original
        return [replace(document, text=cast("str", text), original=original) for text in texts]

    def _tokens_of(self, transform: Transform, document: AnyDocument, tokens: Ids) -> Ids | None:
        result = self._call(transform, document, tokens)
        if result is None:
            return None
        array = np.asarray(result)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise self._wrong(
                transform, document, f"gave {array.dtype} of shape {array.shape} instead of a list of ids"
            )
        return array if array.size else array.astype(np.int64)

    def _call(self, transform: Transform, document: AnyDocument, subject: object) -> object:
        given: dict[str, Any] = {}
        if "rng" in transform.given:
            version = self.files[document.file_index].version
            given["rng"] = generator_at(self.seed, transform.purpose, version, document.ordinal, document.copy)
        if "tokenizer" in transform.given:
            given["tokenizer"] = self.tokenizer
        if "text" in transform.given:
            given["text"] = document.text
        try:
            return transform.function(subject, **given, **transform.args)
        except VoroxError:
            raise
        except Exception as error:
            raise self._wrong(transform, document, f"failed: {type(error).__name__}: {error}") from error

    def _wrong(self, transform: Transform, document: AnyDocument, what: str) -> DataError:
        return DataError(
            f"the transform {transform.name} {what}", where=place_of(document, self.files),
            hint=f"mend {transform.identity['function']}; the units that were built stay",
        )  # fmt: skip


def _renumbered(documents: Iterable[AnyDocument]) -> Iterator[AnyDocument]:
    """Number the texts of each record from 0."""
    previous: AnyDocument | None = None
    copy = 0
    for document in documents:
        is_next = previous is not None and _key(previous) == _key(document)
        copy, previous = copy + 1 if is_next else 0, document
        yield document if document.copy == copy else replace(cast("Document", document), copy=copy)


def _key(document: AnyDocument) -> tuple[int, int]:
    return document.file_index, document.ordinal


def _count(counts: Counts, transform: Transform, made: Sequence[int]) -> None:
    """Add how many documents were made of each input."""
    removed = sum(number == 0 for number in made)
    count = counts.setdefault(transform.purpose, TransformCount())
    count.add(TransformCount(len(made), removed, sum(made) - (len(made) - removed)))
