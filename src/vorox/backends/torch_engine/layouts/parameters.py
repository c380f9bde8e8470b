"""Parameters and gradients of the model on this rank, by optimizer group.

Three layouts have the interface ``Parameters``. ``FlatParameters`` stores one fp32 buffer per group, so that clipping
and updates are a few vector operations; a canonical parameter is a contiguous range. ``ShardedParameters``
(``layouts/sharded_parameters.py``) stores a shard of every matrix, by FSDP2. ``ZeroParameters``
(``layouts/zero_parameters.py``) leaves them to DeepSpeed. In all, some parameters of the modules are fused, so that
one matrix product does the work of several; canonical parameters (``models/spec.py``) are rows of them. With tensor
parallelism, either of the first two stores the share of this rank (``layouts/divided_parameters.py``); in a
pipeline, the first one stores the parameters of this rank's stages (``layouts/pipeline_parameters.py``).

A *buffer* is a tensor or a list of tensors with the layout of a group: values, gradients, optimizer moments.

Invariant of ``FlatParameters``: alignment gaps between parameters stay zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vorox.models.decoder.experts import split_expert
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.optimizer_groups import Group, common_group, in_order
from vorox.models.spec import ModelSpec, ParameterSpec

ALIGNMENT_ELEMENTS = 16
"""Parameters start at multiples of 64 bytes, the size of a cache line and of the widest vector registers."""

Buffers = Mapping[Group, Sequence[Tensor]]
"""Group to the tensors of this rank."""

_FUSED = {
    "attention.query": "attention.qkv",
    "attention.key": "attention.qkv",
    "attention.value": "attention.qkv",
    "mlp.gate": "mlp.gate_up",
    "mlp.up": "mlp.gate_up",
    "mlp.experts.gate": "mlp.experts.gate_up",
    "mlp.experts.up": "mlp.experts.gate_up",
    **dict.fromkeys((f"mamba.{part}" for part in ("gate", "x", "b", "c", "dt")), "mamba.input"),
}


class ParameterPart(NamedTuple):
    """The part of a canonical parameter on this rank: rows from ``first_row``, possibly none.

    With tensor parallelism, ``view`` may have some of the columns only, from ``first_column``.
    """

    name: str
    first_row: int
    view: Tensor
    first_column: int = 0

    @property
    def place(self) -> tuple[slice, ...]:
        """Rows, and columns of a matrix, of ``view`` in the whole parameter."""
        firsts = (self.first_row, self.first_column)[: self.view.ndim]
        return tuple(slice(first, first + size) for first, size in zip(firsts, self.view.shape, strict=False))


class Parameters(Protocol):
    """Values and gradients of all parameters on this rank."""

    @property
    def gradient_divisor(self) -> int:
        """What the backward pass divides gradients by: 1, or the number of ranks if their average is taken."""
        ...

    @property
    def local(self) -> Parameters:
        """The parameters that this rank updates: all, or in a pipeline those of its stages."""
        ...

    @property
    def groups(self) -> tuple[Group, ...]:
        """Optimizer groups that have parameters."""
        ...

    @property
    def modules(self) -> Mapping[str, nn.Parameter]:
        """Name in the modules, possibly fused, to parameter."""
        ...

    @property
    def values(self) -> Buffers:
        """The values, or copies of them: after a change, call ``store``."""
        ...

    @property
    def gradients(self) -> Buffers: ...

    def store(self, values: Buffers) -> None:
        """Take over changed ``values``."""
        ...

    def backward(self, objective: Tensor, loss_scale: Tensor | None = None) -> None:
        """Add the gradients of an objective, multiplied by the loss scale of fp16."""
        ...

    def new_buffers(self, groups: Sequence[Group]) -> dict[Group, list[Tensor]]:
        """Return zeroed buffers of the same layout for some groups."""
        ...

    def zero_gradients(self) -> None: ...

    def release(self) -> None:
        """Free what was gathered for a forward pass that has no backward pass."""
        ...

    def finish_gradients(self) -> None:
        """Complete the gradients after the backward passes of a step. A collective."""
        ...

    def owned(self, buffers: Buffers) -> Iterator[Tensor]:
        """Yield tensors that hold every element of a replica once over its ranks."""
        ...

    def local_parts(self, buffers: Buffers) -> Iterator[ParameterPart]:
        """Yield the parts of canonical parameters on this rank, in table order; other groups are skipped."""
        ...

    def whole_rows(self, buffers: Buffers) -> Iterator[ParameterPart]:
        """Yield rows of canonical parameters, each on one rank of a replica. A collective of its ranks."""
        ...

    def whole(self, buffers: Buffers) -> Iterator[tuple[str, Tensor]]:
        """Yield whole canonical parameters, in table order. A collective if they are sharded: all ranks iterate."""
        ...


@dataclass(frozen=True, slots=True)
class BufferSlice:
    """The range of a canonical parameter: ``num_elements`` from ``start`` in its group's buffer."""

    parameter: ParameterSpec
    group: Group
    start: int

    def view(self, buffers: Buffers) -> Tensor:
        end = self.start + self.parameter.num_elements
        return buffers[self.group][0][self.start : end].view(self.parameter.shape)


