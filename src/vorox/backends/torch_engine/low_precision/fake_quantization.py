"""Quantisation-aware training: linear layers that compute with rounded numbers.

The forward pass rounds the weights of the linear layers in the blocks, and under ``int8-dynamic`` their inputs, as
``vorox compress --quantize`` of the same name does. The backward pass takes rounding for the identity (the
straight-through estimator of Bengio et al., 2013), so the parameters stay in full precision, and all of them get a
gradient. Nothing is stored between steps.

Shape legend: M positions, D inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vorox.backends.torch_engine.device.devices import Compute
from vorox.backends.torch_engine.layers.kernels import Kernels, plain
from vorox.backends.torch_engine.low_precision.affine_quantization import has_int4_groups, round_int4, round_int8
from vorox.backends.torch_engine.low_precision.int4_linear import block_linears
from vorox.core.errors import ConfigError
from vorox.core.schema import QuantizationScheme


def _straight_through(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a rounding whose gradient is the identity, as an op that the compiler does not trace into.

    A compiler that fused it would keep bf16 scales in fp32, and so train for other numbers than those of compression.
    """
    op = torch.library.custom_op(f"vorox::{name}", function, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda _, d_x: d_x)
    return op


_round_rows = _straight_through("round_int8", round_int8)
_round_groups = _straight_through("round_int4", round_int4)


def _round_weight_int4(weight_OI: Tensor) -> Tensor:
    return _round_groups(weight_OI) if has_int4_groups(weight_OI) else weight_OI


def _identity(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class FakeQuantization:
    """How a scheme rounds, straight through in the backward pass.

    Attributes:
        weight: Of a linear layer, ``[O, D]``.
        inputs: Of a linear layer, ``[M, D]`` or ``[B, T, D]``.
    """

    weight: Callable[[Tensor], Tensor]
    inputs: Callable[[Tensor], Tensor]


_SCHEMES: dict[QuantizationScheme, FakeQuantization] = {
    "int8-weight-only": FakeQuantization(_round_rows, _identity),
    "int8-dynamic": FakeQuantization(_round_rows, _round_rows),
    "int4": FakeQuantization(_round_weight_int4, _identity),
}


def quantize_kernels(kernels: Kernels, compute: Compute, scheme: QuantizationScheme | None) -> Kernels:
    """Return kernels whose linear layers compute with rounded numbers; ``None``: the same kernels.

    Their products use autograd: direct kernels would multiply the gradient by the unrounded weights.
    """
    if scheme is None:
        return kernels
    fake, linear = _SCHEMES[scheme], plain(compute).linear

    def quantized_linear(x_MD: Tensor, weight_OD: nn.Parameter, bias_O: nn.Parameter | None) -> Tensor:
        return linear(fake.inputs(x_MD), cast("nn.Parameter", fake.weight(weight_OD)), bias_O)

    return replace(kernels, linear=quantized_linear)


def quantize_modules(model: Any, scheme: QuantizationScheme | None) -> None:
    """Let the linear layers of a transformers model compute with rounded numbers; its head does not.

    Raises:
        ConfigError: It has no linear layer that ``vorox compress`` quantises.
    """
    if scheme is None:
        return
    layers = block_linears(model)
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no linear layer to quantise", where="train.quantization_aware",
            hint="GPT-2 stores transposed matrices; train a family with linear layers, such as llama",
        )  # fmt: skip
    for layer in layers.values():
        layer.forward = partial(_forward, _SCHEMES[scheme], layer)


def _forward(fake: FakeQuantization, layer: nn.Linear, input: Tensor) -> Tensor:
    return F.linear(fake.inputs(input), fake.weight(layer.weight), layer.bias)
