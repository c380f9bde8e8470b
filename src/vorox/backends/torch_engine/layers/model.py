"""The decoder: embedding, blocks of attention and MLP around a residual stream, final norm.

Modules receive their parameters (``layouts/parameters.py``); some are fused: query, key and value; gate and up. The
head is not applied here: the loss (``losses/loss.py``) multiplies by it in chunks. Activations are ``[M, D]``, the
positions of all rows concatenated, except inside attention.

Shape legend: B rows, T positions, M = B x T, D width, N query heads, K key/value heads, X = N + 2K, H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from vorox.backends.torch_engine.attention.attention import Attend, AttentionMask
from vorox.backends.torch_engine.device.inputs import add_noise
from vorox.backends.torch_engine.layers.experts import Experts
from vorox.backends.torch_engine.layers.forward_context import ForwardContext
from vorox.backends.torch_engine.layers.kernels import Kernels, activation, keep_products
from vorox.backends.torch_engine.layers.vision import ImageEncoder
from vorox.backends.torch_engine.ranks.rank_group import num_here
from vorox.backends.torch_engine.ranks.tensor_parallel import TensorGroup
from vorox.backends.torch_engine.taps import Taps
from vorox.core.engine import TapPoint
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.pipeline_stages import PipelineStage
from vorox.models.user_layer import load_layer


@dataclass(frozen=True, slots=True)
class Parts:
    """What the modules of a model share; with tensor parallelism, ``parameters`` are the share of this rank."""

    spec: DecoderSpec
    parameters: Mapping[str, nn.Parameter]
    kernels: Kernels
    attend: Attend
    taps: Taps
    device: torch.device
    parallel: TensorGroup | None = None


class Embedding(nn.Module):
    def __init__(self, parts: Parts, name: str) -> None:
        super().__init__()
        self.weight = parts.parameters[f"{name}.weight"]
        self._embed = parts.kernels.embed

    def forward(self, index: Tensor) -> Tensor:
        return self._embed(index.flatten(), self.weight).view(*index.shape, -1)


class Linear(nn.Module):
    """A matrix product and a bias.

    Attributes:
        kernel: ``Kernels.linear``, which a pipeline may replace.
    """

    def __init__(self, parts: Parts, name: str) -> None:
        super().__init__()
        self.weight = parts.parameters[f"{name}.weight"]
        self.bias = parts.parameters.get(f"{name}.bias")
        self.kernel = parts.kernels.linear

    def forward(self, x_MD: Tensor) -> Tensor:
        return self.kernel(x_MD, self.weight, self.bias)


class Norm(nn.Module):
    def __init__(self, parts: Parts, name: str, *, kind: str) -> None:
        super().__init__()
        self.weight = parts.parameters[f"{name}.weight"]
        self.bias = parts.parameters.get(f"{name}.bias")
        self.eps, self.offset = parts.spec.norm_eps, float(parts.spec.norm_unit_offset)
        self.is_rms, self._rms_norm = kind == "rms_norm", parts.kernels.rms_norm

    def forward(self, x_MD: Tensor) -> Tensor:
        if self.is_rms:
            return self._rms_norm(x_MD, self.weight, self.eps, self.offset)
        return F.layer_norm(x_MD, self.weight.shape, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        spec, name = parts.spec, f"blocks.{layer}.attention"
        self._layer, self.attend, self._rotate = layer, parts.attend, parts.kernels.rotate
        self.num_heads, self.num_kv_heads = (
            num_here(parts.parallel, count) for count in (spec.num_heads, spec.num_kv_heads)
        )
        self._head_dim = spec.head_dim
        self._is_sliding, self.query_scale = spec.has_window(layer), spec.query_scale
        self.qkv = Linear(parts, f"{name}.qkv")
        self.output = Linear(parts, f"{name}.output")
        self.query_norm = Norm(parts, f"{name}.query_norm", kind="rms_norm") if spec.qk_norm else None
        self.key_norm = Norm(parts, f"{name}.key_norm", kind="rms_norm") if spec.qk_norm else None

    def forward(self, x_MD: Tensor, context: ForwardContext) -> Tensor:
        return self.output(self.mix(self.qkv(x_MD), context))

    def inputs(self, context: ForwardContext) -> tuple[tuple[Tensor, Tensor] | None, AttentionMask]:
        """Return the rotary table and the mask of this layer."""
        rotary, mask = context.rotary, context.attention_mask
        return (context.sliding_rotary or rotary, mask.sliding or mask) if self._is_sliding else (rotary, mask)

    def mix(self, qkv_MX: Tensor, context: ForwardContext) -> Tensor:
        """Return the values that each query attends to, ``[M, N x H]``."""
        num_rotated = self.num_heads + self.num_kv_heads
        qkv_BTXH = qkv_MX.view(*context.shape_BT, num_rotated + self.num_kv_heads, self._head_dim)
        rotary, mask = self.inputs(context)
        if self.query_norm is None and rotary is not None:
            qkv_BTXH = self._rotate(qkv_BTXH, *rotary, num_rotated)
        query, key, value = qkv_BTXH.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            query = self._norm_and_rotate(query, self.query_norm, rotary)
            key = self._norm_and_rotate(key, self.key_norm, rotary)
        if self.query_scale != 1:
            query = query * self.query_scale
        query_BNTH, key_BKTH, value_BKTH = (x.transpose(1, 2) for x in (query, key, value))
        if context.cache is not None:
            key_BKTH, value_BKTH = context.cache.extend(self._layer, key_BKTH, value_BKTH)
        attend = self.attend if context.exchange is None else context.exchange.attend(self.attend)
        mixed_BNTH = attend(query_BNTH, key_BKTH, value_BKTH, mask, context.dropout)
        return mixed_BNTH.transpose(1, 2).reshape(qkv_MX.shape[0], -1)

    def _norm_and_rotate(self, x_BTXH: Tensor, norm: Norm, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        normed_BTXH = norm(x_BTXH.reshape(-1, norm.weight.shape[0])).view(x_BTXH.shape)
        return normed_BTXH if rotary is None else self._rotate(normed_BTXH, *rotary, x_BTXH.shape[2])


class Mlp(nn.Module):
    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        name = f"blocks.{layer}.mlp"
        is_gated, self._gate, self.activation = parts.spec.is_gated, parts.kernels.gate, parts.spec.activation
        self.activate = None if is_gated else activation(parts.spec.activation)
        self.gate_up = Linear(parts, f"{name}.gate_up") if is_gated else None
        self.up = None if is_gated else Linear(parts, f"{name}.up")
        self.down = Linear(parts, f"{name}.down")

    def forward(self, x_MD: Tensor) -> Tensor:
        if self.gate_up is not None:
            return self.down(self._gate(self.gate_up(x_MD), self.activation))
        assert self.up is not None
        assert self.activate is not None
        return self.down(self.activate(self.up(x_MD)))


class UserMlp(nn.Module):
    """A user function (``model.mlp``) with its weights."""

    def __init__(self, parts: Parts, layer: int, path: str) -> None:
        super().__init__()
        self._function, prefix = load_layer(path), f"blocks.{layer}.mlp."
        for name, parameter in parts.parameters.items():
            if name.startswith(prefix):
                self.register_parameter(name.removeprefix(prefix), parameter)

    def forward(self, x_MD: Tensor) -> Tensor:
        return self._function(x_MD, dict(self.named_parameters()))


RunStage = Callable[["ResidualBlock", str, Tensor, ForwardContext], Tensor]
"""(block, stage, x_MD, context) -> the residual stream after the stage."""


def call_stage(block: ResidualBlock, stage: str, x_MD: Tensor, context: ForwardContext) -> Tensor:
    """Run a stage of a block; compiled instead of whole blocks if there are taps between the stages."""
    return getattr(block, stage)(x_MD, context)


class ResidualBlock(nn.Module):
    """A block as stages with taps before, between and after them.

    Attributes:
        stages: Methods from the residual stream to the residual stream, each with the tap point that follows it.
    """

    stages: ClassVar[tuple[tuple[str, TapPoint], ...]]
    has_experts = False

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self._layer, self.taps = layer, parts.taps

    def forward(self, x_MD: Tensor, context: ForwardContext, run_stage: RunStage = call_stage) -> Tensor:
        if self.taps.active:
            x_MD = self.taps.apply("block_input", self._layer, x_MD, context.stream_BT)
        for stage, point in self.stages:
            x_MD = run_stage(self, stage, x_MD, context)
            if self.taps.active:
                x_MD = self.taps.apply(point, self._layer, x_MD, context.stream_BT)
        return x_MD


class Block(ResidualBlock):
    stages = (("attend", "after_attention"), ("transform", "after_mlp"))

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__(parts, layer)

        def norm(name: str) -> nn.Module:
            """Return a norm, or the identity where the model has none."""
            is_there = f"blocks.{layer}.{name}.weight" in parts.parameters
            return Norm(parts, f"blocks.{layer}.{name}", kind=parts.spec.norm) if is_there else nn.Identity()

        self.attention_norm, self.attention_output_norm = norm("attention_norm"), norm("attention_output_norm")
        self.attention = Attention(parts, layer)
        self.mlp_norm, self.mlp_output_norm = norm("mlp_norm"), norm("mlp_output_norm")
        self.has_experts = parts.spec.num_experts is not None
        if self.has_experts:
            self.mlp = Experts(parts.spec, parts.parameters, parts.kernels, layer)
        else:
            self.mlp = Mlp(parts, layer) if parts.spec.mlp is None else UserMlp(parts, layer, parts.spec.mlp)

    def attend(self, x_MD: Tensor, context: ForwardContext) -> Tensor:
        mixed_MD = self.attention_output_norm(self.attention(self.attention_norm(x_MD), context))
        return x_MD + context.drop(mixed_MD)

    def transform(self, x_MD: Tensor, context: ForwardContext) -> Tensor:
        router = (context.router,) if self.has_experts else ()
        return x_MD + context.drop(self.mlp_output_norm(self.mlp(self.mlp_norm(x_MD), *router)))


MakeBlock = Callable[[Parts, int], ResidualBlock]
RunBlock = Callable[[ResidualBlock, Tensor, ForwardContext], Tensor]


def call_block(block: ResidualBlock, x_MD: Tensor, context: ForwardContext) -> Tensor:
    """Run a block; the function that is compiled once for all blocks."""
    return block(x_MD, context)


class Decoder(nn.Module):
    """The decoder, or one stage of it."""

    def __init__(self, parts: Parts, stage: PipelineStage | None = None, make_block: MakeBlock = Block) -> None:
        super().__init__()
        spec = parts.spec
        layers = range(spec.num_layers) if stage is None else stage.layers
        has_first, has_last = (True, True) if stage is None else (stage.is_first, stage.is_last)
        self._has_first = has_first
        has_embedding = has_first or (has_last and spec.tie_embeddings)
        self.embedding = Embedding(parts, "embedding") if has_embedding else None
        self._embedding_scale = spec.embedding_scale
        is_learned = spec.positions == "learned" and has_first
        vision = spec.vision if has_first else None
        self.vision = None if vision is None else ImageEncoder(vision, parts.parameters, parts.kernels)
        self.position_embedding = Embedding(parts, "position_embedding") if is_learned else None
        self.blocks = nn.ModuleList(make_block(parts, layer) for layer in layers)
        self.final_norm = Norm(parts, "final_norm", kind=spec.norm) if has_last else None
        self.head = Linear(parts, "head") if has_last and not spec.tie_embeddings else None

    @property
    def head_weight(self) -> nn.Parameter:
        """``[V, D]``, for the loss and for logits; the last stage has it."""
        head = self.embedding if self.head is None else self.head
        assert head is not None
        return cast("nn.Parameter", head.weight)

    def forward(
        self,
        x: Tensor,
        context: ForwardContext,
        finish: Callable[[Tensor], Any],
        run_block: RunBlock | None = None,
    ) -> Any:
        """Return ``finish`` of the final hidden state ``[M, D]``, or of a stage that is not the last its stream.

        Args:
            x: Token ids ``[M]``; after the first stage, the residual stream ``[M, D]`` of the previous one.
            context: All other inputs.
            finish: Applies the head; called inside the forward pass, where a sharded head is gathered.
            run_block: Runs a block, for example compiled; ``call_block`` by default.
        """
        x_MD = self.embed(x, context) if self._has_first else x
        x_MD = self.run_blocks(x_MD, context, run_block)
        return x_MD if self.final_norm is None else finish(self.norm(x_MD))

    def embed(self, tokens_M: Tensor, context: ForwardContext) -> Tensor:
        """Return the residual stream before the first block, ``[M, D]``."""
        assert self.embedding is not None
        x_MD = self.embedding(tokens_M)
        if self._embedding_scale != 1:
            x_MD = x_MD * self._embedding_scale
        if context.embedding_noise is not None:
            x_MD = add_noise(x_MD, context.embedding_noise, context.shape_BT[1], context.row_part)
        if context.images is not None:
            x_MD = cast("ImageEncoder", self.vision)(x_MD, context.images)
        if self.position_embedding is not None:
            x_BTD = x_MD.view(*context.stream_BT, -1) + self.position_embedding(context.stream_positions)
            x_MD = x_BTD.view(x_MD.shape)
        return context.drop(x_MD)

    def run_blocks(self, x_MD: Tensor, context: ForwardContext, run_block: RunBlock | None = None) -> Tensor:
        """Return the residual stream after the blocks, ``[M, D]``; for the arguments, see ``forward``."""
        call = call_block if run_block is None else run_block
        for block in cast("Iterable[ResidualBlock]", self.blocks):
            if context.recompute == "none":
                x_MD = call(block, x_MD, context)
            else:
                x_MD = checkpoint(
                    call, block, x_MD, context, use_reentrant=False, preserve_rng_state=context.dropout > 0,
                    context_fn=noop_context_fn if context.recompute == "block" else keep_products,
                )  # fmt: skip
        return x_MD

    def norm(self, x_MD: Tensor) -> Tensor:
        """Return the final hidden state, ``[M, D]``."""
        assert self.final_norm is not None
        return self.final_norm(x_MD)
