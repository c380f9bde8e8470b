"""The decoder in Flax NNX: embedding, attention and MLP blocks on a residual stream, final norm.

Modules are created without memory and immediately split into a graph definition and a plain tree of parameters, so the
engine, the optimizer and checkpoints handle trees only (``jax_engine/parameters.py``). A path inside the modules is the
canonical name of the parameter. The head is not applied here: the loss (``jax_engine/loss.py``) multiplies by it in
chunks.

Shape legend: B rows, T positions, D width, O outputs, N query heads, K key/value heads, X heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vorox.backends.jax_engine.attention import (
    Attend,
    AttentionMask,
    apply_dropout,
    apply_rotary,
    layer_rotary,
    layer_window,
)
from vorox.backends.jax_engine.layers.experts import Experts, RouterStep, Seen
from vorox.backends.jax_engine.parameters import ParameterLayout
from vorox.backends.jax_engine.taps import Taps, moments
from vorox.core.user_code.extensions import load_function
from vorox.models.decoder.spec import DecoderSpec

Array = jax.Array
Constrain = Callable[[Array], Array]
REMAT_POLICIES = {"block": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
"""``train.activation_checkpointing`` to what a block saves for its backward pass: nothing, or its matrix products."""


@dataclass(frozen=True)
class ForwardContext:
    """Inputs of a forward pass besides parameters and tokens.

    Attributes:
        attention_mask: Which keys each query may attend to.
        positions_BT: Position of each token, ``[B or 1, T]``.
        dropout_key: Random key of dropout; ``None`` for no dropout.
        cache: Keys and values so far, ``[L, 2, B, S, K, H]``, for decoding; with a layer pattern, an entry per layer.
        cache_start: Position at which new keys and values are written.
        num_new: New tokens in decoding; padding follows them.
        measure: Whether to measure the residual stream at the tap points.
        router: Losses and metrics of the routers of experts; ``None`` in evaluation, and without experts.
    """

    attention_mask: AttentionMask
    positions_BT: Array
    dropout_key: Array | None = None
    cache: Any = None
    cache_start: Array | None = None
    num_new: Array | None = None
    measure: bool = False
    router: RouterStep | None = None


class Linear(nnx.Module):
    def __init__(self, num_out: int, num_in: int, *, bias: bool) -> None:
        self.weight = nnx.Param(jnp.zeros((num_out, num_in)))
        self.bias = nnx.Param(jnp.zeros(num_out)) if bias else None

    def __call__(self, x_BTD: Array) -> Array:
        y_BTO = jnp.einsum("btd,od->bto", x_BTD, self.weight[...].astype(x_BTD.dtype))
        return y_BTO if self.bias is None else y_BTO + self.bias[...].astype(x_BTD.dtype)


class Embedding(nnx.Module):
    def __init__(self, num_rows: int, width: int) -> None:
        self.weight = nnx.Param(jnp.zeros((num_rows, width)))

    def __call__(self, index: Array, dtype: Any) -> Array:
        return jnp.take(self.weight[...], index, axis=0).astype(dtype)


class Norm(nnx.Module):
    def __init__(self, width: int, *, kind: str, bias: bool, eps: float, offset: float = 0.0) -> None:
        self.weight = nnx.Param(jnp.ones(width))
        self._offset = offset
        self.bias = nnx.Param(jnp.zeros(width)) if bias else None
        self._kind, self._eps = kind, eps

    def __call__(self, x: Array) -> Array:
        centred = x.astype(jnp.float32)
        if self._kind == "layer_norm":
            centred = centred - centred.mean(axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + self._eps)
        weight = self.weight[...] + self._offset if self._offset else self.weight[...]
        normed = centred * scale * weight
        return (normed if self.bias is None else normed + self.bias[...]).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, spec: DecoderSpec, attend: Attend) -> None:
        self._spec, self._attend = spec, attend
        num_query, num_key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        bias = bool(spec.attention_bias)
        self.query = Linear(num_query, spec.hidden_size, bias=bias)
        self.key = Linear(num_key, spec.hidden_size, bias=bias)
        self.value = Linear(num_key, spec.hidden_size, bias=bias)
        self.output = Linear(spec.hidden_size, num_query, bias=spec.attention_bias is True)
        norm = partial(Norm, kind="rms_norm", bias=False, eps=spec.norm_eps, offset=float(spec.norm_unit_offset))
        whole = spec.qk_norm == "full_width"
        self.query_norm = norm(num_query if whole else spec.head_dim) if spec.qk_norm else None
        self.key_norm = norm(num_key if whole else spec.head_dim) if spec.qk_norm else None

    def __call__(
        self,
        x_BTD: Array,
        context: ForwardContext,
        rotary: tuple[Array, Array] | None,
        key: Array | None,
        cache: Array | None,
    ) -> tuple[Array, Array | None]:
        heads = (*x_BTD.shape[:2], -1, self._spec.head_dim)
        query_BTNH, key_BTKH = self.query(x_BTD).reshape(heads), self.key(x_BTD).reshape(heads)
        value_BTKH = self.value(x_BTD).reshape(heads)
        if self.query_norm is not None and self.key_norm is not None:
            query_BTNH, key_BTKH = _norm_heads(self.query_norm, query_BTNH), _norm_heads(self.key_norm, key_BTKH)
        if rotary is not None:
            query_BTNH, key_BTKH = apply_rotary(query_BTNH, *rotary), apply_rotary(key_BTKH, *rotary)
        if self._spec.query_scale != 1:
            query_BTNH = query_BTNH * self._spec.query_scale
        if cache is not None:
            assert context.cache_start is not None
            new = jnp.stack([key_BTKH, value_BTKH])
            cache = jax.lax.dynamic_update_slice_in_dim(cache, new.astype(cache.dtype), context.cache_start, axis=2)
            key_BTKH, value_BTKH = cache[0].astype(x_BTD.dtype), cache[1].astype(x_BTD.dtype)
        dropout = None if key is None else (self._spec.dropout_fraction, key)
        mixed_BTNH = self._attend(query_BTNH, key_BTKH, value_BTKH, context.attention_mask, dropout)
        return self.output(mixed_BTNH.reshape(*x_BTD.shape[:2], -1)), cache


def _norm_heads(norm: Norm, x_BTXH: Array) -> Array:
    """Norm each head, or all heads together, by the width of the norm."""
    return norm(x_BTXH.reshape(*x_BTXH.shape[:2], -1, norm.weight.shape[0])).reshape(x_BTXH.shape)


_ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
    "swiglu": jax.nn.silu,
    "geglu": partial(jax.nn.gelu, approximate=False),
    "geglu_tanh": partial(jax.nn.gelu, approximate=True),
}


def _activation(name: str) -> Callable[[Array], Array]:
    """Return a built-in activation or a user function."""
    return _ACTIVATIONS.get(name) or load_function(name, kind="activation", where="model.activation")


class Mlp(nnx.Module):
    def __init__(self, spec: DecoderSpec) -> None:
        self._activate = _activation(spec.activation)
        width, inner = spec.hidden_size, spec.intermediate_size
        self.gate = Linear(inner, width, bias=spec.mlp_bias) if spec.is_gated else None
        self.up = Linear(inner, width, bias=spec.mlp_bias)
        self.down = Linear(width, inner, bias=spec.mlp_bias)

    def __call__(self, x_BTD: Array) -> Array:
        if self.gate is not None:
            return self.down(self._activate(self.gate(x_BTD)) * self.up(x_BTD))
        return self.down(self._activate(self.up(x_BTD)))


class Block(nnx.Module):
    def __init__(self, spec: DecoderSpec, attend: Attend) -> None:
        self._spec = spec
        has_pre, has_post = spec.norm_placement != "post", spec.norm_placement != "pre"
        self.attention_norm = stream_norm(spec) if has_pre else None
        self.attention = Attention(spec, attend)
        self.attention_output_norm = stream_norm(spec) if has_post else None
        self.mlp_norm = stream_norm(spec) if has_pre else None
        has_experts = spec.num_experts is not None
        self.mlp = Experts(spec, _activation(spec.activation)) if has_experts else Mlp(spec)
        self.mlp_output_norm = stream_norm(spec) if has_post else None

    def __call__(
        self, x_BTD: Array, layer: Array | int, context: ForwardContext, taps: Taps, rotary: tuple[Array, Array] | None,
        cache: Array | None,
    ) -> tuple[Array, Array | None, Seen]:  # fmt: skip
        """Return the residual stream after the block, the layer's cache, and what was measured."""
        keys: list[Array | None] = [None] * 3
        if context.dropout_key is not None:
            keys = list(jax.random.split(jax.random.fold_in(context.dropout_key, layer), 3))
        measured: list[Array] = []

        def tap(point: str, x: Array) -> Array:
            x = taps.apply(point, layer, x)
            if context.measure:
                measured.append(moments(x))
            return x

        context = replace(context, attention_mask=context.attention_mask.with_window(layer_window(self._spec, layer)))
        x_BTD = tap("block_input", x_BTD)
        rotary = layer_rotary(self._spec, rotary, layer)
        mixed_BTD, cache = self.attention(_apply(self.attention_norm, x_BTD), context, rotary, keys[0], cache)
        x_BTD = tap("after_attention", x_BTD + self._drop(_apply(self.attention_output_norm, mixed_BTD), keys[1]))
        routers, normed_BTD = None, _apply(self.mlp_norm, x_BTD)
        if isinstance(self.mlp, Experts):
            inner_BTD, routers = self.mlp(normed_BTD, context.router)
        else:
            inner_BTD = self.mlp(normed_BTD)
        inner_BTD = _apply(self.mlp_output_norm, inner_BTD)
        x_BTD = tap("after_mlp", x_BTD + self._drop(inner_BTD, keys[2]))
        return x_BTD, cache, Seen(jnp.stack(measured) if measured else None, routers)

    def _drop(self, x_BTD: Array, key: Array | None) -> Array:
        return x_BTD if key is None else apply_dropout(x_BTD, (self._spec.dropout_fraction, key))


