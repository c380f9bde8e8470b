"""A transformers model with an adapter on this rank: the base is frozen, the adapter is trained.

The base has no values until ``pretrained_weights`` reads them; ``parameters`` holds the adapter only. Layers under an
adapter are stored in the precision of matrix products, or with ``qlora`` all linear layers in 4 bits; other weights of
the base are fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from vorox.backends.torch_engine.device.devices import Compute
from vorox.backends.torch_engine.foreign import huggingface_model
from vorox.backends.torch_engine.foreign.module_table import named_tensors
from vorox.backends.torch_engine.layouts.parameters import FlatParameters
from vorox.backends.torch_engine.networks import adapters
from vorox.backends.torch_engine.networks.huggingface_network import HuggingFaceNetwork
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.engine import NamedArray
from vorox.core.schema import RunConfig
from vorox.models.huggingface.adapter_spec import AdapterSpec
from vorox.models.optimizer_groups import optimizer_groups
from vorox.models.weight_init import initial_weights


class AdapterNetwork(HuggingFaceNetwork):
    """See ``network.Network``."""

    has_adapter = True
    _has_base = False

    def __init__(self, config: RunConfig, spec: AdapterSpec, compute: Compute, ranks: Ranks) -> None:
        self._adapter_spec = spec
        super().__init__(config, spec, compute, ranks)

    def initial_weights(self, seed: int) -> Iterator[NamedArray]:
        """Yield the initial adapter, with which the model computes what its base does."""
        magnitudes = dict(adapters.initial_magnitudes(self.module, self._adapter_spec)) if self._has_base else {}
        for name, array in initial_weights(self._adapter_spec, seed):
            yield name, magnitudes[name].cpu().numpy() if name in magnitudes else array

    def pretrained_weights(self, directory: Path) -> Iterator[NamedArray]:
        """Read the base from a transformers directory, and return the initial adapter."""
        for name, array in huggingface_model.pretrained_weights(self._adapter_spec.base, directory):
            self._set_frozen(name, torch.from_numpy(array))
        self._has_base = True
        return self.initial_weights(self._config.run.seed)

    @contextlib.contextmanager
    def without_adapter(self) -> Iterator[None]:
        with adapters.switched_off(self.module, self._adapter_spec):
            yield

    def merged_weights(self) -> Iterator[NamedArray]:
        """Yield the weights of the base with the adapter merged into them, fp32, in table order of the base."""
        adapted = {name for name, _, _ in self._adapter_spec.layers}
        for name, owners in self._owners.items():
            layer, leaf = owners[0]
            owner = name.rpartition(".")[0]
            if leaf == "weight" and owner in adapted:
                value = adapters.merged_weight(self.module, owner)
            elif leaf == "weight" and adapters.is_quantized(layer):
                value = adapters.whole_weight(layer)
            else:
                value = layer._buffers[leaf] if leaf in layer._buffers else layer._parameters[leaf]
                assert value is not None
            yield name, value.detach().float().cpu().contiguous().numpy()

    def _place(self) -> None:
        spec, device = self._adapter_spec, self._compute.device
        if spec.adapter.kind == "qlora":
            adapters.quantize(self.module, spec, self._compute.dtype)
        self._owners = _owners(self.module)
        adapters.inject(self.module, spec)
        self.parameters = FlatParameters(spec, optimizer_groups(spec, self._config.optimizer), device=device)
        adapters.bind(self.module, self.parameters.modules)
        for child in self.module.modules():
            for name, buffer in child._buffers.items():
                child._buffers[name] = None if buffer is None else buffer.to(device)

    def _set_frozen(self, name: str, value: Tensor) -> None:
        """Set a parameter or buffer of the base in every module that has it."""
        owners, layer = self._owners[name], name.rpartition(".")[0]
        if len(owners) == 1 and any(layer == adapted for adapted, _, _ in self._adapter_spec.layers):
            value = value.to(self._compute.dtype)
        parameter = adapters.frozen_parameter(*owners[0], value, self._compute.device)
        for module, leaf in owners:
            if leaf in module._buffers:
                module._buffers[leaf] = parameter.data
            else:
                module._parameters[leaf] = parameter

    @property
    def _weights_dtype(self) -> torch.dtype:
        return self._compute.dtype


def _owners(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return, for each parameter and persistent buffer by canonical name, all modules that have it, with its name."""
    names = {id(tensor): name for name, tensor in named_tensors(module)}
    found: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for child in module.modules():
        for leaf, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None and id(tensor) in names:
                found[names[id(tensor)]].append((child, leaf))
    return found
