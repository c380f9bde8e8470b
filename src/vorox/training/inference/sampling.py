"""Sampling: from logits to completions, the same for every engine.

Each sampled token is keyed only by (seed, prompt, sample, token index), so a completion does not depend on the rest of
the batch or on earlier samples, and there is no generator state. Ids beyond the tokenizer's vocabulary (padding rows of
the embedding) are never sampled.

Shape legend: B sequences, T positions, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vorox.core.batch import AnyImages
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
        max_new_tokens: Maximum length of a completion; ``end_of_text_id`` ends it earlier.
        temperature: Divides the logits; 0 selects the most likely token.
        top_k: Sample only from the most likely tokens; ``None`` samples from all.
        seed: Sampling seed.
        vocab_size: Vocabulary of the tokenizer.
        end_of_text_id: Ends a completion, without being part of it; ``None`` never does.
        max_positions_tokens: Longest sequence of the model.
        top_p: Sample only from the most likely tokens that together have this probability, after ``top_k``.
        min_p: Sample only from tokens with at least this fraction of the probability of the most likely one.
        stop_ids: Further ids that end a completion like ``end_of_text_id``.
        repetition_penalty: Divides the positive logits of tokens that the sequence has, and multiplies the negative
            ones, before all else (CTRL, arXiv 1909.05858); 1 changes nothing.
    """

    max_new_tokens: int
    temperature: float
    top_k: int | None
    seed: int
    vocab_size: int
    end_of_text_id: int | None
    max_positions_tokens: int
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0

    def ends(self, token: int) -> bool:
        """Whether a token ends a completion."""
        return token == self.end_of_text_id or token in self.stop_ids


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], settings: SamplingSettings, images: AnyImages | None = None
) -> list[list[int]]:
    """Continue every prompt; equal prompts get different completions unless the temperature is 0.

    Prompts of different lengths share one decoder: each position feeds the prompt's token while it lasts and the
    sampled token afterwards, so no padding is needed.

    Raises:
        ConfigError: A prompt is empty, has ids outside the vocabulary, or is too long for the completion.
    """
    completions: list[list[int]] = [[] for _ in prompts]
    for row, token in stream(engine, prompts, settings, images=images):
        if not settings.ends(token):
            completions[row].append(token)
    return completions


def stream(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings,
    stopped: Collection[int] = (),
    images: AnyImages | None = None,
) -> Iterator[tuple[int, int]]:
    """Yield each sampled token of ``generate`` with the index of its prompt; an end-of-text id is the last of a prompt.

    Args:
        engine: The model.
        prompts: Token ids.
        settings: How tokens are chosen.
        stopped: Prompts to end early. The caller may add to it between two tokens.
        images: Images of the prompts, which then have equal lengths.

    Raises:
        ConfigError: As ``generate``, before the first token.
    """
    for number, prompt in enumerate(prompts):
        check_prompt(prompt, settings, where=f"prompt {number + 1}")
    return _sample(engine, prompts, settings, stopped, images) if prompts else iter(())


def _sample(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings,
    stopped: Collection[int],
    images: AnyImages | None,
) -> Iterator[tuple[int, int]]:
    keys = [_key(settings.seed, prompt, list(prompts[:i]).count(prompt)) for i, prompt in enumerate(prompts)]
    sequences = [list(prompt) for prompt in prompts]
    lengths = [len(prompt) for prompt in prompts]
    num_tokens = max(lengths) + settings.max_new_tokens
    with_images = {} if images is None else {"images": images}
    decoder = engine.decoder(len(prompts), num_tokens, **with_images)
    finished = [False] * len(prompts)
    fed = min(lengths)
    logits_BV = decoder.feed(np.array([sequence[:fed] for sequence in sequences], np.int32))
    while True:
        for row, sequence in enumerate(sequences):
            if len(sequence) > fed or finished[row] or row in stopped:
                continue
            token = sample_token(logits_BV[row], settings, keys[row], len(sequence) - lengths[row], sequence)
            sequence.append(token)
            finished[row] = settings.ends(token) or len(sequence) == lengths[row] + settings.max_new_tokens
            yield row, token
        if all(finished[row] or row in stopped for row in range(len(prompts))):
            return
        column = [sequence[fed] if fed < len(sequence) else sequence[-1] for sequence in sequences]
        logits_BV = decoder.feed(np.array(column, np.int32)[:, None])
        fed += 1


def complete(
    engine: Engine, tokenizer: Tokenizer, prompts: Sequence[str], settings: SamplingSettings
) -> list[tuple[str, str]]:
    """Continue texts; return pairs of prompt and completion. An empty prompt starts a new document."""
    completions = generate(engine, encode_prompts(tokenizer, prompts), settings)
    return [(prompt, tokenizer.decode(ids)) for prompt, ids in zip(prompts, completions, strict=True)]


