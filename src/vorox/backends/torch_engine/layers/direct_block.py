"""A block of the decoder as one autograd function, for uncompiled fp32 on the CPU.

A small model spends a tenth of a step between its operators: in modules, autograd nodes and dispatch. Here, the kernels
of a block (``direct_kernels.py``) run in sequence, and their backward passes in reverse, without autograd in between.
The modules (``model.py``) run the same operators in the same order, so results are equal bit for bit. A block with any
other part, a forward pass with any other input, pipelines, and steps of the user run the modules.

Shape legend: M rows (positions of a micro-batch), D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from vorox.backends.torch_engine.attention import attention
from vorox.backends.torch_engine.layers import direct_kernels
from vorox.backends.torch_engine.layers.direct_kernels import (
    GELU_APPROXIMATIONS,
    CausalAttention,
    Gate,
    Gelu,
    LayerNorm,
)
from vorox.backends.torch_engine.layers.forward_context import ForwardContext
from vorox.backends.torch_engine.layers.kernels import DirectLinear
from vorox.backends.torch_engine.layers.model import Block, Linear, Mlp, Norm, ResidualBlock, RunBlock, call_block

Kernel = type[torch.autograd.Function]
Step = tuple[Kernel, tuple[Any, ...]]
"""A kernel from one activation to the next, and its other arguments."""


def direct_blocks() -> RunBlock:
    """Return a function that runs a block as one autograd function if it can, and its modules otherwise."""
    known: dict[ResidualBlock, BlockSteps | None] = {}

    def run(block: ResidualBlock, x_MD: Tensor, context: ForwardContext) -> Tensor:
        if block not in known:
            known[block] = BlockSteps.of(block)
        steps = known[block]
        if steps is None or not steps.can_run(context):
            return call_block(block, x_MD, context)
        return DirectBlock.apply(x_MD, steps, context, *steps.parameters)

    return run


class BlockSteps:
    """The kernels of a block.

    Attributes:
        parameters: Those of the block, so that the autograd nodes of their gradients run, and the hooks on them.
    """

    def __init__(self, block: Block, mlp: Mlp) -> None:
        self._block, self._attention, self._modules = block, block.attention, tuple(block.modules())
        self.parameters = tuple(block.parameters())
        num_kv_heads = block.attention.num_kv_heads
        self._num_heads = (block.attention.num_heads, num_kv_heads, num_kv_heads)
        self._before = [*_norm(block.attention_norm), _linear(block.attention.qkv)]
        self._after = [_linear(block.attention.output), *_norm(block.attention_output_norm)]
        self.transform = [*_norm(block.mlp_norm), *_mlp(mlp), *_norm(block.mlp_output_norm)]

    @classmethod
    def of(cls, block: ResidualBlock) -> BlockSteps | None:
        """Return the steps of a block; ``None`` if one of its parts has no direct kernel."""
        if not isinstance(block, Block) or not isinstance(block.mlp, Mlp):
            return None
        part, mlp = block.attention, block.mlp
        linears = [module for module in block.modules() if isinstance(module, Linear)]
        is_direct = all(type(linear) is Linear and isinstance(linear.kernel, DirectLinear) for linear in linears)
        is_plain = part.query_norm is None and part.query_scale == 1
        has_kernels = part.attend is attention.sdpa and (mlp.up is None or mlp.activation in GELU_APPROXIMATIONS)
        return cls(block, mlp) if is_direct and is_plain and has_kernels else None

    def can_run(self, context: ForwardContext) -> bool:
        """Whether a forward pass needs only these kernels: no taps, hooks, dropout, recomputation or documents."""
        return (
            self._attention.inputs(context)[1].is_causal
            and context.dropout == 0
            and context.recompute == "none"
            and context.exchange is None
            and not self._block.taps.active
            and not _has_any_global_hook()
            and not any(_has_hooks(module) for module in self._modules)
            and not any(parameter._backward_hooks for parameter in self.parameters)
        )

    def attend(self, context: ForwardContext) -> list[Step]:
        """Return the steps of the attention branch."""
        rotary, _ = self._attention.inputs(context)
        return [*self._before, (CausalAttention, (context.shape_BT, self._num_heads, rotary)), *self._after]


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _linear(linear: Linear) -> Step:
    assert isinstance(linear.kernel, DirectLinear)
    return direct_kernels.Linear, (linear.weight, linear.bias, linear.kernel.products, False)


def _norm(norm: nn.Module) -> list[Step]:
    """Return the step of a norm; none for the identity."""
    if not isinstance(norm, Norm):
        return []
    if norm.is_rms:
        return [(direct_kernels.RmsNorm, (norm.weight, norm.eps, norm.offset))]
    return [(LayerNorm, (norm.weight, norm.bias, norm.eps))]


def _mlp(mlp: Mlp) -> list[Step]:
    if mlp.up is None:
        assert mlp.gate_up is not None
        return [_linear(mlp.gate_up), (Gate, (mlp.activation,)), _linear(mlp.down)]
    return [_linear(mlp.up), (Gelu, (GELU_APPROXIMATIONS[mlp.activation],)), _linear(mlp.down)]


class _Call:
    """The saved state of a kernel: the part of autograd's context that kernels use."""

    needs_input_grad = (True,)
    _saved: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        self._saved = tensors

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """The saved tensors, once: the kernel frees them."""
        saved, self._saved = self._saved, ()
        return saved


class _Branch:
    """A residual branch: the saved state of its kernels, and their backward passes."""

    def __init__(self) -> None:
        self._calls: list[tuple[Kernel, _Call]] = []

    def forward(self, x_MD: Tensor, steps: Sequence[Step]) -> Tensor:
        """Return ``x`` plus the result of the steps."""
        y_MD = x_MD
        for kernel, arguments in steps:
            call = _Call()
            y_MD = kernel.forward(call, y_MD, *arguments)
            self._calls.append((kernel, call))
        return y_MD.add_(x_MD)

    def backward(self, d_y_MD: Tensor) -> Tensor:
        """Return the gradient of ``x``; saved state is freed on the way."""
        d_x_MD = d_y_MD
        while self._calls:
            kernel, call = self._calls.pop()
            d_x_MD = kernel.backward(call, d_x_MD)[0]
        return d_x_MD.add_(d_y_MD)


class DirectBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, steps: BlockSteps, context: ForwardContext, *parameters: Tensor) -> Tensor:
        ctx.branches, ctx.num_parameters = (_Branch(), _Branch()), len(parameters)
        for branch, branch_steps in zip(ctx.branches, (steps.attend(context), steps.transform), strict=True):
            x_MD = branch.forward(x_MD, branch_steps)
        return x_MD

    @staticmethod
    def backward(ctx: Any, d_y_MD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        branches, ctx.branches = ctx.branches, ()
        if not branches:
            raise RuntimeError("A second backward pass through a block: the first has freed its saved tensors")
        for branch in reversed(branches):
            d_y_MD = branch.backward(d_y_MD)
        return d_y_MD, None, None, *(None,) * ctx.num_parameters
