"""Packing against plain-Python references: every target exactly once, rows well filled."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vorox.core.schema.data import PackingMethod
from vorox.data.cache.units.packing import Packing, pack

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


@given(LENGTHS, ROW_TOKENS, st.sampled_from(["best_fit", "concat"]))
@settings(max_examples=400, deadline=None)
def test_every_token_but_the_first_of_a_document_is_a_target_exactly_once(lengths, row_tokens, method):
    packing = pack(lengths, row_tokens, method)
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


@given(LENGTHS, ROW_TOKENS)
@settings(max_examples=400, deadline=None)
def test_best_fit_cuts_only_documents_longer_than_a_row_and_overlaps_by_one(lengths, row_tokens):
    by_document: dict[int, list[tuple[int, int]]] = {}
    for row in rows_of(pack(lengths, row_tokens, "best_fit")):
        for document, offset, length in row:
            by_document.setdefault(document, []).append((offset, length))
    for document, length in enumerate(lengths):
        fragments = sorted(by_document.get(document, []))
        if length == 0:
            assert fragments == []
        elif length <= row_tokens:
            assert fragments == [(0, length)]
        else:
            assert all(size >= 2 for _, size in fragments)
            ends = [0, *(offset + size - 1 for offset, size in fragments)]
            assert [offset for offset, _ in fragments] == ends[:-1]
            assert ends[-1] == length - 1


@given(LENGTHS, ROW_TOKENS)
@example([1, 3], 2)  # a document that begins with the second token, which two rows share
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
    # Without the document mask every token of the stream but the very first is predicted once, in any document.
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
def test_documents_that_fit_are_packed_by_best_fit_decreasing(lengths, row_tokens):
    packing = pack(lengths, row_tokens, "best_fit")
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


@pytest.mark.parametrize("row_tokens", [65, 257, 1025])
def test_ends_of_long_documents_leave_no_room(row_tokens):
    """All ends are longer than half a row and nothing short is there to go beside them."""
    generator = np.random.default_rng(5)
    lengths = (row_tokens - 1) * generator.integers(1, 9, 2000) + generator.integers(
        row_tokens * 5 // 9, row_tokens, 2000
    )
    packing = pack(lengths, row_tokens)
    check_rows(packing, row_tokens)
    assert packing.utilisation_fraction >= 0.99 if row_tokens < 200 else packing.utilisation_fraction >= 0.999
    pieces_beyond_those_of_whole_rows = packing.lengths.size - int(np.sum(-(-(lengths - 1) // (row_tokens - 1))))
    assert pieces_beyond_those_of_whole_rows <= len(lengths) * 3 // 4


def test_an_end_goes_into_the_room_beside_another_and_a_document_that_fits_stays_whole():
    # Ends of 60 and 61 (documents 0 and 1), each alone in its row, and a document of 70 that no piece may be cut from.
    rows = rows_of(pack([99 + 60, 99 + 61, 70], 100))
    assert sorted(map(len, rows)) == [1, 1, 2, 2]
    assert [(1, 99, 61), (0, 99, 39)] in rows
    assert [(2, 0, 70), (0, 137, 22)] in rows


@pytest.mark.parametrize(("free", "is_filled"), [(20, True), (19, False)])
def test_rows_that_are_98_percent_full_are_left_as_they_are(free, is_filled):
    """Four ends of long documents leave ``free`` tokens each; a fifth end of 30 goes into them only from 20 on."""
    rows = rows_of(pack([999 + 1000 - free] * 4 + [999 + 30], 1000))
    ends = [row for row in rows if (4, 999, 30) in row]
    assert len(ends) == (0 if is_filled else 1)
    assert len(rows) == (9 if is_filled else 10)


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


@pytest.mark.parametrize("arguments", [([3], 1), ([-1], 8)])
def test_senseless_arguments_are_refused(arguments):
    with pytest.raises(ValueError):
        pack(*arguments)


@pytest.mark.parametrize(("method", "digest"), [("best_fit", "23fac1b83dede0ec"), ("concat", "c72e2f6377e373f4")])
def test_rows_stay_as_they_were(method: PackingMethod, digest: str) -> None:
    """A cache's rows are a function of its recipe: another choice among equally good rows is another cache."""
    numbers = np.random.Generator(np.random.PCG64(0))
    seen = xxhash.xxh3_64()
    for _ in range(400):
        row_tokens = int(numbers.integers(8, 40))
        long = numbers.integers(row_tokens + 1, row_tokens * 3, int(numbers.integers(2, 12)))
        lengths = np.concatenate([long, numbers.integers(1, row_tokens, int(numbers.integers(0, 6)))])
        numbers.shuffle(lengths)
        packing = pack(lengths, row_tokens, method)
        for array in (packing.row_ptr, packing.documents, packing.token_offsets, packing.lengths):
            seen.update(array.astype("<i8").tobytes())
    assert seen.hexdigest() == digest
