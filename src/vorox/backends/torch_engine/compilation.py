"""Compiling blocks with ``torch.compile`` (``runtime.compile``), and the settings that it excludes.

All blocks share one compiled graph, so compiling 48 layers takes as long as compiling one.
"""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor, nn

from vorox.backends.torch_engine.devices import Compute
from vorox.backends.torch_engine.model import ForwardContext, RunBlock, call_block
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig

_log = logging.getLogger("vorox.torch_engine")


def check(config: RunConfig, compute: Compute) -> None:
    """Check that the configuration allows compilation.

    Raises:
        ConfigError: Activation statistics are on, or the device is not supported by the compiler.
    """
    if not compute.compiled:
        return
    if config.log.activation_statistics:
        raise ConfigError(
            "Activation statistics need an uncompiled model",
            where="log.activation_statistics, runtime.compile",
            hint="turn one of them off",
        )
    if compute.device.type == "mps":
        raise ConfigError("compile = true is not supported on mps", where="runtime.compile", hint="set it to false")


def compiled_block(compute: Compute) -> RunBlock:
    """Return a function that runs any block, compiled with its backward pass on the first call."""
    from torch._dynamo.exc import BackendCompilerFailed  # takes a second to import

    graph = torch.compile(call_block, dynamic=False, fullgraph=True)
    calls = 0

    def run(block: nn.Module, x_MD: Tensor, context: ForwardContext) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 1:
            return graph(block, x_MD, context)
        _log.info("Compiling the model for %s; this can take a minute", compute.device.type)
        started = time.perf_counter()
        try:
            y_MD = graph(block, x_MD, context)
        except BackendCompilerFailed as error:
            raise ConfigError(
                f"Compiling the model failed: {str(error).splitlines()[0]}",
                where="runtime.compile",
                hint="PyTorch needs a C++ compiler for the CPU and Triton for GPUs; or set runtime.compile=false",
            ) from error
        _log.info("Compiled in %.0f s", time.perf_counter() - started)
        return y_MD

    return run
