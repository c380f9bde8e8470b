"""A causal language model of transformers: ``config.json``, dimensions and parameter table.

The engine that computes it (``backends/torch_engine/huggingface_model.py``) fills the table in from the modules.
Canonical names are those of transformers. Persistent buffers are rows that are not trainable, so that a checkpoint is
complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, cast

from vorox.core.pluralize import pluralize
from vorox.models.spec import Kind, ModelSpec, ParameterSpec

KIND = "huggingface"
VOLATILE_KEYS = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"})
"""Keys of ``config.json`` that do not describe the network."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the parameter table, as JSON stores it (``ParameterSpec``)."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    decay: bool
    trainable: bool


@dataclass(frozen=True)
class HuggingFaceSpec(ModelSpec):
    """A model of transformers.

    Attributes:
        config: Content of ``config.json``, without ``VOLATILE_KEYS``.
        revision: Commit of its repository; ``None`` for a directory.
        rows: The parameter table.
        attention_width: Width of the queries of a layer.
        intermediate_size: Width of the MLP.
        layer_windows: The window of each layer with attention; ``None`` for full attention.
        active_experts: Share of the experts that a token is multiplied by.
    """

    config: Mapping[str, Any]
    revision: str | None
    rows: tuple[Row, ...]
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions_tokens: int
    attention_width: int = 0  # pyright: ignore[reportIncompatibleMethodOverride]
    intermediate_size: int = 0
    layer_windows: tuple[int | None, ...] = ()  # pyright: ignore[reportIncompatibleMethodOverride]
    active_experts: float = 1.0

    free_to_change = frozenset({"revision"})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> HuggingFaceSpec:
        """Return the spec that ``to_json`` described."""
        rows = tuple(
            Row(str(name), tuple(shape), cast(Kind, kind), bool(decay), bool(trainable))
            for name, shape, kind, decay, trainable in values["rows"]
        )
        found = {field.name: values[field.name] for field in fields(cls)}
        return cls(**found | {"rows": rows, "layer_windows": tuple(values["layer_windows"])})

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        rows = [[*asdict(row).values()] for row in self.rows]
        rows = [[name, list(shape), *rest] for name, shape, *rest in rows]
        return {"kind": KIND, **values, "rows": rows, "layer_windows": list(self.layer_windows)}

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """Compare ``config.json`` key by key, and the table by name; the dimensions follow from both."""
        theirs: Mapping[str, Any] = stored.get("config", {})
        found = [
            f"{key} = {theirs.get(key)} (here {self.config.get(key)})"
            for key in sorted({*theirs, *self.config})
            if theirs.get(key) != self.config.get(key)
        ]
        here = {row[0]: row for row in self.to_json()["rows"]}
        there = {row[0]: [row[0], list(row[1]), *row[2:]] for row in stored.get("rows", [])}
        return found + [f"parameter {name}" for name in sorted({*here, *there}) if here.get(name) != there.get(name)]

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        return self._table

    @cached_property
    def _table(self) -> tuple[ParameterSpec, ...]:
        return tuple(
            ParameterSpec(row.name, row.shape, "zeros", 0.0, row.decay, row.kind, ("",) * len(row.shape), row.trainable)
            for row in self.rows
        )

    @property
    def num_matmul_weights(self) -> int:
        experts = sum(row.num_elements for row in self.parameters if row.kind == "tensor" and len(row.shape) == 3)
        return super().num_matmul_weights + round(experts * self.active_experts)

    @property
    def saved_per_position(self) -> int:
        return 4 * self.hidden_size + 4 * self.attention_width + 3 * self.intermediate_size

    def summary(self) -> str:
        return f"{self.config['model_type']}, {pluralize(self.num_layers, 'layer')} x {self.hidden_size}"
