"""Parameters of a decoder on one rank of a pipeline: those of its stages.

Parameters of other stages are pieces without rows here. With tied embeddings, the first and the last rank have the
embedding; both copies stay equal bit by bit, because they get the same gradient before every update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vorox.backends.torch_engine.distributed import Ranks
from vorox.backends.torch_engine.parameters import Buffers, FlatParameters, Piece
from vorox.models.decoder_spec import DecoderSpec
from vorox.models.optimizer_groups import Group
from vorox.models.pipeline_stages import Stage, parameters_of, stages_of_device

TIED = "embedding.weight"


class PipelineParameters:
    """See ``Parameters``.

    Args:
        spec: The whole decoder.
        groups: The optimizer group of every parameter.
        ranks: The layout; its ``replica_group`` is the pipeline.
        per_device: Stages of each rank.
        device: Where the buffers are.

    Attributes:
        stages: The stages of this rank.
    """

    gradient_divisor = 1

    def __init__(
        self, spec: DecoderSpec, groups: Mapping[str, Group], ranks: Ranks, per_device: int, device: torch.device
    ) -> None:
        assert ranks.replica_group is not None
        self._spec, self._group_of, self._pipeline = spec, groups, ranks.replica_group
        self._index, self._size, self._device = ranks.pipeline_index, ranks.pipeline_parallel_size, device
        tables: list[set[str]] = []
        for index in range(self._size):
            stages = stages_of_device(spec.num_layers, self._size, per_device, index)
            table = parameters_of(spec, stages, tied=spec.tie_embeddings)
            tables.append({parameter.name for parameter in table})
            if index == self._index:
                self.stages: tuple[Stage, ...] = stages
                self._inner = FlatParameters(spec, groups, device=device, table=table)
        self._owner = {
            parameter.name: next(index for index, names in enumerate(tables) if parameter.name in names)
            for parameter in spec.parameters
        }

    @property
    def local(self) -> FlatParameters:
        return self._inner

    @property
    def groups(self) -> tuple[Group, ...]:
        return self._inner.groups

    @property
    def modules(self) -> Mapping[str, nn.Parameter]:
        return self._inner.modules

    @property
    def values(self) -> Buffers:
        return self._inner.values

    @property
    def gradients(self) -> Buffers:
        return self._inner.gradients

    @property
    def _has_copy(self) -> bool:
        """Whether this rank has the embedding of another one as its head."""
        return self._spec.tie_embeddings and self._index == self._size - 1

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

    def finish_gradients(self) -> None:
        """Add the gradients of the embedding as an input and as a tied head."""
        if not self._spec.tie_embeddings or self._group_of[TIED].is_frozen:
            return
        if self._index == 0:
            gradient = self._inner.slices[TIED].view(self._inner.gradients)
            other = torch.empty_like(gradient)
            dist.recv(other, self._rank(self._size - 1), self._pipeline)
            gradient.add_(other)
            dist.send(gradient, self._rank(self._size - 1), self._pipeline)
        elif self._has_copy:
            gradient = self._inner.slices[TIED].view(self._inner.gradients)
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
        here = self._inner.slices
        for parameter in self._spec.parameters:
            if self._group_of[parameter.name] not in buffers:
                continue
            if parameter.name in here:
                yield Piece(parameter.name, 0, here[parameter.name].view(buffers))
            else:
                yield Piece(parameter.name, 0, torch.empty(0, *parameter.shape[1:], device=self._device))

    def whole_rows(self, buffers: Buffers) -> Iterator[Piece]:
        """Yield whole parameters of this rank; the first rank yields a tied embedding."""
        return (piece for piece in self._inner.pieces(buffers) if self._owner[piece.name] == self._index)

    def whole(self, buffers: Buffers) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters; the rank that has one sends it to the others."""
        here = self._inner.slices
        for parameter in self._spec.parameters:
            if self._group_of[parameter.name] not in buffers:
                continue
            owner = self._owner[parameter.name]
            is_owner = owner == self._index
            value = (
                here[parameter.name].view(buffers) if is_owner else torch.empty(parameter.shape, device=self._device)
            )
            dist.broadcast(value, self._rank(owner), self._pipeline)
            yield parameter.name, value
