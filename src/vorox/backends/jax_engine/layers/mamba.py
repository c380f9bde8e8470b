"""The layers of ``model.layer_pattern``: Mamba-2, attention and MLP, each behind a norm.

A Mamba-2 layer is projections and a convolution around the scan of ``state_space.py``. Layers differ, so blocks are not
scanned, and the cache of a decoder has an entry of its own for each layer.

Shape legend: B rows, T positions, D width, I inner channels, E = I + 2 G S channels of the convolution, N heads, H head
width, G groups, S state size, K taps.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vorox.backends.jax_engine.attention import Attend, apply_dropout, layer_window
from vorox.backends.jax_engine.layers.experts import Seen
from vorox.backends.jax_engine.layers.model import Attention, Block, ForwardContext, Linear, Mlp, stream_norm
from vorox.backends.jax_engine.layers.state_space import MambaState, causal_convolution, gated_norm, scan
from vorox.backends.jax_engine.taps import Taps, moments
from vorox.models.decoder.mamba import conv_channels, inner_channels
from vorox.models.decoder.spec import DecoderSpec

Array = jax.Array


class Convolution(nnx.Module):
    def __init__(self, spec: DecoderSpec) -> None:
        channels = conv_channels(spec)
        self.weight = nnx.Param(jnp.zeros((channels, 1, spec.mamba_conv_tokens)))
        self.bias = nnx.Param(jnp.zeros(channels)) if spec.mamba_conv_bias else None

    def __call__(self, x_BTE: Array, documents_BT: Array | None, before_BKE: Array | None) -> Array:
        bias_E = None if self.bias is None else self.bias[...]
        weight_EK = self.weight[...][:, 0]
        return causal_convolution(x_BTE, weight_EK, bias_E, documents_BT=documents_BT, before_BKE=before_BKE)


class GatedNorm(nnx.Module):
    def __init__(self, spec: DecoderSpec) -> None:
        self.weight = nnx.Param(jnp.ones(inner_channels(spec)))
        self._num_groups, self._eps = spec.mamba_num_groups, spec.norm_eps

    def __call__(self, y_BTI: Array, gate_BTI: Array) -> Array:
        return gated_norm(y_BTI, gate_BTI, self.weight[...], self._num_groups, self._eps)


class Mamba(nnx.Module):
    """See ``models/decoder/mamba.py`` for its parameters."""

    def __init__(self, spec: DecoderSpec) -> None:
        assert spec.mamba_num_heads is not None
        self._spec, width, inner, heads = spec, spec.hidden_size, inner_channels(spec), spec.mamba_num_heads
        shared = spec.mamba_num_groups * spec.mamba_state_size
        linear = partial(Linear, bias=spec.mamba_bias)
        self.gate, self.x, self.b = linear(inner, width), linear(inner, width), linear(shared, width)
        self.c, self.dt, self.output = linear(shared, width), linear(heads, width), linear(width, inner)
        self.conv, self.norm = Convolution(spec), GatedNorm(spec)
        self.dt_bias, self.A_log, self.D = (nnx.Param(jnp.zeros(heads)) for _ in range(3))

    def __call__(self, x_BTD: Array, context: ForwardContext, past: MambaState | None) -> tuple[Array, Any]:
        """Return the outputs, and the state behind the new tokens of a decoder."""
        spec, documents_BT = self._spec, context.attention_mask.segment_ids_BT
        inputs_BTE = jnp.concatenate([self.x(x_BTD), self.b(x_BTD), self.c(x_BTD)], axis=-1)
        dt_BTN = jax.nn.softplus(self.dt(x_BTD).astype(jnp.float32) + self.dt_bias[...])
        dt_BTN = jnp.maximum(dt_BTN, spec.mamba_time_step_min)
        before_BKE = None if past is None else past.inputs_BKE.astype(inputs_BTE.dtype)
        mixed_BTE = self.conv(inputs_BTE, documents_BT, before_BKE)
        if past is not None and context.num_new is not None:  # padding behind the new tokens keeps the state
            is_new_T = jnp.arange(x_BTD.shape[1]) < context.num_new
            dt_BTN = jnp.where(is_new_T[:, None], dt_BTN, 0.0)
        x_BTI, b, c = jnp.split(mixed_BTE, _ends(spec), axis=-1)
        heads, groups = (*x_BTD.shape[:2], spec.mamba_num_heads, -1), (*x_BTD.shape[:2], spec.mamba_num_groups, -1)
        y_BTNH, state_BNHS = scan(
            x_BTI.reshape(heads), dt_BTN, -jnp.exp(self.A_log[...]), b.reshape(groups), c.reshape(groups),
            self.D[...], chunk_tokens=spec.mamba_chunk_tokens, documents_BT=documents_BT,
            initial_BNHS=None if past is None else past.state_BNHS,
        )  # fmt: skip
        y_BTI = self.norm(y_BTNH.reshape(*x_BTD.shape[:2], -1), self.gate(x_BTD))
        return self.output(y_BTI.astype(x_BTD.dtype)), _after(past, inputs_BTE, state_BNHS, context)


def _ends(spec: DecoderSpec) -> tuple[int, int]:
    """Return where x and B end among the channels of the convolution."""
    inner = inner_channels(spec)
    return inner, inner + spec.mamba_num_groups * spec.mamba_state_size


def _after(past: MambaState | None, inputs_BTE: Array, state_BNHS: Array, context: ForwardContext) -> MambaState | None:
    if past is None or context.num_new is None:
        return None
    both_BUE = jnp.concatenate([past.inputs_BKE, inputs_BTE.astype(past.inputs_BKE.dtype)], axis=1)
    last_BKE = jax.lax.dynamic_slice_in_dim(both_BUE, context.num_new, past.inputs_BKE.shape[1], axis=1)
    return MambaState(last_BKE, state_BNHS)


class MixerBlock(nnx.Module):
    """A norm, and one of Mamba-2, attention and MLP."""

    def __init__(self, spec: DecoderSpec, attend: Attend, layer: int) -> None:
        self._spec, kind = spec, spec.mixer(layer)
        self.norm = stream_norm(spec)
        self.mamba = Mamba(spec) if kind == "M" else None
        self.attention = Attention(spec, attend) if kind == "*" else None
        self.mlp = Mlp(spec) if kind == "-" else None

    def __call__(
        self, x_BTD: Array, layer: Array | int, context: ForwardContext, taps: Taps, rotary: tuple[Array, Array] | None,
        cache: Any,
    ) -> tuple[Array, Any, Seen]:  # fmt: skip
        """Return the residual stream after the layer, its cache, and what was measured."""
        keys: list[Array | None] = [None] * 2
        if context.dropout_key is not None:
            keys = list(jax.random.split(jax.random.fold_in(context.dropout_key, layer), 2))
        before_BTD = taps.apply("block_input", layer, x_BTD)
        normed_BTD = self.norm(before_BTD)
        if self.mamba is not None:
            mixed_BTD, cache = self.mamba(normed_BTD, context, cache)
        elif self.attention is not None:
            mask = context.attention_mask.with_window(layer_window(self._spec, layer))
            context = replace(context, attention_mask=mask)
            mixed_BTD, cache = self.attention(normed_BTD, context, rotary, keys[0], cache)
        else:
            assert self.mlp is not None
            mixed_BTD = self.mlp(normed_BTD)
        if keys[1] is not None:
            mixed_BTD = apply_dropout(mixed_BTD, (self._spec.dropout_fraction, keys[1]))
        after_BTD = taps.apply("after_mlp", layer, before_BTD + mixed_BTD)
        measured = jnp.stack([moments(before_BTD), moments(after_BTD)]) if context.measure else None
        return after_BTD, cache, Seen(measured, None)


def decoder_blocks(spec: DecoderSpec, attend: Attend) -> list[nnx.Module]:
    """Return the blocks of a decoder by layer, without memory; equal ones are one object."""
    if spec.layer_pattern is None:
        return [nnx.eval_shape(lambda: Block(spec, attend))] * spec.num_layers
    return [nnx.eval_shape(partial(MixerBlock, spec, attend, layer)) for layer in range(spec.num_layers)]


def empty_cache(spec: DecoderSpec, batch_size: int, max_tokens: int, dtype: Any) -> Any:
    """Return the cache of a decoder before the first token.

    Keys and values ``[L, 2, B, max_tokens, K, H]``; with a layer pattern, an entry for each layer.
    """
    shape = (2, batch_size, max_tokens, spec.num_kv_heads, spec.head_dim)
    if spec.layer_pattern is None:
        return jnp.zeros((spec.num_layers, *shape), dtype)
    empty = {
        "M": lambda: MambaState.zeros(spec, batch_size, dtype), "*": lambda: jnp.zeros(shape, dtype),
        "-": lambda: None,
    }  # fmt: skip
    return tuple(empty[kind]() for kind in spec.layer_pattern)
