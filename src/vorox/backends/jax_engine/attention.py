"""Attention masks, rotary embeddings and attention kernels.

``xla`` is ``jax.nn.dot_product_attention`` compiled by XLA, ``cudnn`` the same function through cuDNN's fused kernel,
``splash`` the Pallas kernel for TPUs, and ``reference`` the plain formula, which is also used for attention dropout.
Masks are computed on the device from segment ids.

Shape legend: B rows, T query positions, S key positions, N query heads, K key/value heads, H head width, X any heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from vorox.core.user_code.extensions import load_function
from vorox.models.decoder.rotary import RopeScaling, scale_frequencies
from vorox.models.decoder.spec import DecoderSpec

Array = jax.Array
Attend = Callable[[Array, Array, Array, "AttentionMask", "Dropout | None"], Array]
"""(query_BTNH, key_BSKH, value_BSKH, attention_mask, dropout) -> mixed_BTNH."""

Dropout = tuple[float, Array]
"""Dropout rate and random key."""


class AttentionMask:
    """A causal mask, restricted to the same document and to a sliding window if given.

    Args:
        segment_ids_BT: Document of each position, 0 for padding; ``None`` for one document.
        query_positions_T: Absolute position of each query; for decoding, where there are more keys than queries.
        window_tokens: Number of positions that a query attends to, itself included; an array if it depends on the
            layer of a scan.
    """

    def __init__(
        self,
        segment_ids_BT: Array | None = None,
        query_positions_T: Array | None = None,
        window_tokens: int | Array | None = None,
    ) -> None:
        self.segment_ids_BT = segment_ids_BT
        self.query_positions_T = query_positions_T
        self.window_tokens = window_tokens

    def with_window(self, window_tokens: int | Array | None) -> AttentionMask:
        """Return the mask of a layer with a sliding window."""
        return AttentionMask(self.segment_ids_BT, self.query_positions_T, window_tokens)

    @property
    def is_plain(self) -> bool:
        """Whether the mask is causal, perhaps with a window, and nothing else."""
        return (
            self.segment_ids_BT is None
            and self.query_positions_T is None
            and not isinstance(self.window_tokens, jax.Array)
        )

    def dense(self, num_queries: int, num_keys: int) -> Array:
        """Return the mask ``[B or 1, 1, T, S]``, true where a query may attend to a key."""
        queries_T = jnp.arange(num_queries) if self.query_positions_T is None else self.query_positions_T
        keys_S = jnp.arange(num_keys)
        mask = (keys_S[None, :] <= queries_T[:, None])[None, None]
        if self.window_tokens is not None:
            mask = mask & (keys_S[None, :] > queries_T[:, None] - self.window_tokens)
        if self.segment_ids_BT is not None:
            segments = self.segment_ids_BT
            mask = mask & (segments[:, None, :, None] == segments[:, None, None, :])
        return mask


def layer_window(spec: DecoderSpec, layer: Array | int) -> int | Array | None:
    """Return the sliding window of a layer; an array if layers differ and the layer is traced."""
    windows = spec.layer_windows
    if len(set(windows)) == 1:
        return windows[0]
    if isinstance(layer, int):
        return windows[layer]
    return jnp.asarray([spec.max_positions_tokens if window is None else window for window in windows])[layer]


def rotary_tables(spec: DecoderSpec) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """Return cosines and sines ``[positions, H / 2]``; ``None`` without rotary positions.

    If sliding layers have their own, they are ``[positions, 2, H / 2]``: of full and of sliding layers.
    """
    if spec.positions != "rope":
        return None
    full = rotary_table(spec.rotary_dim, spec.max_positions_tokens, spec.rope_theta, spec.rope_scaling)
    if spec.sliding_rope_theta is None:
        return full
    sliding = rotary_table(spec.rotary_dim, spec.max_positions_tokens, spec.sliding_rope_theta)
    return np.stack([full[0], sliding[0]], axis=1), np.stack([full[1], sliding[1]], axis=1)


def layer_rotary(
    spec: DecoderSpec, rotary: tuple[Array, Array] | None, layer: Array | int
) -> tuple[Array, Array] | None:
    """Choose the rotary table of a layer: from ``[B or 1, T, 1, 2, H / 2]`` if sliding layers have their own."""
    if rotary is None or spec.sliding_rope_theta is None:
        return rotary
    kinds = np.array([window is not None for window in spec.layer_windows], np.int32)
    kind = kinds[layer] if isinstance(layer, int) else jnp.asarray(kinds)[layer]
    return jnp.take(rotary[0], kind, axis=3), jnp.take(rotary[1], kind, axis=3)


def rotary_table(
    rotary_dim: int, num_positions: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return cosines and sines ``[positions, H / 2]`` in fp32, computed as in Hugging Face transformers."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    frequencies = np.divide(1.0, np.power(np.float32(theta), exponents, dtype=np.float32), dtype=np.float32)
    scaled, factor = scale_frequencies(frequencies, theta, scaling)
    angles = np.outer(np.arange(num_positions, dtype=np.float32), scaled)
    return np.cos(angles, dtype=np.float32) * np.float32(factor), np.sin(angles, dtype=np.float32) * np.float32(factor)


def apply_rotary(x_BTXH: Array, cosines: Array, sines: Array) -> Array:
    """Rotate the two halves of every head, or of its first dimensions.

    Args:
        x_BTXH: Queries or keys.
        cosines: ``[B or 1, T, 1, R / 2]`` for R rotated dimensions.
        sines: The same shape.
    """
    half = cosines.shape[-1]
    left, right, rest = jnp.split(x_BTXH.astype(jnp.float32), (half, 2 * half), axis=-1)
    rotated = jnp.concatenate([left * cosines - right * sines, right * cosines + left * sines, rest], axis=-1)
    return rotated.astype(x_BTXH.dtype)


def reference(
    query_BTNH: Array, key_BSKH: Array, value_BSKH: Array, attention_mask: AttentionMask, dropout: Dropout | None
) -> Array:
    """Compute attention by the plain formula, softmax in fp32."""
    num_rows, num_queries, num_heads, head_dim = query_BTNH.shape
    num_keys, num_kv_heads = key_BSKH.shape[1:3]
    grouped = query_BTNH.reshape(num_rows, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key_BSKH, preferred_element_type=jnp.float32)
    mask = attention_mask.dense(num_queries, num_keys)[:, :, None]
    scores = jnp.where(mask, scores / math.sqrt(head_dim), jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if dropout is not None:
        weights = apply_dropout(weights, dropout)
    mixed = jnp.einsum("bkgts,bskh->btkgh", weights.astype(value_BSKH.dtype), value_BSKH)
    return mixed.reshape(query_BTNH.shape)


def apply_dropout(x: Array, dropout: Dropout) -> Array:
    """Zero a random share of the elements and scale up the others."""
    fraction, key = dropout
    kept = jax.random.bernoulli(key, 1.0 - fraction, x.shape)
    return jnp.where(kept, x / (1.0 - fraction), jnp.zeros((), x.dtype))


def _fused(implementation: Literal["xla", "cudnn"]) -> Attend:
    def attend(
        query_BTNH: Array, key_BSKH: Array, value_BSKH: Array, attention_mask: AttentionMask, dropout: Dropout | None
    ) -> Array:
        if dropout is not None:
            return reference(query_BTNH, key_BSKH, value_BSKH, attention_mask, dropout)
        mask = None if attention_mask.is_plain else attention_mask.dense(query_BTNH.shape[1], key_BSKH.shape[1])
        window = attention_mask.window_tokens
        local = (window - 1, 0) if mask is None and isinstance(window, int) else None
        return jax.nn.dot_product_attention(
            query_BTNH, key_BSKH, value_BSKH, mask=mask, is_causal=mask is None, local_window_size=local,
            implementation=implementation,
        )  # fmt: skip

    return attend


def splash(
    query_BTNH: Array,
    key_BSKH: Array,
    value_BSKH: Array,
    attention_mask: AttentionMask,
    dropout: Dropout | None,
    *,
    interpret: bool = False,
) -> Array:
    """Block-sparse attention for TPUs.

    Falls back to ``reference`` for dropout, decoding, and scanned layers of different windows.

    Args:
        interpret: Run the kernel in interpret mode, for tests on other devices.
    """
    window = attention_mask.window_tokens
    if dropout is not None or attention_mask.query_positions_T is not None or isinstance(window, jax.Array):
        return reference(query_BTNH, key_BSKH, value_BSKH, attention_mask, dropout)
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    num_positions, num_heads, head_dim = query_BTNH.shape[1:]
    shape = (num_positions, num_positions)
    causal: Any = splash_attention_mask.CausalMask(shape)
    if window is not None:
        causal = splash_attention_mask.LocalMask(shape, window_size=(window - 1, 0), offset=0)
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([causal] * num_heads), head_shards=1, q_seq_shards=1, interpret=interpret
    )
    repeats = num_heads // key_BSKH.shape[2]
    query_BNTH = query_BTNH.swapaxes(1, 2) / math.sqrt(head_dim)  # the kernel does not scale
    key_BNSH, value_BNSH = (jnp.repeat(x.swapaxes(1, 2), repeats, axis=1) for x in (key_BSKH, value_BSKH))
    segments_BT = attention_mask.segment_ids_BT
    if segments_BT is None:
        mixed_BNTH: Any = jax.vmap(lambda q, k, v: kernel(q, k, v))(query_BNTH, key_BNSH, value_BNSH)
    else:
        ids = splash_attention_kernel.SegmentIds
        mixed_BNTH = jax.vmap(lambda q, k, v, s: kernel(q, k, v, segment_ids=ids(s, s)))(
            query_BNTH, key_BNSH, value_BNSH, segments_BT
        )
    return mixed_BNTH.swapaxes(1, 2).astype(query_BTNH.dtype)


ATTENTION: dict[str, Attend] = {
    "reference": reference,
    "xla": _fused("xla"),
    "cudnn": _fused("cudnn"),
    "splash": splash,
}


def attention_kernel(name: str) -> Attend:
    """Return a built-in kernel, or a user function with the arguments of ``jax.nn.dot_product_attention``."""
    if name in ATTENTION:
        return ATTENTION[name]
    function = load_function(name, kind="attention", where="model.attention_kernel")

    def attend(
        query_BTNH: Array, key_BSKH: Array, value_BSKH: Array, attention_mask: AttentionMask, dropout: Dropout | None
    ) -> Array:
        assert dropout is None, "refused before step 1"
        is_causal = attention_mask.is_plain and attention_mask.window_tokens is None
        mask = None if is_causal else attention_mask.dense(query_BTNH.shape[1], key_BSKH.shape[1])
        return function(query_BTNH, key_BSKH, value_BSKH, mask=mask, is_causal=is_causal)

    return attend
