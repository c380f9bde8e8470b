"""Adapters of linear layers through peft: which layers, where their parameters are, how they merge.

``inject`` puts adapters around linear layers of the blocks, on the meta device; ``peft`` computes them. Canonical names
of their parameters equal those of a peft file (``models/huggingface/adapter_spec.py``).

Shape legend: R rank, K inputs, N outputs of a layer.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vorox.backends.torch_engine.networks.huggingface_images import language_blocks
from vorox.core.errors import ConfigError
from vorox.core.platform.installation import install_command
from vorox.core.schema import RunConfig
from vorox.models.huggingface import adapter_spec
from vorox.models.huggingface.adapter_spec import Adapter, AdapterSpec
from vorox.models.huggingface.spec import HuggingFaceSpec

_KEY = "adapter.target_modules"
_NAME = "default"
"""The name of the adapter in peft's modules."""


def describe(config: RunConfig, base: HuggingFaceSpec, module: nn.Module) -> AdapterSpec:
    """Return the spec of the configured adapter of a base; its module on the meta device gets the adapter.

    Raises:
        ConfigError: peft or bitsandbytes is missing, or there is no layer of a configured name.
    """
    settings = config.adapter
    assert settings.kind != "none"
    _library("peft")
    layers = _linear_layers(module)
    if settings.kind == "qlora":
        _library("bitsandbytes")
        if any(_is_transposed(layer) for layer in layers.values()):
            raise ConfigError(
                "The layers of this model store transposed weights, which qlora does not support",
                where="adapter.kind", hint="set adapter.kind=lora or dora",
            )  # fmt: skip
    chosen = [name for name in layers if settings.target_modules is None or _matches(name, settings.target_modules)]
    _check_targets(list(layers), settings.target_modules)
    adapter = Adapter(
        settings.kind, settings.rank, settings.alpha, settings.dropout_fraction, _shortest(module, chosen),
        str(config.model.name_or_path),
    )  # fmt: skip
    shapes = tuple((name, *_inputs_outputs(layers[name])) for name in chosen)
    kinds = {_is_transposed(layers[name]) for name in chosen}
    if len(kinds) > 1:
        raise ConfigError("Adapted layers are of different kinds", where=_KEY, hint="choose layers of one kind")
    spec = adapter_spec.of_base(base, adapter, shapes, is_transposed=kinds == {True})
    try:
        inject(module, spec)
    except ValueError as error:  # layers that a model computes without calling them
        known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
        raise ConfigError(
            f"peft cannot adapt this model: {error}", where=_KEY, hint=f"choose some of its linear layers: {known}"
        ) from error
    return spec


def inject(module: nn.Module, spec: AdapterSpec) -> None:
    """Put adapters around the adapted layers of a module, with parameters on the meta device."""
    peft, adapter = _library("peft"), spec.adapter
    config = peft.LoraConfig(
        r=adapter.rank, lora_alpha=adapter.alpha, lora_dropout=adapter.dropout_fraction, bias="none",
        target_modules=[name for name, _, _ in spec.layers], use_dora=adapter.kind == "dora",
        fan_in_fan_out=spec.is_transposed,
    )  # fmt: skip
    peft.inject_adapter_in_model(config, module, adapter_name=_NAME, low_cpu_mem_usage=True)


def quantize(module: nn.Module, spec: AdapterSpec, dtype: torch.dtype) -> None:
    """Replace the linear layers by layers of bitsandbytes with weights in NF4, still without values.

    Args:
        module: The model, before ``inject``.
        spec: The adapter.
        dtype: Precision of the matrix products.
    """
    layer_type = _library("bitsandbytes").nn.Linear4bit
    for row in spec.base.parameters:
        if not adapter_spec.is_quantized(row):
            continue
        name = row.name.removesuffix(".weight")
        layer = module.get_submodule(name)
        new = layer_type(
            row.shape[1], row.shape[0], bias=layer.bias is not None, compute_dtype=dtype, compress_statistics=True,
            quant_type="nf4", device="meta",
        )  # fmt: skip
        # Inference on some CPUs would repack the weights in place, and later training steps would use other kernels.
        new.support_avx512bf16_for_cpu = False
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, new)


def frozen_parameter(layer: nn.Module, leaf: str, value: Tensor, device: torch.device) -> nn.Parameter:
    """Return a frozen parameter of a layer on the device, in 4 bits if the layer is."""
    if leaf == "weight" and is_quantized(layer):
        bitsandbytes: Any = _library("bitsandbytes")
        packed = bitsandbytes.nn.Params4bit(
            value.contiguous(), requires_grad=False, compress_statistics=True, quant_type="nf4", module=layer
        )
        return packed.to(device)
    return nn.Parameter(value.to(device), requires_grad=False)


