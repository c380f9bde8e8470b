"""Completions: from logits to tokens, the same way for every engine.

Each draw is keyed by (seed, prompt, sample, index of the token) and nothing else, so a completion does not depend on
what else is in the batch or was drawn before, and no generator state exists. Ids at or beyond the tokenizer's
vocabulary (rows that only pad the embedding) are never drawn.

Shape legend: B sequences, T positions, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vorox.core.engine import Engine
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.models.spec import ModelSpec

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: Length of a completion, unless ``end_of_text_id`` ends it before.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Draw only from the likeliest tokens; ``None`` draws from all.
        seed: Seed of all draws.
        vocab_size: Vocabulary of the tokenizer.
        end_of_text_id: Ends a completion and is not part of it; ``None`` never ends one.
        max_positions_tokens: Longest sequence the model can take.
    """

    max_new_tokens: int
    temperature: float
    top_k: int | None
    seed: int
    vocab_size: int
    end_of_text_id: int | None
    max_positions_tokens: int


def generate(engine: Engine, prompts: Sequence[Sequence[int]], settings: SamplingSettings) -> list[list[int]]:
    """Continue every prompt; equal prompts are numbered and continue differently unless the temperature is 0.

    Prompts of different lengths share one decoder: each position feeds the prompt's own token where it has one and
    the drawn token after that, so nothing is padded.

    Raises:
        ConfigError: A prompt is empty, has ids outside the vocabulary, or leaves no room for the completion.
    """
    for number, prompt in enumerate(prompts):
        check_prompt(prompt, settings, where=f"prompt {number + 1}")
    if not prompts:
        return []
    keys = [_key(settings.seed, prompt, list(prompts[:i]).count(prompt)) for i, prompt in enumerate(prompts)]
    sequences = [list(prompt) for prompt in prompts]
    lengths = [len(prompt) for prompt in prompts]
    decoder = engine.decoder(len(prompts), max(lengths) + settings.max_new_tokens)
    finished = [False] * len(prompts)
    fed = min(lengths)
    logits_BV = decoder.feed(np.array([sequence[:fed] for sequence in sequences], np.int32))
    while True:
        for row, sequence in enumerate(sequences):
            if len(sequence) > fed or finished[row]:
                continue
            token = draw(logits_BV[row], settings, keys[row], len(sequence) - lengths[row])
            finished[row] = token == settings.end_of_text_id
            if not finished[row]:
                sequence.append(token)
                finished[row] = len(sequence) == lengths[row] + settings.max_new_tokens
        if all(finished):
            return [sequence[length:] for sequence, length in zip(sequences, lengths, strict=True)]
        column = [sequence[fed] if fed < len(sequence) else sequence[-1] for sequence in sequences]
        logits_BV = decoder.feed(np.array(column, np.int32)[:, None])
        fed += 1


def complete(
    engine: Engine, tokenizer: Tokenizer, prompts: Sequence[str], settings: SamplingSettings
) -> list[tuple[str, str]]:
    """Continue texts: pairs of prompt and completion. An empty text continues the end of another one."""
    completions = generate(engine, encode_prompts(tokenizer, prompts), settings)
    return [(prompt, tokenizer.decode(ids)) for prompt, ids in zip(prompts, completions, strict=True)]


class PromptSampler:
    """Continues the prompts that a run's configuration names.

    Raises:
        ConfigError: A prompt cannot be continued.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, spec: ModelSpec) -> None:
        self._tokenizer, self._prompts = tokenizer, config.eval.prompts
        self._settings = SamplingSettings(
            max_new_tokens=config.eval.sample_tokens,
            temperature=config.eval.sample_temperature,
            top_k=config.eval.sample_top_k,
            seed=config.run.seed,
            vocab_size=tokenizer.vocab_size,
            end_of_text_id=tokenizer.end_of_text_id,
            max_positions_tokens=spec.max_positions_tokens,
        )
        for prompt, ids in zip(self._prompts, encode_prompts(tokenizer, self._prompts), strict=True):
            check_prompt(ids, self._settings, where=f"eval.prompts: {prompt!r}")

    def complete(self, engine: Engine) -> list[tuple[str, str]]:
        """Return pairs of prompt and completion."""
        return complete(engine, self._tokenizer, self._prompts, self._settings)


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Ids of some texts, at least one each."""
    encoded = tokenizer.encode_batch(prompts) if prompts else []
    return [ids.tolist() or [tokenizer.end_of_text_id] for ids in encoded]


def check_prompt(prompt: Sequence[int], settings: SamplingSettings, *, where: str) -> None:
    """Refuse what cannot be continued as asked."""
    if not prompt:
        raise ConfigError("the prompt has no token", where=where, hint="give at least one token")
    if not all(0 <= token < settings.vocab_size for token in prompt):
        raise ConfigError(f"a token id is outside the vocabulary of {settings.vocab_size:,}", where=where)
    if len(prompt) + settings.max_new_tokens > settings.max_positions_tokens:
        raise ConfigError(
            f"{len(prompt):,} tokens and {settings.max_new_tokens:,} new ones are more than the "
            f"{settings.max_positions_tokens:,} positions of the model",
            where=where,
            hint="shorten the prompt or ask for fewer tokens",
        )


def draw(logits_V: npt.NDArray[np.float32], settings: SamplingSettings, key: int, index: int) -> int:
    """The token of one draw: inverse of the cumulative distribution at a number that the key decides."""
    logits = logits_V[: settings.vocab_size].astype(np.float64)
    if settings.temperature == 0 or settings.top_k == 1:
        return int(logits.argmax())
    candidates = np.arange(len(logits))
    if settings.top_k is not None and settings.top_k < len(logits):
        # Stable order: of equal logits, the lower id is in.
        candidates = np.sort(np.argsort(-logits, kind="stable")[: settings.top_k])
    probabilities = _softmax(logits[candidates] / settings.temperature)
    generator = np.random.Generator(np.random.Philox(key=key, counter=index))
    position = np.searchsorted(np.cumsum(probabilities), generator.random(), side="right")
    return int(candidates[min(int(position), len(candidates) - 1)])


def _softmax(values: FloatArray) -> FloatArray:
    exponentials = np.exp(values - values.max())
    return exponentials / exponentials.sum()


def _key(seed: int, prompt: Sequence[int], sample: int) -> int:
    text = f"vorox-sample/1|{seed}|{sample}|{','.join(map(str, prompt))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
