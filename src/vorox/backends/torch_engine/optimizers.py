"""The optimizer that a configuration names."""

from __future__ import annotations

from vorox.backends.torch_engine.devices import Compute
from vorox.backends.torch_engine.distributed import Ranks
from vorox.backends.torch_engine.optim import Optimizer
from vorox.backends.torch_engine.parameters import Parameters
from vorox.backends.torch_engine.quantized_adamw import QuantizedAdamW
from vorox.backends.torch_engine.user_optimizer import UserOptimizer
from vorox.core.extensions import is_extension
from vorox.core.schema import RunConfig


def make_optimizer(config: RunConfig, parameters: Parameters, compute: Compute, ranks: Ranks) -> Optimizer:
    """Create the optimizer of ``optimizer.name``.

    Raises:
        ConfigError: A user's optimizer cannot be imported, or its state cannot be saved.
    """
    if is_extension(config.optimizer.name):
        return UserOptimizer(config, parameters, compute, ranks)
    kind = QuantizedAdamW if config.optimizer.name == "adamw_8bit" else Optimizer
    return kind(config, parameters, compute, ranks)
