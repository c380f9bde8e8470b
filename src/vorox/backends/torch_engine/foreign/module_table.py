"""The parameter table of any ``nn.Module``, and building one without memory for its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping

import torch
from torch import Tensor, nn

from vorox.backends.torch_engine.foreign.module_roles import ModuleRoles, Widths
from vorox.core.errors import ConfigError
from vorox.models.matrix_layout import PLAIN_MATRIX
from vorox.models.module_spec import Row
from vorox.models.parameter_roles import is_decayed

_NO_WIDTHS = Widths()


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers under canonical names, each tied parameter once."""
    yield from module.named_parameters()
    stored = set(module.state_dict())
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in stored)


def rows(module: nn.Module, head: nn.Module | None, widths: Widths = _NO_WIDTHS) -> Iterator[Row]:
    """Yield the table; see ``module_roles.ModuleRoles`` for the arguments."""
    roles = ModuleRoles(module, head, widths)
    parameters = dict(module.named_parameters())
    for name, tensor in named_tensors(module):
        found, is_parameter = roles.of(name, tensor), name in parameters
        kind = found.kind if is_parameter or found.kind not in ("matrix", "router") else "tensor"
        decay = is_parameter and is_decayed(kind)
        layout = found.layout if is_parameter else PLAIN_MATRIX
        yield Row(
            name, tuple(tensor.shape), kind, decay, tensor.requires_grad and is_parameter, layout,
            found.is_routed and is_parameter,
        )  # fmt: skip


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
