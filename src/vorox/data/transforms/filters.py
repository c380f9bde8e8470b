"""Filters: a text or its tokens go in; the same, or ``None``, comes out.

``repetition`` removes repetitive texts by the measures and thresholds of Gopher (Rae et al. 2021, "Scaling Language
Models: Methods, Analysis & Insights from Training Gopher", table A1). Invariant: a filter never changes a text that it
keeps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Le

from vorox.data.transforms.identity import version

Count = Annotated[int, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]

_LINES = re.compile(r"\n+")
_PARAGRAPHS = re.compile(r"\n\s*\n")
TOP_NGRAM_FRACTIONS = (0.20, 0.18, 0.16)
"""For 2-, 3- and 4-grams: maximum fraction of the text covered by the most common one."""
DUPLICATE_NGRAM_FRACTIONS = (0.15, 0.14, 0.13, 0.12, 0.11, 0.10)
"""For 5- to 10-grams: maximum fraction of the text covered by those that occur more than once."""


@version(1)
def length(text: str, *, min_characters: Count = 0, max_characters: Count | None = None) -> str | None:
    """Remove texts outside a range of characters."""
    if len(text) < min_characters or (max_characters is not None and len(text) > max_characters):
        return None
    return text


@version(1)
def token_length(
    tokens: npt.NDArray[Any], *, min_tokens: Count = 0, max_tokens: Count | None = None
) -> npt.NDArray[Any] | None:
    """Remove documents outside a range of tokens; the end-of-text token does not count."""
    if len(tokens) < min_tokens or (max_tokens is not None and len(tokens) > max_tokens):
        return None
    return tokens


@version(1)
def repetition(
    text: str,
    *,
    max_duplicate_line_fraction: Fraction = 0.30,
    max_duplicate_paragraph_fraction: Fraction = 0.30,
    max_duplicate_line_character_fraction: Fraction = 0.20,
    max_duplicate_paragraph_character_fraction: Fraction = 0.20,
    top_ngram_fractions: tuple[Fraction, ...] = TOP_NGRAM_FRACTIONS,
    duplicate_ngram_fractions: tuple[Fraction, ...] = DUPLICATE_NGRAM_FRACTIONS,
) -> str | None:
    """Remove texts that repeat lines, paragraphs or word n-grams.

    Args:
        text: The text.
        max_duplicate_line_fraction: Maximum fraction of lines that repeat an earlier line.
        max_duplicate_paragraph_fraction: The same for paragraphs.
        max_duplicate_line_character_fraction: Maximum fraction of characters in repeated lines.
        max_duplicate_paragraph_character_fraction: The same for paragraphs.
        top_ngram_fractions: Maximum fraction of word characters in the most common 2-gram, 3-gram, ...
        duplicate_ngram_fractions: Maximum fraction of word characters in 5-grams, 6-grams, ... that occur more than
            once; overlaps count once.
    """
    pieces = ((_LINES, max_duplicate_line_fraction, max_duplicate_line_character_fraction),
              (_PARAGRAPHS, max_duplicate_paragraph_fraction, max_duplicate_paragraph_character_fraction))  # fmt: skip
    for pattern, most, most_characters in pieces:
        fraction, character_fraction = duplicate_fractions(pattern.split(text.strip()), len(text))
        if fraction > most or character_fraction > most_characters:
            return None
    ngrams = NGrams(text.split())
    for words, limit in enumerate(top_ngram_fractions, 2):
        if ngrams.top_fraction(words) > limit:
            return None
    for words, limit in enumerate(duplicate_ngram_fractions, 5):
        if ngrams.duplicate_fraction(words) > limit:
            return None
    return text


def duplicate_fractions(pieces: Sequence[str], num_characters: int) -> tuple[float, float]:
    """Return the fraction of pieces that repeat an earlier one, and the fraction of characters in them."""
    seen: set[str] = set()
    repeated = [piece for piece in pieces if piece in seen or seen.add(piece)]
    return len(repeated) / len(pieces), sum(map(len, repeated)) / max(num_characters, 1)


class NGrams:
    """The word n-grams of a text, each with an exact id: different n-grams never share one."""

    def __init__(self, words: Sequence[str]) -> None:
        ids: dict[str, int] = {}
        self._words = np.array([ids.setdefault(word, len(ids)) for word in words], np.int64)
        self._num_ids = len(ids)
        self._characters = np.array([len(word) for word in words], np.int64)
        self._total = max(int(self._characters.sum()), 1)
        self._runs = {1: self._words}

    def top_fraction(self, words: int) -> float:
        """Return the fraction of word characters in the most common n-gram (longest if tied); 0 without repeats."""
        runs = self._ids(words)
        if not len(runs):
            return 0.0
        counts = np.bincount(runs)
        most = int(counts.max())
        if most == 1:
            return 0.0
        lengths = np.convolve(self._characters, np.ones(words, np.int64), "valid")
        longest = int(lengths[counts[runs] == most].max())
        return min(most * longest / self._total, 1.0)

    def duplicate_fraction(self, words: int) -> float:
        """Return the fraction of word characters in n-grams that occur more than once."""
        runs = self._ids(words)
        if not len(runs):
            return 0.0
        repeated = np.bincount(runs)[runs] > 1
        covered = np.convolve(repeated, np.ones(words, np.int64)) > 0
        return float(self._characters[covered].sum() / self._total)

    def _ids(self, words: int) -> npt.NDArray[np.int64]:
        """Return the id of each n-gram of ``words`` words; equal n-grams have equal ids."""
        if words not in self._runs:
            shorter = self._ids(words - 1)
            if len(shorter) < 2:
                return np.zeros(0, np.int64)
            pairs = shorter[:-1] * self._num_ids + self._words[words - 1 :]
            self._runs[words] = np.unique(pairs, return_inverse=True)[1]
        return self._runs[words]
