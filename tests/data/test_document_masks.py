"""Masked documents in a plan: found by what stays of a document, and refused where more than tokens would be left."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from fake_rows import FakeRows
from vorox.core.errors import ConfigError
from vorox.data.documents import DocumentSpan, SourceFile, Unit, UnitSpan
from vorox.data.images.layout import ImageLayout
from vorox.data.order.document_masks import DocumentMasks, check_masks
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


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no document mask": ({"document_mask": False}, {}, "data.document_mask"),
    "teacher": ({"has_teacher": True}, {}, "train.distillation.logits"),
    "pairs": ({}, {"source": {"format": "jsonl", "preference_pairs": "true"}}, "data.sources"),
    "images": ({}, {"images": ImageLayout(4)}, "model.vision"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_would_leak_or_be_left_is_refused_by_name(name: str) -> None:
    facts, changes, key = CASES[name]
    reader = FakeRows("code", [3])
    reader.recipe = replace(reader.recipe, **changes)
    given = {"document_mask": True, "has_teacher": False} | facts
    check_masks(state_of(), [None, reader], **given)
    with pytest.raises(ConfigError, match="masks documents, which is not possible with") as caught:
        check_masks(state_of(MaskEvent(0, (MaskedDocument("code", "v", 0),))), [None, reader], **given)
    assert caught.value.where == key
    check_masks(state_of(MaskEvent(0, (MaskedDocument("code", "v", 0),))), [], document_mask=True, has_teacher=False)
