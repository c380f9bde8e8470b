"""Exposures: which records of an evaluation set the training read, how often, and at which steps.

In: a run and encoded records. Out: of each record, the readings of training documents that contain it. A document
contains a record if at least ``MOSTLY_FRACTION`` of the record's tokens are in n-grams that also occur in it, by the
rule of ``contamination``. An *exposure* is one reading of such a document, in one epoch; if the document lies across
rows, it has several steps. Masked documents, and steps that were skipped, rolled back or never run, do not count.

Shape legend: M matches, G n-grams of a record.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vorox.data.provenance.contamination import (
    MOSTLY_FRACTION,
    NGRAM_TOKENS,
    BoolArray,
    EvaluationRecord,
    Int64Array,
    Ngrams,
    Readings,
    check_search,
)
from vorox.data.provenance.run_data_index import RunDataIndex


@dataclass(frozen=True, slots=True)
class Exposure:
    """One reading of a document that contains a record.

    Attributes:
        uri: File of the document.
        ordinal: Index of the document in the file, from 0.
        source: Name of the source.
        epoch: Epoch of the source, from 0.
        steps: The steps, from 1, whose rows have tokens of the record.
    """

    uri: str
    ordinal: int
    source: str
    epoch: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordExposure:
    """The exposures of a record, by first step.

    Attributes:
        uri: As of the ``EvaluationRecord``.
        ordinal: As of the ``EvaluationRecord``.
        num_tokens: Its tokens.
        matched_tokens: Those in n-grams that some document has.
        is_short: Whether it has fewer tokens than an n-gram, and was not compared.
        exposures: The readings of documents that contain it.
    """

    uri: str
    ordinal: int
    num_tokens: int
    matched_tokens: int
    is_short: bool
    exposures: tuple[Exposure, ...]


@dataclass(frozen=True, slots=True)
class Exposures:
    """The exposures of an evaluation set, in the order of its records.

    Attributes:
        num_steps: Steps that were searched.
        num_rows: Distinct rows of these steps.
        records: The records.
    """

    num_steps: int
    num_rows: int
    records: tuple[RecordExposure, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """The n-grams that one row has of a document, and the positions at which training read it."""

    numbers: Int64Array
    positions: Int64Array


_Document = tuple[int, int, int, int]
"""Source, file, index of the record in it, and copy."""


def find_exposures(
    run_data: RunDataIndex,
    records: Sequence[EvaluationRecord],
    *,
    last_step: int,
    ngram_tokens: int = NGRAM_TOKENS,
) -> Exposures:
    """Search the rows of all steps up to one for records of an evaluation set.

    Args:
        run_data: The run. Every row that it was trained on is read once.
        records: The evaluation set, encoded with the run's tokenizer, without special tokens.
        last_step: The last step that counts; with 0, nothing was read.
        ngram_tokens: Length of an n-gram.

    Raises:
        ConfigError: No step of the run is on record, or a row is shorter than an n-gram.
        DataError: A chunk is missing or damaged.
    """
    applied = run_data.applied_steps()
    steps = applied[applied <= last_step]
    check_search(run_data, steps if last_step else np.zeros(1, np.int64), ngram_tokens)
    compared = [record for record in records if len(record.ids) >= ngram_tokens]
    ngrams = Ngrams(compared, ngram_tokens)
    trained = [uses > 0 for uses in run_data.row_uses(steps)]
    documents = _documents(Readings(run_data, steps), trained, ngrams)
    covers = _Coverage(ngrams, compared)
    exposures: dict[int, list[Exposure]] = defaultdict(list)
    is_found = np.zeros(len(ngrams), np.bool_)
    for document, pieces in documents.items():
        numbers = np.unique(np.concatenate([piece.numbers for piece in pieces]))
        is_found[numbers] = True
        for record in covers.records_in(numbers):
            exposures[record] += _exposures(run_data, document, pieces, covers, record)
    at = {id(record): index for index, record in enumerate(compared)}
    found: list[RecordExposure] = []
    for record in records:
        index = at.get(id(record))
        own = sorted(exposures.get(index, ()) if index is not None else (), key=lambda one: (one.steps, one.uri))
        matched = 0 if index is None else covers.num_covered(index, is_found)
        found.append(
            RecordExposure(record.uri, record.ordinal, len(record.ids), matched, index is None, tuple(own))
        )  # fmt: skip
    return Exposures(len(steps), sum(int(np.count_nonzero(rows)) for rows in trained), tuple(found))


class _Coverage:
    """Which tokens of a record some n-grams cover."""

    def __init__(self, ngrams: Ngrams, records: Sequence[EvaluationRecord]) -> None:
        self._length, self._num_ngrams = ngrams.length, len(ngrams)
        self._numbers_G = [ngrams.number_of[a:b] for a, b in itertools.pairwise(ngrams.record_starts.tolist())]
        self._num_tokens = np.array([len(record.ids) for record in records], np.int64)
        order = np.argsort(ngrams.number_of, kind="stable")
        self._records = np.searchsorted(ngrams.record_starts, order, side="right") - 1
        self._starts = np.searchsorted(ngrams.number_of[order], np.arange(len(ngrams) + 1))

    def records_in(self, numbers: Int64Array) -> list[int]:
        """Return the records that a document with some n-grams contains."""
        own = [self._records[self._starts[number] : self._starts[number + 1]] for number in numbers.tolist()]
        records, num_found = np.unique(np.concatenate(own), return_counts=True)
        # An n-gram covers at most its own length: most records that share one only are left out by this alone.
        likely = num_found * self._length >= MOSTLY_FRACTION * self._num_tokens[records]
        is_found = np.zeros(self._num_ngrams, np.bool_)
        is_found[numbers] = True
        return [record for record in records[likely].tolist() if self.contains(record, is_found)]

    def num_covered(self, record: int, is_found: BoolArray) -> int:
        is_here = is_found[self._numbers_G[record]]
        covered = np.zeros(self._num_tokens[record], np.bool_)
        for offset in range(self._length):
            covered[offset : offset + len(is_here)] |= is_here
        return int(covered.sum())

    def contains(self, record: int, is_found: BoolArray) -> bool:
        return self.num_covered(record, is_found) / int(self._num_tokens[record]) >= MOSTLY_FRACTION

    def contains_numbers(self, record: int, parts: Iterable[Int64Array]) -> bool:
        is_found = np.zeros(self._num_ngrams, np.bool_)
        for numbers in parts:
            is_found[numbers] = True
        return self.contains(record, is_found)

    def has_any(self, record: int, numbers: Int64Array) -> bool:
        return bool(np.isin(self._numbers_G[record], numbers).any())


def _documents(
    readings: Readings, trained: Sequence[BoolArray], ngrams: Ngrams
) -> Mapping[_Document, list[_Piece]]:  # fmt: skip
    """Return the pieces of each document of the training rows that has n-grams of an evaluation set."""
    found: dict[_Document, list[_Piece]] = defaultdict(list)
    for one in readings.matches(trained, ngrams):
        document = one.source_index, one.span.file_index, one.span.ordinal, one.span.copy
        found[document].append(_Piece(np.unique(one.number_M), one.positions))
    return found


def _exposures(
    run_data: RunDataIndex, document: _Document, pieces: Sequence[_Piece], covers: _Coverage, record: int
) -> Iterable[Exposure]:
    """Yield the readings of a document in which a record is whole enough, one per epoch."""
    index, file_index, ordinal, _ = document
    by_epoch: dict[int, list[tuple[int, Int64Array]]] = defaultdict(list)
    for piece in pieces:
        if covers.has_any(record, piece.numbers):
            epochs = run_data.plan.locate(piece.positions).epoch.tolist()
            for position, epoch in zip(piece.positions.tolist(), epochs, strict=True):
                by_epoch[epoch].append((run_data.step_and_slot(position)[0], piece.numbers))
    uri, source = run_data.readers[index].files[file_index].uri, run_data.plan.sources[index].name
    for epoch, read in sorted(by_epoch.items()):
        if covers.contains_numbers(record, (numbers for _, numbers in read)):
            yield Exposure(uri, ordinal, source, epoch, tuple(sorted({step for step, _ in read})))