class FlatParameters:
    """See ``Parameters``. One buffer per group; the parameters' ``grad`` are views of the gradient buffers.

    Args:
        spec: The model.
        groups: The optimizer group of every parameter.
        device: Where the buffers are.
        table: The parameters that this rank has, in the order of the buffers, each with all that it is fused with;
            default: all.

    Attributes:
        slices: Canonical name to its range, in table order.
        starts: Name in the modules to group and start in its buffer, in table order.
    """

    gradient_divisor = 1

    def __init__(
        self,
        spec: ModelSpec,
        groups: Mapping[str, Group],
        *,
        device: torch.device,
        table: Sequence[ParameterSpec] | None = None,
    ) -> None:
        self.slices: dict[str, BufferSlice] = {}
        shapes: dict[str, tuple[Group, int, tuple[int, ...]]] = {}
        sizes = dict.fromkeys(in_order(groups.values()), 0)
        table = spec.parameters if table is None else table
        for fused_name, parts in fused_parts(spec, table).items():
            group = fused_group(parts, groups)
            start = sizes[group]
            shapes[fused_name] = (group, start, fused_shape(parts))
            for part in parts:
                self.slices[part.name] = BufferSlice(part, group, sizes[group])
                sizes[group] += part.num_elements
            sizes[group] += -sizes[group] % ALIGNMENT_ELEMENTS
        self.slices = {row.name: self.slices[row.name] for row in spec.parameters if row.name in self.slices}
        self.groups = tuple(sizes)
        self.values: dict[Group, list[Tensor]] = {
            group: [torch.zeros(sizes[group], device=device)] for group in self.groups
        }
        self.starts = {name: (group, start) for name, (group, start, _) in shapes.items()}
        self.modules: dict[str, nn.Parameter] = {}
        for name, (group, start, shape) in shapes.items():
            view = self.values[group][0][start : start + prod(shape)].view(shape)
            self.modules[name] = nn.Parameter(view, requires_grad=not group.is_frozen)
        self._gradients: dict[Group, list[Tensor]] = {}
        self._gradient_views: dict[str, Tensor] = {}
        self._place_gradients(shapes)

    def _place_gradients(self, shapes: Mapping[str, tuple[Group, int, tuple[int, ...]]]) -> None:
        """Create the gradient buffers; ``shapes`` are group, start and shape of each parameter of the modules."""
        self._gradients = self.new_buffers([group for group in self.groups if not group.is_frozen])
        for name, (group, start, shape) in shapes.items():
            if not group.is_frozen:
                view = self._gradients[group][0][start : start + prod(shape)].view(shape)
                self.modules[name].grad = self._gradient_views[name] = view

    @property
    def gradients(self) -> Buffers:
        return self._gradients

    @property
    def local(self) -> FlatParameters:
        return self

    def new_buffers(self, groups: Sequence[Group]) -> dict[Group, list[Tensor]]:
        return {group: [torch.zeros_like(self.values[group][0])] for group in groups if group in self.values}

    def zero_gradients(self) -> None:
        for (buffer,) in self._gradients.values():
            buffer.zero_()
        for name, view in self._gradient_views.items():  # other optimizers set them to None
            self.modules[name].grad = view

    def drop_gradients(self) -> None:
        """Free the gradients of a model that is not trained."""
        self._gradients.clear()
        self._gradient_views.clear()

    def release(self) -> None:
        """Do nothing: nothing was gathered."""

    def finish_gradients(self) -> None:
        """Do nothing: no other rank of the replica has a part of them."""

    def owned(self, buffers: Buffers) -> Iterator[Tensor]:
        return (tensor for tensors in buffers.values() for tensor in tensors)

    def store(self, values: Buffers) -> None:
        """Do nothing: ``values`` are the parameters themselves."""

    def backward(self, objective: Tensor, loss_scale: Tensor | None = None) -> None:
        (objective if loss_scale is None else objective * loss_scale).backward()

    def local_parts(self, buffers: Buffers) -> Iterator[ParameterPart]:
        for name, view in self.whole(buffers):
            yield ParameterPart(name, 0, view)

    def whole_rows(self, buffers: Buffers) -> Iterator[ParameterPart]:
        return self.local_parts(buffers)

    def whole(self, buffers: Buffers) -> Iterator[tuple[str, Tensor]]:
        """Yield views; nothing is copied."""
        for name, buffer_slice in self.slices.items():
            if buffer_slice.group in buffers:
                yield name, buffer_slice.view(buffers)


