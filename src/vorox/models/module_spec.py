"""A model of foreign modules: dimensions, and the parameter table that was read from them.

``HuggingFaceSpec`` (``huggingface/spec.py``) describes a transformers model, ``UserSpec`` one of the user. The
engine fills the table in from the modules, whose names are canonical. Persistent buffers are rows that are not
trainable, so that a checkpoint is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Self, cast

from vorox.core.pluralize import pluralize
from vorox.models.matrix_layout import PLAIN_MATRIX, MatrixLayout
from vorox.models.spec import Kind, ModelSpec, ParameterSpec


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the parameter table, as JSON stores it (``ParameterSpec``)."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    decay: bool
    trainable: bool
    layout: MatrixLayout = PLAIN_MATRIX
    is_routed: bool = False

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Row:
        """Return the row that ``to_json`` described."""
        name, shape, kind, decay, trainable, (count, is_transposed, parts), is_routed = values
        layout = MatrixLayout(int(count), bool(is_transposed), tuple(parts))
        return cls(str(name), tuple(shape), cast(Kind, kind), bool(decay), bool(trainable), layout, bool(is_routed))

    def to_json(self) -> list[Any]:
        layout = [self.layout.count, self.layout.is_transposed, list(self.layout.parts)]
        return [self.name, list(self.shape), self.kind, self.decay, self.trainable, layout, self.is_routed]


@dataclass(frozen=True)
class ModuleSpec(ModelSpec):
    """A model whose parameter table was read from its modules.

    Attributes:
        kind: Its name in JSON.
        config: What the modules were built from.
        rows: The parameter table.
        attention_width: Width of the queries of the widest layer.
        attention_widths: That of each layer with attention; empty if all are ``attention_width``.
        intermediate_size: Width of the MLP.
        layer_windows: The window of each layer with attention; ``None`` for full attention.
        has_chunks: Whether a window is a chunk: positions attend within their own chunk.
        active_experts: Share of the experts that a token is multiplied by.
        scan_flops_per_position: FLOPs of all recurrences for one position.
    """

    config: Mapping[str, Any]
    rows: tuple[Row, ...]
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions_tokens: int
    attention_width: int = 0  # pyright: ignore[reportIncompatibleMethodOverride]
    intermediate_size: int = 0
    layer_windows: tuple[int | None, ...] = ()  # pyright: ignore[reportIncompatibleMethodOverride]
    attention_widths: tuple[int, ...] = ()  # pyright: ignore[reportIncompatibleMethodOverride]
    has_chunks: bool = False
    scan_flops_per_position: float = 0.0  # pyright: ignore[reportIncompatibleMethodOverride]
    active_experts: float = 1.0  # pyright: ignore[reportIncompatibleMethodOverride]

    kind: ClassVar[str]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the spec that ``to_json`` described."""
        rows = tuple(Row.from_json(row) for row in values["rows"])
        found: dict[str, Any] = {field.name: values[field.name] for field in fields(cls)}
        found["rows"] = rows
        for name in ("layer_windows", "attention_widths"):
            found[name] = tuple(values[name])
        return cls(**found)

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        rows = [row.to_json() for row in self.rows]
        lists = {name: list(values[name]) for name in ("layer_windows", "attention_widths")}
        return {"kind": self.kind, **values, "rows": rows, **lists}

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """Compare the configuration key by key, and the table by name; the dimensions follow from both."""
        theirs: Mapping[str, Any] = stored.get("config", {})
        found = [
            f"{key} = {theirs.get(key)} (here {self.config.get(key)})"
            for key in sorted({*theirs, *self.config})
            if theirs.get(key) != self.config.get(key)
        ]
        here = {row[0]: row for row in self.to_json()["rows"]}
        there = {row[0]: Row.from_json(row).to_json() for row in stored.get("rows", [])}
        return found + [f"parameter {name}" for name in sorted({*here, *there}) if here.get(name) != there.get(name)]

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        return self._table

    @cached_property
    def _table(self) -> tuple[ParameterSpec, ...]:
        return tuple(
            ParameterSpec(
                row.name,
                row.shape,
                "zeros",
                0.0,
                row.decay,
                row.kind,
                ("",) * len(row.shape),
                row.trainable,
                layout=row.layout,
                is_routed=row.is_routed,
            )
            for row in self.rows
        )

    @property
    def saved_per_position(self) -> int:
        return 12 * self.hidden_size + 6 * self.attention_width + 4 * self.intermediate_size  # fits Llama and GPT-2

    @property
    def has_whole_logits(self) -> bool:
        return True

    def summary(self) -> str:
        return f"{self.label}, {pluralize(self.num_layers, 'layer')} x {self.hidden_size}"

    @property
    def label(self) -> str:
        """The architecture, for people."""
        return self.kind


@dataclass(frozen=True)
class UserSpec(ModuleSpec):
    """A model by import path (``model.kind``).

    Attributes:
        config: The settings of the section ``model`` that are not defaults, with the resolved sizes.
        function: Its import path.
    """

    function: str = ""

    kind: ClassVar[str] = "user"
    free_to_change = frozenset({"function"})

    @property
    def label(self) -> str:
        return self.function.rpartition(":")[2]
