"""Decoding piece by piece equals the whole forward pass, for every architecture."""

from __future__ import annotations

import numpy as np
import pytest

from backends.torch_engine.small_models import MODELS, PATTERNS, POSITIONS, make, random_rows, randomise
from vorox.core.errors import ConfigError

pytestmark = pytest.mark.torch
ALL = MODELS | PATTERNS


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("pieces", [(POSITIONS,), (1,) * POSITIONS, (5, 1, 1, 9, 1, 7)], ids=["whole", "ones", "mixed"])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_decoding_equals_the_forward_pass(name: str, pieces: tuple[int, ...], kernel: str) -> None:
    engine = make(ALL[name] | {"attention_kernel": kernel})
    randomise(engine)
    tokens = random_rows(3)[:, :-1]
    expected = engine.logits(tokens)
    decoder, fed = engine.decoder(3, POSITIONS), 0
    for count in pieces:
        found = decoder.feed(tokens[:, fed : fed + count])
        fed += count
        assert found.dtype == np.float32
        allowed = 5e-4 if name in PATTERNS else 2e-5  # a gated norm of nearly zero amplifies rounding
        np.testing.assert_allclose(found, expected[:, fed - 1], atol=allowed)


def test_sequences_of_a_batch_do_not_meet() -> None:
    engine = make()
    randomise(engine)
    tokens = random_rows(3)[:, :-1]
    alone = engine.decoder(1, POSITIONS).feed(tokens[1:2])
    np.testing.assert_allclose(engine.decoder(3, POSITIONS).feed(tokens)[1:2], alone, atol=2e-5)


def test_two_decoders_at_once() -> None:
    engine = make()
    randomise(engine)
    rows = random_rows(2)[:, :-1]
    first, second = engine.decoder(1, POSITIONS), engine.decoder(1, POSITIONS)
    for position in range(6):
        a = first.feed(rows[:1, position : position + 1])
        b = second.feed(rows[1:, position : position + 1])
    np.testing.assert_allclose(np.concatenate([a, b]), engine.logits(rows[:, :6])[:, -1], atol=2e-5)


def test_more_than_announced_is_refused() -> None:
    decoder = make().decoder(1, 4)
    decoder.feed(random_rows(1)[:, :3])
    with pytest.raises(ConfigError, match="holds 4 tokens, but got 5"):
        decoder.feed(random_rows(1)[:, :2])


def test_more_than_the_model_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="exceeds the model's 24 positions"):
        make().decoder(1, POSITIONS + 1)
    with pytest.raises(ConfigError, match="exceeds the model's 24 positions"):
        make().logits(random_rows(1, positions=POSITIONS))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision(dtype: str) -> None:
    engine = make(precision__dtype=dtype)
    tokens = random_rows(2)[:, :-1]
    expected = engine.logits(tokens)
    decoder = engine.decoder(2, POSITIONS)
    decoder.feed(tokens[:, :10])
    np.testing.assert_allclose(decoder.feed(tokens[:, 10:]), expected[:, -1], atol=0.01)
