"""Filters by their definitions: what is removed, and that everything else is unchanged."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vorox.data.transforms.filters import NGrams, duplicate_fractions, length, repetition, token_length

WORDS = [f"word{index}" for index in range(2000)]


def prose(num_words: int, seed: int = 0) -> str:
    """Words that rarely come twice, in lines of twelve."""
    chosen = np.random.default_rng(seed).choice(WORDS, num_words, replace=False)
    lines = [" ".join(chosen[start : start + 12]) for start in range(0, num_words, 12)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "kept"), [("", False), ("ab", False), ("abc", True), ("abcde", True), ("é" * 6, False)]
)
def test_length_counts_characters(text, kept):
    assert (length(text, min_characters=3, max_characters=5) == text) == kept
    assert length(text) == text


def test_token_length_counts_ids():
    ids = np.arange(4)
    assert token_length(ids, min_tokens=4, max_tokens=4) is ids
    assert token_length(ids, min_tokens=5) is None
    assert token_length(ids, max_tokens=3) is None


def test_prose_passes_and_repetition_of_every_kind_does_not():
    text = prose(600)
    assert repetition(text) == text
    assert repetition("") == ""
    assert repetition("one") == "one"
    lines = text.splitlines()
    assert repetition("\n".join(lines + lines[:30])) is None  # 30 of 80 lines
    assert repetition("\n".join(lines[:10] * 5)) is None
    assert repetition("\n\n".join([prose(40, 1), prose(40, 2), prose(40, 1)])) is None
    assert repetition(text + " buy now" * 200) is None
    sentence = " ".join(WORDS[-30:])
    inside = " ".join(f"{left} {sentence} {right}" for left, right in zip(WORDS[:8], WORDS[8:16], strict=True))
    assert repetition(inside) is None
    assert repetition(inside, duplicate_ngram_fractions=(), top_ngram_fractions=()) == inside


def test_each_threshold_is_the_one_that_is_asked_for():
    text = "a b c d e f\n" * 2 + "g h i j k l\nm n o p q r"
    off = {
        "max_duplicate_line_fraction": 1.0, "max_duplicate_paragraph_fraction": 1.0,
        "max_duplicate_line_character_fraction": 1.0, "max_duplicate_paragraph_character_fraction": 1.0,
        "top_ngram_fractions": (), "duplicate_ngram_fractions": (),
    }  # fmt: skip
    assert repetition(text, **off) == text
    assert repetition(text, **{**off, "max_duplicate_line_fraction": 0.25}) == text
    assert repetition(text, **{**off, "max_duplicate_line_fraction": 0.24}) is None
    share = len("a b c d e f") / len(text)
    assert repetition(text, **{**off, "max_duplicate_line_character_fraction": share + 0.01}) == text
    assert repetition(text, **{**off, "max_duplicate_line_character_fraction": share - 0.01}) is None
    assert repetition(text, **{**off, "top_ngram_fractions": (4 / 24,)}) == text
    assert repetition(text, **{**off, "top_ngram_fractions": (4 / 24 - 0.01,)}) is None
    assert repetition(text, **{**off, "duplicate_ngram_fractions": (0.5,)}) == text  # 12 of 24 letters, twice a-f
    assert repetition(text, **{**off, "duplicate_ngram_fractions": (0.49,)}) is None


def test_duplicate_fractions_count_what_came_before():
    assert duplicate_fractions(["ab", "c", "ab", "ab"], 7) == (2 / 4, 4 / 7)
    assert duplicate_fractions([""], 0) == (0.0, 0.0)


@settings(max_examples=150, deadline=None)
@given(words=st.lists(st.sampled_from(["a", "bb", "ccc", "dd"]), max_size=25), size=st.integers(2, 6))
def test_ngram_fractions_are_those_of_counting_by_hand(words, size):
    runs = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    counts = Counter(runs)
    total = max(sum(map(len, words)), 1)
    covered = {
        place for start, run in enumerate(runs) if counts[run] > 1 for place in range(start, start + size)
    }  # fmt: skip
    ngrams = NGrams(words)
    assert ngrams.duplicate_fraction(size) == pytest.approx(sum(len(words[place]) for place in covered) / total)
    most = max(counts.values(), default=0)
    longest = max((sum(map(len, run)) for run, count in counts.items() if count == most), default=0)
    expected = min(most * longest / total, 1.0) if most > 1 else 0.0
    assert ngrams.top_fraction(size) == pytest.approx(expected)
