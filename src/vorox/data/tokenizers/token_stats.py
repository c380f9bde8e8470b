"""Statistics of token ids, and warnings about a tokenizer that does not fit its text.

Counts of ids go in, statistics and warnings come out. Statistics of the text exclude the tokens before and after a
document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vorox.data.tokenizers.tokenizer import Tokenizer

UNKNOWN_FRACTION = 0.001
"""A larger fraction of unknown tokens is worth a warning."""

_NEARLY_FULL = 0.98
_FEW_DISTINCT_FRACTION = 0.1
_ENOUGH_TOKENS_PER_ID = 20
_SHORT_TOKEN_BYTES = 2.0
_LARGE_VOCABULARY = 1000


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Statistics of the tokens of a text.

    Attributes:
        bytes_per_token: UTF-8 bytes of text per token, without the tokens before and after a document.
        largest_token_id: Highest id that occurs.
        distinct_tokens: Number of ids that occur.
        unknown_fraction: Fraction of tokens that are the unknown token.
        entropy_bits: Entropy of the unigram distribution, in bits per token, without those tokens.
    """

    bytes_per_token: float
    largest_token_id: int
    distinct_tokens: int
    unknown_fraction: float
    entropy_bits: float


def token_stats(counts_V: npt.NDArray[np.int64], tokenizer: Tokenizer) -> TokenStats:
    """Return the statistics of tokens from the count of each id, ``[V]``."""
    text_V = counts_V.copy()
    text_V[[*tokenizer.start_ids, *tokenizer.end_ids]] = 0
    text_tokens = int(text_V.sum())
    lengths_V = np.zeros(len(counts_V), np.int64)
    lengths_V[: tokenizer.vocab_size] = tokenizer.token_byte_lengths()
    unknown = 0 if tokenizer.unknown_id is None else int(counts_V[tokenizer.unknown_id])
    shares = text_V[text_V > 0] / max(text_tokens, 1)
    return TokenStats(
        bytes_per_token=int(counts_V @ lengths_V) / max(text_tokens, 1),
        largest_token_id=int(np.flatnonzero(counts_V).max(initial=0)),
        distinct_tokens=int(np.count_nonzero(counts_V)),
        unknown_fraction=unknown / max(text_tokens, 1),
        entropy_bits=float(-(shares * np.log2(shares)).sum()) if len(shares) else 0.0,
    )


def warnings_of(figures: TokenStats, tokenizer: Tokenizer, num_tokens: int) -> Iterator[str]:
    """Yield warnings that the user should see before training on these tokens."""
    vocab_size = tokenizer.vocab_size
    if figures.unknown_fraction > UNKNOWN_FRACTION:
        yield (
            f"{100 * figures.unknown_fraction:.2f}% of the tokens are the unknown token: the vocabulary does not cover "
            "this text"
        )
    if not tokenizer.lossless:
        yield "the tokenizer does not preserve the bytes of the text, so bits per byte are not reported"
    limit = 1 << 16
    if vocab_size <= limit and figures.largest_token_id >= _NEARLY_FULL * limit:
        yield (
            f"the highest id is {figures.largest_token_id:,}; from {limit:,} on, rows need twice the space and a new "
            "cache"
        )
    enough = num_tokens > _ENOUGH_TOKENS_PER_ID * vocab_size
    if enough and figures.distinct_tokens < _FEW_DISTINCT_FRACTION * vocab_size:
        yield (
            f"only {figures.distinct_tokens:,} of {vocab_size:,} ids occur: the tokenizer was trained on different "
            "text, and most of the embedding is unused"
        )
    if vocab_size > _LARGE_VOCABULARY and 0 < figures.bytes_per_token < _SHORT_TOKEN_BYTES and tokenizer.lossless:
        yield (
            f"a token covers only {figures.bytes_per_token:.2f} bytes, too few for a vocabulary of {vocab_size:,}: the "
            "tokenizer was trained on different text"
        )
