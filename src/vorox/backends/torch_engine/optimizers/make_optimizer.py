"""The optimizer that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping

from vorox.backends.torch_engine.device.devices import Compute
from vorox.backends.torch_engine.layouts.parameters import Parameters
from vorox.backends.torch_engine.layouts.zero_parameters import ZeroParameters
from vorox.backends.torch_engine.optimizers.optimizer import Optimizer
from vorox.backends.torch_engine.optimizers.optimizer_in_backward import InBackwardOptimizer, TransientGradients
from vorox.backends.torch_engine.optimizers.quantized_adamw import QuantizedAdamW
from vorox.backends.torch_engine.optimizers.user_optimizer import UserOptimizer
from vorox.backends.torch_engine.optimizers.zero_optimizer import ZeroOptimizer
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.core.user_code.extensions import is_extension
from vorox.models.pruning import pruned_matrices
from vorox.models.spec import ModelSpec

BUILT_IN: Mapping[str, type[Optimizer]] = {"adamw": Optimizer, "adamw_8bit": QuantizedAdamW, "muon": Optimizer}


def make_optimizer(
    config: RunConfig, spec: ModelSpec, parameters: Parameters, compute: Compute, ranks: Ranks
) -> Optimizer:
    """Create the optimizer of ``optimizer.name``.

    Raises:
        ConfigError: A user's optimizer cannot be imported, its state cannot be saved, or the layout of the parameters
            has an optimizer of its own.
    """
    name = config.optimizer.name
    kind = UserOptimizer if is_extension(name) else BUILT_IN[name]
    if isinstance(parameters, ZeroParameters | TransientGradients) and kind is not Optimizer:
        raise ConfigError(
            f"optimizer.name={name} is not computed where gradients are not kept or DeepSpeed holds the state",
            where="optimizer.name", hint="set optimizer.name=adamw",
        )  # fmt: skip
    if isinstance(parameters, ZeroParameters):
        return ZeroOptimizer(config, parameters, compute, ranks)
    if isinstance(parameters, TransientGradients):
        optimizer = InBackwardOptimizer(config, parameters, compute, ranks)
    else:
        optimizer = kind(config, parameters, compute, ranks)
    optimizer.layouts.update((row.name, row.layout) for row in spec.parameters)
    if config.train.keep_zeros:
        optimizer.keep_zeros(matrix.name for matrix in pruned_matrices(spec))
    return optimizer
