"""Packing against plain-Python references: nothing lost, nothing twice, nothing left half empty."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vorox.data.packing import Packing, pack

LENGTHS = st.lists(st.integers(0, 40), max_size=60)
ROW_TOKENS = st.integers(2, 17)
Fragment = tuple[int, int, int]


def rows_of(packing: Packing) -> list[list[Fragment]]:
    fragments = list(
        zip(packing.documents.tolist(), packing.token_offsets.tolist(), packing.lengths.tolist(), strict=True)
    )
    pointers = packing.row_ptr.tolist()
    return [fragments[start:end] for start, end in itertools.pairwise(pointers)]


def masked_targets(packing: Packing) -> list[tuple[int, int]]:
    """(document, token) of everything predicted when documents of a row do not see each other."""
    return [
        (document, offset + index)
        for row in rows_of(packing)
        for document, offset, length in row
        for index in range(1, length)
    ]


def check_rows(packing: Packing, row_tokens: int) -> None:
    assert packing.row_ptr[0] == 0
    for row in rows_of(packing):
        assert row
        assert all(length >= 1 for _, _, length in row)
        assert sum(length for _, _, length in row) <= row_tokens


@given(LENGTHS, ROW_TOKENS, st.sampled_from(["best_fit", "concat"]), st.integers(1, 70))
@settings(max_examples=400, deadline=None)
def test_every_token_but_the_first_of_a_document_is_a_target_exactly_once(lengths, row_tokens, method, window):
    packing = pack(lengths, row_tokens, method, window)
    check_rows(packing, row_tokens)
    expected = [(document, token) for document, length in enumerate(lengths) for token in range(1, length)]
    assert sorted(masked_targets(packing)) == expected
    present = {
        (document, token)
        for row in rows_of(packing)
        for document, offset, length in row
        for token in range(offset, offset + length)
    }
    assert present == {(document, token) for document, length in enumerate(lengths) for token in range(length)}
    assert packing.num_tokens + packing.padding_tokens == packing.num_rows * row_tokens


@given(LENGTHS, ROW_TOKENS, st.integers(1, 70))
@settings(max_examples=200, deadline=None)
def test_best_fit_cuts_only_documents_longer_than_a_row_and_overlaps_by_one(lengths, row_tokens, window):
    by_document: dict[int, list[tuple[int, int]]] = {}
    for row in rows_of(pack(lengths, row_tokens, "best_fit", window)):
        for document, offset, length in row:
            by_document.setdefault(document, []).append((offset, length))
    for document, length in enumerate(lengths):
        fragments = sorted(by_document.get(document, []))
        if length == 0:
            assert fragments == []
        elif length <= row_tokens:
            assert fragments == [(0, length)]
        else:
            assert all(size == row_tokens for _, size in fragments[:-1])
            assert [offset for offset, _ in fragments] == [index * (row_tokens - 1) for index in range(len(fragments))]
            assert sum(fragments[-1]) == length
            assert fragments[-1][1] >= 2


@given(LENGTHS, ROW_TOKENS)
@settings(max_examples=300, deadline=None)
def test_concat_is_the_stream_of_documents_cut_into_windows(lengths, row_tokens):
    stream = [(document, token) for document, length in enumerate(lengths) for token in range(length)]
    expected: list[list[tuple[int, int]]] = []
    start = 0
    while start == 0 or start + 1 < len(stream):
        if stream[start : start + row_tokens]:
            expected.append(stream[start : start + row_tokens])
        start += row_tokens - 1
    actual = [
        [(document, token) for document, offset, length in row for token in range(offset, offset + length)]
        for row in rows_of(pack(lengths, row_tokens, "concat"))
    ]
    assert actual == expected
    # Without the document mask every token of the stream but the very first is predicted once, whoever owns it.
    assert sorted(token for row in actual for token in row[1:]) == stream[1:]


def brute_force_best_fit(lengths: list[int], row_tokens: int) -> list[list[int]]:
    """Best-fit decreasing by looking at every row: the number of rows and their loads."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        free = [(row_tokens - sum(row), index) for index, row in enumerate(rows) if row_tokens - sum(row) >= length]
        if free:
            rows[min(free)[1]].append(length)
        else:
            rows.append([length])
    return rows


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(30, 50))
@settings(max_examples=200, deadline=None)
def test_one_window_is_best_fit_decreasing(lengths, row_tokens):
    packing = pack(lengths, row_tokens, "best_fit", window=1000)
    actual = sorted(sorted(length for _, _, length in row) for row in rows_of(packing))
    # Rows of equal free space are interchangeable, so the loads agree though the rows may be numbered differently.
    assert sorted(map(sum, actual)) == sorted(map(sum, brute_force_best_fit(lengths, row_tokens)))


@pytest.mark.parametrize("row_tokens", [257, 1025, 2049])
def test_lognormal_lengths_fill_the_rows(row_tokens):
    generator = np.random.default_rng(20)
    lengths = np.maximum(generator.lognormal(np.log(572), 1.05, 60_000).astype(np.int64), 2)
    packing = pack(lengths, row_tokens)
    assert packing.utilisation_fraction >= 0.999
    cut = np.bincount(packing.documents) > 1
    assert np.array_equal(cut, lengths > row_tokens)


def test_rows_that_are_nearly_full_do_not_wait_and_others_do():
    # Row of 100 with 99 is closed at the window's end; row with 60 waits and takes the 40 of the next window.
    packing = pack([99, 60, 1, 40], 100, "best_fit", window=2)
    assert rows_of(packing) == [[(0, 0, 99)], [(1, 0, 60), (3, 0, 40)], [(2, 0, 1)]]


def test_the_same_lengths_give_the_same_rows():
    lengths = np.random.default_rng(3).integers(1, 500, 5000)
    first, second = pack(lengths, 129), pack(lengths.tolist(), 129)
    assert rows_of(first) == rows_of(second)


def test_no_documents_give_no_rows():
    for method in ("best_fit", "concat"):
        packing = pack([], 8, method)
        assert packing.num_rows == 0
        assert packing.utilisation_fraction == 1.0
        assert pack([0, 0], 8, method).num_rows == 0


@pytest.mark.parametrize("arguments", [([3], 1), ([3], 8, "best_fit", 0), ([-1], 8)])
def test_senseless_arguments_are_refused(arguments):
    with pytest.raises(ValueError):
        pack(*arguments)
