"""Model kernels in two versions: plain PyTorch, and hand-written backward passes for fp32 on CPU.

The plain version uses autograd; it is compiled, and runs on accelerators and under autocast. The direct version is for
uncompiled fp32 on the CPU, where memory traffic and small operations dominate: weight gradients are accumulated
directly in the flat buffers (``parameters.py``), element-wise chains share buffers, and matrix products use the fastest
library (``Compute.products``). Tests compare both versions with each other and with float64.

Shape legend: M rows (positions of a micro-batch), D width, F width of the MLP, O outputs, V vocabulary, T positions,
H head width, X heads of queries, keys and values together, E experts, S slots: positions times experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from vorox.backends.torch_engine.devices import Compute
from vorox.backends.torch_engine.recorded_choices import RecordedChoices
from vorox.core.extensions import load_function

ONEDNN_MIN_WORK = 1 << 20
"""Below so many multiplications, starting a oneDNN product costs more than it saves."""
_aten = torch.ops.aten


class Products:
    """Matrix products ``a @ b.T`` through one library; either factor may be a transposed view.

    Args:
        use_onednn: Use oneDNN for large fp32 products; otherwise ``torch.mm``.
        choices: The library of products that add to a gradient.
    """

    def __init__(self, *, use_onednn: bool, choices: RecordedChoices | None = None) -> None:
        self.is_onednn, self._choices = use_onednn, choices or RecordedChoices()
        self._onednn = torch.ops.mkldnn._linear_pointwise.default if use_onednn else None

    def __call__(self, a_MK: Tensor, b_NK: Tensor) -> Tensor:
        if self._onednn is None or a_MK.shape[0] * a_MK.shape[1] * b_NK.shape[0] < ONEDNN_MIN_WORK:
            return torch.mm(a_MK, b_NK.t())
        return self._onednn(_dense(a_MK), _dense(b_NK), None, "none", [], "")

    def add_to(self, sum_MN: Tensor, a_MK: Tensor, b_NK: Tensor, scale: float = 1.0) -> None:
        """Add ``scale * a @ b.T`` in place."""
        if self._onednn is None or self._choices.gradient_products == "blas":
            sum_MN.addmm_(a_MK, b_NK.t(), alpha=scale)
        else:
            sum_MN.add_(self(a_MK, b_NK), alpha=scale)


def _dense(x: Tensor) -> Tensor:
    """Return ``x`` with the strides of a matrix or its transpose; oneDNN is slow for any others."""
    return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()


@dataclass(frozen=True, slots=True)
class Kernels:
    """The operations that the modules call.

    Attributes:
        embed: (tokens_M, weight_VD) -> x_MD.
        linear: (x_MD, weight_OD, bias_O or None) -> y_MO.
        rms_norm: (x_MD, weight_D, eps, offset) -> y_MD, scaled by weight + offset.
        gate: (gate_and_up_M2F, activation) -> hidden_MF.
        rotate: (x_BTXH, cosines, sines, R) -> y_BTXH with the first R heads rotated; cosines and sines are
            ``[B or 1, T, 1, H / 2]``, or fewer for the first dimensions of each head.
        grouped: (x_SD, weights of all experts, one below the other, ends_E) -> y_SO: the slots of expert e, which end
            before ``ends_E[e]``, by its ``[O, D]``.
    """

    embed: Callable[[Tensor, nn.Parameter], Tensor]
    linear: Callable[[Tensor, nn.Parameter, nn.Parameter | None], Tensor]
    rms_norm: Callable[[Tensor, nn.Parameter, float, float], Tensor]
    gate: Callable[[Tensor, str], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    grouped: Callable[[Tensor, nn.Parameter, Tensor], Tensor]


def select(compute: Compute, *, keeps_products: bool = False) -> Kernels:
    """Return the kernels for a device and precision.

    Args:
        compute: Device and precision.
        keeps_products: Whether results of matrix products are kept for a recomputation, so that none may change.
    """
    if not compute.is_direct:
        return plain(compute)
    chosen = products(compute)
    return Kernels(
        embed=_Embed.apply,
        linear=lambda x_MD, weight_OD, bias_O: _Linear.apply(x_MD, weight_OD, bias_O, chosen, keeps_products),
        rms_norm=_RmsNorm.apply,
        gate=_Gate.apply,
        rotate=_Rotate.apply,
        grouped=lambda x_SD, weight_RD, ends_E: _Grouped.apply(x_SD, weight_RD, ends_E, chosen),
    )


def plain(compute: Compute) -> Kernels:
    """Return the kernels that use autograd."""
    grouped = replace(PLAIN, grouped=partial(_plain_grouped, dtype=compute.dtype))
    return replace(grouped, linear=_traceable_linear) if products(compute).is_onednn else grouped


def products(compute: Compute) -> Products:
    """Return the matrix products for a device and precision."""
    use_onednn = compute.products == "onednn" and compute.dtype == torch.float32
    return Products(use_onednn=use_onednn, choices=compute.choices)


# -- plain ------------------------------------------------------------------------------------------------------------


def _plain_rms_norm(x_MD: Tensor, weight_D: nn.Parameter, eps: float, offset: float) -> Tensor:
    scale_D = weight_D + offset if offset else weight_D
    return F.rms_norm(x_MD, weight_D.shape, scale_D.to(x_MD.dtype), eps)  # mixed types would not be fused


def _plain_gate(gate_and_up_M2F: Tensor, activation: str) -> Tensor:
    gate_MF, up_MF = gate_and_up_M2F.chunk(2, dim=-1)
    return _activate_gate(gate_MF, activation) * up_MF


def _activate_gate(gate_MF: Tensor, activation: str) -> Tensor:
    return F.silu(gate_MF) if activation == "swiglu" else F.gelu(gate_MF, approximate=_APPROXIMATIONS[activation])


_APPROXIMATIONS = {"geglu": "none", "geglu_tanh": "tanh"}


def _plain_rotate(x_BTXH: Tensor, cosines: Tensor, sines: Tensor, num_rotated: int) -> Tensor:
    rotated_BTRH, rest = x_BTXH[:, :, :num_rotated], x_BTXH[:, :, num_rotated:]
    half = cosines.shape[-1]
    first, second, still = rotated_BTRH.split((half, half, rotated_BTRH.shape[-1] - 2 * half), dim=-1)
    turned_BTRH = torch.cat([first * cosines - second * sines, second * cosines + first * sines, still], dim=-1)
    return torch.cat([turned_BTRH.to(x_BTXH.dtype), rest], dim=2)


def _plain_grouped(x_SD: Tensor, weight_RD: nn.Parameter, ends_E: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    weight_EOD = weight_RD.to(dtype).view(len(ends_E), -1, weight_RD.shape[1])
    if not len(x_SD):  # with expert parallelism, a rank may compute nothing
        return F.linear(x_SD.to(dtype), weight_EOD[0])
    return F.grouped_mm(x_SD.to(dtype), weight_EOD.mT, offs=ends_E)


PLAIN = Kernels(F.embedding, F.linear, _plain_rms_norm, _plain_gate, _plain_rotate, _plain_grouped)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation of an MLP without a gate: a built-in one or a user function."""
    return _ACTIVATIONS.get(name) or load_function(name, kind="activation", where="model.activation")


