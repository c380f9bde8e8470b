"""Train and validation are disjoint, complete, and decided by position alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vorox.core.schema.data import ValidationConfig
from vorox.data.text import holdout
from vorox.data.text.holdout import document_filter, file_split, held_out_spans

places = st.text(st.characters(codec="utf-8"), min_size=1)


def validation(split: str, fraction: float) -> ValidationConfig:
    return ValidationConfig.model_validate({"split": split, "held_out_fraction": fraction})


def test_files_are_held_out_by_frozen_hash() -> None:
    """These must never change: they decide which text old runs were validated on."""
    frozen = {
        ("json/decoder.py", None): 0x3D2A1102290B9453,
        ("os.py", None): 0xEE36DF6479177779,
        ("ü.txt", None): 0xDDB3EA910290C516,
        ("a.jsonl", 0): 0xE479CD9DF819CBC2,
        ("a.jsonl", 1 << 40): 0x3A5240A2C2C5C761,
    }
    assert {place: holdout._hash(*place) for place in frozen} == frozen


@given(place=places, offset=st.integers(0, 2**63), fraction=st.floats(0, 0.999))
def test_every_record_is_in_exactly_one_split(place: str, offset: int, fraction: float) -> None:
    rule = validation("document", fraction)
    taken = [document_filter(rule, split, place)(offset) for split in ("train", "validation")]
    assert sum(taken) == 1


@given(place=places, offset=st.integers(0, 2**63), low=st.floats(0, 0.999), high=st.floats(0, 0.999))
def test_a_larger_share_holds_out_everything_a_smaller_one_does(
    place: str, offset: int, low: float, high: float
) -> None:
    low, high = sorted((low, high))
    if document_filter(validation("document", low), "validation", place)(offset):
        assert document_filter(validation("document", high), "validation", place)(offset)
    if file_split(validation("file", low), place) == "validation":
        assert file_split(validation("file", high), place) == "validation"


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
def test_shares_are_as_asked(fraction: float) -> None:
    count = 40_000
    files = sum(file_split(validation("file", fraction), f"folder/{n}.txt") == "validation" for n in range(count))
    accept = document_filter(validation("document", fraction), "validation", "one.jsonl")
    records = sum(accept(n * 137) for n in range(count))
    margin = 5 * (count * fraction * (1 - fraction)) ** 0.5
    assert abs(files - count * fraction) < margin
    assert abs(records - count * fraction) < margin


def test_nothing_is_held_out_at_zero() -> None:
    assert all(file_split(validation("file", 0), f"{n}") == "train" for n in range(500))
    assert not any(document_filter(validation("document", 0), "validation", "x")(n) for n in range(500))
    assert held_out_spans(validation("span", 0), "x", 1000) == []


@given(path=places, size=st.integers(0, 1 << 27), low=st.floats(0.001, 0.9), high=st.floats(0.001, 0.9))
def test_spans_are_inside_the_file_disjoint_and_grow_with_the_share(
    path: str, size: int, low: float, high: float
) -> None:
    low, high = sorted((low, high))
    small, large = (held_out_spans(validation("span", share), path, size) for share in (low, high))
    for spans in (small, large):
        assert spans == sorted(spans)
        ends = [0, *(end for _, end in spans)]
        assert all(before <= start < end <= size for before, (start, end) in zip(ends, spans, strict=False))
    for start, end in small:
        assert any(first <= start and end <= last for first, last in _joined(large))


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


@pytest.mark.parametrize("size", [1 << 18, 1_115_394, 1 << 30])
@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
def test_spans_hold_out_the_share_that_is_asked_spread_over_the_file(size: int, fraction: float) -> None:
    spans = held_out_spans(validation("span", fraction), "a/b.txt", size)
    held = sum(end - start for start, end in spans)
    assert held == pytest.approx(fraction * size, abs=64)
    quarters = {4 * start // size for start, _ in spans}
    assert quarters == set(range(4)) or size < 1 << 20


def test_spans_begin_anywhere_and_depend_on_path_and_size_alone() -> None:
    starts = [held_out_spans(validation("span", 0.01), f"{n}.txt", 100_000)[-1][0] for n in range(400)]
    assert 45_000 < sum(starts) / 400 < 55_000
    assert min(starts) < 5_000
    assert max(starts) > 95_000
    assert held_out_spans(validation("span", 0.01), "0.txt", 100_000)[-1][0] == starts[0]


def test_filter_takes_everything_when_documents_are_not_split() -> None:
    for split in ("file", "span"):
        assert all(
            document_filter(validation(split, 0.5), side, "x")(n) for side in ("train", "validation") for n in range(50)
        )
