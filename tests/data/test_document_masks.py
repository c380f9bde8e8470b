"""Masked documents in a plan: found by what stays of a document, and refused where more than tokens would be left."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from fake_rows import FakeRows
from pictures import picture
from vorox.core.errors import ConfigError
from vorox.data.documents import DocumentSpan, SourceFile, Unit, UnitSpan
from vorox.data.images.decoding import ImageInput, PatchInput
from vorox.data.images.layout import ImageLayout, PatchGrid
from vorox.data.images.tokens import FIRST_IMAGE_ID, find_images
from vorox.data.order.document_masks import DocumentMasks, _filler, check_masks
from vorox.data.order.plan_events import Bucket, MaskedDocument, MaskEvent, PlanSource, PlanStart
from vorox.data.order.plan_state import PlanState

BUCKETS = tuple(
    PlanSource(f"text.{name}", Fraction(1), "ab", 9, bucket=Bucket("text", "tokens_per_document", low, high))
    for name, low, high in (("easy", None, Fraction(7)), ("hard", Fraction(7), None))
)


def state_of(*events: MaskEvent) -> PlanState:
    code = PlanSource("code", Fraction(1), "cd", 9)
    return PlanState.initial(PlanStart(7, True, 10, (*BUCKETS, code))).apply_all(events)


def test_a_document_is_masked_in_its_source_from_the_first_position_on() -> None:
    state = state_of(
        MaskEvent(30, (MaskedDocument("text", "v1", 4), MaskedDocument("text", "v1", 5))),
        MaskEvent(20, (MaskedDocument("text", "v1", 4),)),
        MaskEvent(50, (MaskedDocument("text", "v1", 5), MaskedDocument("code", "v1", 0))),
    )
    masks = DocumentMasks(state)

    def first(source: int, version: str, ordinal: int) -> int | None:
        return next((at for at in range(100) if masks.is_masked(source, version, ordinal, at)), None)

    for bucket in (0, 1):
        assert [first(bucket, "v1", ordinal) for ordinal in (3, 4, 5)] == [None, 20, 30]
    assert [first(2, "v1", ordinal) for ordinal in (0, 4)] == [50, None]
    assert first(0, "v2", 4) is None
    assert all(masks.is_masked(0, "v1", 4, at) for at in range(20, 100))


class OneDocumentPerRow(FakeRows):
    """A file of four records in two units; each is a row."""

    files = (SourceFile("file", 40, "v1"),)
    units = tuple(Unit(unit, (UnitSpan(0, 20 * unit, 20 * unit + 20, 2 * unit),)) for unit in range(2))

    def __init__(self) -> None:
        super().__init__("code", [2, 2], max_segments=1)

    def documents_of(self, row: int) -> list[DocumentSpan]:
        return [DocumentSpan("file", 10 * row, 10, 0, self.row_tokens, 0, row, self.row_tokens, 0)]


@pytest.mark.parametrize("ordinal", range(4))
def test_the_first_and_the_last_document_of_a_unit_are_masked_like_others(ordinal: int) -> None:
    masks, reader = DocumentMasks(state_of(MaskEvent(0, (MaskedDocument("code", "v1", ordinal),)))), OneDocumentPerRow()
    rows = np.arange(4)
    block = masks.apply(reader.read_rows(rows), rows, np.full(4, 2, np.int32), rows, [None, None, reader])
    assert block.masked_NC is not None
    assert block.masked_NC.all(axis=1).tolist() == block.masked_NC.any(axis=1).tolist() == (rows == ordinal).tolist()
    assert (block.tokens_NC[ordinal] == reader.recipe.end_of_text_id).all()


def test_a_mask_moves_no_row_and_counts_from_its_position_on() -> None:
    before, after = state_of(), state_of(MaskEvent(20, (MaskedDocument("text", "v1", 4),)))
    assert after.num_positions == before.num_positions
    assert (after.stages, after.segments) == (before.stages, before.segments)
    assert after.effective_from[-1] == 20
    assert after.digests[0] == before.digests[0] != after.digests[-1]


@pytest.mark.parametrize("is_planned", [True, False])
def test_what_would_leak_is_refused_by_name(is_planned: bool) -> None:
    state = state_of(MaskEvent(0, (MaskedDocument("code", "v", 0),)))
    check_masks(state_of(), document_mask=False)
    check_masks(state, document_mask=True, is_planned=is_planned)
    words = "masks documents, which is not possible with" if is_planned else "cannot be masked, because of"
    with pytest.raises(ConfigError, match=words) as caught:
        check_masks(state, document_mask=False, is_planned=is_planned)
    assert caught.value.where == "data.document_mask"


GRID = PatchGrid(patch_size_pixels=4, merge_size=2, min_pixels=256, max_pixels=1024)
SIZES = ((20, 12), (9, 31), (40, 24), (16, 16), (70, 50), (3, 500), (33, 32))


@pytest.mark.parametrize("layout", [ImageLayout(6), ImageLayout(0, GRID, (7,), (8,))])
def test_a_masked_picture_is_blank_and_keeps_its_positions(layout: ImageLayout) -> None:
    """A row of text and pictures of random sizes, by an own computation of where they are."""
    pytest.importorskip("PIL")
    chooser = np.random.default_rng()
    sizes = [SIZES[index] for index in chooser.integers(len(SIZES), size=3)]
    contents = [picture("red", int(chooser.integers(1 << 30)), size) for size in sizes]
    digests = [int(digest) for digest in chooser.integers(1 << 63, size=3)]
    parts = [layout.ids(digest, layout.num_tokens(size)) for digest, size in zip(digests, sizes, strict=True)]
    text = chooser.integers(9, 99, 5).astype(np.uint32)
    row = np.concatenate([text, *itertools.chain(*((part, text) for part in parts))])
    reader = OneDocumentPerRow()
    recipe, images = replace(reader.recipe, images=layout), dict(zip(digests, contents, strict=True))
    filler, blanks = _filler(row, recipe, images)
    is_picture = row >= FIRST_IMAGE_ID
    assert np.array_equal(filler >= FIRST_IMAGE_ID, is_picture)
    assert (filler[~is_picture] == recipe.filler_id).all()
    rows, addresses = find_images(filler[None])
    assert rows.tolist() == [0, 0, 0]
    input_ = ImageInput(8, 5) if layout.grid is None else PatchInput(layout.grid, 5)
    of_blanks = input_.read([blanks[address] for address in addresses], rows)
    before = input_.read(contents, rows)
    for (name, blank), (_, array) in zip(of_blanks.arrays(), before.arrays(), strict=True):
        assert blank.shape == array.shape
        assert np.array_equal(blank, array if name == "grids" else np.zeros_like(array))
        assert array.any()
    other = layout.ids(digests[0] ^ 1, layout.num_tokens(sizes[0]))
    assert not np.array_equal(other, parts[0])
    again, _ = _filler(np.concatenate([text, other]), recipe, {digests[0] ^ 1: contents[0]})
    assert np.array_equal(again, filler[: len(again)]), "nothing of the bytes of a picture stays"
