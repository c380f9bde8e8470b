"""What counts of token ids say about a tokenizer and its text, and what is off about it.

Counts go in, figures and warnings come out. Invariant: every figure is of the tokens that were counted, the ends of
text left out where text is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vorox.data.tokenizers.tokenizer import Tokenizer

UNKNOWN_FRACTION = 0.001
"""More unknown tokens than these are worth a warning."""

_NEARLY_FULL = 0.98
_FEW_DISTINCT_FRACTION = 0.1
_ENOUGH_TOKENS_PER_ID = 20
_SHORT_TOKEN_BYTES = 2.0
_LARGE_VOCABULARY = 1000


@dataclass(frozen=True, slots=True)
class TokenStats:
    """What was counted.

    Attributes:
        bytes_per_token: UTF-8 bytes of text per token of text.
        largest_token_id: Highest id that occurs.
        distinct_tokens: Ids that occur.
        unknown_fraction: Share of tokens that stand for text the vocabulary lacks.
        entropy_bits: Entropy of the ids of text, in bits per token: what a model that knows nothing but how frequent
            each token is would need.
    """

    bytes_per_token: float
    largest_token_id: int
    distinct_tokens: int
    unknown_fraction: float
    entropy_bits: float


def token_stats(counts_V: npt.NDArray[np.int64], tokenizer: Tokenizer) -> TokenStats:
    """The figures of so many tokens of each id, ``[ids]``."""
    text_V = counts_V.copy()
    text_V[tokenizer.end_of_text_id] = 0
    of_text = int(text_V.sum())
    lengths_V = np.zeros(len(counts_V), np.int64)
    lengths_V[: tokenizer.vocab_size] = tokenizer.token_byte_lengths()
    unknown = 0 if tokenizer.unknown_id is None else int(counts_V[tokenizer.unknown_id])
    shares = text_V[text_V > 0] / max(of_text, 1)
    return TokenStats(
        bytes_per_token=int(counts_V @ lengths_V) / max(of_text, 1),
        largest_token_id=int(np.flatnonzero(counts_V).max(initial=0)),
        distinct_tokens=int(np.count_nonzero(counts_V)),
        unknown_fraction=unknown / max(of_text, 1),
        entropy_bits=float(-(shares * np.log2(shares)).sum()) if len(shares) else 0.0,
    )


def warnings_of(figures: TokenStats, tokenizer: Tokenizer, num_tokens: int) -> Iterator[str]:
    """What a person should know before training on these tokens."""
    vocab_size = tokenizer.vocab_size
    if figures.unknown_fraction > UNKNOWN_FRACTION:
        yield (
            f"{100 * figures.unknown_fraction:.2f}% of the tokens are the unknown token: the vocabulary lacks text "
            "that is here"
        )
    if not tokenizer.lossless:
        yield "ids do not determine the bytes of the text, so bits per byte are not reported"
    limit = 1 << 16
    if vocab_size <= limit and figures.largest_token_id >= _NEARLY_FULL * limit:
        yield (
            f"the highest id is {figures.largest_token_id:,}; from {limit:,} ids on every row takes twice the room, as "
            "a cache of another recipe"
        )
    enough = num_tokens > _ENOUGH_TOKENS_PER_ID * vocab_size
    if enough and figures.distinct_tokens < _FEW_DISTINCT_FRACTION * vocab_size:
        yield (
            f"only {figures.distinct_tokens:,} of {vocab_size:,} ids occur: the tokenizer was made for other text, and "
            "the model spends its embedding on the rest"
        )
    if vocab_size > _LARGE_VOCABULARY and 0 < figures.bytes_per_token < _SHORT_TOKEN_BYTES and tokenizer.lossless:
        yield (
            f"a token stands for {figures.bytes_per_token:.2f} bytes only, little for {vocab_size:,} ids: the "
            "tokenizer was made for other text"
        )
