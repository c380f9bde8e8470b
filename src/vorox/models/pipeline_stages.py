"""Stages of a pipeline: which blocks and parameters of a decoder each device holds.

Blocks are divided as evenly as possible, earlier stages take one more. The first stage has the embeddings, the last one
the final norm and the head. With tied embeddings, both have the embedding, whose gradients are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vorox.models.spec import ModelSpec, ParameterSpec


@dataclass(frozen=True, slots=True)
class Stage:
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


def stages_of_device(num_layers: int, num_devices: int, per_device: int, index: int) -> tuple[Stage, ...]:
    """Return the stages of a device: every ``num_devices``-th one, from ``index``.

    Args:
        num_layers: Blocks of the decoder, at least one for each stage.
        num_devices: Devices of the pipeline.
        per_device: Stages of each.
        index: Index of the device in the pipeline.
    """
    count = num_devices * per_device
    return tuple(_stage(num_layers, count, place) for place in range(index, count, num_devices))


def _stage(num_layers: int, count: int, index: int) -> Stage:
    each, more = divmod(num_layers, count)
    first = each * index + min(index, more)
    return Stage(index, count, range(first, first + each + (index < more)))


def parameters_of(spec: ModelSpec, stages: Sequence[Stage], *, tied: bool) -> tuple[ParameterSpec, ...]:
    """Return the parameters that stages need, in table order.

    Args:
        spec: A decoder.
        stages: The stages of a device.
        tied: Whether the head is the embedding.
    """
    layers = {layer for stage in stages for layer in stage.layers}
    has_first, has_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)

    def is_here(name: str) -> bool:
        part, _, rest = name.partition(".")
        if part == "blocks":
            return int(rest.partition(".")[0]) in layers
        if part == "embedding":
            return has_first or (has_last and tied)
        return has_first if part == "position_embedding" else has_last

    return tuple(parameter for parameter in spec.parameters if is_here(parameter.name))
