"""Parameters of a model that several ranks divide by a plan (``ranks/plan.py``), around another layout.

The layout inside holds the share of this rank as if it were a whole model; here its parts have their place in the
canonical parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from vorox.backends.torch_engine.layouts.parameters import (
    Buffers,
    FlatParameters,
    ParameterPart,
    Parameters,
    WrappedParameters,
)
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.backends.torch_engine.ranks.plan import ParallelPlan, Style
from vorox.backends.torch_engine.ranks.rank_group import RankGroup
from vorox.backends.torch_engine.ranks.tensor_parallel import TensorGroup
from vorox.models.optimizer_groups import Group
from vorox.models.spec import ParameterSpec


class DividedParameters(WrappedParameters):
    """See ``Parameters``.

    Args:
        inner: The parameters of this rank's share.
        table: The whole parameters.
        groups: The optimizer group of each.
        plan: How they are divided.
        group: The ranks that divide them.
    """

    def __init__(
        self,
        inner: Parameters,
        table: Sequence[ParameterSpec],
        groups: Mapping[str, Group],
        plan: ParallelPlan,
        group: RankGroup,
    ) -> None:
        super().__init__(inner)
        self._table, self._group_of, self._plan, self._group = table, groups, plan, group
        self._shapes = {row.name: row.shape for row in table}

    @cached_property
    def _here(self) -> set[str]:
        """The parameters that this rank has a part of."""
        return {part.name for part in self._inner.local_parts(self._inner.values)}

    @property
    def local(self) -> Parameters:
        plan = replace(self._plan, holders={})
        return DividedParameters(self._inner.local, self._table, self._group_of, plan, self._group)

    def _rows(self, buffers: Buffers) -> Iterator[ParameterSpec]:
        """Yield the parameters in buffers that a rank of the group has."""
        for row in self._table:
            if self._group_of[row.name] in buffers and (row.name in self._here or row.name in self._plan.holders):
                yield row

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=next(iter(self.modules.values())).device)

    def finish_gradients(self) -> None:
        self._inner.finish_gradients()

    def _is_counted(self, name: str) -> bool:
        """Whether this rank counts its part of a parameter, or the whole."""
        return self._plan.dim(name) is not None or self._plan.owner(name) == self._group.index

    def owned(self, buffers: Buffers) -> Iterator[Tensor]:
        return (part.view for part in self._inner.whole_rows(buffers) if self._is_counted(part.name))

    def local_parts(self, buffers: Buffers) -> Iterator[ParameterPart]:
        """Yield all parameters; those of other ranks have no rows."""
        here = {part.name: self._placed(part) for part in self._inner.local_parts(buffers)}
        return (
            here[row.name] if row.name in here else ParameterPart(row.name, 0, self._empty(0, *row.shape[1:]))
            for row in self._rows(buffers)
        )

    def _placed(self, part: ParameterPart) -> ParameterPart:
        """Return a part with its place in the canonical parameter."""
        dim = self._plan.dim(part.name)
        if dim is None:
            return part
        first, _ = self._group.range_of(self._shapes[part.name][dim])
        return part._replace(first_column=first) if dim else part._replace(first_row=part.first_row + first)

    def whole_rows(self, buffers: Buffers) -> Iterator[ParameterPart]:
        """Yield rows; ranks exchange columns for rows."""
        for part in map(self._placed, self._inner.whole_rows(buffers)):
            if self._plan.dim(part.name) == 1:
                first, rows = self._group.exchange_columns(part.view)
                yield ParameterPart(part.name, part.first_row + first, rows)
            elif self._is_counted(part.name):
                yield part

    def whole(self, buffers: Buffers) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters; ranks join their parts, or the first one that has a parameter sends it."""
        here = self._inner.whole(buffers)
        for row in self._rows(buffers):
            value = next(here)[1] if row.name in self._here else self._empty(*row.shape)
            if row.name in self._plan.holders:
                value = value.contiguous() if self._is_counted(row.name) else self._empty(*row.shape)
                self._group.broadcast_(value, self._plan.owner(row.name))
            dim = self._plan.dim(row.name)
            yield row.name, value if dim is None else self._group.join(value, row.shape[dim], dim)


class TensorParallelParameters(DividedParameters):
    """Parameters of tensor parallelism. Whole ones stay equal bit by bit: their gradients are made equal."""

    _group: TensorGroup

    def finish_gradients(self) -> None:
        """Sum gradients of whole parameters that each rank has a part of; give all ranks the others of rank 0."""
        super().finish_gradients()
        held = [part for part in self._inner.local_parts(self._inner.gradients) if self._plan.dim(part.name) is None]
        all_are_parts = self._group.divides_positions or self._group.index == 0
        parts = [
            part.view
            if all_are_parts or self._plan.styles[part.name] == Style.PER_HEAD
            else torch.zeros_like(part.view)
            for part in held
        ]
        if parts:
            total = torch.cat([part.reshape(-1) for part in parts])
            self._group.sum_(total)
            for part, values in zip(held, total.split([part.numel() for part in parts]), strict=True):
                part.view.copy_(values.view(part.view.shape))


class ExpertParallelParameters(DividedParameters):
    """Parameters of expert parallelism: the exchange of slots brings every gradient to the rank of its expert."""

    def sum_gradients(self, ranks: Ranks) -> None:
        """Add shared gradients over all ranks, and those of experts over the ranks that have the same ones.

        Each are one range of the gradient buffer of a group, and one sum (``ExpertShare``).
        """
        assert isinstance(self._inner, FlatParameters), "divided experts refuse FSDP2 and DeepSpeed"
        for group, (buffer,) in self._inner.gradients.items():
            slices = [one for one in self._inner.slices.values() if one.group == group]
            slices.sort(key=lambda one: one.start)
            for is_divided, run in groupby(slices, key=lambda one: self._plan.is_divided(one.parameter.name)):
                ends = [(one.start, one.start + one.parameter.num_elements) for one in run]
                add = ranks.sum_over_replicas if is_divided else ranks.sum
                add(buffer[ends[0][0] : ends[-1][1]])
