"""Parameters of the pipeline stages on one rank.

Parameters of other stages are pieces without rows here. With tied embeddings, the first and the last rank have the
embedding; both copies stay equal bit by bit, because they get the same gradient before every update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vorox.backends.torch_engine.distributed import Ranks
from vorox.backends.torch_engine.parallel.sharded_parameters import ShardedParameters
from vorox.backends.torch_engine.parameters import Buffers, FlatParameters, Parameters, Piece, WrappedParameters
from vorox.models.optimizer_groups import Group
from vorox.models.pipeline_stages import Stage, parameters_of, stages_of_device, tied_embedding
from vorox.models.spec import ModelSpec


class PipelineParameters(WrappedParameters):
    """See ``Parameters``.

    Args:
        spec: The whole model.
        groups: The optimizer group of every parameter.
        ranks: The layout.
        per_device: Stages of each rank.
        device: Where the buffers are.

    Attributes:
        stages: The stages of this rank.
        tied: Name of the embedding that is also the head, if any.
    """

    def __init__(
        self, spec: ModelSpec, groups: Mapping[str, Group], ranks: Ranks, per_device: int, device: torch.device
    ) -> None:
        assert ranks.pipeline_group is not None
        self._spec, self._group_of, self._pipeline = spec, groups, ranks.pipeline_group
        self._index, self._size, self._device = ranks.pipeline_index, ranks.pipeline_parallel_size, device
        self.tied = tied_embedding(spec)
        devices = [stages_of_device(spec.num_layers, self._size, per_device, index) for index in range(self._size)]
        tables = [parameters_of(spec, stages) for stages in devices]
        self.stages: tuple[Stage, ...] = devices[self._index]
        table = tables[self._index]
        super().__init__(
            FlatParameters(spec, groups, device=device, table=table)
            if ranks.fsdp_size == 1
            else ShardedParameters(spec, groups, ranks=ranks, table=table)
        )
        self._names = {parameter.name for parameter in table}
        # The first rank owns a tied embedding.
        self._owner = {parameter.name: index for index in reversed(range(self._size)) for parameter in tables[index]}

    def shard(
        self, modules: Sequence[nn.Module], blocks: Sequence[nn.Module], dtype: torch.dtype, *, reshard: bool
    ) -> None:
        """Shard the stages of this rank and their blocks by FSDP2, if several ranks have them."""
        if isinstance(self._inner, ShardedParameters):
            self._inner.shard(nn.ModuleList(modules), blocks, dtype, reshard=reshard, roots=modules)

    @property
    def local(self) -> Parameters:
        return self._inner

    @property
    def _has_copy(self) -> bool:
        """Whether this rank's head is the embedding of another rank."""
        return self.tied is not None and self._index == self._size - 1

    def finish_gradients(self) -> None:
        """Add the gradients of the embedding as an input and as a tied head."""
        if self.tied is None or self._group_of[self.tied].is_frozen:
            return
        if self._index not in (0, self._size - 1):
            return
        gradient = next(piece.view for piece in self._inner.pieces(self._inner.gradients) if piece.name == self.tied)
        if not gradient.numel():  # FSDP has fewer rows than ranks
            return
        if self._index == 0:
            other = torch.empty_like(gradient)
            dist.recv(other, self._rank(self._size - 1), self._pipeline)
            gradient.add_(other)
            dist.send(gradient, self._rank(self._size - 1), self._pipeline)
        else:
            dist.send(gradient, self._rank(0), self._pipeline)
            dist.recv(gradient, self._rank(0), self._pipeline)

    def _rank(self, index: int) -> int:
        return dist.get_global_rank(self._pipeline, index)

    def owned(self, buffers: Buffers) -> Iterator[Tensor]:
        if not self._has_copy:
            return self._inner.owned(buffers)
        return (piece.view for piece in self.whole_rows(buffers))

    def pieces(self, buffers: Buffers) -> Iterator[Piece]:
        """Yield all parameters; those of other ranks have no rows."""
        here = {piece.name: piece for piece in self._inner.pieces(buffers)}
        for parameter in self._spec.parameters:
            if self._group_of[parameter.name] in buffers:
                empty = Piece(parameter.name, 0, torch.empty(0, *parameter.shape[1:], device=self._device))
                yield here.get(parameter.name, empty)

    def whole_rows(self, buffers: Buffers) -> Iterator[Piece]:
        """Yield the parameters of this rank, or its shards of them; the first rank yields a tied embedding."""
        return (piece for piece in self._inner.pieces(buffers) if self._owner[piece.name] == self._index)

    def whole(self, buffers: Buffers) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters; the rank that has one sends it to the others."""
        here = self._inner.whole(buffers)
        for parameter in self._spec.parameters:
            if self._group_of[parameter.name] not in buffers:
                continue
            owner = self._owner[parameter.name]
            value = next(here)[1] if parameter.name in self._names else None
            if value is None or owner != self._index:
                value = torch.empty(parameter.shape, device=self._device)
            dist.broadcast(value, self._rank(owner), self._pipeline)
            yield parameter.name, value
