"""Train and validation are disjoint, complete, and decided by position alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vorox.core.schema.data import ValidationConfig
from vorox.data.text import holdout
from vorox.data.text.holdout import document_filter, file_split, tail_start

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
    assert tail_start(validation("tail", 0), 1000) == 1000


def test_tail_is_exact_in_decimals() -> None:
    """0.1 of 1,115,394 bytes in binary floating point would be off in larger files."""
    assert tail_start(validation("tail", 0.1), 1_115_394) == 1_115_394 - 111_539
    assert tail_start(validation("tail", 0.1), 10**18) == 9 * 10**17


def test_filter_takes_everything_when_documents_are_not_split() -> None:
    for split in ("file", "tail"):
        assert all(
            document_filter(validation(split, 0.5), side, "x")(n) for side in ("train", "validation") for n in range(50)
        )
