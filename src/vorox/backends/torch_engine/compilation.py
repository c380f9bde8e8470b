"""``runtime.compile``: what it excludes, and blocks that say when they compile.

All blocks share one compiled graph, because they are alike: compiling takes as long for 48 layers as for one."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor, nn

from vorox.backends.torch_engine.devices import Compute
from vorox.backends.torch_engine.model import Pass, RunBlock, call_block
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig

_log = logging.getLogger("vorox.torch_engine")


def check(config: RunConfig, compute: Compute) -> None:
    """Refuse what a compiled model cannot do.

    Raises:
        ConfigError: Activation statistics, or a device that the compiler does not know.
    """
    if not compute.compiled:
        return
    if config.log.activation_statistics:
        raise ConfigError(
            "activation statistics need an uncompiled model",
            where="log.activation_statistics, runtime.compile",
            hint="turn one of them off",
        )
    if compute.device.type == "mps":
        raise ConfigError("compile = true is not supported on mps", where="runtime.compile", hint="set it to false")


def compiled_block(compute: Compute) -> RunBlock:
    """A block, compiled at its first call together with its backward pass, and shared by all blocks."""
    from torch._dynamo.exc import BackendCompilerFailed  # a second of imports that only compiling needs

    graph = torch.compile(call_block, dynamic=False, fullgraph=True)
    calls = 0

    def run(block: nn.Module, x_MD: Tensor, context: Pass) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 1:
            return graph(block, x_MD, context)
        _log.info("compiling the model for %s; this can take a minute", compute.device.type)
        started = time.perf_counter()
        try:
            y_MD = graph(block, x_MD, context)
        except BackendCompilerFailed as error:
            raise ConfigError(
                f"the model does not compile: {str(error).splitlines()[0]}",
                where="runtime.compile",
                hint="PyTorch needs a C++ compiler for the CPU and Triton for GPUs; or set runtime.compile=false",
            ) from error
        _log.info("compiled in %.0f s", time.perf_counter() - started)
        return y_MD

    return run
