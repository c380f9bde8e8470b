"""Forward and backward pass of a micro-batch as a CUDA graph (``runtime.cuda_graphs``).

The host starts one graph instead of some hundred kernels, so small steps take as long as their kernels. A graph reads
its inputs from tensors of its own, into which every replay copies the given ones, and adds to the gradients where they
are. Inputs that differ in more than the values of their tensors have graphs of their own. The kernels are the same as
without a graph.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vorox.backends.torch_engine.device.devices import Compute
from vorox.backends.torch_engine.losses.loss import LossSums
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig

_log = logging.getLogger("vorox.torch_engine")
WARMUP_PASSES = 3
"""Passes without a graph before it is captured: kernels are compiled and chosen in them."""
MAX_GRAPHS = 16
"""Each graph keeps its inputs, so further kinds of inputs run without one."""

Pass = Callable[..., LossSums]


def check(config: RunConfig, compute: Compute, world_size: int) -> None:
    """Check that this machine can capture passes; the configuration is checked when it is read.

    Raises:
        ConfigError: They cannot.
    """
    if not config.runtime.cuda_graphs:
        return
    needs = {
        "an NVIDIA GPU": compute.device.type == "cuda",
        "runtime.compile=true": compute.compiled,
        "one process": world_size == 1,
    }
    missing = next((name for name, is_there in needs.items() if not is_there), None)
    if missing is not None:
        raise ConfigError(
            f"runtime.cuda_graphs=true needs {missing}; altogether it needs {', '.join(needs)}",
            where="runtime.cuda_graphs", hint="set runtime.cuda_graphs=false",
        )  # fmt: skip


class CudaGraphs:
    """A pass that is replayed from graphs.

    Args:
        run: (inputs) -> loss sums; the inputs are tensors and nested dataclasses and tuples of tensors and of values
            that can be compared.
        capture: Captures a pass; another one in tests.
    """

    def __init__(self, run: Pass, capture: Callable[[Callable[[], LossSums]], Pass] | None = None) -> None:
        self._run, self._capture = run, capture or _Capture()
        self._num_passes = Counter[Hashable]()
        self._graphs: dict[Hashable, tuple[list[Tensor], Pass]] = {}

    def __call__(self, *inputs: Any) -> LossSums:
        tensors: list[Tensor] = []
        kind = _flatten(inputs, tensors)
        if kind not in self._graphs:
            self._num_passes[kind] += 1
            if self._num_passes[kind] <= WARMUP_PASSES or len(self._graphs) == MAX_GRAPHS:
                return self._run(*inputs)
            _log.info("Capturing CUDA graph %d of at most %d", len(self._graphs) + 1, MAX_GRAPHS)
            own = [tensor.clone() for tensor in tensors]
            own_inputs = _rebuild(inputs, iter(own))
            self._graphs[kind] = own, self._capture(lambda: self._run(*own_inputs))
        own, replay = self._graphs[kind]
        for mine, given in zip(own, tensors, strict=True):
            mine.copy_(given)
        return LossSums(*(value.clone() for value in replay()))


class _Capture:
    """Captures passes into graphs that share their memory, since one replays at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], LossSums]) -> Pass:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, for example to copy a checkpoint.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            sums = run()
        self._pool = graph.pool()

        def replay() -> LossSums:
            graph.replay()
            return sums

        return replay


def _flatten(value: Any, tensors: list[Tensor]) -> Hashable:
    """Append the tensors of a value; return what else it consists of."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.dtype, tuple(value.shape), value.stride()
    if is_dataclass(value):
        return type(value), *(_flatten(getattr(value, field.name), tensors) for field in fields(value))
    if isinstance(value, tuple):
        return type(value), *(_flatten(part, tensors) for part in value)
    return value


def _rebuild(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a value with other tensors."""
    if isinstance(value, Tensor):
        return next(tensors)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _rebuild(getattr(value, field.name), tensors) for field in fields(value)})
    if isinstance(value, tuple):
        return tuple(_rebuild(part, tensors) for part in value)
    return value
