"""Expert parallelism: ranks divide the experts of every block and exchange tokens for them.

The ranks of a group train on different rows, as replicas do, and each has some of the experts. A rank routes its own
positions and sends each slot to the rank that has its expert (all-to-all); that rank computes its experts on the slots
of all ranks, and sends the results back. All other parameters are on every rank.

Shape legend: E experts, X experts of a rank, R ranks of the group, S slots of this rank, P slots that it computes, D
width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vorox.backends.torch_engine.distributed import Ranks
from vorox.backends.torch_engine.parallel.differentiable import differentiable
from vorox.backends.torch_engine.parameters import Buffers, FlatParameters, Piece
from vorox.models.decoder_spec import DecoderSpec
from vorox.models.experts import split_expert
from vorox.models.optimizer_groups import Group, in_order
from vorox.models.spec import ParameterSpec

Compute = Callable[[Tensor, Tensor], Tensor]
"""(slots sorted by expert, end of each expert) -> their output."""


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """This rank's share of the experts."""

    index: int
    size: int
    num_experts: int
    group: ProcessGroup

    @classmethod
    def of(cls, num_experts: int | None, ranks: Ranks) -> ExpertParallel | None:
        """Return the share of a rank; ``None`` without expert parallelism."""
        if ranks.expert_parallel_size == 1:
            return None
        assert num_experts is not None
        assert ranks.replica_group is not None
        return cls(ranks.expert_index, ranks.expert_parallel_size, num_experts, ranks.replica_group)

    @property
    def num_local(self) -> int:
        return self.num_experts // self.size

    def owner(self, expert: int) -> int:
        """Return the index of the rank that has an expert."""
        return expert // self.num_local

    def run(self, compute: Compute, x_SD: Tensor, ends_E: Tensor) -> Tensor:
        """Compute the experts of all ranks on this rank's slots, which are sorted by expert."""
        load_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        sent_RX = load_E.view(self.size, self.num_local).contiguous()
        received_RX = torch.empty_like(sent_RX)
        dist.all_to_all_single(received_RX, sent_RX, group=self.group)
        sent, received = sent_RX.sum(1).tolist(), received_RX.sum(1).tolist()
        dispatch, combine = partial(self._all_to_all, sent, received), partial(self._all_to_all, received, sent)
        x_PD = differentiable(x_SD, dispatch, combine)
        # Slots arrive by rank, then by expert.
        expert_P = torch.arange(self.num_local, device=x_SD.device).repeat(self.size)
        order_P = expert_P.repeat_interleave(received_RX.flatten().long()).argsort(stable=True)
        inverse_P = order_P.argsort()
        y_PD = compute(Permute.apply(x_PD, order_P, inverse_P), received_RX.sum(0).cumsum(0).int())
        return differentiable(Permute.apply(y_PD, inverse_P, order_P), combine, dispatch)

    def _all_to_all(self, sent: list[int], received: list[int], x_SD: Tensor) -> Tensor:
        """Send consecutive slots to the ranks of the group, ``sent[r]`` to rank r."""
        found_PD = x_SD.new_empty(sum(received), x_SD.shape[1])
        dist.all_to_all_single(found_PD, x_SD.contiguous(), received, sent, group=self.group)
        return found_PD


