"""Gradients of transformers models with divided experts: which ranks add which elements, and in how many sums.

That divided models compute what one process computes is tested in ``tests/ranks``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.torch_engine.transformers_models import MODELS, SHARED
from small_configurations import configuration
from vorox.backends.torch_engine.huggingface_model import describe
from vorox.backends.torch_engine.parallel.module_expert_parallel import StackedExpertParameters
from vorox.backends.torch_engine.parallel.tensor_parallel import TensorGroup
from vorox.backends.torch_engine.parallel.tensor_parallel_parameters import Division
from vorox.backends.torch_engine.parameters import FlatParameters
from vorox.models.optimizer_groups import optimizer_groups

pytestmark = [pytest.mark.torch, pytest.mark.hf]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_gradients_are_added_once_and_in_few_sums(name: str) -> None:
    """Shared ones over all ranks, those of experts over the ranks with the same; two sums per block and group."""
    spec, _ = describe({**SHARED, **MODELS[name], "model_type": name}, revision=None)
    divided = {one.name for one in spec.parameters if ".experts." in one.name}
    division = Division({one.name: 0 if one.name in divided else None for one in spec.parameters}, frozenset())
    inner = FlatParameters(spec, optimizer_groups(spec, configuration().optimizer), device=torch.device("cpu"))
    group: Any = TensorGroup(0, 2, None)  # pyright: ignore[reportArgumentType] - nothing is sent
    sums: list[torch.Tensor] = []

    def adding(value: float) -> Any:
        return lambda tensor: (sums.append(tensor), tensor.add_(value))

    ranks: Any = SimpleNamespace(sum=adding(2.0), sum_over_replicas=adding(3.0))
    StackedExpertParameters(inner, spec, group, division).sum_gradients(ranks)
    for piece in inner.pieces(inner.gradients):
        assert (piece.view == (3.0 if piece.name in divided else 2.0)).all(), piece.name
    num_layers = len({one.partition(".mlp.")[0] for one in divided})
    assert len(sums) <= len(inner.gradients) * (2 * num_layers + 1) < len(inner.slices)