class PromptSampler:
    """Continues the prompts in ``eval.prompts``, by ``eval.sample_tokens`` or as far as the model's positions allow.

    Raises:
        ConfigError: A prompt cannot be continued by a single token.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, spec: ModelSpec) -> None:
        self._tokenizer, self._prompts = tokenizer, config.eval.prompts
        encoded = encode_prompts(tokenizer, self._prompts)
        room_tokens = spec.max_positions_tokens - max(map(len, encoded), default=0)
        self._settings = SamplingSettings(
            max_new_tokens=max(1, min(config.eval.sample_tokens, room_tokens)),
            temperature=config.eval.sample_temperature,
            top_k=config.eval.sample_top_k,
            seed=config.run.seed,
            vocab_size=tokenizer.vocab_size,
            end_of_text_id=tokenizer.end_of_text_id,
            max_positions_tokens=spec.max_positions_tokens,
            stop_ids=tokenizer.stop_ids,
            repetition_penalty=tokenizer.repetition_penalty,
        )
        for prompt, ids in zip(self._prompts, encoded, strict=True):
            check_prompt(ids, self._settings, where=f"eval.prompts: {prompt!r}")

    def complete(self, engine: Engine) -> list[tuple[str, str]]:
        """Return pairs of prompt and completion."""
        return complete(engine, self._tokenizer, self._prompts, self._settings)


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Encode texts, after the tokens that start a document; without any token, an empty text is the end-of-text id."""
    encoded = tokenizer.encode_batch(prompts) if prompts else []
    return [[*tokenizer.start_ids, *ids.tolist()] or [tokenizer.end_of_text_id] for ids in encoded]


def check_prompt(prompt: Sequence[int], settings: SamplingSettings, *, where: str) -> None:
    """Refuse a prompt that cannot be continued."""
    if not prompt:
        raise ConfigError("Prompt has no token", where=where, hint="give at least one token")
    if not all(0 <= token < settings.vocab_size for token in prompt):
        raise ConfigError(f"Prompt has a token id outside the vocabulary of {settings.vocab_size:,}", where=where)
    if len(prompt) + settings.max_new_tokens > settings.max_positions_tokens:
        raise ConfigError(
            f"Prompt has {len(prompt):,} tokens; with {settings.max_new_tokens:,} new ones they are more than the "
            f"{settings.max_positions_tokens:,} positions of the model",
            where=where,
            hint="shorten the prompt or request fewer tokens",
        )


def sample_token(
    logits_V: npt.NDArray[np.float32], settings: SamplingSettings, key: int, index: int, before: Sequence[int] = ()
) -> int:
    """Sample the token after some others: the inverse of the cumulative distribution at a number from the key."""
    logits = logits_V[: settings.vocab_size].astype(np.float64)
    if settings.repetition_penalty != 1:
        present = np.unique(np.asarray(before, np.int64))
        values = logits[present]
        logits[present] = np.where(
            values > 0, values / settings.repetition_penalty, values * settings.repetition_penalty
        )
    if settings.temperature == 0 or settings.top_k == 1:
        return int(logits.argmax())
    candidates = np.arange(len(logits))
    if settings.top_k is not None and settings.top_k < len(logits):
        # Stable sort: of equal logits, the lower id is kept.
        candidates = np.sort(np.argsort(-logits, kind="stable")[: settings.top_k])
    probabilities = _softmax(logits[candidates] / settings.temperature)
    if settings.min_p > 0:
        kept = probabilities >= settings.min_p * probabilities.max()
        candidates, probabilities = candidates[kept], probabilities[kept] / probabilities[kept].sum()
    if settings.top_p < 1:
        candidates, probabilities = _nucleus(candidates, probabilities, settings.top_p)
    generator = np.random.Generator(np.random.Philox(key=key, counter=index))
    position = np.searchsorted(np.cumsum(probabilities), generator.random(), side="right")
    return int(candidates[min(int(position), len(candidates) - 1)])


def _nucleus(
    candidates: npt.NDArray[np.intp], probabilities: FloatArray, top_p: float
) -> tuple[npt.NDArray[np.intp], FloatArray]:
    """Keep the fewest most likely tokens whose probabilities sum to at least ``top_p``; of equal ones the lower id."""
    order = np.argsort(-probabilities, kind="stable")
    num_kept = int(np.searchsorted(np.cumsum(probabilities[order]), top_p)) + 1
    kept = np.sort(order[:num_kept])
    return candidates[kept], probabilities[kept] / probabilities[kept].sum()


def _softmax(values: FloatArray) -> FloatArray:
    exponentials = np.exp(values - values.max())
    return exponentials / exponentials.sum()


def _key(seed: int, prompt: Sequence[int], sample: int) -> int:
    text = f"vorox-sample/1|{seed}|{sample}|{','.join(map(str, prompt))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
