"""Expert parallelism of a transformers model: ranks divide the stacked parameters of its experts.

transformers keeps the experts of a block in stacked parameters ``[E, ...]``; a rank has some of them, and everything
else. The module stays in place: slots travel to the rank of their expert as in the native decoder
(``expert_parallel.py``), where the module's own code runs on them, as positions that have chosen one expert each. So
activations, biases and the implementation that transformers selected do not change.

Shape legend: E experts, X experts of a rank, M positions, K experts per position, P slots of a rank, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from vorox.backends.torch_engine.distributed import Ranks
from vorox.backends.torch_engine.experts import apply_experts
from vorox.backends.torch_engine.module_table import named_tensors
from vorox.backends.torch_engine.parallel.expert_parallel import ExpertParallel
from vorox.backends.torch_engine.parallel.tensor_parallel import TensorGroup
from vorox.backends.torch_engine.parallel.tensor_parallel_parameters import Division, TensorParallelParameters
from vorox.backends.torch_engine.parameters import FlatParameters


class StackedExpertParameters(TensorParallelParameters):
    """See ``Parameters``; a rank has some rows of the stacks of experts, and all of every other parameter."""

    def sum_gradients(self, ranks: Ranks) -> None:
        """Add shared gradients over all ranks, and those of experts over the ranks that have the same ones.

        The shared parameters between the experts of two blocks are one range of a gradient buffer, and one sum.
        """
        assert isinstance(self._inner, FlatParameters), "divided experts refuse FSDP2 and DeepSpeed"
        for group, (buffer,) in self._inner.gradients.items():
            slices = [one for one in self._inner.slices.values() if one.group == group]
            slices.sort(key=lambda one: one.start)
            for is_shared, run in groupby(slices, key=lambda one: self._dims[one.parameter.name] is None):
                ends = [(one.start, one.start + one.parameter.num_elements) for one in run]
                add = ranks.sum if is_shared else ranks.sum_over_replicas
                add(buffer[ends[0][0] : ends[-1][1]])

    def finish_gradients(self) -> None:
        """Do nothing: the exchange of tokens brought every gradient to the rank of its expert."""


def expert_group(ranks: Ranks) -> TensorGroup:
    """Return the ranks that divide the experts, as those that have parts of parameters."""
    assert ranks.replica_group is not None
    return TensorGroup(ranks.expert_index, ranks.expert_parallel_size, ranks.replica_group)


def divide_experts(module: nn.Module, ranks: Ranks) -> Division:
    """Make the experts of a model compute with this rank's share of them."""
    stacked: set[int] = set()
    for layer in module.modules():
        if is_stack(layer):
            stacked |= {id(parameter) for parameter in layer.parameters()}
            _divide(layer, ranks)
    names = {name: id(tensor) for name, tensor in named_tensors(module)}
    return Division({name: 0 if key in stacked else None for name, key in names.items()}, frozenset())


def is_stack(layer: nn.Module) -> bool:
    """Whether a module holds experts: all its parameters are stacks with one matrix or vector for each expert."""
    shapes = [parameter.shape for parameter in layer.parameters()]
    count = getattr(layer, "num_experts", None)
    return any(len(shape) == 3 for shape in shapes) and all(shape[0] == count for shape in shapes)


def _divide(layer: Any, ranks: Ranks) -> None:
    parallel = ExpertParallel.of(layer.num_experts, ranks)
    assert parallel is not None
    layer.forward = partial(_run, parallel, layer.forward)
    layer.num_experts = parallel.num_local


def _run(
    parallel: ExpertParallel, own: Callable[..., Tensor], x_MD: Tensor, experts_MK: Tensor, weights_MK: Tensor
) -> Tensor:
    """Return the weighted sum of the chosen experts of each position; ``own`` computes those of this rank."""

    def compute(x_PD: Tensor, ends_X: Tensor) -> Tensor:
        if not len(x_PD):  # stays in the graph, because the other ranks exchange gradients with this one
            return x_PD
        load_X = ends_X.diff(prepend=ends_X.new_zeros(1))
        expert_P = torch.arange(parallel.num_local, device=x_PD.device).repeat_interleave(load_X)
        return own(x_PD, expert_P[:, None], x_PD.new_ones(len(x_PD), 1))

    y_MKD = apply_experts(x_MD, experts_MK, parallel.num_experts, partial(parallel.run, compute))
    return (y_MKD * weights_MK[..., None]).sum(1).to(x_MD.dtype)
