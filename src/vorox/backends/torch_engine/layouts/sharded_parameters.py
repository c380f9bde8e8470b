"""Parameters sharded by FSDP2: each rank stores some rows and gathers the others to compute.

Each residual block is a unit, gathered before it runs; embedding, final norm and head belong to the root and are
gathered once per pass. Gradients are summed, not averaged, because the loss is already divided by the global
number of targets.

Constants of the model (persistent buffers, such as the routing bias of Nemotron-H) are whole on every rank, because
FSDP2 shards parameters only. Their rows are divided as those of parameters in checkpoints.

Shape legend: the first dimension of a parameter ("rows") is sharded, as ``torch.chunk`` divides it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vorox.backends.torch_engine.layouts.parameters import Buffers, ParameterPart, fused_group, fused_parts, fused_shape
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.models.optimizer_groups import Group, in_order
from vorox.models.spec import ModelSpec, ParameterSpec

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class _Sharded:
    """A parameter of the modules: its canonical parts, concatenated along rows, and this rank's rows."""

    name: str
    group: Group
    place: int  # index among the tensors of its group
    parts: tuple[ParameterSpec, ...]
    rows_per_rank: int
    first_row: int
    num_rows: int

    def ranges(self) -> Iterator[tuple[ParameterSpec, int, int]]:
        """Yield canonical parts with their range of fused rows."""
        start = 0
        for part in self.parts:
            yield part, start, start + part.shape[0]
            start += part.shape[0]


