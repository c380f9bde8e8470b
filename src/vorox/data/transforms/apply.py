"""Applying transforms to batches of documents, with counts per transform.

Documents and a list of transforms go in, the remaining documents come out. The output of a transform keeps the location
of its record, for provenance. Invariant: the result for a record depends on the record, its location and the
transforms, not on neighbouring records (``pipeline.duplicates`` finds duplicate texts beforehand).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from vorox.core.errors import DataError, VoroxError
from vorox.data.documents import AnyDocument, Document, SourceFile, place_of
from vorox.data.transforms.identity import generator_at
from vorox.data.transforms.registry import Transform

Ids = npt.NDArray[Any]
IsDuplicate = Callable[[AnyDocument], bool]


@dataclass(frozen=True, slots=True)
class TransformCount:
    """Document counts of one transform.

    Attributes:
        inputs: Input documents.
        removed: Input documents without output.
        added: Output documents beyond one per input.
    """

    inputs: int = 0
    removed: int = 0
    added: int = 0

    def to_json(self) -> list[int]:
        return [self.inputs, self.removed, self.added]

    def __add__(self, other: TransformCount) -> TransformCount:
        return TransformCount(self.inputs + other.inputs, self.removed + other.removed, self.added + other.added)


Counts = dict[str, TransformCount]
"""Counts by the transform's index in the list and its name: ``0/length``."""


@dataclass(frozen=True)
class Applier:
    """Applies the transforms of a source.

    Attributes:
        transforms: The transforms, in order.
        seed: ``data.transform_seed``.
        files: The source's files.
        tokenizer: The tokenizer, for transforms with a parameter ``tokenizer``.
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
            duplicates: For each deduplication transform, by its index: a predicate for texts seen before.
            counts: Updated in place.

        Raises:
            DataError: A function failed or did not return text; the error names the document.
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
        """Apply the transforms of tokens; return the remaining documents and their ids.

        Raises:
            DataError: A function failed or did not return ids; the error names the document.
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

    def token_sequences(
        self, record: AnyDocument, encode: Callable[[Sequence[AnyDocument]], Sequence[Ids]]
    ) -> list[Ids]:  # fmt: skip
        """Return the ids of all documents made from a record, without deduplication.

        For verifying the content of a cache, where earlier documents are not known.
        """
        kept: dict[int, IsDuplicate] = {transform.number: lambda _: False for transform in self.transforms}
        made = self.texts([record], kept, {})
        return self.tokens(made, encode(made), {})[1]

    def _texts_of(self, transform: Transform, document: AnyDocument) -> list[AnyDocument]:
        result = self._call(transform, document, document.text)
        texts = list(cast("Sequence[object]", result)) if isinstance(result, list | tuple) else [result]
        if texts == [None]:
            return []
        for text in texts:
            if not isinstance(text, str):
                raise self._error(transform, document, f"returned {type(text).__name__} instead of text")
        if texts == [document.text]:
            return [document]
        assert isinstance(document, Document), "transforms of text are refused for sources of tokens"
        if document.answers:
            raise self._error(transform, document, "changes a conversation, whose answers it cannot mark")
        original = document.text if document.original is None else document.original
        return [replace(document, text=cast("str", text), original=original) for text in texts]

    def _tokens_of(self, transform: Transform, document: AnyDocument, tokens: Ids) -> Ids | None:
        result = self._call(transform, document, tokens)
        if result is None:
            return None
        array = np.asarray(result)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise self._error(
                transform, document, f"returned {array.dtype} of shape {array.shape} instead of a list of ids"
            )
        if isinstance(document, Document) and document.answers and not np.array_equal(array, tokens):
            raise self._error(transform, document, "changes a conversation, whose answers it cannot mark")
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
            raise self._error(transform, document, f"failed: {type(error).__name__}: {error}") from error

    def _error(self, transform: Transform, document: AnyDocument, what: str) -> DataError:
        return DataError(
            f"Transform {transform.name} {what}", where=place_of(document, self.files),
            hint=f"fix {transform.identity['function']}; units that are built already are kept",
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
    """Count the documents made from each input."""
    removed = sum(number == 0 for number in made)
    count = TransformCount(len(made), removed, sum(made) - (len(made) - removed))
    counts[transform.purpose] = counts.get(transform.purpose, TransformCount()) + count
