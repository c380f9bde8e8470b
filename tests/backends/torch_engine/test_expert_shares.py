"""Gradients of models with divided experts: which ranks add which elements, and in how many sums.

That divided models compute what one process computes is tested in ``tests/ranks``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.torch_engine.transformers_models import MODELS, SHARED
from small_configurations import MODELS as NATIVE_MODELS
from small_configurations import configuration
from vorox.backends.torch_engine.foreign.huggingface_model import describe
from vorox.backends.torch_engine.layouts.divided_parameters import ExpertParallelParameters
from vorox.backends.torch_engine.layouts.parameters import FlatParameters
from vorox.backends.torch_engine.parallel import decoder_plan, module_plan
from vorox.backends.torch_engine.parallel.share import ExpertShare
from vorox.backends.torch_engine.ranks.expert_parallel import ExpertGroup
from vorox.backends.torch_engine.ranks.plan import ParallelPlan
from vorox.models.decoder.spec import decoder_spec
from vorox.models.optimizer_groups import optimizer_groups
from vorox.models.spec import ModelSpec

pytestmark = [pytest.mark.torch, pytest.mark.hf]

SIZE = 2


def model_of(name: str) -> tuple[ModelSpec, ParallelPlan]:
    if name == "native":
        config = configuration(model=NATIVE_MODELS["mixtral"]).model
        spec = decoder_spec(config, tokenizer_vocab_size=61, sequence_length_tokens=8)
        return spec, decoder_plan.expert_plan(spec, SIZE)
    spec, module = describe({**SHARED, **MODELS[name], "model_type": name}, revision=None)
    return spec, module_plan.expert_plan(module)


@pytest.mark.parametrize("index", range(SIZE))
@pytest.mark.parametrize("name", ["native", "mixtral", "gpt_oss"])
def test_gradients_are_added_once_and_in_few_sums(name: str, index: int) -> None:
    """Shared ones over all ranks, those of experts over the ranks with the same; a sum of each per optimizer group."""
    spec, plan = model_of(name)
    groups = optimizer_groups(spec, configuration().optimizer)
    share = ExpertShare(spec, plan, ExpertGroup(index, SIZE, None))  # pyright: ignore[reportArgumentType] - nothing is sent
    inner = FlatParameters(spec, groups, device=torch.device("cpu"), table=share.table)
    sums: list[torch.Tensor] = []

    def adding(value: float) -> Any:
        return lambda tensor: (sums.append(tensor), tensor.add_(value))

    ranks: Any = SimpleNamespace(sum=adding(2.0), sum_over_replicas=adding(3.0))
    parameters = share.place(inner, groups)
    assert isinstance(parameters, ExpertParallelParameters)
    parameters.sum_gradients(ranks)
    has_experts = {one.name: ".experts." in one.name for one in spec.parameters}
    experts = sum(one.num_elements for one in spec.parameters if has_experts[one.name])
    assert experts
    found = dict.fromkeys((True, False), 0)
    for part in parameters.local_parts(parameters.gradients):
        assert (part.view == (3.0 if has_experts[part.name] else 2.0)).all(), part.name
        found[has_experts[part.name]] += part.view.numel()
    assert found == {True: experts // SIZE, False: spec.num_parameters - experts}
    assert len(sums) == len({(groups[name], is_expert) for name, is_expert in has_experts.items()})
