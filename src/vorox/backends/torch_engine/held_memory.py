"""Measure the memory that a rank holds between steps: parameters, gradients and optimizer state.

The modules, parameters and optimizer of the engine go in; bytes by metric name come out, for the comparison with the
plan (``planning/memory_estimate.py``). Sizes count the storages on the device, each once. On CUDA, the
rest of the peak is reported too: what steps allocate beyond these parts. DeepSpeed keeps the state itself, so nothing
is reported with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vorox.backends.torch_engine.device import devices
from vorox.backends.torch_engine.layouts.parameters import FlatParameters, Parameters
from vorox.backends.torch_engine.layouts.zero_parameters import ZeroParameters
from vorox.backends.torch_engine.network import Network
from vorox.backends.torch_engine.networks.reference_model import ReferenceModel
from vorox.backends.torch_engine.optimizers.optimizer import Optimizer
from vorox.backends.torch_engine.optimizers.optimizer_in_backward import TransientGradients
from vorox.backends.torch_engine.optimizers.quantized_adamw import QuantizedTensor

MEASURE_EVERY_READS = 100
"""Sizes rarely change, and a measurement takes about 10 us for each parameter."""


class HeldMemory:
    """Reads the device memory of an engine; the parts are measured at the first two reads and every hundredth.

    The first read of several ranks comes before the first step, when FSDP2 has no gradients yet.

    Args:
        device: Device of the parts.
        network: The model; its modules, parameters and gradients are parts.
        optimizer: Its state is a part.
        reference: The reference of DPO, if any; counted with the parameters.
    """

    def __init__(
        self, device: torch.device, network: Network, optimizer: Optimizer, reference: ReferenceModel | None
    ) -> None:
        self._device, self._module, self._parameters = device, network.module, network.parameters
        self._optimizer, self._reference = optimizer, reference
        self._num_reads = 0
        self._held: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """Return device memory by metric name. Reads counters and sizes only."""
        if self._num_reads == 1 or self._num_reads % MEASURE_EVERY_READS == 0:
            self._held = self._measure()
        self._num_reads += 1
        found = devices.memory_stats(self._device)
        return found | self._held | (beyond(found, self._held) if self._held else {})

    def _measure(self) -> dict[str, float]:
        if isinstance(self._parameters, ZeroParameters):
            return {}
        counted: set[int] = set()
        weights = [*self._module.parameters(), *self._module.buffers(), *_tensors(self._reference)]
        parts = {
            "memory/parameter_bytes": weights,
            "memory/gradient_bytes": _gradients(self._module, self._parameters),
            "memory/optimizer_bytes": _tensors(self._optimizer),
        }
        return {name: float(_new_bytes(tensors, self._device, counted)) for name, tensors in parts.items()}


def beyond(stats: Mapping[str, float], held: Mapping[str, float]) -> dict[str, float]:
    """Return the peak of the device's allocator beyond the parts that it holds; empty without such a peak."""
    peak = stats.get("memory/device_peak_bytes")
    return {} if peak is None else {"memory/step_peak_bytes": max(0.0, peak - sum(held.values()))}


def _gradients(module: nn.Module, parameters: Parameters) -> Iterator[Tensor]:
    yield from (parameter.grad for parameter in module.parameters() if parameter.grad is not None)
    if isinstance(parameters, FlatParameters) and not isinstance(parameters, TransientGradients):
        yield from _tensors(parameters.gradients)  # the buffers stay if an optimizer sets ``grad`` to None


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and in the state of optimizers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _tensors(value.state)
    elif isinstance(value, Optimizer | QuantizedTensor | ReferenceModel):
        yield from _tensors(vars(value))


def _new_bytes(tensors: Iterable[Tensor], device: torch.device, counted: set[int]) -> int:
    """Return the size of the storages that are not counted yet."""
    total = 0
    for tensor in tensors:
        to_local = getattr(tensor, "to_local", None)  # of a DTensor, whose module takes a second to import
        local: Tensor = tensor if to_local is None else to_local()
        if local.device.type != device.type:
            continue
        storage = local.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += storage.nbytes()
    return total