class ShardedParameters:
    """See ``Parameters``. Created without memory (``modules`` are on the meta device); ``shard`` allocates.

    Attributes:
        modules: Name in the modules, possibly fused, to parameter.
    """

    gradient_divisor = 1

    def __init__(
        self,
        spec: ModelSpec,
        groups: Mapping[str, Group],
        *,
        ranks: Ranks,
        table: Sequence[ParameterSpec] | None = None,
        constants: Mapping[str, torch.device] | None = None,
    ) -> None:
        """Create them for a model.

        Args:
            spec: The model.
            groups: The optimizer group of every parameter.
            ranks: The ranks that share it.
            table: Its parameters on this rank, as in ``FlatParameters``; default: all.
            constants: Persistent buffers by name, with the device of each.
        """
        self._spec, self._ranks, self._constants = spec, ranks, constants or {}
        self._sharded: list[_Sharded] = []
        self.modules: dict[str, nn.Parameter] = {}
        counts = dict.fromkeys(in_order(groups.values()), 0)
        index, size = ranks.fsdp_index, ranks.num_fsdp_shards
        for name, parts in fused_parts(spec, table).items():
            group = fused_group(parts, groups)
            shape = fused_shape(parts)
            device = self._constants.get(name, "meta")
            self.modules[name] = nn.Parameter(torch.zeros(shape, device=device), requires_grad=not group.is_frozen)
            share = -(-shape[0] // size)
            first = min(share * index, shape[0])
            num_rows = min(share, shape[0] - first)
            self._sharded.append(_Sharded(name, group, counts[group], tuple(parts), share, first, num_rows))
            counts[group] += 1
        self.groups = tuple(counts)

    def shard(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        dtype: torch.dtype,
        *,
        reshard: bool,
        roots: Sequence[nn.Module] = (),
        offload: bool = False,
    ) -> None:
        """Shard a model that was built from ``modules``, and allocate this rank's rows.

        Args:
            model: The decoder.
            units: Modules that are gathered as a whole, in the order of the forward pass.
            dtype: Precision of the gathered parameters; gradients are summed in fp32.
            reshard: Free the gathered rows of a unit between its forward and backward pass (ZeRO-3), or keep them
                (ZeRO-2).
            roots: The modules that are called, if not ``model``: the stages of a pipeline.
            offload: Keep the rows and their gradients in host memory; a unit is copied to the device when it is
                gathered.
        """
        # Takes more than a second to import, and one device needs none of it.
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        assert self._ranks.mesh is not None
        buffers = dict(model.named_buffers())
        paths = {id(parameter): path for path, parameter in model.named_parameters()}
        sharded = {name: value for name, value in self.modules.items() if name not in self._constants}
        paths = {name: paths[id(parameter)] for name, parameter in sharded.items()}
        mesh = self._ranks.mesh["data", "fsdp"] if self._ranks.num_replicas > 1 else self._ranks.mesh["fsdp"]
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        device_type = self._ranks.mesh.device_type
        place = CPUOffloadPolicy(pin_memory=device_type == "cuda") if offload else OffloadPolicy()
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, offload_policy=place)
        for root in roots or (model,):
            fully_shard(root, mesh=mesh, mp_policy=policy, offload_policy=place)
        self._units = [cast("FSDPModule", module) for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        model.to_empty(device="cpu" if offload else device_type)
        for name, buffer in buffers.items():  # emptied too
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = buffer
        found = dict(model.named_parameters())
        self.modules |= {name: found[path] for name, path in paths.items()}

    @property
    def local(self) -> ShardedParameters:
        return self

    def release(self) -> None:
        for unit in self._units:
            unit.reshard()

    def store(self, values: Buffers) -> None:
        """Complete the constants from the rows that each rank has changed; other ``values`` are the parameters."""
        for one in self._sharded:
            if one.name in self._constants:
                whole = self.modules[one.name].data
                whole.copy_(self._gather(one, values[one.group][one.place])[: len(whole)])

    def backward(self, objective: Tensor, loss_scale: Tensor | None = None) -> None:
        (objective if loss_scale is None else objective * loss_scale).backward()

    @property
    def values(self) -> Buffers:
        return self._by_group([self._rows(one) for one in self._sharded])

    def _rows(self, one: _Sharded) -> Tensor:
        """Return this rank's rows of a parameter."""
        value = self.modules[one.name]
        if one.name in self._constants:
            return value.detach()[one.first_row : one.first_row + one.num_rows]
        return _local(value)

    @property
    def gradients(self) -> Buffers:
        found: list[Tensor] = []
        for one in self._sharded:
            gradient = self.modules[one.name].grad
            found.append(torch.zeros_like(self._rows(one)) if gradient is None else _local(gradient))
        return {group: tensors for group, tensors in self._by_group(found).items() if not group.is_frozen}

    def _by_group(self, tensors: Sequence[Tensor]) -> dict[Group, list[Tensor]]:
        found: dict[Group, list[Tensor]] = {group: [] for group in self.groups}
        for one, tensor in zip(self._sharded, tensors, strict=True):
            found[one.group].append(tensor)
        return found

    def new_buffers(self, groups: Sequence[Group]) -> dict[Group, list[Tensor]]:
        values = self.values
        return {group: [torch.zeros_like(value) for value in values[group]] for group in groups if group in values}

    def zero_gradients(self) -> None:
        for parameter in self.modules.values():
            parameter.grad = None

    def finish_gradients(self) -> None:
        """Do nothing: FSDP has summed them in the backward passes."""

    def owned(self, buffers: Buffers) -> Iterator[Tensor]:
        return (tensor for tensors in buffers.values() for tensor in tensors)

    def whole_rows(self, buffers: Buffers) -> Iterator[ParameterPart]:
        return self.local_parts(buffers)

    def local_parts(self, buffers: Buffers) -> Iterator[ParameterPart]:
        found: dict[str, ParameterPart] = {}
        for one in self._sharded:
            if one.group in buffers:
                local, end = buffers[one.group][one.place], one.first_row + one.num_rows
                for part, first, last in one.ranges():
                    start = max(first, one.first_row)
                    stop = max(start, min(last, end))
                    view = local[start - one.first_row : stop - one.first_row]
                    found[part.name] = ParameterPart(part.name, start - first, view)
        for parameter in self._spec.parameters:
            if parameter.name in found:
                yield found[parameter.name]

    def whole(self, buffers: Buffers) -> Iterator[tuple[str, Tensor]]:
        owners = {part.name: one for one in self._sharded for part in one.parts if one.group in buffers}
        gathered: dict[str, Tensor] = {}
        for parameter in self._spec.parameters:
            one = owners.get(parameter.name)
            if one is None:
                continue
            if parameter.name not in gathered:
                full = self._gather(one, buffers[one.group][one.place])
                gathered |= {part.name: full[first:last] for part, first, last in one.ranges()}
            yield parameter.name, gathered.pop(parameter.name)

    def _gather(self, one: _Sharded, local: Tensor) -> Tensor:
        if self._ranks.num_fsdp_shards == 1:
            return local
        assert self._ranks.mesh is not None
        padded = local.new_zeros((one.rows_per_rank, *local.shape[1:]))
        padded[: one.num_rows] = local
        pieces = [torch.empty_like(padded) for _ in range(self._ranks.num_fsdp_shards)]
        dist.all_gather(pieces, padded, group=self._ranks.mesh.get_group("fsdp"))
        return torch.cat(pieces)


def _local(tensor: Tensor) -> Tensor:
    return cast("DTensor", tensor).to_local().detach()