class WrappedParameters:
    """The base of layouts around another one, which holds this rank's share as if it were a whole model."""

    def __init__(self, inner: Parameters) -> None:
        self._inner = inner
        self.groups, self.gradient_divisor = inner.groups, inner.gradient_divisor

    @property
    def modules(self) -> Mapping[str, nn.Parameter]:
        return self._inner.modules

    @property
    def values(self) -> Buffers:
        return self._inner.values

    @property
    def gradients(self) -> Buffers:
        return self._inner.gradients

    def store(self, values: Buffers) -> None:
        self._inner.store(values)

    def backward(self, objective: Tensor, loss_scale: Tensor | None = None) -> None:
        self._inner.backward(objective, loss_scale)

    def new_buffers(self, groups: Sequence[Group]) -> dict[Group, list[Tensor]]:
        return self._inner.new_buffers(groups)

    def zero_gradients(self) -> None:
        self._inner.zero_gradients()

    def release(self) -> None:
        self._inner.release()


def register_gradient_hooks(parameters: Mapping[str, nn.Parameter], report: Callable[[str], None]) -> list[Any]:
    """Call ``report`` with the name of each parameter once all its uses in a backward pass have added to its gradient.

    The hooks are on the autograd nodes that accumulate gradients. Unlike ``register_post_accumulate_grad_hook``,
    they run as well after kernels that wrote the gradient themselves (``direct_kernels.py``).

    Returns:
        The nodes. The caller keeps them: autograd holds only weak references, and the hooks end with them.
    """

    def run(name: str, *_: object) -> None:
        report(name)

    nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in parameters.values()]
    for name, node in zip(parameters, nodes, strict=True):
        node.register_hook(partial(run, name))
    return nodes


def fused_parts(spec: ModelSpec, table: Sequence[ParameterSpec] | None = None) -> dict[str, list[ParameterSpec]]:
    """Return the canonical parameters that form each parameter of the modules, by its name, concatenated along rows.

    Args:
        spec: The model.
        table: Some of its parameters; default: all.
    """
    decoder = spec if isinstance(spec, DecoderSpec) else None
    parts: dict[str, list[ParameterSpec]] = {}
    for parameter in spec.parameters if table is None else table:
        name = parameter.name
        if decoder is not None and (decoder.block is None or name.startswith("vision.")):  # others are not fused
            name = module_name(name, gated=decoder.is_gated)
        parts.setdefault(name, []).append(parameter)
    return parts


def fused_group(parts: Sequence[ParameterSpec], groups: Mapping[str, Group]) -> Group:
    """Return the group of a parameter of the modules.

    Raises:
        ConfigError: Its canonical parts have different groups.
    """
    return common_group(
        [part.name for part in parts],
        groups,
        hint="let one pattern match query, key and value; gate and up; all experts; or all inputs of Mamba-2",
    )


def fused_shape(parts: Sequence[ParameterSpec]) -> tuple[int, ...]:
    if not parts[0].shape:  # a number
        return ()
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def module_name(name: str, *, gated: bool) -> str:
    """Return the name in the modules of the parameter that holds a canonical one."""
    split = split_expert(name)
    if split is not None:
        name = split[0]
    stem, _, kind = name.rpartition(".")
    for part, fused in _FUSED.items():
        if stem.endswith("." + part) and (gated or not part.startswith("mlp")):
            return f"{stem.removesuffix(part)}{fused}.{kind}"
    return name
