"""Incremental decoding with a key/value cache and the states of Mamba-2 layers.

Shape legend: B rows, T new positions, S positions so far, K key/value heads, H head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vorox.backends.torch_engine.layers.state_space import MambaState
from vorox.core.batch import Int32Array
from vorox.core.errors import ConfigError
from vorox.models.decoder.spec import DecoderSpec


class KeyValueCache:
    """Keys and values of a fixed number of positions in every layer with attention, and the states of the others."""

    def __init__(
        self,
        spec: DecoderSpec,
        num_kv_heads: int,
        batch_size: int,
        max_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        attention = [layer for layer in range(spec.num_layers) if spec.mixer(layer) in ("", "*")]
        self._index = {layer: index for index, layer in enumerate(attention)}
        self._states = {
            layer: MambaState.zeros(spec, batch_size, device, dtype)
            for layer in range(spec.num_layers)
            if spec.mixer(layer) == "M"
        }
        shape = (2, len(self._index), batch_size, num_kv_heads, max_tokens, spec.head_dim)
        self._stored = torch.zeros(shape, device=device, dtype=dtype)
        self.num_tokens = 0

    def extend(self, layer: int, key_BKTH: Tensor, value_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens to a layer and return all so far, ``[B, K, S, H]``."""
        end = self.num_tokens + key_BKTH.shape[2]
        keys_BKSH, values_BKSH = self._stored[:, self._index[layer]]
        keys_BKSH[:, :, self.num_tokens : end] = key_BKTH
        values_BKSH[:, :, self.num_tokens : end] = value_BKTH
        return keys_BKSH[:, :, :end].to(key_BKTH.dtype), values_BKSH[:, :, :end].to(value_BKTH.dtype)

    def mamba(self, layer: int) -> MambaState:
        """Return the state of a Mamba-2 layer, which the layer updates."""
        return self._states[layer]


class TorchDecoder:
    """Decoding state of one batch of sequences.

    Args:
        cache: Key/value cache, initially empty.
        max_tokens: Capacity of the cache.
        forward: (tokens_BT, cache) -> logits of the last position ``[B, V]``.
    """

    def __init__(
        self, cache: KeyValueCache, max_tokens: int, forward: Callable[[Int32Array, KeyValueCache], Tensor]
    ) -> None:
        self._cache, self._max_tokens, self._forward = cache, max_tokens, forward

    def feed(self, tokens_BT: Int32Array) -> npt.NDArray[np.float32]:
        """Append tokens to every sequence and return the logits that follow the last one, fp32 ``[B, V]``."""
        end = self._cache.num_tokens + tokens_BT.shape[1]
        if end > self._max_tokens:
            raise ConfigError(f"The decoder holds {self._max_tokens} tokens, but got {end}", where="decoder")
        logits_BV = self._forward(tokens_BT, self._cache)
        self._cache.num_tokens = end
        return logits_BV.float().cpu().numpy()


class PrefixDecoder:
    """Decoding that recomputes the whole prefix for each token, so that it equals ``logits`` for any model."""

    def __init__(self, logits: Callable[[Int32Array], Tensor], batch_size: int, max_tokens: int) -> None:
        self._logits, self._max_tokens = logits, max_tokens
        self._tokens_BT = np.zeros((batch_size, 0), np.int32)

    def feed(self, tokens_BT: Int32Array) -> npt.NDArray[np.float32]:
        """Append tokens to every sequence and return the logits that follow the last one, fp32 ``[B, V]``."""
        self._tokens_BT = np.concatenate([self._tokens_BT, tokens_BT], axis=1)
        if self._tokens_BT.shape[1] > self._max_tokens:
            end = self._tokens_BT.shape[1]
            raise ConfigError(f"The decoder holds {self._max_tokens} tokens, but got {end}", where="decoder")
        return self._logits(self._tokens_BT)[:, -1].cpu().numpy()
