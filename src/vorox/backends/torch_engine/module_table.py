"""The parameter table of any ``nn.Module``, and building one without memory for its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vorox.core.errors import ConfigError
from vorox.models.module_spec import Row


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers under canonical names, each tied parameter once."""
    yield from module.named_parameters()
    stored = set(module.state_dict())
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in stored)


def rows(module: Any, head: nn.Module | None) -> Iterator[Row]:
    """Yield the table; vectors, and weights that their module exempts, have no weight decay.

    Args:
        module: The model.
        head: The layer whose outputs are the logits.
    """
    embeddings = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    output = 0 if head is None else id(head.weight)
    matrices = {id(child.weight) for child in module.modules() if isinstance(child, nn.Linear)}
    parameters = dict(module.named_parameters())
    for name, tensor in named_tensors(module):
        is_buffer = name not in parameters
        decay = not is_buffer and tensor.ndim > 1 and not getattr(tensor, "_no_weight_decay", False)
        kind = "tensor"
        if id(tensor) in embeddings:
            kind = "embedding"
        elif id(tensor) == output:
            kind = "head"
        elif tensor.ndim == 1:
            kind = "bias" if name.endswith("bias") else "norm"
        elif id(tensor) in matrices:
            kind = "matrix"
        yield Row(name, tuple(tensor.shape), kind, decay, tensor.requires_grad and not is_buffer)


def check_modules(module: nn.Module, *, where: str) -> None:
    """Check that all state of a model is floating-point and does not depend on the batches.

    Raises:
        ConfigError: Some is not, or does.
    """
    for name, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):  # pyright: ignore[reportPrivateUsage]
            raise ConfigError(f"{name} is a batch norm, whose state depends on the batches", where=where)
    for name, tensor in named_tensors(module):
        if not tensor.is_floating_point():
            raise ConfigError(f"{name} has dtype {tensor.dtype}; only floating-point state is supported", where=where)


@contextlib.contextmanager
def parameters_on_meta() -> Generator[None]:
    """Move every parameter to the meta device as it is registered; buffers are left alone."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            moved = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            vars(moved).update(vars(param))
            param = moved
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def replace_tensors(module: nn.Module, tensors: Mapping[str, nn.Parameter]) -> None:
    """Replace parameters and persistent buffers by tensors of the same names, in every module that uses them."""
    replaced = {id(tensor): tensors[name] for name, tensor in named_tensors(module)}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = replaced[id(parameter)]
        for name, buffer in child._buffers.items():
            if id(buffer) in replaced:
                child._buffers[name] = replaced[id(buffer)].data


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of a module to a device."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            child._buffers[name] = None if buffer is None else buffer.to(device)