# -- compiled with oneDNN ---------------------------------------------------------------------------------------------


@torch.library.custom_op("vorox::product", mutates_args=())
def _opaque_product(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """``a @ b.T`` by oneDNN, as a custom op that the compiler does not trace into."""
    return Products(use_onednn=True)(a_MK, b_NK)


@_opaque_product.register_fake
def _(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    return a_MK.new_empty(a_MK.shape[0], b_NK.shape[0])


def _save_factors(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001 - PyTorch's shape
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, d_y_MN: Tensor) -> tuple[Tensor, Tensor]:
    a_MK, b_NK = ctx.saved_tensors
    return _opaque_product(d_y_MN, b_NK.t()), _opaque_product(d_y_MN.t(), a_MK.t())


_opaque_product.register_autograd(_product_backward, setup_context=_save_factors)


def _traceable_linear(x_MD: Tensor, weight_OD: nn.Parameter, bias_O: nn.Parameter | None) -> Tensor:
    y_MO = _opaque_product(x_MD, weight_OD)
    return y_MO if bias_O is None else y_MO + bias_O


# -- direct -----------------------------------------------------------------------------------------------------------


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient to add to; a training loop outside of the engine may have removed it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_M: Tensor, weight_VD: nn.Parameter) -> Tensor:
        ctx.tokens_M, ctx.weight_VD = tokens_M, weight_VD
        return F.embedding(tokens_M, weight_VD.detach())

    @staticmethod
    def backward(ctx: Any, d_x_MD: Tensor) -> tuple[None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _gradient(ctx.weight_VD).index_add_(0, ctx.tokens_M, d_x_MD)
        return None, None


class _Linear(torch.autograd.Function):
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
            ctx.products.add_to(_gradient(ctx.weight_OD), d_y_MO.t(), x_MD.t())
        if ctx.bias_O is not None and ctx.bias_O.requires_grad:
            _gradient(ctx.bias_O).add_(d_y_MO.sum(0))
        d_x_MD = ctx.products(d_y_MO, ctx.weight_OD.detach().t()) if ctx.needs_input_grad[0] else None
        return d_x_MD, None, None, None, None


class _Grouped(torch.autograd.Function):
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
                ctx.products.add_to(gradient_RD[rows], d_y_SO[slots].t(), x_SD[slots].t())
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


class _RmsNorm(torch.autograd.Function):
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


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up_M2F: Tensor, activation: str) -> Tensor:
        gate_MF, up_MF = gate_and_up_M2F.chunk(2, dim=-1)
        active_MF = _activate_gate(gate_MF, activation)
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
            approximate = _APPROXIMATIONS[ctx.activation]
            _aten.gelu_backward.grad_input(d_active_MF, gate_MF, approximate=approximate, grad_input=d_gate_MF)
        return d_both_M2F, None


class _Rotate(torch.autograd.Function):
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


def keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts for forward pass and recomputation of a block that keep matrix products and attention."""
    kept = [
        _aten.mm.default, _aten.addmm.default, _aten._grouped_mm.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default, _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default, _aten._scaled_dot_product_cudnn_attention.default,
    ]  # fmt: skip
    if torch.backends.mkldnn.is_available():
        kept.append(torch.ops.mkldnn._linear_pointwise.default)
    return create_selective_checkpoint_contexts(kept)
