"""Incremental decoding: keys and values of the tokens so far are kept, so a new token costs one position.

Compiled functions have fixed shapes: a prompt is filled up to a multiple of a few tokens, so that prompts of many
lengths share one. What is behind the real tokens is overwritten by those that follow and is seen by none of them.

Shape legend: B rows, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import numpy.typing as npt

from vorox.core.batch import Int32Array
from vorox.core.errors import ConfigError

PROMPT_MULTIPLE_TOKENS = 16

Feed = Callable[[Int32Array, int, jax.Array, int], tuple[jax.Array, jax.Array]]
"""(tokens_BT, real tokens, cache, tokens before) -> logits_BV, cache."""


class JaxDecoder:
    """One batch of sequences being continued.

    Args:
        cache: Empty, ``[L, 2, B, max_tokens, K, H]``.
        max_tokens: Announced length.
        feed: The forward pass.
    """

    def __init__(self, cache: jax.Array, max_tokens: int, feed: Feed) -> None:
        self._cache, self._max_tokens, self._feed = cache, max_tokens, feed
        self._num_tokens = 0

    def feed(self, tokens_BT: Int32Array) -> npt.NDArray[np.float32]:
        """Append tokens to every sequence and return the logits that follow the last one, fp32 ``[B, V]``."""
        num_new = tokens_BT.shape[1]
        end = self._num_tokens + num_new
        if end > self._max_tokens:
            raise ConfigError(f"{end} tokens were fed to a decoder for {self._max_tokens}", where="decoder")
        room = self._max_tokens - self._num_tokens
        length = 1 if num_new == 1 else min(room, -(-num_new // PROMPT_MULTIPLE_TOKENS) * PROMPT_MULTIPLE_TOKENS)
        filled_BT = np.pad(np.asarray(tokens_BT, np.int32), ((0, 0), (0, length - num_new)))
        logits_BV, self._cache = self._feed(filled_BT, num_new, self._cache, self._num_tokens)
        self._num_tokens = end
        return np.asarray(logits_BV)
