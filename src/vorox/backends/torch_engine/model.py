"""The decoder: embedding, blocks of attention and MLP around a residual stream, final norm.

Parameters are given (views of flat buffers, some fused: queries, keys and values; gate and up), so the modules only
say what is computed. The head is not here: the loss (``loss.py``) multiplies by it in chunks. Activations are
``[M, D]``, rows of all sequences below each other, except inside attention.

Shape legend: B rows, T positions, M = B x T, D width, N query heads, K key/value heads, X = N + 2K, H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vorox.backends.torch_engine.attention import Attend, Visibility
from vorox.backends.torch_engine.kernels import Kernels, activate
from vorox.backends.torch_engine.taps import Taps
from vorox.models.spec import ModelSpec


class Cache(Protocol):
    """Keys and values of earlier tokens."""

    def extend(self, layer: int, key_BKTH: Tensor, value_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        """Store those of new tokens and return all so far."""
        ...


@dataclass(frozen=True, slots=True)
class Pass:
    """What a forward pass needs beside the tokens.

    Attributes:
        shape_BT: Rows and positions.
        visibility: Who attends to whom.
        rotary: Cosines and sines, ``[B or 1, T, 1, H / 2]``, or ``None`` with learned positions.
        positions: Index of each position, ``[B or 1, T]``, for learned positions.
        dropout: Share that is dropped; 0 in evaluation.
        cache: For decoding.
        recompute_blocks: Keep only the inputs of blocks and run them again in the backward pass.
    """

    shape_BT: tuple[int, int]
    visibility: Visibility
    rotary: tuple[Tensor, Tensor] | None = None
    positions: Tensor | None = None
    dropout: float = 0.0
    cache: Cache | None = None
    recompute_blocks: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """What every module of one model shares."""

    spec: ModelSpec
    parameters: Mapping[str, nn.Parameter]
    kernels: Kernels
    attend: Attend
    taps: Taps


class Embedding(nn.Module):
    def __init__(self, parts: Parts, name: str) -> None:
        super().__init__()
        self.weight = parts.parameters[f"{name}.weight"]
        self._embed = parts.kernels.embed

    def forward(self, index: Tensor) -> Tensor:
        return self._embed(index.flatten(), self.weight).view(*index.shape, -1)


class Linear(nn.Module):
    def __init__(self, parts: Parts, name: str) -> None:
        super().__init__()
        self.weight = parts.parameters[f"{name}.weight"]
        self.bias = parts.parameters.get(f"{name}.bias")
        self._linear = parts.kernels.linear

    def forward(self, x_MD: Tensor) -> Tensor:
        return self._linear(x_MD, self.weight, self.bias)


class Norm(nn.Module):
    def __init__(self, parts: Parts, name: str, *, kind: str) -> None:
        super().__init__()
        self.weight = parts.parameters[f"{name}.weight"]
        self.bias = parts.parameters.get(f"{name}.bias")
        self._eps = parts.spec.norm_eps
        self._rms_norm = parts.kernels.rms_norm if kind == "rms_norm" else None

    def forward(self, x_MD: Tensor) -> Tensor:
        if self._rms_norm is not None:
            return self._rms_norm(x_MD, self.weight, self._eps)
        return F.layer_norm(x_MD, self.weight.shape, self.weight, self.bias, self._eps)


class Attention(nn.Module):
    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        spec, name = parts.spec, f"blocks.{layer}.attention"
        self._layer, self._attend, self._rotate = layer, parts.attend, parts.kernels.rotate
        self._num_heads, self._num_kv_heads, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.qkv = Linear(parts, f"{name}.qkv")
        self.output = Linear(parts, f"{name}.output")
        self.query_norm = Norm(parts, f"{name}.query_norm", kind="rms_norm") if spec.qk_norm else None
        self.key_norm = Norm(parts, f"{name}.key_norm", kind="rms_norm") if spec.qk_norm else None

    def forward(self, x_MD: Tensor, run: Pass) -> Tensor:
        num_rotated = self._num_heads + self._num_kv_heads
        qkv_BTXH = self.qkv(x_MD).view(*run.shape_BT, num_rotated + self._num_kv_heads, self._head_dim)
        if self.query_norm is None and run.rotary is not None:
            qkv_BTXH = self._rotate(qkv_BTXH, *run.rotary, num_rotated)
        query, key, value = qkv_BTXH.split((self._num_heads, self._num_kv_heads, self._num_kv_heads), dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self._normed(query, self.query_norm, run), self._normed(key, self.key_norm, run)
        query_BNTH, key_BKTH, value_BKTH = (x.transpose(1, 2) for x in (query, key, value))
        if run.cache is not None:
            key_BKTH, value_BKTH = run.cache.extend(self._layer, key_BKTH, value_BKTH)
        mixed_BNTH = self._attend(query_BNTH, key_BKTH, value_BKTH, run.visibility, run.dropout)
        return self.output(mixed_BNTH.transpose(1, 2).reshape(x_MD.shape[0], -1))

    def _normed(self, x_BTXH: Tensor, norm: Norm, run: Pass) -> Tensor:
        normed_BTXH = norm(x_BTXH.reshape(-1, self._head_dim)).view(x_BTXH.shape)
        return normed_BTXH if run.rotary is None else self._rotate(normed_BTXH, *run.rotary, x_BTXH.shape[2])


class Mlp(nn.Module):
    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        name = f"blocks.{layer}.mlp"
        self._activation, self._gate = parts.spec.activation, parts.kernels.gate
        self.gate_up = Linear(parts, f"{name}.gate_up") if parts.spec.is_gated else None
        self.up = None if parts.spec.is_gated else Linear(parts, f"{name}.up")
        self.down = Linear(parts, f"{name}.down")

    def forward(self, x_MD: Tensor) -> Tensor:
        if self.gate_up is not None:
            return self.down(self._gate(self.gate_up(x_MD), self._activation))
        assert self.up is not None
        return self.down(activate(self.up(x_MD), self._activation))


class Block(nn.Module):
    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self._layer, self._taps = layer, parts.taps
        self.attention_norm = Norm(parts, f"blocks.{layer}.attention_norm", kind=parts.spec.norm)
        self.attention = Attention(parts, layer)
        self.mlp_norm = Norm(parts, f"blocks.{layer}.mlp_norm", kind=parts.spec.norm)
        self.mlp = Mlp(parts, layer)

    def forward(self, x_MD: Tensor, run: Pass) -> Tensor:
        taps = self._taps
        if taps.active:
            x_MD = taps.apply("block_input", self._layer, x_MD, run.shape_BT)
        x_MD = x_MD + _dropped(self.attention(self.attention_norm(x_MD), run), run.dropout)
        if taps.active:
            x_MD = taps.apply("after_attention", self._layer, x_MD, run.shape_BT)
        x_MD = x_MD + _dropped(self.mlp(self.mlp_norm(x_MD)), run.dropout)
        if taps.active:
            x_MD = taps.apply("after_mlp", self._layer, x_MD, run.shape_BT)
        return x_MD


RunBlock = Callable[[nn.Module, Tensor, Pass], Tensor]


def call_block(block: nn.Module, x_MD: Tensor, run: Pass) -> Tensor:
    """One block; what gets compiled, once for all blocks."""
    return block(x_MD, run)


class Decoder(nn.Module):
    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.embedding = Embedding(parts, "embedding")
        is_learned = parts.spec.positions == "learned"
        self.position_embedding = Embedding(parts, "position_embedding") if is_learned else None
        self.blocks = nn.ModuleList(Block(parts, layer) for layer in range(parts.spec.num_layers))
        self.final_norm = Norm(parts, "final_norm", kind=parts.spec.norm)
        self.head = None if parts.spec.tie_embeddings else Linear(parts, "head")

    @property
    def head_weight(self) -> nn.Parameter:
        """``[V, D]``, for the loss and for logits."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, tokens_M: Tensor, run: Pass, run_block: RunBlock | None = None) -> Tensor:
        """Tokens to the final hidden state ``[M, D]``, which the head turns into logits.

        Args:
            tokens_M: Token ids.
            run: Everything else about this pass.
            run_block: How a block is called, if not plainly.
        """
        x_MD = self.embedding(tokens_M)
        if self.position_embedding is not None:
            assert run.positions is not None
            x_MD = (x_MD.view(*run.shape_BT, -1) + self.position_embedding(run.positions)).view(x_MD.shape)
        x_MD = _dropped(x_MD, run.dropout)
        call = call_block if run_block is None else run_block
        for block in self.blocks:
            if run.recompute_blocks:
                x_MD = checkpoint(call, block, x_MD, run, use_reentrant=False, preserve_rng_state=run.dropout > 0)
            else:
                x_MD = call(block, x_MD, run)
        return self.final_norm(x_MD)


def _dropped(x_MD: Tensor, dropout: float) -> Tensor:
    return F.dropout(x_MD, dropout) if dropout > 0 else x_MD
