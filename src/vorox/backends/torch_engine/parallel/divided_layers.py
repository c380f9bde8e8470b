"""Layers that compute with this rank's part of their parameters, in the native decoder and in transformers models.

As in Megatron-LM, query, key, value, gate and up projections are divided along their outputs, the projections behind
them along their inputs, so a block has two sums over the group in the forward pass and two in the backward pass. A
layer stays in place and gets a class that communicates; its parameters become those of the share.

Experts stay in place as well: slots travel to the rank of their expert (``expert_parallel.py``).

Shape legend: E experts, X experts of a rank, M positions, K experts per position, P slots of a rank, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vorox.backends.torch_engine.layers.experts import Experts, apply_experts
from vorox.backends.torch_engine.layers.model import Embedding, Linear
from vorox.backends.torch_engine.ranks.expert_parallel import ExpertGroup
from vorox.backends.torch_engine.ranks.plan import ParallelPlan, Style
from vorox.backends.torch_engine.ranks.tensor_parallel import TensorGroup
from vorox.models.spec import ParameterSpec


class DividedLayer(nn.Module):
    """A layer with a part of its parameters, in front of its class.

    Attributes:
        parallel: The ranks that divide it.
        num_rows: Rows of the whole weight.
        kernel: ``kernel(x, weight, bias)`` is the product of a linear layer.
    """

    parallel: TensorGroup
    num_rows: int
    weight: nn.Parameter
    bias: nn.Parameter | None
    kernel: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(F.linear)


class _ColumnLinear(DividedLayer):
    """A linear layer with a part of its outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(self.parallel.share(x, is_training=self.training), self.weight, self.bias)


class _RowLinear(DividedLayer):
    """A linear layer with a part of its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        total = self.parallel.sum(self.kernel(x, self.weight, None), is_training=self.training)
        return total if self.bias is None else total + self.bias.to(total.dtype)


class _VocabularyHead(_ColumnLinear):
    """A head with a part of the vocabulary, whose logits are gathered."""

    def forward(self, x: Tensor) -> Tensor:
        return self.parallel.join_columns(super().forward(x), self.num_rows)


class _VocabularyEmbedding(DividedLayer):
    """An embedding with a part of the vocabulary."""

    def forward(self, index: Tensor) -> Tensor:
        local, is_here = self.parallel.local_rows(index, self.num_rows)
        found = super().forward(local).masked_fill(~is_here[..., None], 0.0)
        return self.parallel.sum(found, is_training=self.training)


_LINEAR = {Style.COLWISE: _ColumnLinear, Style.ROWWISE: _RowLinear, Style.VOCABULARY: _VocabularyHead}


def divide_layers(
    module: nn.Module, plan: ParallelPlan, parameters: Mapping[int, ParameterSpec], group: TensorGroup
) -> None:
    """Make the layers of a model compute with this rank's part of their parameters.

    Args:
        module: The model.
        plan: How it is divided.
        parameters: The ``id`` of each parameter of the modules to the whole one, or to the first that it is fused of.
        group: The ranks.
    """
    for layer in module.modules():
        row = parameters.get(id(getattr(layer, "weight", None)))
        kind = None if row is None else _kind(layer, plan.styles[row.name])
        if row is not None and kind is not None:
            _divide(layer, kind, row.shape[0], group)


def _kind(layer: nn.Module, style: Style) -> type[DividedLayer] | None:
    if isinstance(layer, Embedding | nn.Embedding):
        return _VocabularyEmbedding if style == Style.VOCABULARY else None
    return _LINEAR.get(style) if isinstance(layer, Linear | nn.Linear) else None


def _divide(layer: Any, kind: type[DividedLayer], num_rows: int, group: TensorGroup) -> None:
    layer.__class__, layer.parallel, layer.num_rows = _divided(kind, type(layer)), group, num_rows
    if getattr(layer, "padding_idx", None) is not None:
        first, count = group.range_of(num_rows)
        here = layer.padding_idx - first
        layer.padding_idx = here if 0 <= here < count else None


@cache
def _divided(kind: type[DividedLayer], layer: type[nn.Module]) -> type[nn.Module]:
    return type(f"{kind.__name__}Of{layer.__name__}", (kind, layer), {})


def divide_experts(module: nn.Module, parameters: set[int], group: ExpertGroup) -> None:
    """Make the experts of a model compute with this rank's share of them.

    The native decoder has one product for all experts of a block. transformers keeps experts in stacked parameters
    ``[E, ...]``, which the module's own code multiplies, as positions that have chosen one expert each: so activations,
    biases and the implementation that transformers selected do not change.

    Args:
        module: The model.
        parameters: The ``id`` of each parameter that is a stack of experts.
        group: The ranks.
    """
    layers: list[Any] = [layer for layer in module.modules() if hasattr(layer, "num_experts")]
    for layer in layers:
        if isinstance(layer, Experts):
            layer.parallel = group
        elif {id(parameter) for parameter in layer.parameters()} <= parameters:
            layer.forward = partial(_run_stack, group, layer.num_experts, layer.forward)
            layer.num_experts //= group.size


def _run_stack(
    group: ExpertGroup,
    num_experts: int,
    own: Callable[..., Tensor],
    x_MD: Tensor,
    experts_MK: Tensor,
    weights_MK: Tensor,
) -> Tensor:
    """Return the weighted sum of the chosen experts of each position; ``own`` computes those of this rank."""

    def compute(x_PD: Tensor, ends_X: Tensor) -> Tensor:
        if not len(x_PD):  # stays in the graph, because the other ranks exchange gradients with this one
            return x_PD
        load_X = ends_X.diff(prepend=ends_X.new_zeros(1))
        expert_P = torch.arange(len(ends_X), device=x_PD.device).repeat_interleave(load_X)
        return own(x_PD, expert_P[:, None], x_PD.new_ones(len(x_PD), 1))

    y_MKD = apply_experts(x_MD, experts_MK, num_experts, partial(group.run, compute))
    return (y_MKD * weights_MK[..., None]).sum(1).to(x_MD.dtype)
