"""The plans of a transformers model, from the one that the library has for it.

That names modules and styles: ``colwise`` divides the outputs of a linear layer, ``rowwise`` the inputs of the one
behind it, ``replicated_with_grad_allreduce`` is a norm of each head. Embedding and head are divided along the
vocabulary. Styles that gather a layer's outputs only to split them again leave the layer whole, which is the same
function.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from vorox.backends.torch_engine.foreign.module_table import named_tensors
from vorox.backends.torch_engine.ranks.plan import ParallelPlan, Style, not_divisible

_STYLES = {
    "colwise": Style.COLWISE, "rowwise": Style.ROWWISE, "replicated_with_grad_allreduce": Style.PER_HEAD,
}  # fmt: skip
_HEAD, _EMBEDDING = "colwise_gather_output", "embedding_rowwise"
_WHOLE = frozenset({_HEAD, _EMBEDDING, "rowwise_split_input"})
"""Styles of layers that may stay whole."""


def tensor_plan(module: Any) -> ParallelPlan:
    """Return how tensor parallelism divides a model.

    Raises:
        ConfigError: transformers has no plan for the model, or the plan has what is not supported.
    """
    name, planned = type(module).__name__, list(_planned_layers(module))
    for path, layer, style in planned:
        is_linear = _STYLES.get(style) in (Style.COLWISE, Style.ROWWISE) and type(layer) is nn.Linear
        if not is_linear and style not in _WHOLE and _STYLES.get(style) != Style.PER_HEAD:
            raise not_divisible(f"The tensor-parallel plan of {name} has {path}: {style} ({type(layer).__name__})")
    if not any(style == "rowwise" for _, _, style in planned):
        raise not_divisible(f"{name} has no tensor-parallel plan in this version of transformers")
    styles = dict.fromkeys((id(tensor) for _, tensor in named_tensors(module)), Style.WHOLE)
    for _, layer, style in planned:
        if style in _STYLES:
            styles |= {id(parameter): _STYLES[style] for parameter in layer.parameters()}
        if style == "rowwise" and layer.bias is not None:  # it is added to the sum over the ranks
            styles[id(layer.bias)] = Style.WHOLE
    for layer in _vocabulary_layers(module, {id(layer): style for _, layer, style in planned}):
        styles |= {id(parameter): Style.VOCABULARY for parameter in layer.parameters()}
    return ParallelPlan({name: styles[id(tensor)] for name, tensor in named_tensors(module)})


def expert_plan(module: nn.Module) -> ParallelPlan:
    """Return how expert parallelism divides a model: it has its experts in stacks."""
    stacked = {id(parameter) for layer in module.modules() if is_stack(layer) for parameter in layer.parameters()}
    styles = {name: Style.EXPERTS if id(tensor) in stacked else Style.WHOLE for name, tensor in named_tensors(module)}
    return ParallelPlan(styles)


def is_stack(layer: nn.Module) -> bool:
    """Whether a module holds experts: all its parameters are stacks with one matrix or vector for each expert."""
    shapes = [parameter.shape for parameter in layer.parameters()]
    count = getattr(layer, "num_experts", None)
    return any(len(shape) == 3 for shape in shapes) and all(shape[0] == count for shape in shapes)


def _planned_layers(module: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield the layers that the plan of transformers names, with their path and style."""
    plan: dict[str, str] = dict(getattr(module, "_tp_plan", None) or {})
    for path, layer in module.named_modules():
        style = plan.get(re.sub(r"\d+", "*", path))
        if style is not None:
            yield path, layer, style


def _vocabulary_layers(module: Any, styles: dict[int, str]) -> list[Any]:
    """Return embedding and head, if the plan divides them and they are plain layers; tied ones together or not at all.

    Args:
        module: The model.
        styles: Layers that the plan names, by ``id``, to style.
    """
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    has_embedding = type(embedding) is nn.Embedding and styles.get(id(embedding)) == _EMBEDDING
    has_head = type(head) is nn.Linear and styles.get(id(head)) == _HEAD
    if head is not None and head.weight is embedding.weight and not (has_embedding and has_head):
        return []
    return [layer for layer, is_divided in ((embedding, has_embedding), (head, has_head)) if is_divided]
