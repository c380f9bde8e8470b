"""A rank's share of a foreign model: of every layer by tensor parallelism, or of its experts."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from vorox.backends.torch_engine.distributed import Ranks
from vorox.backends.torch_engine.parallel import module_expert_parallel, module_tensor_parallel
from vorox.backends.torch_engine.parallel.module_expert_parallel import StackedExpertParameters
from vorox.backends.torch_engine.parallel.tensor_parallel import TensorGroup
from vorox.backends.torch_engine.parallel.tensor_parallel_parameters import TensorParallelParameters
from vorox.backends.torch_engine.parameters import Parameters
from vorox.models.module_spec import ModuleSpec


def divide(module: nn.Module, spec: ModuleSpec, ranks: Ranks) -> tuple[ModuleSpec, Callable[[Parameters], Parameters]]:
    """Make a model compute with this rank's share of its parameters.

    Returns:
        The model with the shapes of the share, and what makes the parameters of the share parts of the whole ones.

    Raises:
        ConfigError: The model cannot be divided.
    """
    parallel, kind = TensorGroup.among(ranks), TensorParallelParameters
    if parallel is not None:
        division = module_tensor_parallel.divide(module, parallel)
    elif ranks.expert_parallel_size > 1:
        parallel, kind = module_expert_parallel.expert_group(ranks), StackedExpertParameters
        division = module_expert_parallel.divide_experts(module, ranks)
    else:
        return spec, lambda inner: inner
    local = module_tensor_parallel.local_spec(spec, division, parallel)
    return local, lambda inner: kind(inner, spec, parallel, division)
