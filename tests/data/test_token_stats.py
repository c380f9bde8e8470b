"""Token statistics worked out by hand, and the warnings they cause."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.tokenizers.loading import train
from vorox.data.tokenizers.token_stats import TokenStats, token_stats, warnings_of
from vorox.data.tokenizers.tokenizer import Tokenizer

BYTES = train(TokenizerConfig(kind="byte"), ())


def counted(**counts: int) -> np.ndarray:
    found = np.zeros(1 << 16, np.int64)
    for character, count in counts.items():
        found[256 if character == "end" else ord(character)] = count
    return found


def test_by_hand() -> None:
    figures = token_stats(counted(a=4, b=2, c=1, d=1, end=100), BYTES)
    assert figures.entropy_bits == pytest.approx(0.5 * 1 + 0.25 * 2 + 0.125 * 3 * 2)
    assert figures.bytes_per_token == 1
    assert figures.largest_token_id == 256
    assert figures.distinct_tokens == 5
    assert figures.unknown_fraction == 0


def test_nothing_but_ends_of_text() -> None:
    figures = token_stats(counted(end=5), BYTES)
    assert figures.entropy_bits == 0
    assert figures.bytes_per_token == 0
    assert token_stats(counted(), BYTES).largest_token_id == 0


@dataclasses.dataclass
class _Kind:
    vocab_size: int = 50_000
    lossless: bool = True


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({}, {}, None),
        ({"unknown_fraction": 0.0009}, {}, None),
        ({"unknown_fraction": 0.0011}, {}, "0.11% of the tokens are the unknown token"),
        ({}, {"lossless": False}, "bits per byte are not reported"),
        ({"largest_token_id": 65_500}, {"vocab_size": 65_536}, "the highest id is 65,500"),
        ({"largest_token_id": 60_000}, {"vocab_size": 65_536}, None),
        ({"largest_token_id": 65_500}, {"vocab_size": 128_000}, None),
        ({"distinct_tokens": 400}, {}, "only 400 of 50,000 ids occur"),
        ({"bytes_per_token": 1.4}, {}, "a token covers only 1.40 bytes"),
        ({"bytes_per_token": 1.0}, {"vocab_size": 257}, None),
    ],
)
def test_what_is_worth_a_warning(changes: dict[str, Any], kind: dict[str, Any], said: str | None) -> None:
    usual = TokenStats(
        bytes_per_token=4.2, largest_token_id=49_000, distinct_tokens=48_000, unknown_fraction=0, entropy_bits=10
    )
    tokenizer: Tokenizer = _Kind(**kind)  # type: ignore[assignment]
    found = list(warnings_of(dataclasses.replace(usual, **changes), tokenizer, 10_000_000))
    assert found == [] if said is None else (len(found) == 1 and said in found[0])


def test_few_ids_of_little_text_are_no_warning() -> None:
    figures = TokenStats(4.2, 49_000, 400, 0, 10)
    assert list(warnings_of(figures, _Kind(), 10_000)) == []  # type: ignore[arg-type]