def stream_norm(spec: DecoderSpec) -> Norm:
    """Return a norm of the residual stream."""
    return Norm(
        spec.hidden_size, kind=spec.norm, bias=spec.norm_bias, eps=spec.norm_eps, offset=float(spec.norm_unit_offset)
    )


def _apply(norm: Norm | None, x_BTD: Array) -> Array:
    return x_BTD if norm is None else norm(x_BTD)


class OuterLayers(nnx.Module):
    """The layers outside the blocks: embeddings, final norm, head."""

    def __init__(self, spec: DecoderSpec) -> None:
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size)
        is_learned = spec.positions == "learned"
        self.position_embedding = Embedding(spec.max_positions_tokens, spec.hidden_size) if is_learned else None
        self.final_norm = stream_norm(spec)
        self.head = None if spec.tie_embeddings else Linear(spec.vocab_size, spec.hidden_size, bias=False)


class Decoder:
    """The model as pure functions of a tree of parameters.

    Args:
        layout: Leaves of the parameter tree.
        blocks: The block of each layer, without memory.
        rotary: Cosines and sines of all positions, or ``None``.
        dtype: Precision of activations; parameters stay fp32.
        taps: Functions attached to the residual stream.
        remat: ``train.activation_checkpointing``.
        constrain: Constrains the sharding of the residual stream.
    """

    def __init__(
        self, layout: ParameterLayout, blocks: Sequence[nnx.Module], rotary: tuple[Any, Any] | None, *, dtype: Any,
        taps: Taps, remat: str, constrain: Constrain,
    ) -> None:  # fmt: skip
        self._layout, self._rotary, self._dtype, self._taps = layout, rotary, dtype, taps
        self._remat, self._constrain = remat, constrain
        spec = layout.spec
        split = {id(block): _SplitModule(block) for block in blocks}
        self._layers = [split[id(block)] for block in blocks]
        self._outer = _SplitModule(nnx.eval_shape(lambda: OuterLayers(spec)))

    def head(self, params: Mapping[str, Array]) -> tuple[str, Array]:
        """Return name and value of the output head's leaf ``[V, D]``."""
        name = "embedding.weight" if self._layout.spec.tie_embeddings else "head.weight"
        return name, params[name]

    def __call__(
        self, params: Mapping[str, Array], tokens_BT: Array, context: ForwardContext
    ) -> tuple[Array, Any, Seen]:  # fmt: skip
        """Return the final hidden state ``[B, T, D]``, the extended cache, and what was measured, by layer."""
        outer = self._outer.bind(params)
        x_BTD = outer.embedding(tokens_BT, self._dtype)
        if self._layout.spec.scale_embeddings:
            x_BTD = x_BTD * self._layout.spec.embedding_scale
        if outer.position_embedding is not None:
            x_BTD = x_BTD + outer.position_embedding(context.positions_BT, self._dtype)
        if context.dropout_key is not None:
            key = jax.random.fold_in(context.dropout_key, self._layout.spec.num_layers)
            x_BTD = apply_dropout(x_BTD, (self._layout.spec.dropout_fraction, key))
        rotary = None
        if self._rotary is not None:
            cosines, sines = (jnp.asarray(table)[context.positions_BT][:, :, None] for table in self._rotary)
            rotary = cosines, sines
        x_BTD, cache, seen = self._blocks(params, self._constrain(x_BTD), context, rotary)
        return outer.final_norm(x_BTD), cache, seen

    def _blocks(
        self, params: Mapping[str, Array], x_BTD: Array, context: ForwardContext, rotary: tuple[Array, Array] | None
    ) -> tuple[Array, Any, Seen]:
        num_layers = self._layout.spec.num_layers

        def body(x: Array, layer: Any, tree: Mapping[str, Array], cache: Any) -> Any:
            block = self._layers[0 if self._layout.scanned else layer]
            x, cache, seen = block.bind(tree)(x, layer, context, self._taps, rotary, cache)
            return self._constrain(x), (cache, seen)

        # A scan stores everything saved for the backward pass, including what XLA would otherwise recompute.
        remat = "dots" if self._layout.scanned and self._remat == "none" else self._remat
        if remat != "none" and context.cache is None:
            body = jax.checkpoint(
                body, policy=REMAT_POLICIES[remat], static_argnums=() if self._layout.scanned else (1,),
                prevent_cse=not self._layout.scanned,  # a scan body is isolated already
            )  # fmt: skip
        if self._layout.scanned:
            stacked = {
                name.removeprefix("blocks."): leaf for name, leaf in params.items() if name.startswith("blocks.")
            }
            x_BTD, (cache, seen) = jax.lax.scan(
                lambda x, inputs: body(x, *inputs), x_BTD, (jnp.arange(num_layers), stacked, context.cache)
            )
            return x_BTD, cache, seen
        caches: list[Any] = []
        measured: list[Any] = []
        for layer in range(num_layers):
            layer_cache = None if context.cache is None else context.cache[layer]
            x_BTD, (cache, seen) = body(x_BTD, layer, _subtree(params, f"blocks.{layer}."), layer_cache)
            caches.append(cache)
            measured.append(seen)
        seen = jax.tree.map(lambda *layers: jnp.stack(layers), *measured)
        if context.cache is None:
            return x_BTD, None, seen
        return x_BTD, jnp.stack(caches) if self._layout.spec.layer_pattern is None else tuple(caches), seen


def _subtree(params: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): leaf for name, leaf in params.items() if name.startswith(prefix)}


class _SplitModule:
    """An NNX module split into its graph definition and the paths of its parameters."""

    def __init__(self, module: nnx.Module) -> None:
        self._definition, state = nnx.split(module)
        self._leaves = list(nnx.to_flat_state(state))

    def bind(self, params: Mapping[str, Array]) -> Any:
        """Return the module with the parameters of a tree."""
        bound = [(path, leaf.replace(params[".".join(map(str, path))])) for path, leaf in self._leaves]
        return nnx.merge(self._definition, nnx.from_flat_state(bound))
