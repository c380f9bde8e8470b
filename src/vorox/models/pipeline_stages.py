"""Stages of a pipeline: which blocks and parameters of a decoder each device holds.

Blocks are divided as evenly as possible, earlier stages take one more. The first stage has the embeddings, the last one
the final norm and the head. With tied embeddings, both have the embedding, whose gradients are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vorox.core.schema import ParallelConfig
from vorox.models.spec import ModelSpec, ParameterSpec


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Consecutive blocks of a decoder.

    Attributes:
        index: Index of the stage, in the order of the forward pass.
        count: Number of stages.
        layers: Indices of the blocks.
    """

    index: int
    count: int
    layers: range

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """Which device of a pipeline has which stages.

    Attributes:
        devices: The stages of each device, in the order of the forward pass.
    """

    devices: tuple[tuple[PipelineStage, ...], ...]

    @classmethod
    def of(cls, num_layers: int, parallel: ParallelConfig) -> StagePlacement:
        """Deal stages out in turn.

        Args:
            num_layers: Blocks of the decoder, at least one for each stage.
            parallel: Devices of the pipeline, and stages of each.
        """
        size = parallel.pipeline_parallel_size
        count = size * parallel.pipeline_needs.stages_per_device
        stages = [_stage(num_layers, count, index) for index in range(count)]
        return cls(tuple(tuple(stages[device::size]) for device in range(size)))

    def device_of(self, index: int) -> int:
        """Return the device that has the stage with an index."""
        return next(device for device, stages in enumerate(self.devices) if any(one.index == index for one in stages))


def _stage(num_layers: int, count: int, index: int) -> PipelineStage:
    each, more = divmod(num_layers, count)
    first = each * index + min(index, more)
    return PipelineStage(index, count, range(first, first + each + (index < more)))


def tied_embedding(spec: ModelSpec) -> str | None:
    """Return the name of the embedding that is also the head; ``None`` if the model has a head of its own."""
    if any(row.kind == "head" for row in spec.parameters):
        return None
    return next((row.name for row in spec.parameters if row.kind == "embedding"), None)  # those of positions are later


def parameters_of(spec: ModelSpec, stages: Sequence[PipelineStage]) -> tuple[ParameterSpec, ...]:
    """Return the parameters that stages need, in table order.

    Args:
        spec: A decoder. The names of its blocks' parameters contain the number of the block.
        stages: The stages of a device.
    """
    layers = {layer for stage in stages for layer in stage.layers}
    has_first, has_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    tied = tied_embedding(spec)

    def is_here(row: ParameterSpec) -> bool:
        layer = next((int(word) for word in row.name.split(".") if word.isdigit()), None)
        if layer is not None:
            return layer in layers
        if row.kind == "embedding":
            return has_first or (has_last and row.name == tied)
        return has_last

    return tuple(row for row in spec.parameters if is_here(row))
