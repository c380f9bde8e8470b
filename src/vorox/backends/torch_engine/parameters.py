"""Parameters and gradients of the model on this rank, by optimizer group.

Two layouts have the interface ``Parameters``. ``FlatParameters`` stores one fp32 buffer per group, so that clipping and
updates are a few vector operations; a canonical parameter is a contiguous range. ``ShardedParameters``
(``sharded_parameters.py``) stores a shard of every matrix, by FSDP2. In both, some parameters of the modules are fused,
so that one matrix product does the work of several; canonical parameters (``models/spec.py``) are rows of them.

A *buffer* is a tensor or a list of tensors with the layout of a group: values, gradients, optimizer moments.

Invariant of ``FlatParameters``: alignment gaps between parameters stay zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vorox.models.decoder_spec import DecoderSpec
from vorox.models.optimizer_groups import DECAYED, FROZEN, ORTHOGONAL, PLAIN, optimizer_group
from vorox.models.spec import ModelSpec, ParameterSpec

ALIGNMENT_ELEMENTS = 16
"""Parameters start at multiples of 64 bytes, the size of a cache line and of the widest vector registers."""

Buffers = Mapping[str, Sequence[Tensor]]
"""Group to the tensors of this rank."""

_FUSED = {
    "attention.query": "attention.qkv",
    "attention.key": "attention.qkv",
    "attention.value": "attention.qkv",
    "mlp.gate": "mlp.gate_up",
    "mlp.up": "mlp.gate_up",
}


class Piece(NamedTuple):
    """The part of a canonical parameter on this rank: rows from ``first_row``, possibly none."""

    name: str
    first_row: int
    view: Tensor


class Parameters(Protocol):
    """Values and gradients of all parameters on this rank."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Optimizer groups that have parameters."""
        ...

    @property
    def modules(self) -> Mapping[str, nn.Parameter]:
        """Name in the modules, possibly fused, to parameter."""
        ...

    @property
    def values(self) -> Buffers: ...

    @property
    def gradients(self) -> Buffers: ...

    def new_buffers(self, groups: Sequence[str]) -> dict[str, list[Tensor]]:
        """Return zeroed buffers of the same layout for some groups."""
        ...

    def zero_gradients(self) -> None: ...

    def release(self) -> None:
        """Free what was gathered for a forward pass that has no backward pass."""
        ...

    def pieces(self, buffers: Buffers) -> Iterator[Piece]:
        """Yield the parts of canonical parameters on this rank, in table order; other groups are skipped."""
        ...

    def whole(self, buffers: Buffers) -> Iterator[tuple[str, Tensor]]:
        """Yield whole canonical parameters, in table order. A collective if they are sharded: all ranks iterate."""
        ...


@dataclass(frozen=True, slots=True)
class BufferSlice:
    """The range of a canonical parameter: ``num_elements`` from ``start`` in its group's buffer."""

    parameter: ParameterSpec
    group: str
    start: int

    def view(self, buffers: Buffers) -> Tensor:
        end = self.start + self.parameter.num_elements
        return buffers[self.group][0][self.start : end].view(self.parameter.shape)


class FlatParameters:
    """See ``Parameters``. One buffer per group; the parameters' ``grad`` are views of the gradient buffers.

    Attributes:
        slices: Canonical name to its range, in table order.
    """

    def __init__(self, spec: ModelSpec, *, muon: bool, decay_embeddings: bool, device: torch.device) -> None:
        self.slices: dict[str, BufferSlice] = {}
        shapes: dict[str, tuple[str, int, tuple[int, ...]]] = {}
        sizes = {DECAYED: 0, PLAIN: 0, ORTHOGONAL: 0, FROZEN: 0}
        for fused_name, parts in fused_parts(spec).items():
            group = optimizer_group(parts[0], muon=muon, decay_embeddings=decay_embeddings)
            start = sizes[group]
            shapes[fused_name] = (group, start, fused_shape(parts))
            for part in parts:
                self.slices[part.name] = BufferSlice(part, group, sizes[group])
                sizes[group] += part.num_elements
            sizes[group] += -sizes[group] % ALIGNMENT_ELEMENTS
        self.slices = {parameter.name: self.slices[parameter.name] for parameter in spec.parameters}
        self.groups = tuple(group for group, size in sizes.items() if size)
        self.values: dict[str, list[Tensor]] = {
            group: [torch.zeros(sizes[group], device=device)] for group in self.groups
        }
        self.gradients = self.new_buffers([group for group in self.groups if group != FROZEN])
        self.modules: dict[str, nn.Parameter] = {}
        self._gradient_views: dict[str, Tensor] = {}
        for name, (group, start, shape) in shapes.items():
            end = start + prod(shape)
            is_trainable = group != FROZEN
            parameter = nn.Parameter(self.values[group][0][start:end].view(shape), requires_grad=is_trainable)
            if is_trainable:
                parameter.grad = self._gradient_views[name] = self.gradients[group][0][start:end].view(shape)
            self.modules[name] = parameter

    def new_buffers(self, groups: Sequence[str]) -> dict[str, list[Tensor]]:
        return {group: [torch.zeros_like(self.values[group][0])] for group in groups if group in self.values}

    def zero_gradients(self) -> None:
        for (buffer,) in self.gradients.values():
            buffer.zero_()
        for name, view in self._gradient_views.items():  # other optimizers set them to None
            self.modules[name].grad = view

    def release(self) -> None:
        """Do nothing: nothing was gathered."""

    def pieces(self, buffers: Buffers) -> Iterator[Piece]:
        for name, view in self.whole(buffers):
            yield Piece(name, 0, view)

    def whole(self, buffers: Buffers) -> Iterator[tuple[str, Tensor]]:
        """Yield views; nothing is copied."""
        for name, buffer_slice in self.slices.items():
            if buffer_slice.group in buffers:
                yield name, buffer_slice.view(buffers)


def fused_parts(spec: ModelSpec) -> dict[str, list[ParameterSpec]]:
    """Return the canonical parameters that form each parameter of the modules, by its name, concatenated along rows."""
    is_gated = spec.is_gated if isinstance(spec, DecoderSpec) else None  # modules of transformers are not fused
    parts: dict[str, list[ParameterSpec]] = {}
    for parameter in spec.parameters:
        name = parameter.name if is_gated is None else module_name(parameter.name, gated=is_gated)
        parts.setdefault(name, []).append(parameter)
    return parts


def fused_shape(parts: Sequence[ParameterSpec]) -> tuple[int, ...]:
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def module_name(name: str, *, gated: bool) -> str:
    """Return the name in the modules of the parameter that holds a canonical one."""
    stem, _, kind = name.rpartition(".")
    for part, fused in _FUSED.items():
        if stem.endswith("." + part) and (gated or not part.startswith("mlp")):
            return f"{stem.removesuffix(part)}{fused}.{kind}"
    return name
