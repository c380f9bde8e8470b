"""Measure what a transformers model saves for its backward pass, without using that memory.

The forward pass runs on fake tensors, which have shapes but no data, in the precision of the run. Hooks count what
autograd saves. What does not grow with the number of rows, such as weights in the compute precision, cancels out,
because one row is compared with two.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vorox.backends.torch_engine.foreign import huggingface_model
from vorox.backends.torch_engine.networks.module_network import blocks
from vorox.core.errors import ConfigError
from vorox.models.huggingface.adapter_spec import AdapterSpec
from vorox.models.huggingface.spec import HuggingFaceSpec
from vorox.models.spec import SavedActivations
from vorox.planning.memory_estimate import FP32_BYTES

_RECURRENT_TOKENS = 32
"""Measured positions of a model without attention: its activations grow linearly, and it can be slow."""


class _Measured(HuggingFaceSpec):
    """A transformers model whose saved activations are measured; for an adapter, its base."""

    def saved_activations(self, sequence_length_tokens: int, dtype_bytes: int) -> SavedActivations:
        """Measure what the blocks save for each row, without activation checkpointing.

        Raises:
            ConfigError: The forward pass depends on values, which fake tensors do not have (mixtures of experts).
        """
        key = sequence_length_tokens, dtype_bytes
        if key not in self._found:
            self._found[key] = self._measure(*key)
        return self._found[key]

    @cached_property
    def _found(self) -> dict[tuple[int, int], SavedActivations]:
        return {}

    def _measure(self, sequence_length_tokens: int, dtype_bytes: int) -> SavedActivations:
        length = sequence_length_tokens if self.attention_width else min(sequence_length_tokens, _RECURRENT_TOKENS)
        one, two = (_saved_by_block(self, length, dtype_bytes, num_rows) for num_rows in (1, 2))
        rows = [(there - here) * sequence_length_tokens / length for here, there in zip(one, two, strict=True)]
        stream = (
            sequence_length_tokens * self.hidden_size * FP32_BYTES
        )  # embeddings are not computed in lower precision
        return SavedActivations(sum(rows), max(rows), stream)


class _MeasuredAdapter(_Measured, AdapterSpec):
    pass


def measured(spec: HuggingFaceSpec) -> HuggingFaceSpec:
    """Return a spec that measures what its blocks save."""
    kind = _MeasuredAdapter if isinstance(spec, AdapterSpec) else _Measured
    return kind(**{field.name: getattr(spec, field.name) for field in fields(spec)})


def _saved_by_block(spec: HuggingFaceSpec, length_tokens: int, dtype_bytes: int, num_rows: int) -> list[int]:
    module: Any = huggingface_model.build(spec.config)
    counter = _Counter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        module.to_empty(device="cpu")
        module.train()
        for block in blocks(module):
            counter.watch(block)
        tokens = torch.zeros((num_rows, length_tokens), dtype=torch.long)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype_bytes < FP32_BYTES), counter.hooks():
                module(input_ids=tokens, use_cache=False)
        except Exception as error:  # control flow by value raises many types
            raise ConfigError(
                f"The activations of {type(module).__name__} are not known without running it",
                where="model.kind", hint="measure them with a run of a few steps",
            ) from error  # fmt: skip
    return counter.saved_bytes


class _Counter:
    """Counts saved storages once, by the block whose forward pass is running."""

    def __init__(self) -> None:
        self.saved_bytes: list[int] = []
        self._current: int | None = None
        self._seen: dict[int, Any] = {}  # the storage is kept, so that its id is not used again

    def watch(self, block: nn.Module) -> None:
        index = len(self.saved_bytes)
        self.saved_bytes.append(0)
        block.register_forward_pre_hook(lambda *_: self._enter(index))
        block.register_forward_hook(lambda *_: self._enter(None))

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor)

    def _enter(self, index: int | None) -> None:
        self._current = index

    def _saved(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if self._current is not None and id(storage) not in self._seen:
            self._seen[id(storage)] = storage
            self.saved_bytes[self._current] += storage.nbytes()
        return tensor
