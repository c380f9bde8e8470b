"""Compiling blocks with ``torch.compile`` (``runtime.compile``).

All blocks share one compiled graph, so compiling 48 layers takes as long as compiling one. Taps and activation
statistics run between compiled graphs: while there are any, the stages of a block (attention, MLP) are compiled instead
of the whole. Experts are not compiled, because the size of their products depends on the tokens; attention is.
"""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from vorox.backends.torch_engine.device.devices import Compute
from vorox.backends.torch_engine.layers.forward_context import ForwardContext
from vorox.backends.torch_engine.layers.model import ResidualBlock, RunBlock, call_block, call_stage
from vorox.core.errors import ConfigError

MAX_GRAPHS = 256
"""Graphs of one function: kinds of inputs times models in one process."""
_log = logging.getLogger("vorox.torch_engine")


def check(compute: Compute) -> None:
    """Check that the configuration allows compilation.

    Raises:
        ConfigError: The device is not supported by the compiler.
    """
    if compute.compiled and compute.device.type == "mps":
        raise ConfigError("compile = true is not supported on mps", where="runtime.compile", hint="set it to false")


def compiled_block(compute: Compute) -> RunBlock:
    """Return a function that runs any block, compiled with its backward pass on the first call."""
    import torch._dynamo.config as compiler_settings  # takes a second to import
    from torch._dynamo.exc import BackendCompilerFailed

    # All engines of a process share the graphs of a function; beyond the limit, a call fails.
    compiler_settings.recompile_limit = max(compiler_settings.recompile_limit, MAX_GRAPHS)
    graph = torch.compile(call_block, dynamic=False, fullgraph=True)
    stage_graph = torch.compile(call_stage, dynamic=False, fullgraph=True)
    calls = 0

    def call_attention(block: ResidualBlock, stage: str, x_MD: Tensor, context: ForwardContext) -> Tensor:
        return (stage_graph if stage == "attend" else call_stage)(block, stage, x_MD, context)

    def call(block: ResidualBlock, x_MD: Tensor, context: ForwardContext) -> Tensor:
        if block.has_experts:
            return block(x_MD, context, call_attention)
        return block(x_MD, context, stage_graph) if block.taps.active else graph(block, x_MD, context)

    def run(block: ResidualBlock, x_MD: Tensor, context: ForwardContext) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 1:
            return call(block, x_MD, context)
        name = compute.device.type
        _log.info("Compiling the model for %s; this can take a minute", name, extra={"event_kind": "compile_started"})
        started = time.perf_counter()
        try:
            y_MD = call(block, x_MD, context)
        except BackendCompilerFailed as error:
            raise ConfigError(
                f"Compiling the model failed: {str(error).splitlines()[0]}",
                where="runtime.compile",
                hint="PyTorch needs a C++ compiler for the CPU and Triton for GPUs; or set runtime.compile=false",
            ) from error
        seconds = time.perf_counter() - started
        _log.info("Compiled in %.1f s", seconds, extra={"event_kind": "compiled", "event_fields": {"seconds": seconds}})
        return y_MD

    return run
