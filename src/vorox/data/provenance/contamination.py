"""Contamination: records of an evaluation set that share long n-grams with a run's training rows.

A token of a record is *contaminated* if it is part of ``ngram_tokens`` consecutive tokens that also occur, within one
document, in a row of a step whose update the weights hold (Llama 2, arXiv:2307.09288, appendix A.6, without skipped
tokens). Records are encoded with the run's tokenizer, so a match does not depend on how text is normalised. N-grams
across the border of two rows are not found. A document counts in the steps in which the plan does not mask it.

Shape legend: N rows, T tokens of a row, G n-grams of the evaluation set, L tokens of an n-gram, M matches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vorox.core.errors import ConfigError
from vorox.data.documents import DocumentSpan
from vorox.data.order.difficulty_buckets import SourceReader
from vorox.data.order.document_masks import DocumentMasks
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.data.rows import real_tokens

NGRAM_TOKENS = 13
MOSTLY_FRACTION = 0.8
"""From this fraction of contaminated tokens on, Llama 2 calls a record dirty."""

_ROWS_AT_ONCE = 1024
_PLACES_PER_NGRAM = 16
_FILTER_BITS = 22
_BASE = np.uint64(0x9E3779B97F4A7C15)

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class EvaluationRecord(NamedTuple):
    """A record of an evaluation set: its file, its index in the file from 0, and its token ids."""

    uri: str
    ordinal: int
    ids: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedDocument:
    """A document of the training data that shares n-grams with a record.

    Attributes:
        uri: File of the document.
        ordinal: Index of the document in the file, from 0.
        num_ngrams: Shared n-grams that were found in it.
        steps: Steps, from 1, whose rows contain them; steps that were rolled back or skipped are left out.
    """

    uri: str
    ordinal: int
    num_ngrams: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ContaminatedRecord:
    """A record with contaminated tokens, and some documents that share most n-grams with it."""

    uri: str
    ordinal: int
    num_tokens: int
    contaminated_tokens: int
    documents: tuple[SharedDocument, ...]

    @property
    def fraction(self) -> float:
        return self.contaminated_tokens / self.num_tokens


@dataclass(frozen=True, slots=True)
class Contamination:
    """The contaminated records, most contaminated first.

    Attributes:
        num_records: Records of the evaluation set.
        num_short_records: Records with fewer tokens than an n-gram; they are never contaminated.
        num_steps: Steps that were searched: executed, neither rolled back nor skipped.
        num_rows: Distinct rows of these steps.
        records: The contaminated records.
    """

    num_records: int
    num_short_records: int
    num_steps: int
    num_rows: int
    records: tuple[ContaminatedRecord, ...]


class Ngrams:
    """The distinct n-grams of an evaluation set, by 64-bit hash; a match is compared token by token."""

    def __init__(self, records: Sequence[EvaluationRecord], length: int) -> None:
        self.length = length
        grams = [np.lib.stride_tricks.sliding_window_view(record.ids, length) for record in records]
        self.record_starts = np.cumsum([0, *map(len, grams)])
        tokens_GL = np.concatenate(grams) if grams else np.zeros((0, length), np.int64)
        hashes_G = _hashes(tokens_GL.astype(np.uint64), length)[:, 0]
        self._hashes, first, self.number_of = np.unique(hashes_G, return_index=True, return_inverse=True)
        self._tokens_GL = tokens_GL[first]
        self._filter = np.zeros(1 << _FILTER_BITS, np.bool_)
        self._filter[_filter_index(self._hashes)] = True

    def __len__(self) -> int:
        return len(self._hashes)

    def matches(self, tokens_NT: npt.NDArray[np.integer]) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return (row, first token, n-gram) of every occurrence in some rows, each ``[M]``."""
        if tokens_NT.shape[1] < self.length or not len(self):
            nothing = np.zeros(0, np.int64)
            return nothing, nothing, nothing
        hashes_NT = _hashes(tokens_NT.astype(np.uint64), self.length)
        row, column = np.nonzero(self._filter[_filter_index(hashes_NT)])
        hashes = hashes_NT[row, column]
        number = np.minimum(np.searchsorted(self._hashes, hashes), len(self) - 1)
        is_equal = self._hashes[number] == hashes
        row, column, number = row[is_equal], column[is_equal], number[is_equal]
        window_ML = tokens_NT[row[:, None], column[:, None] + np.arange(self.length)]
        is_equal = (window_ML == self._tokens_GL[number]).all(axis=1)
        return row[is_equal], column[is_equal], number[is_equal]


