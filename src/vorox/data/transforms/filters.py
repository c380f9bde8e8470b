"""Filters: a text or its tokens go in, the same come out or None.

``repetition`` removes texts that repeat themselves, by the measures and thresholds of Gopher (Rae et al. 2021,
"Scaling Language Models: Methods, Analysis & Insights from Training Gopher", table A1). Invariant: a filter never
changes what it lets through.
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
"""Of 2-, 3- and 4-grams: the most common one may make up so much of the text."""
DUPLICATE_NGRAM_FRACTIONS = (0.15, 0.14, 0.13, 0.12, 0.11, 0.10)
"""Of 5- to 10-grams: all that occur more than once may cover so much of the text."""


@version(1)
def length(text: str, *, min_characters: Count = 0, max_characters: Count | None = None) -> str | None:
    """Remove texts that are shorter or longer than this."""
    if len(text) < min_characters or (max_characters is not None and len(text) > max_characters):
        return None
    return text


@version(1)
def token_length(
    tokens: npt.NDArray[Any], *, min_tokens: Count = 0, max_tokens: Count | None = None
) -> npt.NDArray[Any] | None:
    """Remove documents of fewer or more tokens than this, their end of text not counted."""
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
    """Remove texts that repeat lines, paragraphs or runs of words.

    Args:
        text: The text.
        max_duplicate_line_fraction: Share of lines that were there before.
        max_duplicate_paragraph_fraction: The same for paragraphs.
        max_duplicate_line_character_fraction: Share of the text's characters in such lines.
        max_duplicate_paragraph_character_fraction: The same for paragraphs.
        top_ngram_fractions: Share of the characters of all words in the most common run of 2, 3, ... words.
        duplicate_ngram_fractions: Share of them in runs of 5, 6, ... words that occur more than once, overlaps
            counted once.
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
    """Share of pieces that came before, and of characters in them."""
    seen: set[str] = set()
    repeated = [piece for piece in pieces if piece in seen or seen.add(piece)]
    return len(repeated) / len(pieces), sum(map(len, repeated)) / max(num_characters, 1)


class NGrams:
    """The runs of words of one text, by exact ids: no two different runs share one."""

    def __init__(self, words: Sequence[str]) -> None:
        ids: dict[str, int] = {}
        self._words = np.array([ids.setdefault(word, len(ids)) for word in words], np.int64)
        self._num_ids = len(ids)
        self._characters = np.array([len(word) for word in words], np.int64)
        self._total = max(int(self._characters.sum()), 1)
        self._runs = {1: self._words}

    def top_fraction(self, words: int) -> float:
        """Share of the words' characters in the most common run; of several the longest. 0 where none is repeated."""
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
        """Share of the words' characters in runs that occur more than once."""
        runs = self._ids(words)
        if not len(runs):
            return 0.0
        repeated = np.bincount(runs)[runs] > 1
        covered = np.convolve(repeated, np.ones(words, np.int64)) > 0
        return float(self._characters[covered].sum() / self._total)

    def _ids(self, words: int) -> npt.NDArray[np.int64]:
        """A number per run of so many words; equal runs have equal numbers."""
        if words not in self._runs:
            shorter = self._ids(words - 1)
            if len(shorter) < 2:
                return np.zeros(0, np.int64)
            pairs = shorter[:-1] * self._num_ids + self._words[words - 1 :]
            self._runs[words] = np.unique(pairs, return_inverse=True)[1]
        return self._runs[words]
