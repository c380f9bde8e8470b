"""Flat fp32 buffers that hold all parameters and gradients, one per optimizer group.

In: the parameter table. Out: parameters for the modules, some of them fused so that one matrix product does the work of
several, and canonical views of any buffer with the same layout: values, gradients, optimizer moments. Clipping and
updates are a few vector operations over whole buffers.

Invariant: a canonical parameter is a contiguous range of its group's buffer; alignment gaps stay zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from vorox.models.optimizer_groups import DECAYED, ORTHOGONAL, PLAIN, optimizer_group
from vorox.models.spec import ModelSpec, ParameterSpec

ALIGNMENT_ELEMENTS = 16
"""Parameters start at multiples of 64 bytes, the size of a cache line and of the widest vector registers."""

_FUSED = {
    "attention.query": "attention.qkv",
    "attention.key": "attention.qkv",
    "attention.value": "attention.qkv",
    "mlp.gate": "mlp.gate_up",
    "mlp.up": "mlp.gate_up",
}


@dataclass(frozen=True, slots=True)
class BufferSlice:
    """The range of a canonical parameter: ``num_elements`` from ``start`` in its group's buffer."""

    parameter: ParameterSpec
    group: str
    start: int

    def view(self, buffers: Mapping[str, Tensor]) -> Tensor:
        end = self.start + self.parameter.num_elements
        return buffers[self.group][self.start : end].view(self.parameter.shape)


class ParameterStore:
    """Values and gradients of all parameters.

    Attributes:
        values: Group to flat buffer.
        gradients: Group to flat buffer, same layout; the parameters' ``grad`` are views of it.
        slices: Canonical name to its range, in table order.
        modules: Name in the modules, possibly fused, to parameter.
    """

    def __init__(self, spec: ModelSpec, *, muon: bool, decay_embeddings: bool, device: torch.device) -> None:
        self.slices: dict[str, BufferSlice] = {}
        shapes: dict[str, tuple[str, int, tuple[int, ...]]] = {}
        sizes = {DECAYED: 0, PLAIN: 0, ORTHOGONAL: 0}
        for fused_name, parts in _fused_parts(spec).items():
            group = optimizer_group(parts[0], muon=muon, decay_embeddings=decay_embeddings)
            start = sizes[group]
            shapes[fused_name] = (group, start, (sum(part.shape[0] for part in parts), *parts[0].shape[1:]))
            for part in parts:
                self.slices[part.name] = BufferSlice(part, group, sizes[group])
                sizes[group] += part.num_elements
            sizes[group] += -sizes[group] % ALIGNMENT_ELEMENTS
        self.slices = {parameter.name: self.slices[parameter.name] for parameter in spec.parameters}
        self.groups = tuple(group for group, size in sizes.items() if size)
        self.values = {group: torch.zeros(sizes[group], device=device) for group in self.groups}
        self.gradients = self.new_buffers(self.groups)
        self.modules: dict[str, nn.Parameter] = {}
        for name, (group, start, shape) in shapes.items():
            end = start + prod(shape)
            parameter = nn.Parameter(self.values[group][start:end].view(shape))
            parameter.grad = self.gradients[group][start:end].view(shape)
            self.modules[name] = parameter

    def new_buffers(self, groups: tuple[str, ...]) -> dict[str, Tensor]:
        """Return zeroed buffers of the same layout for some groups."""
        return {group: torch.zeros_like(self.values[group]) for group in groups if group in self.values}

    def views(self, buffers: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield canonical views of buffers, in table order; other groups are skipped."""
        for name, buffer_slice in self.slices.items():
            if buffer_slice.group in buffers:
                yield name, buffer_slice.view(buffers)

    def zero_gradients(self) -> None:
        for buffer in self.gradients.values():
            buffer.zero_()


def _fused_parts(spec: ModelSpec) -> dict[str, list[ParameterSpec]]:
    parts: dict[str, list[ParameterSpec]] = {}
    for parameter in spec.parameters:
        parts.setdefault(module_name(parameter.name, gated=spec.is_gated), []).append(parameter)
    return parts


def module_name(name: str, *, gated: bool) -> str:
    """Return the name in the modules of the parameter that holds a canonical one."""
    stem, _, kind = name.rpartition(".")
    for part, fused in _FUSED.items():
        if stem.endswith("." + part) and (gated or not part.startswith("mlp")):
            return f"{stem.removesuffix(part)}{fused}.{kind}"
    return name