def is_quantized(layer: nn.Module) -> bool:
    """Whether a layer stores its weight in 4 bits."""
    return type(layer).__name__ == "Linear4bit"


def whole_weight(layer: nn.Module) -> Tensor:
    """Return the weight of a layer, out of 4 bits if it is quantized."""
    return importlib.import_module("peft.utils.integrations").dequantize_module_weight(layer)


@contextlib.contextmanager
def switched_off(module: nn.Module, spec: AdapterSpec) -> Iterator[None]:
    """Inside the block, adapted layers compute what their frozen layers do."""
    layers: list[Any] = [module.get_submodule(name) for name, _, _ in spec.layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def bind(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Replace the parameters of the adapters by tensors of their canonical names."""
    for name, _ in list(module.named_parameters()):
        found = parameters.get(_canonical(name))
        if found is not None:
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner)._parameters[leaf] = found


@torch.no_grad()
def row_norms(module: nn.Module, name: str) -> Tensor:
    """Return the norm of each output's weights in the frozen layer of an adapter, ``[N]``."""
    layer: Any = module.get_submodule(name)
    return torch.linalg.vector_norm(_base_weight_NK(layer), dim=1)


@torch.no_grad()
def merged_weight(module: nn.Module, name: str) -> Tensor:
    """Return the weight of a layer with its adapter merged into it, fp32, in the layout of the base."""
    layer: Any = module.get_submodule(name)
    weight_NK = _base_weight_NK(layer)
    factors_NR, factors_RK = layer.lora_B[_NAME].weight, layer.lora_A[_NAME].weight
    merged_NK = weight_NK + layer.scaling[_NAME] * (factors_NR @ factors_RK)
    if _NAME in layer.lora_magnitude_vector:
        norms_N = torch.linalg.vector_norm(merged_NK, dim=1)
        merged_NK = merged_NK * (layer.lora_magnitude_vector[_NAME].weight / norms_N)[:, None]
    return merged_NK.T if _is_transposed(layer.get_base_layer()) else merged_NK


def _base_weight_NK(layer: Any) -> Tensor:
    base = layer.get_base_layer()
    weight = whole_weight(base)
    return (weight.T if _is_transposed(base) else weight).float()


def _canonical(name: str) -> str:
    """Return the name that a peft file gives a parameter of its modules."""
    return name.replace(f".lora_magnitude_vector.{_NAME}.weight", ".lora_magnitude_vector").replace(f".{_NAME}.", ".")


def _linear_layers(module: Any) -> dict[str, nn.Module]:
    """Return the linear layers of the blocks by name; a vision tower stays frozen."""
    inside = {id(child) for block in language_blocks(module) for child in block.modules()}
    return {
        name: child
        for name, child in module.named_modules()
        if id(child) in inside and (isinstance(child, nn.Linear) or _is_transposed(child))
    }


def _is_transposed(layer: nn.Module) -> bool:
    """Whether the weight is ``[K, N]``, as in the linear layers of GPT-2."""
    return type(layer).__name__ == "Conv1D"


def _inputs_outputs(layer: nn.Module) -> tuple[int, int]:
    weight: Any = layer.weight
    return tuple(weight.shape) if _is_transposed(layer) else tuple(weight.shape)[::-1]


def _matches(name: str, targets: tuple[str, ...]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _shortest(module: nn.Module, chosen: list[str]) -> tuple[str, ...]:
    """Return last parts of names if they name exactly the chosen layers, else whole names."""
    leaves = tuple(sorted({name.rpartition(".")[2] for name in chosen}))
    named = [name for name, _ in module.named_modules() if _matches(name, leaves)]
    return leaves if sorted(named) == sorted(chosen) else tuple(chosen)


def _check_targets(layers: list[str], targets: tuple[str, ...] | None) -> None:
    unknown = [target for target in targets or () if not any(_matches(name, (target,)) for name in layers)]
    known = ", ".join(sorted({name.rpartition(".")[2] for name in layers})) or "none"
    if unknown or not layers:
        raise ConfigError(
            f"The blocks have no linear layer {unknown[0]}" if unknown else "The blocks have no linear layers",
            where=_KEY, hint=f"linear layers of the blocks: {known}",
        )  # fmt: skip


def _library(name: str) -> Any:
    # On CPUs with AVX512-BF16, bitsandbytes, which peft imports, recommends a kernel for 4 bits that it would download.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"Adapters need {name}, which is not installed", where="adapter.kind", hint=install_command("adapters")
        ) from error


def initial_magnitudes(module: nn.Module, spec: AdapterSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield the trained norms of DoRA by canonical name: at first, those of the base."""
    if spec.adapter.kind == "dora":
        yield from ((f"{name}.lora_magnitude_vector", row_norms(module, name)) for name, _, _ in spec.layers)