class Permute(torch.autograd.Function):
    """Reorder slots; the gradient is the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, order_P: Tensor, inverse_P: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_P)
        return x_PD[order_P]

    @staticmethod
    def backward(ctx: Any, d_PD: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (inverse_P,) = ctx.saved_tensors
        return d_PD[inverse_P], None, None


class LocalParameters:
    """The parameters that this rank updates: those of all ranks, and those of its experts, in a buffer of their own."""

    def __init__(
        self, spec: DecoderSpec, groups: Mapping[str, Group], parallel: ExpertParallel, device: torch.device
    ) -> None:
        tables: tuple[list[ParameterSpec], list[ParameterSpec]] = ([], [])
        for parameter in spec.parameters:
            split = split_expert(parameter.name)
            if split is None:
                tables[0].append(parameter)
            elif parallel.owner(split[1]) == parallel.index:
                tables[1].append(parameter)
        self.parts = tuple(
            FlatParameters(spec, {row.name: groups[row.name] for row in table}, device=device, table=table)
            for table in tables
        )
        self.groups = in_order(group for part in self.parts for group in part.groups)
        self.modules: dict[str, nn.Parameter] = {name: one for part in self.parts for name, one in part.modules.items()}

    @property
    def values(self) -> Buffers:
        return self.join([part.values for part in self.parts])

    def split(self, buffers: Buffers) -> tuple[Buffers, Buffers]:
        """Return the buffers of shared parameters and those of experts."""
        found: tuple[dict[Group, Sequence[Tensor]], dict[Group, Sequence[Tensor]]] = ({}, {})
        for group, tensors in buffers.items():
            rest = list(tensors)
            for part, own in zip(self.parts, found, strict=True):
                if group in part.groups:
                    own[group] = [rest.pop(0)]
        return found

    def join(self, parts: Sequence[Buffers]) -> dict[Group, list[Tensor]]:
        found: dict[Group, list[Tensor]] = {}
        for group in self.groups:
            tensors = [tensor for part in parts for tensor in part.get(group, ())]
            if tensors:
                found[group] = tensors
        return found

    def pieces(self, buffers: Buffers) -> Iterator[Piece]:
        for part, own in zip(self.parts, self.split(buffers), strict=True):
            yield from part.pieces(own)

    def whole(self, buffers: Buffers) -> Iterator[tuple[str, Tensor]]:
        return ((piece.name, piece.view) for piece in self.pieces(buffers))


class ExpertParallelParameters:
    """See ``Parameters``. Experts of other ranks are pieces without rows."""

    gradient_divisor = 1

    def __init__(
        self, spec: DecoderSpec, groups: Mapping[str, Group], parallel: ExpertParallel, device: torch.device
    ) -> None:
        self._spec, self._group_of, self._parallel, self._device = spec, groups, parallel, device
        self._local = LocalParameters(spec, groups, parallel, device)

    @property
    def local(self) -> Any:
        return self._local

    @property
    def groups(self) -> tuple[Group, ...]:
        return self._local.groups

    @property
    def modules(self) -> Mapping[str, nn.Parameter]:
        return self._local.modules

    @property
    def values(self) -> Buffers:
        return self._local.values

    @property
    def gradients(self) -> Buffers:
        return self._local.join([part.gradients for part in self._local.parts])

    def sum_gradients(self, ranks: Ranks) -> None:
        """Add shared gradients over all ranks, and those of experts over the ranks that have the same ones."""
        shared, experts = (part.gradients for part in self._local.parts)
        ranks.sum(*(tensor for tensors in shared.values() for tensor in tensors))
        ranks.sum_over_replicas(*(tensor for tensors in experts.values() for tensor in tensors))

    def store(self, values: Buffers) -> None:
        """Do nothing: ``values`` are the parameters themselves."""

    def backward(self, objective: Tensor, loss_scale: Tensor | None = None) -> None:
        (objective if loss_scale is None else objective * loss_scale).backward()

    def new_buffers(self, groups: Sequence[Group]) -> dict[Group, list[Tensor]]:
        return self._local.join([part.new_buffers(groups) for part in self._local.parts])

    def zero_gradients(self) -> None:
        for part in self._local.parts:
            part.zero_gradients()

    def release(self) -> None:
        """Do nothing: nothing was gathered."""

    def finish_gradients(self) -> None:
        """Do nothing: the exchange of tokens brought every gradient to the rank of its expert."""

    def owned(self, buffers: Buffers) -> Iterator[Tensor]:
        """Yield the experts of this rank; the first rank also yields what all have."""
        shared, experts = self._local.split(buffers)
        parts = (shared, experts) if self._parallel.index == 0 else (experts,)
        return (tensor for part in parts for tensors in part.values() for tensor in tensors)

    def pieces(self, buffers: Buffers) -> Iterator[Piece]:
        here = {piece.name: piece for piece in self._local.pieces(buffers)}
        for parameter in self._spec.parameters:
            if self._group_of[parameter.name] in buffers:
                empty = Piece(parameter.name, 0, torch.empty(0, *parameter.shape[1:], device=self._device))
                yield here.get(parameter.name, empty)

    def whole_rows(self, buffers: Buffers) -> Iterator[Piece]:
        for piece in self._local.pieces(buffers):
            if split_expert(piece.name) is not None or self._parallel.index == 0:
                yield piece

    def whole(self, buffers: Buffers) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters; the rank that has an expert sends it to the others."""
        here = dict(self._local.whole(buffers))
        for parameter in self._spec.parameters:
            if self._group_of[parameter.name] not in buffers:
                continue
            split = split_expert(parameter.name)
            if split is None:
                yield parameter.name, here[parameter.name]
                continue
            value = here.get(parameter.name)
            value = torch.empty(parameter.shape, device=self._device) if value is None else value.contiguous()
            group = self._parallel.group
            dist.broadcast(value, dist.get_global_rank(group, self._parallel.owner(split[1])), group)
            yield parameter.name, value
