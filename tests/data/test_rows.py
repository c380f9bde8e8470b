"""Batch assembly against a token-by-token reference of the contract."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_rows import FakeRows
from vorox.core.batch import IGNORED_LABEL, Batch, DataCursor
from vorox.data.rows import RowBlock, interleave, row_digests
from vorox.data.rows import assemble as assemble_batch


def block_of(rows: list[tuple[list[int], list[int]]], dtype: type = np.uint16) -> RowBlock:
    """From (tokens, segment lengths) of each row."""
    lengths = np.array([length for _, row in rows for length in row], np.int32)
    return RowBlock(
        tokens_NC=np.array([tokens for tokens, _ in rows], dtype),
        row_ptr=np.cumsum([0, *(len(row) for _, row in rows)]).astype(np.int64),
        segment_lengths=lengths,
        segment_document_offsets=np.zeros_like(lengths),
    )


def assemble(block: RowBlock, *, document_mask: bool) -> Batch:
    """All rows as one micro-batch."""
    return assemble_batch(block, document_mask=document_mask, step=0, cursor_after=DataCursor("", 0, 1, 1, 0))


def oracle(tokens: list[int], lengths: list[int], document_mask: bool) -> list[tuple[int, int, int, int]]:
    """(token, label, segment id, position id) of each position of a row."""
    segment = [number for number, length in enumerate(lengths, 1) for _ in range(length)]
    position = [place for length in lengths for place in range(length)]
    padding = len(tokens) - len(segment)
    segment += [0] * padding
    position += list(range(padding))
    result: list[tuple[int, int, int, int]] = []
    for i in range(len(tokens) - 1):
        real = segment[i + 1] != 0
        trained = real and (segment[i] == segment[i + 1] or not document_mask)
        result.append((tokens[i], tokens[i + 1] if trained else IGNORED_LABEL, segment[i], position[i]))
    return result


@st.composite
def rows_strategy(draw: st.DrawFn) -> tuple[list[tuple[list[int], list[int]]], type]:
    row_tokens = draw(st.integers(2, 12))
    dtype, highest = draw(st.sampled_from([(np.uint16, 2**16 - 1), (np.uint32, 2**31 - 1)]))
    rows: list[tuple[list[int], list[int]]] = []
    for _ in range(draw(st.integers(1, 5))):
        tokens = draw(st.lists(st.integers(0, highest), min_size=row_tokens, max_size=row_tokens))
        lengths: list[int] = []
        while sum(lengths) < row_tokens and draw(st.booleans()):
            lengths.append(draw(st.integers(1, row_tokens - sum(lengths))))
        rows.append((tokens, lengths))
    return rows, dtype


@settings(max_examples=150, deadline=None)
@given(rows_strategy(), st.booleans())
def test_equals_the_oracle(rows_and_type: tuple[list[tuple[list[int], list[int]]], type], document_mask: bool) -> None:
    rows, dtype = rows_and_type
    made = assemble(block_of(rows, dtype), document_mask=document_mask)
    expected = np.array([oracle(tokens, lengths, document_mask) for tokens, lengths in rows])
    assert np.array_equal(made.tokens_ABT[0], expected[:, :, 0])
    assert np.array_equal(made.labels_ABT[0], expected[:, :, 1])
    assert made.num_target_tokens == np.count_nonzero(expected[:, :, 1] != IGNORED_LABEL)
    if document_mask:
        assert made.segment_ids_ABT is not None
        assert made.position_ids_ABT is not None
        assert np.array_equal(made.segment_ids_ABT[0], expected[:, :, 2])
        assert np.array_equal(made.position_ids_ABT[0], expected[:, :, 3])
    else:
        assert made.segment_ids_ABT is None
        assert made.position_ids_ABT is None


def test_one_row_by_hand() -> None:
    """Two documents of 3 and 2 tokens and two of padding."""
    made = assemble(block_of([([10, 11, 12, 20, 21, 0, 0], [3, 2])]), document_mask=True)
    assert made.tokens_ABT[0].tolist() == [[10, 11, 12, 20, 21, 0]]
    assert made.labels_ABT[0].tolist() == [[11, 12, -100, 21, -100, -100]]
    assert made.segment_ids_ABT is not None
    assert made.segment_ids_ABT[0].tolist() == [[1, 1, 1, 2, 2, 0]]
    assert made.position_ids_ABT is not None
    assert made.position_ids_ABT[0].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert made.num_target_tokens == 3
    unmasked = assemble(block_of([([10, 11, 12, 20, 21, 0, 0], [3, 2])]), document_mask=False)
    assert unmasked.labels_ABT[0].tolist() == [[11, 12, 20, 21, -100, -100]]
    assert unmasked.num_target_tokens == 4


@pytest.mark.parametrize("document_mask", [True, False])
def test_arrays_are_the_engines_to_keep(document_mask: bool) -> None:
    """int32, contiguous, writable, and nothing shared with the block or with the next batch."""
    block = FakeRows("a", [50]).read_rows(np.arange(20))
    first, second = (assemble(block, document_mask=document_mask) for _ in range(2))
    for name in ("tokens_ABT", "labels_ABT", "segment_ids_ABT", "position_ids_ABT"):
        array, other = getattr(first, name), getattr(second, name)
        if array is None:
            assert not document_mask
            continue
        assert (array.dtype, array.flags.c_contiguous, array.flags.writeable) == (np.int32, True, True)
        assert not np.shares_memory(array, other)
        assert not np.shares_memory(array, block.tokens_NC)


def test_row_digests_are_the_hash_of_tokens_and_segments() -> None:
    tokens, lengths = [1, 2, 3, 4, 65535], [2, 3]
    for dtype in ("<u2", "<u4"):
        expected = xxhash.xxh3_64_intdigest(np.array(tokens, dtype).tobytes() + np.array(lengths, "<i4").tobytes())
        block = block_of([([9] * 5, [5]), (tokens, lengths)], np.dtype(dtype).type)
        assert int(row_digests(block)[1]) == expected
    variants = [
        ([1, 2, 3, 4, 65534], [2, 3]), (tokens, [3, 2]), (tokens, [2, 2, 1]), (tokens, [2]), (tokens, lengths),
    ]  # fmt: skip
    assert len(set(row_digests(block_of(variants)).tolist())) == 5


def test_rows_do_not_depend_on_their_neighbours() -> None:
    reader = FakeRows("a", [50], row_tokens=17, max_segments=5)
    together = assemble(reader.read_rows(np.arange(40)), document_mask=True)
    for row in range(40):
        alone = assemble(reader.read_rows(np.array([row])), document_mask=True)
        assert np.array_equal(alone.labels_ABT[0, 0], together.labels_ABT[0, row])
        assert alone.row_digests_AB[0, 0] == together.row_digests_AB[0, row]


def test_a_block_that_is_not_contiguous() -> None:
    block = FakeRows("a", [50]).read_rows(np.arange(20))
    wide = np.zeros((20, 30), np.uint16)
    wide[:, 3 : 3 + block.row_tokens] = block.tokens_NC
    view = RowBlock(wide[:, 3 : 3 + block.row_tokens], block.row_ptr, block.segment_lengths, block.segment_lengths)
    assert np.array_equal(row_digests(view), row_digests(block))


def test_interleave_puts_every_row_into_its_slot() -> None:
    readers = [FakeRows("a", [50]), FakeRows("b", [50], max_segments=5), FakeRows("c", [50], max_segments=1)]
    slots = [np.array([5, 0]), np.array([1, 4, 3]), np.array([2])]
    rows = [np.array([7, 10]), np.array([3, 5, 5]), np.array([49])]
    made = interleave([reader.read_rows(r) for reader, r in zip(readers, rows, strict=True)], slots)
    for reader, at, numbers in zip(readers, slots, rows, strict=True):
        for slot, row in zip(at.tolist(), numbers.tolist(), strict=True):
            assert made.tokens_NC[slot].tolist() == reader.tokens(row)
            segments = made.segment_lengths[made.row_ptr[slot] : made.row_ptr[slot + 1]]
            assert segments.tolist() == reader.segments(row)


@pytest.mark.parametrize("has_answers", [False, True])
def test_masked_tokens_are_no_targets_and_the_number_of_targets_stays(has_answers: bool) -> None:
    block = block_of([([5, 6, 7, 8, 9, 3, 4, 0], [2, 3, 2]), ([1, 2, 3, 4, 5, 6, 7, 8], [8])])
    if has_answers:
        block = replace(block, loss_mask_NC=np.array([[0, 1, 0, 0, 1, 0, 1, 0], [0, 0, 1, 1, 1, 0, 0, 0]], np.bool_))
    masked_NC = np.zeros((2, 8), np.bool_)
    masked_NC[0, 2:5] = True
    plain, batch = (
        assemble(block, document_mask=True),
        assemble(replace(block, masked_NC=masked_NC), document_mask=True),
    )
    labels = plain.labels_ABT.copy()
    labels[0, 0, 1:4] = IGNORED_LABEL
    assert np.array_equal(batch.labels_ABT, labels)
    assert np.count_nonzero(labels != plain.labels_ABT) == (1 if has_answers else 2)
    assert batch.num_target_tokens == plain.num_target_tokens == np.count_nonzero(plain.labels_ABT != IGNORED_LABEL)