def _hashes(tokens_NT: UInt64Array, length: int) -> UInt64Array:
    """Return the polynomial hash, modulo 2^64, of each window of a row."""
    width = tokens_NT.shape[1] - length + 1
    found = np.zeros((tokens_NT.shape[0], width), np.uint64)
    for offset in range(length):
        found *= _BASE
        found += tokens_NT[:, offset : offset + width] + np.uint64(1)
    return found


def _filter_index(hashes: UInt64Array) -> npt.NDArray[np.intp]:
    mixed = (hashes ^ (hashes >> np.uint64(32))) * _BASE
    return (mixed >> np.uint64(64 - _FILTER_BITS)).astype(np.intp)


class DocumentMatches(NamedTuple):
    """Occurrences of n-grams in the part of a document that a row has.

    Attributes:
        source_index: Index of the source.
        row: The row.
        span: The document in it.
        token_M: First token of each occurrence in the row.
        number_M: Number of its n-gram.
        positions: Positions at which steps read the row, and the document is not masked.
    """

    source_index: int
    row: int
    span: DocumentSpan
    token_M: Int64Array
    number_M: Int64Array
    positions: Int64Array


class Readings:
    """What some steps of a run read: rows, and the documents in them that were not masked then.

    Args:
        run_data: The run.
        steps: The steps, from 1.

    Attributes:
        has_masks: Whether the plan masks documents.
    """

    def __init__(self, run_data: RunDataIndex, steps: Int64Array) -> None:
        self._run_data, self._steps = run_data, frozenset(steps.tolist())
        self._masks = DocumentMasks(run_data.plan.state)
        self.has_masks = bool(self._masks.events)
        self._positions: dict[tuple[int, int], Int64Array] = {}

    def positions(self, source_index: int, row: int, file_index: int, ordinal: int) -> Int64Array:
        """Return the positions of a row in the steps at which a document is not masked."""
        reader = self._run_data.readers[source_index]
        if (source_index, row) not in self._positions:
            found = self._run_data.plan.positions_of(source_index, row, reader).tolist()
            kept = [one for one in found if self.step(one) in self._steps]
            self._positions[source_index, row] = np.array(kept, np.int64)
        positions = self._positions[source_index, row]
        if not self.has_masks:
            return positions
        version = reader.files[file_index].version
        kept = [
            one for one in positions.tolist() if not self._masks.is_masked(source_index, version, ordinal, one)
        ]  # fmt: skip
        return np.array(kept, np.int64)

    def step(self, position: int) -> int:
        """Return the step, from 1, that reads a position."""
        return self._run_data.step_and_slot(position)[0]

    def matches(self, trained: Sequence[BoolArray], ngrams: Ngrams) -> Iterator[DocumentMatches]:
        """Yield the occurrences of n-grams by document, without documents that were masked whenever they were read.

        Raises:
            DataError: A chunk is missing or damaged.
        """
        for index, row_M, token_M, number_M in matches_in_rows(self._run_data, trained, ngrams):
            borders = [0, *(np.flatnonzero(np.diff(row_M)) + 1).tolist(), len(row_M)]  # rows ascend
            for first, end in pairwise(borders if len(row_M) else ()):
                row = int(row_M[first])
                for span, is_here in self._segments(index, row, token_M[first:end]):
                    positions = self.positions(index, row, span.file_index, span.ordinal)
                    if len(positions):
                        tokens, numbers = token_M[first:end][is_here], number_M[first:end][is_here]
                        yield DocumentMatches(index, row, span, tokens, numbers, positions)

    def _segments(self, index: int, row: int, token_M: Int64Array) -> Iterable[tuple[DocumentSpan, BoolArray]]:
        spans: Sequence[DocumentSpan] = self._run_data.readers[index].documents_of(row)
        segment_M = np.searchsorted(np.cumsum([span.length for span in spans]), token_M, side="right")
        segments: list[int] = np.unique(segment_M).tolist()
        return [(spans[segment], segment_M == segment) for segment in segments]


