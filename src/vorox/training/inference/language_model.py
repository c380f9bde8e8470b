"""A trained model for inference: logits, completions and losses of an engine with its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from vorox.core.batch import Batch
from vorox.core.engine import Engine
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.models.spec import ModelSpec
from vorox.training.inference.image_prompts import encode_image_prompt
from vorox.training.inference.sampling import SamplingSettings, complete, generate
from vorox.training.steps.evaluate import Evaluation, evaluate


class LanguageModel:
    """A model with its tokenizer: the argument of ``eval.functions``, and the result of ``vorox.load_model``.

    Attributes:
        engine: The engine that holds the weights.
        tokenizer: Encodes text to token ids.
        config: The configuration of its run.
        spec: The architecture, and the names and shapes of all parameters.
        step: Optimizer steps of its training.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, config: RunConfig, spec: ModelSpec, step: int) -> None:
        self.engine, self.tokenizer, self.config, self.spec, self.step = engine, tokenizer, config, spec, step

    def logits(self, token_ids: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Return the next-token logits at each position.

        Args:
            token_ids: Integers ``[T]``, or ``[B, T]`` for sequences of one length.

        Returns:
            float32 ``[T, V]`` or ``[B, T, V]``.

        Raises:
            ConfigError: The ids are empty, too many, or not integers of the vocabulary.
        """
        ids = np.asarray(token_ids)
        if ids.ndim not in (1, 2) or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise ConfigError(
                f"Token ids must be integers of shape [T] or [B, T], not {ids.dtype} of shape {list(ids.shape)}",
                where="model.logits", hint="encode text first: model.tokenizer.encode_batch([text])[0]",
            )  # fmt: skip
        if ids.min() < 0 or ids.max() >= self.spec.vocab_size:
            raise ConfigError(
                f"A token id is outside the vocabulary of {self.spec.vocab_size:,}", where="model.logits",
                hint="use the model's own tokenizer: model.tokenizer",
            )  # fmt: skip
        if ids.shape[-1] > self.spec.max_positions_tokens:
            raise ConfigError(
                f"{ids.shape[-1]:,} tokens are more than the model's {self.spec.max_positions_tokens:,} positions",
                where="model.logits", hint="shorten the sequence",
            )  # fmt: skip
        logits = self.engine.logits(np.atleast_2d(ids).astype(np.int32))
        return logits if ids.ndim == 2 else logits[0]

    @overload
    def generate(
        self, prompt: str, *, num_tokens: int | None = None, temperature: float | None = None,
        top_k: int | None = None, top_p: float = 1.0, seed: int | None = None,
        images: Sequence[str | Path | bytes] = (),
    ) -> str: ...  # fmt: skip
    @overload
    def generate(
        self, prompt: list[str] | tuple[str, ...], *, num_tokens: int | None = None, temperature: float | None = None,
        top_k: int | None = None, top_p: float = 1.0, seed: int | None = None,
    ) -> list[str]: ...  # fmt: skip
    def generate(
        self,
        prompt: str | list[str] | tuple[str, ...],
        *,
        num_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
        images: Sequence[str | Path | bytes] = (),
    ) -> str | list[str]:
        """Continue one or several texts; the same text, settings and seed give the same completion.

        Args:
            prompt: One text or several. Equal texts in one call get different completions.
            num_tokens: Maximum length of a completion. ``None``: ``eval.sample_tokens`` of the run.
            temperature: 0 selects the most likely token. ``None``: ``eval.sample_temperature``.
            top_k: Sample from the most likely tokens; 0 samples from all. ``None``: ``eval.sample_top_k``.
            top_p: Sample from the fewest most likely tokens that together have this probability.
            seed: Sampling seed. ``None``: the seed of the run.
            images: Image files, or their bytes, of a single prompt, which has ``<image>`` where each belongs.

        Returns:
            The completion without its prompt; a list for several prompts.

        Raises:
            ConfigError: Prompt and completion are longer than the model's positions.
        """
        settings = self.sampling_settings(num_tokens, temperature, top_k, seed, top_p)
        if images:
            if not isinstance(prompt, str):
                raise ConfigError("Images belong to a single prompt", where="images", hint="call generate per prompt")
            ids, found = encode_image_prompt(self.config, self.tokenizer, prompt, images)
            return self.tokenizer.decode(generate(self.engine, ids, settings, found)[0])
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        texts = [text for _, text in complete(self.engine, self.tokenizer, prompts, settings)]
        return texts[0] if isinstance(prompt, str) else texts

    def sampling_settings(
        self,
        num_tokens: int | None,
        temperature: float | None,
        top_k: int | None,
        seed: int | None,
        top_p: float = 1.0,
    ) -> SamplingSettings:
        """Return the sampling settings, with those of the run for each ``None`` (see ``generate``)."""
        evaluation = self.config.eval
        return SamplingSettings(
            max_new_tokens=num_tokens or evaluation.sample_tokens,
            temperature=evaluation.sample_temperature if temperature is None else temperature,
            top_k=evaluation.sample_top_k if top_k is None else top_k or None,
            seed=self.config.run.seed if seed is None else seed,
            vocab_size=self.tokenizer.vocab_size,
            end_of_text_id=self.tokenizer.end_of_text_id,
            max_positions_tokens=self.spec.max_positions_tokens,
            top_p=top_p,
            stop_ids=self.tokenizer.stop_ids,
            repetition_penalty=self.tokenizer.repetition_penalty,
        )

    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        """Return loss, perplexity, bits per byte and accuracy over some batches, such as ``run.validation_batches()``.

        Raises:
            DataError: The batches hold no token to predict.
        """
        return evaluate(self.engine, batches, self.tokenizer.token_byte_lengths() if self.tokenizer.lossless else None)
