"""``runtime.compile``: what it excludes, and a model that says when it compiles."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from vorox.backends.torch_engine.devices import Compute
from vorox.backends.torch_engine.model import Decoder, Pass
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


def compiled(model: Decoder, compute: Compute) -> Callable[[Tensor, Pass], Tensor]:
    """The compiled forward pass; its backward pass is compiled with it, at the first call."""
    graph = torch.compile(model, dynamic=False, fullgraph=True)
    state = {"shapes": 0}

    def forward(tokens_M: Tensor, run: Pass) -> Tensor:
        if state["shapes"]:
            return graph(tokens_M, run)
        state["shapes"] = 1
        _log.info("compiling the model for %s; this can take a minute", compute.device.type)
        started = time.perf_counter()
        try:
            hidden_MD = graph(tokens_M, run)
        except BackendCompilerFailed as error:
            raise ConfigError(
                f"the model does not compile: {str(error).splitlines()[0]}",
                where="runtime.compile",
                hint="PyTorch needs a C++ compiler for the CPU and Triton for GPUs; or set runtime.compile=false",
            ) from error
        _log.info("compiled the forward pass in %.0f s", time.perf_counter() - started)
        return hidden_MD

    return forward
