"""The plans of the native decoder, from the logical axes of its parameters, which JAX's mesh uses as well."""

from __future__ import annotations

from vorox.backends.torch_engine.ranks.plan import ParallelPlan, Style
from vorox.models.decoder.experts import split_expert
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.spec import ParameterSpec

_DIVIDED_AXES = frozenset({"heads", "kv_heads", "mlp"})
"""Logical axes of layers that are divided; no parameter has two of them."""


def tensor_plan(spec: DecoderSpec) -> ParallelPlan:
    """Return how tensor parallelism divides a decoder."""
    return ParallelPlan({row.name: _style(row) for row in spec.parameters})


def expert_plan(spec: DecoderSpec, size: int) -> ParallelPlan:
    """Return how expert parallelism over ``size`` ranks divides a decoder: its experts have parameters of their own."""
    experts = {row.name: split for row in spec.parameters if (split := split_expert(row.name)) is not None}
    per_rank = (spec.num_experts or 0) // size
    holders = {name: (expert // per_rank,) for name, (_, expert) in experts.items()}
    return ParallelPlan({row.name: Style.WHOLE for row in spec.parameters}, holders)


def _style(row: ParameterSpec) -> Style:
    if row.axes == ("head",):
        return Style.PER_HEAD
    if "vocab" in row.axes:
        return Style.VOCABULARY
    for axis, style in zip(row.axes, (Style.COLWISE, Style.ROWWISE), strict=False):
        if axis in _DIVIDED_AXES:
            return style
    return Style.WHOLE
