"""An adapter of a transformers model: the base that stays frozen, and the trained parameters.

The parameter table holds the adapter only, and so do gradients, optimizer, checkpoints and fingerprints. The base is
part of the model's identity: its ``config.json``, its own table and the fingerprint of its weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from vorox.core.pluralize import pluralize
from vorox.core.schema.adapter import AdapterKind
from vorox.models.arrays.fingerprint import fingerprint
from vorox.models.arrays.weights_file import open_directory
from vorox.models.huggingface.spec import HuggingFaceSpec
from vorox.models.spec import Init, ParameterSpec

_NF4_BYTES = 0.5 + 0.125 / 8 + 4 / (256 * 64)
"""Bytes per element in NF4: 4 bits, an 8-bit scale per 64 elements, and an fp32 scale per 256 of those."""


ADAPTER_CONFIG_NAME = "adapter_config.json"
"""Describes an adapter to peft, with the name of its base."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter and the model that it belongs to.

    Attributes:
        kind: ``dora`` also trains the norm of each row, ``qlora`` stores the linear layers of the base in 4 bits.
        rank: Rank of the two matrices.
        alpha: Their product is multiplied by ``alpha / rank``.
        dropout_fraction: Dropout on the input of the product.
        target_modules: Names of adapted layers, or endings of names.
        location: Directory or ``OWNER/NAME`` of the base.
        base_fingerprint: Fingerprint of the weights of the base; empty until they are read.
    """

    kind: AdapterKind
    rank: int
    alpha: float
    dropout_fraction: float
    target_modules: tuple[str, ...]
    location: str
    base_fingerprint: str = ""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Adapter:
        """Return the adapter that ``dataclasses.asdict`` described."""
        return cls(**{**values, "target_modules": tuple(values["target_modules"])})


@dataclass(frozen=True, kw_only=True)
class AdapterSpec(HuggingFaceSpec):
    """A transformers model with an adapter. The inherited attributes describe the base.

    Attributes:
        adapter: Settings and base.
        layers: Name of each adapted linear layer, with its inputs and outputs.
        is_transposed: Whether their weights are ``[in, out]``, as in GPT-2.
    """

    adapter: Adapter
    layers: tuple[tuple[str, int, int], ...]
    is_transposed: bool

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AdapterSpec:
        """Return the spec that ``to_json`` described."""
        layers = tuple((str(name), int(inputs), int(outputs)) for name, inputs, outputs in values["layers"])
        base, adapter = HuggingFaceSpec.from_json(values), Adapter.from_json(values["adapter"])
        return of_base(base, adapter, layers, is_transposed=bool(values["is_transposed"]))

    def to_json(self) -> dict[str, Any]:
        adapter = asdict(self.adapter) | {"target_modules": list(self.adapter.target_modules)}
        layers = [list(layer) for layer in self.layers]
        return self.base.to_json() | {"adapter": adapter, "layers": layers, "is_transposed": self.is_transposed}

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """Compare the base, then the adapter key by key; a moved base is identified by its fingerprint."""
        theirs: Mapping[str, Any] = stored.get("adapter", {})
        here: Mapping[str, Any] = self.to_json()["adapter"]
        keys = [key for key in here if key != "location" and theirs.get(key) != here[key]]
        changed = [f"adapter.{key} = {theirs.get(key)} (here {here[key]})" for key in keys]
        return self.base.differences(stored) + changed

    @cached_property
    def base(self) -> HuggingFaceSpec:
        """The frozen model."""
        return HuggingFaceSpec(**{field.name: getattr(self, field.name) for field in fields(HuggingFaceSpec)})

    @cached_property
    def _table(self) -> tuple[ParameterSpec, ...]:
        return tuple(row for layer in self.layers for row in self._rows_of(*layer))

    def _rows_of(self, name: str, inputs: int, outputs: int) -> Iterable[ParameterSpec]:
        """Yield the parameters of an adapted layer, under the names of a peft file; the product starts at 0."""
        rank = self.adapter.rank
        yield _row(f"{name}.lora_A.weight", (rank, inputs), "uniform", (3 * inputs) ** -0.5)
        yield _row(f"{name}.lora_B.weight", (outputs, rank), "zeros")
        if self.adapter.kind == "dora":
            yield _row(f"{name}.lora_magnitude_vector", (outputs,), "ones")

    @property
    def num_matmul_weights(self) -> int:
        adapters = sum(row.num_elements for row in self.parameters if len(row.shape) == 2)
        return self.base.num_matmul_weights + adapters

    @property
    def num_frozen_matmul_weights(self) -> int:
        return self.base.num_matmul_weights

    @property
    def num_converted_weights(self) -> int:
        return sum(row.num_elements for row in self.parameters if len(row.shape) == 2)

    @property
    def num_frozen_parameters(self) -> int:
        return self.base.num_parameters

    def frozen_bytes(self, dtype_bytes: int) -> int:
        if self.adapter.kind == "qlora":
            each, smaller = _NF4_BYTES, sum(row.num_elements for row in self.base.parameters if is_quantized(row))
        else:
            each, smaller = dtype_bytes, sum(inputs * outputs for _, inputs, outputs in self.layers)
        return 4 * (self.base.num_parameters - smaller) + round(each * smaller)

    def summary(self) -> str:
        adapter = self.adapter
        return (
            f"{adapter.kind} of rank {adapter.rank} on {pluralize(len(self.layers), 'layer')} of {self.base.summary()}"
        )


def is_quantized(row: ParameterSpec) -> bool:
    """Whether ``qlora`` stores a weight of the base in 4 bits: that of a linear layer, but no router."""
    is_linear = row.name.endswith(".weight") and len(row.shape) == 2 and not row.layout.is_transposed
    return row.kind == "matrix" and is_linear


def of_base(
    base: HuggingFaceSpec, adapter: Adapter, layers: tuple[tuple[str, int, int], ...], *, is_transposed: bool
) -> AdapterSpec:
    """Return the spec of an adapter of a base."""
    values = {field.name: getattr(base, field.name) for field in fields(HuggingFaceSpec)}
    return AdapterSpec(**values, adapter=adapter, layers=layers, is_transposed=is_transposed)


def base_fingerprint(directory: Path) -> str:
    """Return a fingerprint of all tensors of a directory of safetensors; how they are split over files is not part."""
    return fingerprint(pair for file in open_directory(directory) for pair in file)


def _row(name: str, shape: tuple[int, ...], init: Init, std: float = 0.0) -> ParameterSpec:
    return ParameterSpec(name, shape, init, std, len(shape) > 1, "tensor", ("",) * len(shape))
