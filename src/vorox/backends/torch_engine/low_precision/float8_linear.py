"""Linear layers that multiply in 8-bit floats (``precision.float8``), by torchao.

Inputs, weights and gradients of outputs are scaled and rounded to 8 bits before each of the three products of a layer;
results have the precision of the run. Scales are computed from the tensors of each call, so nothing is stored between
steps: parameters, optimizer state and checkpoints are ordinary. The layer is torchao's own, called with the parameters
of the model. The head, and matrices with a size that is no multiple of 16, are not rounded.

Shape legend: M positions, D inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.func import functional_call

from vorox.backends.torch_engine.device.devices import Compute
from vorox.backends.torch_engine.layers.kernels import Kernels
from vorox.backends.torch_engine.low_precision.int4_linear import block_linears
from vorox.core.config.checks.training import FLOAT8
from vorox.core.errors import ConfigError
from vorox.core.platform.library_logs import silence_torchao
from vorox.core.schema import PrecisionConfig

_SIZE_MULTIPLE = 16
"""What the instructions of GPUs need of the sizes of a product."""
_ROUTERS = {"gate", "router"}
"""Names of the routers of experts in transformers that are linear layers; their choices are not rounded."""

Product = Callable[[Tensor, Tensor], Tensor]
"""(x ``[..., D]``, weight ``[O, D]``) -> ``[..., O]``."""


def float8_kernels(kernels: Kernels, compute: Compute, precision: PrecisionConfig) -> Kernels:
    """Return kernels whose linear layers multiply in 8-bit floats; without ``precision.float8``, the same kernels."""
    if precision.float8 is None:
        return kernels
    product = float8_product(compute, precision)

    def linear(x_MD: Tensor, weight_OD: nn.Parameter, bias_O: nn.Parameter | None) -> Tensor:
        if not _divides(weight_OD):
            return kernels.linear(x_MD, weight_OD, bias_O)
        return _linear(product, x_MD, weight_OD, bias_O)

    return replace(kernels, linear=linear)


def convert_modules(model: Any, compute: Compute, precision: PrecisionConfig) -> None:
    """Let the linear layers of a transformers model multiply in 8-bit floats; its head does not.

    Raises:
        ConfigError: It has no linear layer of suitable size.
    """
    if precision.float8 is None:
        return
    layers = [
        layer for name, layer in block_linears(model).items()
        if _divides(layer.weight) and not _ROUTERS & set(name.split("."))
    ]  # fmt: skip
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no linear layer whose sizes are multiples of {_SIZE_MULTIPLE}", where=FLOAT8,
            hint="GPT-2 stores transposed matrices; train a family with linear layers, such as llama",
        )  # fmt: skip
    product = float8_product(compute, precision)
    for layer in layers:
        layer.forward = partial(_forward, product, layer)


def float8_product(compute: Compute, precision: PrecisionConfig) -> Product:
    """Return ``x @ weight.T`` in 8-bit floats, with gradients, rounded as torchao's recipe of that name."""
    silence_torchao()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    assert precision.float8 is not None
    recipe = replace(Float8LinearConfig.from_recipe_name(precision.float8), emulate=precision.float8_emulate)
    template = nn.Linear(_SIZE_MULTIPLE, _SIZE_MULTIPLE, bias=False, device="meta")  # calls bring their weights
    layer = padded = convert_to_float8_training(template, config=recipe)
    if not recipe.emulate:  # the gradient of the weights is a sum over positions, so their number must divide as well
        padded = convert_to_float8_training(template, config=replace(recipe, pad_inner_dim=True))

    def multiply(x: Tensor, weight_OD: Tensor) -> Tensor:
        chosen = padded if (x.numel() // x.shape[-1]) % _SIZE_MULTIPLE else layer
        with compute.no_autocast():
            y = functional_call(chosen, {"weight": weight_OD.to(compute.dtype)}, (x.to(compute.dtype),))
        return cast("Tensor", y)

    return multiply


def _divides(weight_OD: Tensor) -> bool:
    return not any(size % _SIZE_MULTIPLE for size in weight_OD.shape)


def _linear(product: Product, x: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    y = product(x, weight_OD)
    return y if bias_O is None else y + bias_O.to(y.dtype)


def _forward(product: Product, layer: nn.Linear, input: Tensor) -> Tensor:
    return _linear(product, input, layer.weight, layer.bias)