class _Places(NamedTuple):
    """Where n-grams occur in the training data: up to some places for each, in the order of the search."""

    number: Int64Array
    source_index: Int64Array
    row: Int64Array
    token: Int64Array


def find_contamination(
    run_data: RunDataIndex,
    records: Sequence[EvaluationRecord],
    *,
    ngram_tokens: int = NGRAM_TOKENS,
    steps: Int64Array | None = None,
    num_documents: int = 3,
) -> Contamination:
    """Search the rows that the weights were trained on for n-grams of an evaluation set.

    Args:
        run_data: The run. Every row that it was trained on is read once.
        records: The evaluation set, encoded with the run's tokenizer, without special tokens.
        ngram_tokens: Length of an n-gram.
        steps: Search only these steps, ascending. ``None``: all whose updates the weights hold.
        num_documents: Documents to name for each record: those that share most n-grams with it.

    Raises:
        ConfigError: No step of the run is on record, or a row is shorter than an n-gram.
        DataError: A chunk is missing or damaged.
    """
    steps = run_data.applied_steps() if steps is None else steps
    check_search(run_data, steps, ngram_tokens)
    ngrams = Ngrams([record for record in records if len(record.ids) >= ngram_tokens], ngram_tokens)
    trained = [uses > 0 for uses in run_data.row_uses(steps)]
    readings = Readings(run_data, steps)
    places = _search(run_data, readings, trained, ngrams)
    found = _Report(run_data, readings, ngrams, places, num_documents).contaminated(
        [record for record in records if len(record.ids) >= ngram_tokens]
    )
    return Contamination(
        num_records=len(records),
        num_short_records=sum(len(record.ids) < ngram_tokens for record in records),
        num_steps=len(steps),
        num_rows=sum(int(np.count_nonzero(rows)) for rows in trained),
        records=tuple(sorted(found, key=lambda record: (-record.fraction, record.uri, record.ordinal))),
    )


def check_search(run_data: RunDataIndex, steps: Int64Array, ngram_tokens: int) -> None:
    """Check that there are steps to search, and that n-grams fit into their rows.

    Raises:
        ConfigError: No step is on record, or a row is shorter than an n-gram.
    """
    if not len(steps):
        raise ConfigError(
            "No step of this run is on record", where=str(run_data.directory), hint="train at least one step first"
        )
    row_tokens = min(reader.row_tokens for reader in run_data.readers)
    if not 1 <= ngram_tokens <= row_tokens:
        raise ConfigError(
            f"An n-gram of {ngram_tokens:,} tokens does not fit into a row of {row_tokens:,}", where="--ngram-tokens",
            hint=f"give 1 to {row_tokens:,}",
        )  # fmt: skip


def matches_in_rows(
    run_data: RunDataIndex, trained: Sequence[BoolArray], ngrams: Ngrams
) -> Iterator[tuple[int, Int64Array, Int64Array, Int64Array]]:
    """Yield every occurrence of n-grams in the rows that are ``True`` in ``trained``, a block of rows at a time.

    Yields:
        Index of the source; then row, first token and n-gram, each ``[M]``. Padding has no occurrences.

    Raises:
        DataError: A chunk is missing or damaged.
    """
    for index, (reader, is_trained) in enumerate(zip(run_data.readers, trained, strict=True)):
        for rows in _blocks(np.flatnonzero(is_trained)):
            block = reader.read_rows(rows)
            row, token, number = ngrams.matches(block.tokens_NC)
            is_text = token + ngrams.length <= real_tokens(block)[row]
            yield index, rows[row[is_text]], token[is_text], number[is_text]


