"""Parameters of the pipeline stages on one rank.

Parameters of other stages are parts without rows here. With tied embeddings, the ranks of the first and the last stage
have the embedding; both copies stay equal bit by bit, because they get the same gradient before every update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vorox.backends.torch_engine.layouts.divided_parameters import DividedParameters
from vorox.backends.torch_engine.layouts.parameters import Buffers, FlatParameters
from vorox.backends.torch_engine.layouts.sharded_parameters import ShardedParameters
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.backends.torch_engine.ranks.plan import ParallelPlan, Style
from vorox.backends.torch_engine.ranks.rank_group import RankGroup
from vorox.models.optimizer_groups import Group
from vorox.models.pipeline_stages import StagePlacement, parameters_of, tied_embedding
from vorox.models.spec import ModelSpec, ParameterSpec


class PipelineParameters(DividedParameters):
    """See ``Parameters``.

    Args:
        spec: The whole model.
        table: Its parameters with their shapes on the ranks of this pipeline.
        groups: The optimizer group of every parameter.
        ranks: The layout.
        placement: The stages of all ranks.
        device: Where the buffers are.
    """

    def __init__(
        self,
        spec: ModelSpec,
        table: Sequence[ParameterSpec],
        groups: Mapping[str, Group],
        ranks: Ranks,
        placement: StagePlacement,
        device: torch.device,
    ) -> None:
        assert ranks.pipeline_group is not None
        group = RankGroup(ranks.pipeline_index, ranks.pipeline_parallel_size, ranks.pipeline_group)
        self._tied, plan = tied_embedding(spec), pipeline_plan(spec, placement)
        here = plan.share(table, group)
        inner = (
            FlatParameters(spec, groups, device=device, table=here)
            if ranks.num_fsdp_shards == 1
            else ShardedParameters(spec, groups, ranks=ranks, table=here)
        )
        super().__init__(inner, table, groups, plan, group)

    def shard(
        self, modules: Sequence[nn.Module], blocks: Sequence[nn.Module], dtype: torch.dtype, *, reshard: bool
    ) -> None:
        """Shard the stages of this rank and their blocks by FSDP2, if several ranks have them."""
        if isinstance(self._inner, ShardedParameters):
            self._inner.shard(nn.ModuleList(modules), blocks, dtype, reshard=reshard, roots=modules)

    @property
    def _has_copy(self) -> bool:
        """Whether this rank's head is the embedding of another rank."""
        return self._tied is not None and self._group.index in self._plan.holders[self._tied][1:]

    def finish_gradients(self) -> None:
        """Add the gradients of the embedding as an input and as a tied head, if two ranks have it."""
        if self._tied is None or self._group_of[self._tied].is_frozen:
            return
        group, holders = self._group, self._plan.holders[self._tied]
        if len(holders) == 1 or group.index not in holders:
            return
        gradient = next(part.view for part in self._inner.local_parts(self._inner.gradients) if part.name == self._tied)
        if not gradient.numel():  # FSDP has fewer rows than ranks
            return
        first, last = (group.global_rank(index) for index in holders)
        if group.index == holders[0]:
            other = torch.empty_like(gradient)
            dist.recv(other, last, group.group)
            gradient.add_(other)
            dist.send(gradient, last, group.group)
        else:
            dist.send(gradient, first, group.group)
            dist.recv(gradient, first, group.group)

    def owned(self, buffers: Buffers) -> Iterator[Tensor]:
        return super().owned(buffers) if self._has_copy else self._inner.owned(buffers)


def pipeline_plan(spec: ModelSpec, placement: StagePlacement) -> ParallelPlan:
    """Return which rank of a pipeline has which parameter: those that its stages need."""
    holders: dict[str, tuple[int, ...]] = {}
    for index, stages in enumerate(placement.devices):
        for row in parameters_of(spec, stages):
            holders[row.name] = (*holders.get(row.name, ()), index)
    return ParallelPlan(dict.fromkeys(holders, Style.WHOLE), holders)
