"""Text is split where the library splits it, for every accepted construct and code point in any combination."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from tokenizer_patterns import ANY_TEXT, AWKWARD, CLASSES, PATTERNS, nasty_text, random_pattern
from vorox.data.tokenizers.word_pattern import WordPattern, digits_pattern, word_pattern

_ASSIGNED = (range(0xD800), range(0xE000, 0x323B0), range(0xE0000, 0xE0200), range(0xFFFFD, 0x100002))
EVERY_CODE_POINT = "".join(chr(point) for points in _ASSIGNED for point in points)
"""Every assigned code point; each omitted range of private or unassigned ones adjoins an included one."""
FOLDED = dict.fromkeys(map(ord, "\u017f\u212a\u0130\u0131"))
"""For ``str.translate``: removes letters that case folding equates with others, which are refused."""


def library_words(pattern: str, text: str) -> list[str]:
    """The oracle: the pre-tokenizer that the pattern is for."""
    library: Any = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return [piece for piece, _ in library.pre_tokenize_str(text)]


def known(pattern: str) -> WordPattern:
    words = word_pattern(pattern)
    assert words is not None
    return words


def assert_cut_alike(pattern: str, words: WordPattern, text: str) -> None:
    found, pieces = words.words(text), words.iterate(text)
    if found is None or pieces is None:
        assert found is pieces is None
        return
    assert found == list(pieces) == library_words(pattern, text), (pattern, text[:100])


class TestKnownPatterns:
    @pytest.mark.parametrize("name", PATTERNS)
    def test_cuts_where_the_library_cuts(self, name: str) -> None:
        words = known(PATTERNS[name])
        library: Any = pre_tokenizers.Split(Regex(PATTERNS[name]), behavior="isolated")
        refused = 0
        for triple in itertools.product(AWKWARD, repeat=3):
            text = "".join(triple)
            found = words.words(text)
            refused += found is None
            assert found is None or found == [piece for piece, _ in library.pre_tokenize_str(text)]
        folded = sum("\u017f" in triple or "\u212a" in triple for triple in itertools.product(AWKWARD, repeat=3))
        assert refused == (folded if "(?i:" in PATTERNS[name] else 0)

    @settings(max_examples=100, deadline=None)
    @given(text=ANY_TEXT)
    def test_cuts_any_text_alike(self, text: str) -> None:
        plain = "It's 12 words,\n and   more; " * 6
        for pattern in PATTERNS.values():
            for each in (text, text[:3] + plain + text[3:6] + plain):  # and few characters in a text of ASCII
                assert_cut_alike(pattern, known(pattern), each)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["llama3", "kimi"])
    def test_cuts_alike_around_every_code_point(self, name: str) -> None:
        letters = EVERY_CODE_POINT.translate(FOLDED)
        text = "".join(f"{character}a {character}1" for character in letters)
        assert known(PATTERNS[name]).words(text) == library_words(PATTERNS[name], text)


class TestConstructs:
    @pytest.mark.slow
    @pytest.mark.parametrize("form", ["{}+", "[{}]+", "[^{}a]+"])
    def test_classes_have_the_members_that_the_library_gives_them_in_the_same_form(self, form: str) -> None:
        for name in CLASSES:
            pattern = form.format(name)
            assert known(pattern).words(EVERY_CODE_POINT) == library_words(pattern, EVERY_CODE_POINT), pattern

    @pytest.mark.parametrize("individual", [True, False])
    def test_digits_are_those_of_the_pre_tokenizer(self, individual: bool) -> None:
        library: Any = pre_tokenizers.Digits(individual_digits=individual)
        expected = [piece for piece, _ in library.pre_tokenize_str(EVERY_CODE_POINT)]
        assert digits_pattern(individual=individual).words(EVERY_CODE_POINT) == expected

    @pytest.mark.parametrize("form", [r"\{}", r"[\{}]", "{}", "[{}]", "[a{}]", "[^{}]"])
    def test_every_character_and_every_escape(self, form: str) -> None:
        for letter in map(chr, range(128)):
            pattern = form.format(letter)
            words = word_pattern(pattern)
            if words is not None:
                assert_cut_alike(pattern, words, EVERY_CODE_POINT[:300] * 2)

    def test_case_is_ignored_as_the_library_ignores_it(self) -> None:
        pattern = r"'(?i:[sdmt]|ll|ve|re)|(?i:'k|'i|'f|'ft)"
        text = "".join(f"'{character}'{character}e'r{character}" for character in EVERY_CODE_POINT[:0x20000])
        assert_cut_alike(pattern, known(pattern), text.translate(FOLDED))
        for character in map(chr, FOLDED):
            assert known(pattern).words(f"'{character}") is None

    @pytest.mark.parametrize(
        "pattern", [r"[\d-z]", r"[!-\d]", r"[\p{Lm}]|[a]", r"[\p{Lm}^a]", r"[\w&&[^a]]|\w", r"[&&a]|a"]
    )
    def test_brackets_are_read_as_a_whole(self, pattern: str) -> None:
        words = word_pattern(pattern)
        if words is not None:
            assert_cut_alike(pattern, words, EVERY_CODE_POINT[:0x3000])

    @settings(max_examples=100, deadline=None)
    @given(text=st.text("a一龥龦ぁゟ゠ヿ㐀 1.é"))
    def test_classes_of_other_letters(self, text: str) -> None:
        for pattern in ("[一-龥぀-ゟ゠-ヿ]+", "[^一-龥]+|[一-龥]", "[é-ü ]?[一-龥a]"):
            assert_cut_alike(pattern, known(pattern), text)

    def test_text_that_the_pattern_leaves_out_is_not_lost(self) -> None:
        for text in ("ab1", "ab", "ä1", "12 ab, é!é", "1", ""):
            assert_cut_alike(r"\p{L}+", known(r"\p{L}+"), text)


@pytest.mark.parametrize(
    "pattern",
    [
        r"^a", r"a$", r".", r"(a)", r"(?<=a)b", r"[]a]", r"\X", r"\b", r"a{1,3}+", r"é", r"\h", r"[a", r"(?x: a)",
        r"\p{Nonsense}", r"(?:a", r"a)", r"\1", r"(?i:\p{Ll})", "(?i:[é-ü])", "(?i:ss)", "(?i:'s)(?i:s)", "(?i:'s)+",
        "(?i:'[st]s)", "(?i:'fi)", "a*", "(?:a*)+b", "(?:a|a)*b", "(?:a+)+b", "(?=a)*b", "a{2}{3}", "a{0}b", "a{3,2}",
        r"[a[b]]", r"[\c]]", "a||b", "",
    ],
)  # fmt: skip
def test_what_the_two_engines_might_read_differently_is_refused(pattern: str) -> None:
    assert word_pattern(pattern) is None


@pytest.mark.parametrize("seed", range(3))
def test_random_patterns_cut_nasty_texts_alike(seed: int) -> None:
    draw = random.Random(seed)
    accepted = 0
    for _ in range(500):
        pattern = random_pattern(draw)
        words = word_pattern(pattern)
        if words is None:
            continue
        accepted += 1
        for _ in range(15):
            assert_cut_alike(pattern, words, nasty_text(draw))
    assert accepted > 100