def _search(run_data: RunDataIndex, readings: Readings, trained: Sequence[BoolArray], ngrams: Ngrams) -> _Places:
    parts: list[_Places] = []
    num_places = np.zeros(len(ngrams), np.int64)
    found = matches_in_rows(run_data, trained, ngrams)
    if readings.has_masks:
        found = (
            (one.source_index, np.full(len(one.token_M), one.row), one.token_M, one.number_M)
            for one in readings.matches(trained, ngrams)
        )
    for index, row, token, number in found:
        kept = _below_limit(number, num_places)
        parts.append(_Places(number[kept], np.full(len(kept), index), row[kept], token[kept]))
    return _Places(*(np.concatenate(column) if parts else np.zeros(0, np.int64) for column in zip(*parts, strict=True)))


def _blocks(rows: Int64Array) -> Iterator[Int64Array]:
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        yield rows[first : first + _ROWS_AT_ONCE]


def _below_limit(number: Int64Array, num_places: Int64Array) -> Int64Array:
    """Return the indexes of matches whose n-gram has fewer than the kept number of places, and count these."""
    order = np.argsort(number, kind="stable")
    in_order = number[order]
    first_of_run = np.searchsorted(in_order, in_order)
    kept = order[np.arange(len(order)) - first_of_run + num_places[in_order] < _PLACES_PER_NGRAM]
    np.add.at(num_places, number[kept], 1)
    return np.sort(kept)


class _Report:
    """Describes the places of n-grams as documents and steps."""

    def __init__(
        self, run_data: RunDataIndex, readings: Readings, ngrams: Ngrams, places: _Places, num_documents: int
    ) -> None:
        self._run_data, self._readings, self._ngrams, self._num_documents = run_data, readings, ngrams, num_documents
        order = np.argsort(places.number, kind="stable")
        self._places = _Places(*(column[order] for column in places))
        self._starts = np.searchsorted(self._places.number, np.arange(len(ngrams) + 1))

    def contaminated(self, records: Sequence[EvaluationRecord]) -> Iterator[ContaminatedRecord]:
        for record, (first, last) in zip(records, pairwise(self._ngrams.record_starts.tolist()), strict=True):
            numbers = self._ngrams.number_of[first:last]
            is_found = self._starts[numbers + 1] > self._starts[numbers]
            if not is_found.any():
                continue
            covered = np.zeros(len(record.ids), np.bool_)
            for offset in range(self._ngrams.length):
                covered[offset : offset + len(numbers)] |= is_found
            yield ContaminatedRecord(
                record.uri, record.ordinal, len(record.ids), int(covered.sum()), self._documents(numbers[is_found])
            )

    def _documents(self, numbers: Int64Array) -> tuple[SharedDocument, ...]:
        ngrams_of: dict[tuple[str, int], set[int]] = {}
        rows_of: dict[tuple[str, int], set[tuple[int, int, int]]] = {}
        for number in set(numbers.tolist()):
            for place in range(self._starts[number], self._starts[number + 1]):
                index, row = int(self._places.source_index[place]), int(self._places.row[place])
                span = _document_at(self._run_data.readers[index], row, int(self._places.token[place]))
                document = span.uri, span.ordinal
                ngrams_of.setdefault(document, set()).add(number)
                rows_of.setdefault(document, set()).add((index, row, span.file_index))
        most = sorted(ngrams_of, key=lambda document: (-len(ngrams_of[document]), document))[: self._num_documents]
        return tuple(
            SharedDocument(*document, len(ngrams_of[document]), self._steps_of(document[1], rows_of[document]))
            for document in most
        )

    def _steps_of(self, ordinal: int, rows: set[tuple[int, int, int]]) -> tuple[int, ...]:
        steps: set[int] = set()
        for index, row, file_index in rows:
            positions = self._readings.positions(index, row, file_index, ordinal)
            steps.update(map(self._readings.step, positions.tolist()))
        return tuple(sorted(steps))


def _document_at(reader: SourceReader, row: int, token: int) -> DocumentSpan:
    """Return the document with a token of a row."""
    end = 0
    for span in reader.documents_of(row):
        end += span.length
        if token < end:
            return span
    raise AssertionError("a match is never in the padding of a row")
