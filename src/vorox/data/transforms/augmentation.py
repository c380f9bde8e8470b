"""Augmentation: reproducible changes of documents on their way into the cache.

All randomness comes from the generator that the caller passes. ``fill_in_the_middle`` and ``token_dropout`` change
token ids. ``local_model`` is an example of rewriting text with a language model; such transforms are slow and run in
several threads (``data.pipeline.filter_threads``). Paraphrasing, back-translation or cleaning work the same way.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Le

from vorox.core.errors import ConfigError
from vorox.core.platform.installation import install_command
from vorox.data.transforms.identity import version

Fraction = Annotated[float, Ge(0), Le(1)]
Tokens = npt.NDArray[Any]


class SpecialTokens(Protocol):
    """The part of a tokenizer that transforms need."""

    def encode(self, text: str, /) -> Tokens: ...
    def special_id(self, token: str, /) -> int | None: ...


@version(1)
def fill_in_the_middle(
    tokens: Tokens,
    rng: np.random.Generator,
    *,
    tokenizer: SpecialTokens,
    text: str | None,
    rate: Fraction = 0.5,
    spm_rate: Fraction = 0.5,
    level: Literal["character", "token"] = "character",
    prefix: str = "<|fim_prefix|>",
    suffix: str = "<|fim_suffix|>",
    middle: str = "<|fim_middle|>",
) -> Tokens:
    """Rearrange a document into prefix, suffix and middle, so that a model learns infilling.

    After Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle": a document is split at
    two uniformly random characters. PSM is ``<prefix>P<suffix>S<middle>M``; SPM, in the variant that the paper trains,
    is ``<prefix><suffix>S<middle>PM``.

    Args:
        tokens: Token ids of the document.
        rng: Random generator of the document.
        tokenizer: A tokenizer with the three sentinels as special tokens.
        text: Text of the document.
        rate: Fraction of documents that are rearranged.
        spm_rate: Fraction of those that use SPM.
        level: Split between characters or between tokens.
        prefix: Sentinel before the prefix.
        suffix: Sentinel before the suffix.
        middle: Sentinel before the middle.
    """
    draw, order = rng.random(2)
    if draw >= rate:
        return tokens
    if level == "character":
        assert text is not None, "a source of tokens has no text to split"
        first, second = sorted(rng.integers(0, len(text) + 1, 2).tolist())
        parts = [tokenizer.encode(part) for part in (text[:first], text[first:second], text[second:])]
    else:
        first, second = sorted(rng.integers(0, len(tokens) + 1, 2).tolist())
        parts = [tokens[:first], tokens[first:second], tokens[second:]]
    before, gap, after = (part.astype(np.int64) for part in parts)
    prefix_id, suffix_id, middle_id = (
        np.array([tokenizer.special_id(token)], np.int64) for token in (prefix, suffix, middle)
    )
    if order < spm_rate:
        return np.concatenate([prefix_id, suffix_id, after, middle_id, before, gap])
    return np.concatenate([prefix_id, before, suffix_id, after, middle_id, gap])


@version(1)
def token_dropout(
    tokens: Tokens,
    rng: np.random.Generator,
    *,
    tokenizer: SpecialTokens,
    fraction: Fraction,
    replacement: str | None = None,
) -> Tokens:
    """Drop each token with a given probability, or replace it by a special token.

    Args:
        tokens: Token ids of the document.
        rng: Random generator of the document.
        tokenizer: A tokenizer with ``replacement`` as a special token.
        fraction: Probability of dropping a token.
        replacement: Special token that replaces dropped tokens; ``None`` shortens the document.
    """
    dropped = rng.random(len(tokens)) < fraction
    if replacement is None:
        return tokens[~dropped]
    return np.where(dropped, np.int64(tokenizer.special_id(replacement) or 0), tokens.astype(np.int64))


@version(1)
def local_model(
    text: str,
    *,
    path: str,
    weights_version: str,
    prompt: str = "Rewrite the following text in other words.\n\n{text}\n\nRewritten text:\n",
    max_new_tokens: Annotated[int, Ge(1)] = 512,
    keep_original: bool = True,
) -> list[str]:
    """Rewrite a text with a local transformers model and greedy decoding.

    Greedy decoding is not random, but its floating-point results differ between devices: build such a cache on one kind
    of machine.

    Args:
        text: The document.
        path: Directory of a causal language model with its tokenizer; nothing is downloaded.
        weights_version: Version of the weights, as part of the cache's identity; their content is not hashed.
        prompt: The prompt; ``{text}`` is replaced by the document.
        max_new_tokens: Maximum number of generated tokens.
        keep_original: Whether to keep the original text, before the new one.
    """
    del weights_version
    written = _generate(path)(prompt.replace("{text}", text), max_new_tokens).strip()
    return ([text] if keep_original else []) + ([written] if written else [])


@functools.cache
def _generate(path: str) -> Callable[[str, int], str]:
    """Load a model and return its generation function: (prompt, max_new_tokens) -> generated text."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            "Transform local_model needs the library transformers", where="data.transforms", hint=install_command("hf")
        ) from error
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True).eval()

    def generate(prompt: str, max_new_tokens: int) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
        return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return generate
