"""Incremental decoding with a key/value cache and the states of Mamba-2 layers.

Compiled functions have fixed shapes: prompts are padded to a multiple of ``PROMPT_MULTIPLE_TOKENS``, so that prompts of
many lengths share one. The cache entries of padding are masked, and overwritten by the tokens that follow.

Shape legend: B rows, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from vorox.core.batch import Int32Array
from vorox.core.errors import ConfigError

PROMPT_MULTIPLE_TOKENS = 16

DecodeStep = Callable[[Int32Array, int, Any, int], tuple[jax.Array, Any]]
"""(padded tokens_BT, number of new tokens, cache, number of earlier tokens) -> logits_BV, cache."""


class JaxDecoder:
    """Decoding state of one batch of sequences.

    Args:
        cache: Empty (``layers/mamba.py: empty_cache``).
        max_tokens: Capacity of the cache.
        decode: The forward pass.
    """

    def __init__(self, cache: Any, max_tokens: int, decode: DecodeStep) -> None:
        self._cache, self._max_tokens, self._decode = cache, max_tokens, decode
        self._num_tokens = 0

    def feed(self, tokens_BT: Int32Array) -> npt.NDArray[np.float32]:
        """Append tokens to every sequence and return the logits that follow the last one, fp32 ``[B, V]``."""
        num_new = tokens_BT.shape[1]
        end = self._num_tokens + num_new
        if end > self._max_tokens:
            raise ConfigError(f"The decoder holds {self._max_tokens} tokens, but got {end}", where="decoder")
        room = self._max_tokens - self._num_tokens
        length = 1 if num_new == 1 else min(room, -(-num_new // PROMPT_MULTIPLE_TOKENS) * PROMPT_MULTIPLE_TOKENS)
        padded_BT = np.pad(np.asarray(tokens_BT, np.int32), ((0, 0), (0, length - num_new)))
        logits_BV, self._cache = self._decode(padded_BT, num_new, self._cache, self._num_tokens)
        self._num_tokens = end
        return np.asarray(logits_BV)
