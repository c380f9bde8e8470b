"""Sampling: against a distribution that is known, and independent of batching, order and history."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numpy_engine import NumpyEngine
from vorox.core.batch import Int32Array
from vorox.core.errors import ConfigError
from vorox.training.inference.sampling import SamplingSettings, generate, sample_token

VOCAB = 11
SETTINGS = SamplingSettings(6, 1.0, None, 42, VOCAB, None, 64)


def trained_engine() -> NumpyEngine:
    engine = NumpyEngine(VOCAB, seed=3)
    for array in engine.parameters.values():
        array *= 8  # sharper than at the start, so that prompts differ
    return engine


class Table:
    """An engine whose logits depend on the last token only and are given."""

    def __init__(self, logits_VV: np.ndarray) -> None:
        self._logits = logits_VV.astype(np.float32)

    def decoder(self, batch_size: int, max_tokens: int) -> Table:
        return self

    def feed(self, tokens_BT: Int32Array) -> np.ndarray:
        return self._logits[tokens_BT[:, -1]]


def test_greedy_follows_the_likeliest_token() -> None:
    table = np.zeros((4, 4))
    for token in range(4):
        table[token, (token + 1) % 4] = 1
    engine = Table(table)
    greedy = replace(SETTINGS, temperature=0.0, vocab_size=4)
    assert generate(engine, [[0], [2, 1]], greedy) == [[1, 2, 3, 0, 1, 2], [2, 3, 0, 1, 2, 3]]  # type: ignore[arg-type]
    assert generate(engine, [[0]], replace(greedy, temperature=1.0, top_k=1)) == [[1, 2, 3, 0, 1, 2]]  # type: ignore[arg-type]
    ends = replace(greedy, end_of_text_id=3)
    assert generate(engine, [[0], [3], [1]], ends) == [[1, 2], [0, 1, 2], [2]]  # type: ignore[arg-type]


@pytest.mark.hf
@pytest.mark.torch
def test_a_repetition_penalty_is_that_of_transformers() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    generator = np.random.default_rng()
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.3)
    settings = replace(SETTINGS, temperature=0.0, vocab_size=12, repetition_penalty=1.3)
    changed = 0
    for _ in range(200):
        logits, before = generator.normal(size=12).astype(np.float32), generator.integers(0, 12, 6)
        expected = processor(torch.tensor(before)[None], torch.tensor(logits)[None])[0].argmax()
        assert sample_token(logits, settings, 0, 0, before.tolist()) == int(expected)
        changed += int(expected) != int(logits.argmax())
    assert changed


def test_frequencies_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    count = 20_000

    def frequencies(settings: SamplingSettings) -> np.ndarray:
        draws = [sample_token(logits, settings, key=key, index=3) for key in range(count)]
        return np.bincount(draws, minlength=4) / count

    four = replace(SETTINGS, vocab_size=4)
    assert frequencies(four) == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.015)
    squared = np.array([0.5, 0.25, 0.15, 0.1]) ** 2
    assert frequencies(replace(four, temperature=0.5)) == pytest.approx(squared / squared.sum(), abs=0.015)
    assert frequencies(replace(four, top_k=2)) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.015)
    assert frequencies(replace(four, vocab_size=3)) == pytest.approx(np.array([0.5, 0.25, 0.15, 0]) / 0.9, abs=0.015)


def test_draws_along_a_sequence_are_independent() -> None:
    logits = np.zeros(2, np.float32)
    draws = np.array([sample_token(logits, replace(SETTINGS, vocab_size=2), 7, index) for index in range(20_000)])
    assert draws.mean() == pytest.approx(0.5, abs=0.015)
    assert (draws[1:] == draws[:-1]).mean() == pytest.approx(0.5, abs=0.015)


def test_a_completion_does_not_depend_on_its_company() -> None:
    engine = trained_engine()
    prompts = [[1, 2, 3], [4], [5, 6], [1, 2, 3], [9, 8, 7, 6, 5]]
    together = generate(engine, prompts, SETTINGS)
    assert [len(completion) for completion in together] == [6] * 5
    for index in (0, 1, 2, 4):
        assert generate(engine, [prompts[index]], SETTINGS) == [together[index]]
    assert generate(engine, prompts[::-1], SETTINGS)[:3] == [together[4], together[0], together[2]]
    assert together[3] != together[0], "the second sample of the same prompt"
    assert generate(engine, prompts, replace(SETTINGS, seed=43)) != together
    assert generate(engine, [], SETTINGS) == []


@settings(deadline=None, max_examples=50)
@given(vocab=st.integers(1, VOCAB), top_k=st.none() | st.integers(1, VOCAB), temperature=st.sampled_from([0.0, 0.7, 5]))
def test_padding_ids_are_never_drawn(vocab: int, top_k: int | None, temperature: float) -> None:
    asked = replace(SETTINGS, vocab_size=vocab, top_k=top_k, temperature=temperature)
    completions = generate(NumpyEngine(VOCAB), [[0], [vocab - 1, 0]], asked)
    assert all(token < vocab for completion in completions for token in completion)


def test_refuses_what_cannot_be_continued() -> None:
    engine = NumpyEngine(VOCAB)
    with pytest.raises(ConfigError, match="has no token"):
        generate(engine, [[1], []], SETTINGS)
    with pytest.raises(ConfigError, match="outside the vocabulary of 11"):
        generate(engine, [[11]], SETTINGS)
    with pytest.raises(ConfigError, match="59 tokens; with 6 new ones they are more than the 64 positions"):
        generate(engine, [[1] * 59], SETTINGS)
    assert len(generate(engine, [[1] * 58], SETTINGS)[0]) == 6


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = np.log(np.array([0.15, 0.5, 0.1, 0.25], np.float32))

    def drawn(top_p: float, top_k: int | None = None) -> dict[int, float]:
        asked = replace(SETTINGS, vocab_size=4, top_p=top_p, top_k=top_k)
        draws = np.bincount([sample_token(logits, asked, key, 0) for key in range(4_000)], minlength=4) / 4_000
        return {token: share for token, share in enumerate(draws.tolist()) if share}

    assert drawn(0.4) == {1: 1.0}
    assert drawn(0.7) == pytest.approx({1: 2 / 3, 3: 1 / 3}, abs=0.03)
    assert drawn(0.85) == pytest.approx({0: 0.15 / 0.9, 1: 0.5 / 0.9, 3: 0.25 / 0.9}, abs=0.03)
    assert drawn(0.6, top_k=2) == {1: 1.0}, "of the two, the first has two thirds"
    assert set(drawn(0.9999)) == {0, 1, 2, 3}
    assert drawn(0.0) == {1: 1.0}
