"""Model kernels in two versions: plain PyTorch, and hand-written backward passes for fp32 on CPU.

The plain version uses autograd; it is compiled, and runs on accelerators and under autocast. The direct version is for
uncompiled fp32 on the CPU (``direct_kernels.py``), with matrix products by the fastest library (``Compute.products``).
Tests compare both versions with each other and with float64.

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

from vorox.backends.torch_engine.device.devices import Compute
from vorox.backends.torch_engine.device.matrix_products import Products
from vorox.backends.torch_engine.layers.direct_kernels import (
    GELU_APPROXIMATIONS,
    Embed,
    Gate,
    Grouped,
    Linear,
    RmsNorm,
    Rotate,
    activate_gate,
)
from vorox.core.user_code.extensions import load_function

_aten = torch.ops.aten


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
        embed=Embed.apply,
        linear=DirectLinear(chosen, keeps_products),
        rms_norm=RmsNorm.apply,
        gate=Gate.apply,
        rotate=Rotate.apply,
        grouped=lambda x_SD, weight_RD, ends_E: Grouped.apply(x_SD, weight_RD, ends_E, chosen),
    )


@dataclass(frozen=True, slots=True)
class DirectLinear:
    """The linear layer of ``direct_kernels.py``, which ``direct_block.py`` recognises.

    Attributes:
        products: Matrix products.
        keeps_products: See ``select``.
    """

    products: Products
    keeps_products: bool

    def __call__(self, x_MD: Tensor, weight_OD: nn.Parameter, bias_O: nn.Parameter | None) -> Tensor:
        return Linear.apply(x_MD, weight_OD, bias_O, self.products, self.keeps_products)


def plain(compute: Compute) -> Kernels:
    """Return the kernels that use autograd."""
    grouped = replace(PLAIN, grouped=partial(_plain_grouped, dtype=compute.dtype))
    return replace(grouped, linear=_traceable_linear) if products(compute).is_onednn else grouped


def products(compute: Compute) -> Products:
    """Return the matrix products for a device and precision."""
    use_onednn = compute.products == "onednn" and compute.dtype == torch.float32
    has_fp32_sums = compute.device.type == "cuda" and compute.dtype != torch.float32
    return Products(use_onednn=use_onednn, has_fp32_sums=has_fp32_sums)


# -- plain ------------------------------------------------------------------------------------------------------------


def _plain_rms_norm(x_MD: Tensor, weight_D: nn.Parameter, eps: float, offset: float) -> Tensor:
    scale_D = weight_D + offset if offset else weight_D
    return F.rms_norm(x_MD, weight_D.shape, scale_D.to(x_MD.dtype), eps)  # mixed types would not be fused


def _plain_gate(gate_and_up_M2F: Tensor, activation: str) -> Tensor:
    gate_MF, up_MF = gate_and_up_M2F.chunk(2, dim=-1)
    return activate_gate(gate_MF, activation) * up_MF


def _plain_rotate(x_BTXH: Tensor, cosines: Tensor, sines: Tensor, num_rotated: int) -> Tensor:
    rotated_BTRH, rest = x_BTXH[:, :, :num_rotated], x_BTXH[:, :, num_rotated:]
    half = cosines.shape[-1]
    first, second, still = rotated_BTRH.split((half, half, rotated_BTRH.shape[-1] - 2 * half), dim=-1)
    turned_BTRH = torch.cat([first * cosines - second * sines, second * cosines + first * sines, still], dim=-1)
    return torch.cat([turned_BTRH.to(x_BTXH.dtype), rest], dim=2)


_GROUPED_BYTES = 16
"""The grouped product needs rows of a multiple of so many bytes; others are filled with zeros."""


def _plain_grouped(x_SD: Tensor, weight_RD: nn.Parameter, ends_E: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    weight_EOD = weight_RD.to(dtype).view(len(ends_E), -1, weight_RD.shape[1])
    if not len(x_SD):  # with expert parallelism, a rank may compute nothing
        return F.linear(x_SD.to(dtype), weight_EOD[0])
    num_outputs, num_inputs = weight_EOD.shape[1:]
    multiple = _GROUPED_BYTES // weight_EOD.element_size()
    more_outputs, more_inputs = -num_outputs % multiple, -num_inputs % multiple
    if not more_outputs and not more_inputs:
        return F.grouped_mm(x_SD.to(dtype), weight_EOD.mT, offs=ends_E)
    padded_SD = F.pad(x_SD.to(dtype), (0, more_inputs))
    padded_EOD = F.pad(weight_EOD, (0, more_inputs, 0, more_outputs))
    return F.grouped_mm(padded_SD, padded_EOD.mT, offs=ends_E)[:, :num_outputs]


PLAIN = Kernels(F.embedding, F.linear, _plain_rms_norm, _plain_gate, _plain_rotate, _plain_grouped)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: partial(F.gelu, approximate=approximate) for name, approximate in GELU_APPROXIMATIONS.items()},
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
