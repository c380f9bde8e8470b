"""User-defined special tokens are appended, never matched in text, and do not change the ids of text."""

from __future__ import annotations

import numpy as np
import pytest

from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.tokenizers.loading import train

TEXT = ["the quick brown fox jumps over the lazy dog, and the dog does not mind " * 20]
SENTINELS = ("<|fim_prefix|>", "<|fim_suffix|>")


@pytest.mark.parametrize("kind", ["bpe", "byte", "char"])
def test_they_come_behind_all_others_and_change_no_text(kind):
    plain = train(TokenizerConfig(kind=kind, vocab_size=270), TEXT)
    more = plain.with_special_tokens([*SENTINELS, plain.end_of_text, SENTINELS[0]])
    assert [more.special_id(token) for token in SENTINELS] == [plain.vocab_size, plain.vocab_size + 1]
    assert more.vocab_size == plain.vocab_size + 2
    assert more.end_of_text_id == plain.end_of_text_id
    assert more.special_id(plain.end_of_text) == plain.end_of_text_id
    assert more.fingerprint != plain.fingerprint
    assert more.lossless == plain.lossless
    assert np.array_equal(more.encode("the dog"), plain.encode("the dog"))
    assert plain.special_id("<|fim_prefix|>") is None
    assert more.special_id("the") is None
    assert more.with_special_tokens(SENTINELS) is more
    spelled = "<|fim_prefix|> the"
    if kind == "char":
        with pytest.raises(DataError, match="not in the vocabulary"):
            more.encode(spelled)
    else:
        assert np.array_equal(more.encode(spelled), plain.encode(spelled))
        assert more.decode(more.encode(spelled)) == spelled


def test_an_ordinary_token_cannot_become_one():
    tokenizer = train(TokenizerConfig(vocab_size=300), TEXT)
    with pytest.raises(ConfigError, match="ordinary token"):
        tokenizer.with_special_tokens(["the"])
