"""Kernels with hand-written backward passes, for uncompiled fp32 on the CPU.

Memory traffic and small operations dominate there: weight gradients are added to the flat buffers
(``layouts/parameters.py``) within the backward pass, and element-wise chains share buffers. ``kernels.py`` chooses
them; ``direct_block.py`` runs those of a block in sequence.

Shape legend: M rows (positions of a micro-batch), D width, F width of the MLP, O outputs, V vocabulary, B rows of
tokens, T positions, H head width, X heads of queries, keys and values together, N query heads, E experts, S slots:
positions times experts per token, R rows of the weights of all experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vorox.backends.torch_engine.device.matrix_products import Products

_aten = torch.ops.aten
_attend = _aten._scaled_dot_product_flash_attention_for_cpu.default
_attend_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
GATE_APPROXIMATIONS = {"geglu": "none", "geglu_tanh": "tanh"}
GELU_APPROXIMATIONS = {"gelu": "none", "gelu_tanh": "tanh"}


def activate_gate(gate_MF: Tensor, activation: str) -> Tensor:
    return F.silu(gate_MF) if activation == "swiglu" else F.gelu(gate_MF, approximate=GATE_APPROXIMATIONS[activation])


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient to add to; a training loop outside of the engine may have removed it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_M: Tensor, weight_VD: nn.Parameter) -> Tensor:
        ctx.tokens_M, ctx.weight_VD = tokens_M, weight_VD
        return F.embedding(tokens_M, weight_VD.detach())

    @staticmethod
    def backward(ctx: Any, d_x_MD: Tensor) -> tuple[None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _gradient(ctx.weight_VD).index_add_(0, ctx.tokens_M, d_x_MD)
        return None, None


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MD: Tensor, weight_OD: nn.Parameter, bias_O: nn.Parameter | None, products: Products, is_kept: bool
    ) -> Tensor:
        ctx.save_for_backward(x_MD)
        ctx.weight_OD, ctx.bias_O, ctx.products = weight_OD, bias_O, products
        y_MO = products(x_MD, weight_OD.detach())
        if bias_O is None:
            return y_MO
        return y_MO + bias_O.detach() if is_kept else y_MO.add_(bias_O.detach())

    @staticmethod
    def backward(ctx: Any, d_y_MO: Tensor) -> tuple[Tensor | None, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x_MD,) = ctx.saved_tensors
        if ctx.weight_OD.requires_grad:
            ctx.products.add_to(_gradient(ctx.weight_OD), d_y_MO, x_MD)
        if ctx.bias_O is not None and ctx.bias_O.requires_grad:
            _gradient(ctx.bias_O).add_(d_y_MO.sum(0))
        d_x_MD = ctx.products(d_y_MO, ctx.weight_OD.detach().t()) if ctx.needs_input_grad[0] else None
        return d_x_MD, None, None, None, None


class Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, weight_RD: nn.Parameter, ends_E: Tensor, products: Products) -> Tensor:
        ctx.save_for_backward(x_SD)
        ctx.weight_RD, ctx.products = weight_RD, products
        ctx.segments = segments = _segments(ends_E, weight_RD.shape[0])
        parts = [products(x_SD[slots], weight_RD.detach()[rows]) for slots, rows in segments]
        return torch.cat(parts) if parts else x_SD.new_empty(0, weight_RD.shape[0] // len(ends_E))

    @staticmethod
    def backward(ctx: Any, d_y_SO: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x_SD,) = ctx.saved_tensors
        if ctx.weight_RD.requires_grad:
            gradient_RD = _gradient(ctx.weight_RD)
            for slots, rows in ctx.segments:
                ctx.products.add_to(gradient_RD[rows], d_y_SO[slots], x_SD[slots])
        weight_RD = ctx.weight_RD.detach()
        parts = [ctx.products(d_y_SO[slots], weight_RD[rows].t()) for slots, rows in ctx.segments]
        return torch.cat(parts) if parts else torch.zeros_like(x_SD), None, None, None


def _segments(ends_E: Tensor, num_rows: int) -> list[tuple[slice, slice]]:
    """Return slots and rows of the weights of each expert that has slots."""
    ends, size = ends_E.tolist(), num_rows // len(ends_E)
    starts = [0, *ends[:-1]]
    return [
        (slice(start, end), slice(expert * size, (expert + 1) * size))
        for expert, (start, end) in enumerate(zip(starts, ends, strict=True))
        if start < end
    ]


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, weight_D: nn.Parameter, eps: float, offset: float) -> Tensor:
        norm_M1 = torch.linalg.vector_norm(x_MD, dim=-1, keepdim=True)
        scale_M1 = norm_M1.square_().div_(x_MD.shape[-1]).add_(eps).rsqrt_()
        unit_MD = x_MD * scale_M1
        ctx.save_for_backward(unit_MD, scale_M1)
        ctx.weight_D = weight_D
        ctx.scale_D = weight_D.detach() + offset if offset else weight_D.detach()
        return unit_MD * ctx.scale_D

    @staticmethod
    def backward(ctx: Any, d_y_MD: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        unit_MD, scale_M1 = ctx.saved_tensors
        d_weight_MD = d_y_MD * unit_MD
        if ctx.weight_D.requires_grad:
            _gradient(ctx.weight_D).add_(d_weight_MD.sum(0))
        projection_M1 = torch.mv(d_weight_MD, ctx.scale_D).div_(-unit_MD.shape[-1])[:, None]
        return (unit_MD * projection_M1).addcmul_(d_y_MD, ctx.scale_D).mul_(scale_M1), None, None, None


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, weight_D: nn.Parameter, bias_D: nn.Parameter | None, eps: float) -> Tensor:
        bias = None if bias_D is None else bias_D.detach()
        y_MD, mean_M1, scale_M1 = torch.native_layer_norm(x_MD, weight_D.shape, weight_D.detach(), bias, eps)
        ctx.save_for_backward(x_MD, mean_M1, scale_M1)
        ctx.weight_D, ctx.bias_D = weight_D, bias_D
        return y_MD

    @staticmethod
    def backward(ctx: Any, d_y_MD: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_MD, mean_M1, scale_M1 = ctx.saved_tensors
        weight_D, bias_D = ctx.weight_D, ctx.bias_D
        bias = None if bias_D is None else bias_D.detach()
        wanted = [True, weight_D.requires_grad, bias_D is not None and bias_D.requires_grad]
        d_x_MD, d_weight_D, d_bias_D = _aten.native_layer_norm_backward.default(
            d_y_MD, x_MD, weight_D.shape, mean_M1, scale_M1, weight_D.detach(), bias, wanted
        )
        if d_weight_D is not None:
            _gradient(weight_D).add_(d_weight_D)
        if bias_D is not None and d_bias_D is not None:
            _gradient(bias_D).add_(d_bias_D)
        return d_x_MD, None, None, None


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up_M2F: Tensor, activation: str) -> Tensor:
        gate_MF, up_MF = gate_and_up_M2F.chunk(2, dim=-1)
        active_MF = activate_gate(gate_MF, activation)
        ctx.save_for_backward(gate_and_up_M2F, active_MF)
        ctx.activation = activation
        return active_MF * up_MF

    @staticmethod
    def backward(ctx: Any, d_hidden_MF: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate_and_up_M2F, active_MF = ctx.saved_tensors
        gate_MF, up_MF = gate_and_up_M2F.chunk(2, dim=-1)
        d_both_M2F = torch.empty_like(gate_and_up_M2F)
        d_gate_MF, d_up_MF = d_both_M2F.chunk(2, dim=-1)
        torch.mul(d_hidden_MF, active_MF, out=d_up_MF)
        d_active_MF = d_hidden_MF * up_MF
        if ctx.activation == "swiglu":
            _aten.silu_backward.grad_input(d_active_MF, gate_MF, grad_input=d_gate_MF)
        else:
            approximate = GATE_APPROXIMATIONS[ctx.activation]
            _aten.gelu_backward.grad_input(d_active_MF, gate_MF, approximate=approximate, grad_input=d_gate_MF)
        return d_both_M2F, None


class Gelu(torch.autograd.Function):
    """GELU for ``direct_block.py``: the gradient takes the memory of the gradient of its result."""

    @staticmethod
    def forward(ctx: Any, x_MF: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x_MF)
        ctx.approximate = approximate
        return F.gelu(x_MF, approximate=approximate)

    @staticmethod
    def backward(ctx: Any, d_y_MF: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x_MF,) = ctx.saved_tensors
        _aten.gelu_backward.grad_input(d_y_MF, x_MF, approximate=ctx.approximate, grad_input=d_y_MF)
        return d_y_MF, None


class CausalAttention(torch.autograd.Function):
    """Rotation and attention of all heads by the kernel that PyTorch takes for them, with a causal mask."""

    @staticmethod
    def forward(
        ctx: Any, qkv_MX: Tensor, shape_BT: tuple[int, int], num_heads: tuple[int, int, int],
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        ctx.rotary, ctx.num_rotated = rotary, num_heads[0] + num_heads[1]
        qkv_BTXH = qkv_MX.view(*shape_BT, sum(num_heads), -1)
        if rotary is not None:
            qkv_BTXH = _turn(qkv_BTXH, *rotary, ctx.num_rotated, 1)
        query, key, value = (x.transpose(1, 2) for x in qkv_BTXH.split(num_heads, dim=2))
        mixed_BNTH, log_sums = _attend(query, key, value, 0.0, True)
        ctx.save_for_backward(query, key, value, mixed_BNTH, log_sums)
        return mixed_BNTH.transpose(1, 2).reshape(len(qkv_MX), -1)

    @staticmethod
    def backward(ctx: Any, d_mixed_MX: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, mixed_BNTH, log_sums = ctx.saved_tensors
        num_rows, num_heads, num_positions, _ = query.shape
        d_mixed_BNTH = d_mixed_MX.view(num_rows, num_positions, num_heads, -1).transpose(1, 2)
        found = _attend_backward(d_mixed_BNTH, query, key, value, mixed_BNTH, log_sums, 0.0, True)
        del query, key, value, mixed_BNTH, log_sums  # before memory for their gradients' copy is taken
        d_qkv_BTXH = torch.cat([d_x.transpose(1, 2) for d_x in found], dim=2)
        if ctx.rotary is not None:
            cosines, sines = ctx.rotary
            d_qkv_BTXH = _turn(d_qkv_BTXH, cosines, sines, ctx.num_rotated, -1)
        return d_qkv_BTXH.view(len(d_mixed_MX), -1), None, None, None


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTXH: Tensor, cosines: Tensor, sines: Tensor, num_rotated: int) -> Tensor:
        ctx.tables, ctx.num_rotated = (cosines, sines), num_rotated
        return _turn(x_BTXH, cosines, sines, num_rotated, 1)

    @staticmethod
    def backward(ctx: Any, d_y_BTXH: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cosines, sines = ctx.tables
        return _turn(d_y_BTXH, cosines, sines, ctx.num_rotated, -1), None, None, None


def _turn(x_BTXH: Tensor, cosines: Tensor, sines: Tensor, num_rotated: int, direction: int) -> Tensor:
    """Return a new tensor with the first ``num_rotated`` heads rotated (``direction`` 1 or -1), the others copied."""
    y_BTXH = torch.empty_like(x_BTXH, memory_format=torch.contiguous_format)
    half = cosines.shape[-1]
    first, second = x_BTXH[:, :, :num_rotated, :half], x_BTXH[:, :, :num_rotated, half : 2 * half]
    new_first, new_second = y_BTXH[:, :, :num_rotated, :half], y_BTXH[:, :, :num_rotated, half : 2 * half]
    torch.mul(first, cosines, out=new_first).addcmul_(second, sines, value=-direction)
    torch.mul(second, cosines, out=new_second).addcmul_(first, sines, value=direction)
    if 2 * half < x_BTXH.shape[3]:
        y_BTXH[:, :, :num_rotated, 2 * half :].copy_(x_BTXH[:, :, :num_rotated, 2 * half :])
    if num_rotated < x_BTXH.shape[2]:
        y_BTXH[:, :, num_rotated:].copy_(x_BTXH[:, :, num_rotated:])
    return y_BTXH
