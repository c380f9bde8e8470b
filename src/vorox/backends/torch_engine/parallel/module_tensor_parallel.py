"""Tensor parallelism of a transformers model, by the plan that the model has itself.

The plan names modules and styles: ``colwise`` divides the outputs of a linear layer, ``rowwise`` the inputs of the one
behind it, ``replicated_with_grad_allreduce`` is a norm of each head. Embedding and head are divided along the
vocabulary. Styles that gather a layer's outputs only to split them again leave the layer whole, which is the same
function. Layers stay in place and get a class that communicates; only their parameters become shares.

Shape legend: D width, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vorox.backends.torch_engine.module_table import named_tensors
from vorox.backends.torch_engine.parallel.tensor_parallel import TensorGroup
from vorox.backends.torch_engine.parallel.tensor_parallel_parameters import Division
from vorox.core.errors import ConfigError
from vorox.models.module_spec import ModuleSpec

_SIZE = "parallel.tensor_parallel_size"
_COLUMNS, _ROWS, _PER_HEAD = "colwise", "rowwise", "replicated_with_grad_allreduce"
_HEAD, _EMBEDDING = "colwise_gather_output", "embedding_rowwise"
_WHOLE = frozenset({_HEAD, _EMBEDDING, "rowwise_split_input"})
"""Styles of layers that may stay whole."""


class DividedLinear(nn.Linear):
    """A linear layer with a share of its inputs or outputs.

    Attributes:
        parallel: The ranks that share it.
        kernel: ``kernel(x, weight, bias)`` is the product of the share.
    """

    parallel: TensorGroup
    kernel: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(F.linear)


class _ColumnLinear(DividedLinear):
    """A linear layer with a share of its outputs."""

    def forward(self, input: Tensor) -> Tensor:
        return self.kernel(self.parallel.share(input), self.weight, self.bias)


class _RowLinear(DividedLinear):
    """A linear layer with a share of its inputs."""

    def forward(self, input: Tensor) -> Tensor:
        total = self.parallel.sum(self.kernel(input, self.weight, None))
        return total if self.bias is None else total + self.bias.to(total.dtype)


class _VocabularyHead(_ColumnLinear):
    """A head with a part of the vocabulary, whose logits are gathered."""

    def forward(self, input: Tensor) -> Tensor:
        return self.parallel.join_columns(super().forward(input), self.out_features)


class _VocabularyEmbedding(nn.Embedding):
    """An embedding with a part of the vocabulary."""

    parallel: TensorGroup

    def forward(self, input: Tensor) -> Tensor:
        local, is_here = self.parallel.local_rows(input, self.num_embeddings)
        first, count = self.parallel.range_of(self.num_embeddings)
        padding = None if self.padding_idx is None else self.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < count else None
        return self.parallel.sum(F.embedding(local, self.weight, padding).masked_fill(~is_here[..., None], 0.0))


def divide(module: Any, parallel: TensorGroup) -> Division:
    """Make the layers of a model compute with this rank's shares of their parameters.

    Raises:
        ConfigError: The model has no plan, or the plan has what is not supported.
    """
    dims: dict[int, int] = {}
    per_head: set[int] = set()
    for _, layer, style in check_plan(module):
        if style == _COLUMNS:
            dims |= _divide_rows(layer, _ColumnLinear, parallel)
        elif style == _ROWS:
            _change(layer, _RowLinear, parallel)
            dims[id(layer.weight)] = 1
        elif style == _PER_HEAD:
            per_head |= {id(parameter) for parameter in layer.parameters()}
    dims |= _divide_vocabulary(module, parallel)
    names = {id(tensor): name for name, tensor in named_tensors(module)}
    return Division({name: dims.get(key) for key, name in names.items()}, frozenset(names[key] for key in per_head))


def check_plan(module: Any) -> list[tuple[str, Any, str]]:
    """Return the layers that the plan of a model names, with their path and style, if all are supported.

    Raises:
        ConfigError: The model has no plan, or the plan has what is not supported.
    """
    name, found = type(module).__name__, list(_planned_layers(module))
    for path, layer, style in found:
        is_supported = style in {_PER_HEAD, *_WHOLE} or (style in {_COLUMNS, _ROWS} and type(layer) is nn.Linear)
        if not is_supported:
            raise _refusal(f"The tensor-parallel plan of {name} has {path}: {style} ({type(layer).__name__})")
    if not any(style == _ROWS for _, _, style in found):
        raise _refusal(f"{name} has no tensor-parallel plan in this version of transformers")
    return found


def _planned_layers(module: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield the layers that the plan names, with their path and style."""
    plan: dict[str, str] = dict(getattr(module, "_tp_plan", None) or {})
    for path, layer in list(module.named_modules()):
        style = plan.get(re.sub(r"\d+", "*", path))
        if style is not None:
            yield path, layer, style


def _divide_vocabulary(module: Any, parallel: TensorGroup) -> dict[int, int]:
    """Divide embedding and head, if the plan does and they are plain layers; tied ones together or not at all."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    styles = {id(layer): style for _, layer, style in _planned_layers(module)}
    has_embedding = type(embedding) is nn.Embedding and styles.get(id(embedding)) == _EMBEDDING
    has_head = type(head) is nn.Linear and styles.get(id(head)) == _HEAD
    if head is not None and head.weight is embedding.weight and not (has_embedding and has_head):
        return {}
    divided: dict[int, int] = {}
    if has_embedding:
        divided |= _divide_rows(embedding, _VocabularyEmbedding, parallel)
    if has_head:
        divided |= _divide_rows(head, _VocabularyHead, parallel)
    return divided


def _divide_rows(layer: Any, kind: type[nn.Module], parallel: TensorGroup) -> dict[int, int]:
    _change(layer, kind, parallel)
    return {id(parameter): 0 for parameter in layer.parameters()}


def _change(layer: Any, kind: type[nn.Module], parallel: TensorGroup) -> None:
    layer.__class__, layer.parallel = kind, parallel


def local_spec(spec: ModuleSpec, division: Division, parallel: TensorGroup) -> ModuleSpec:
    """Return the model with the shapes of this rank's share.

    Raises:
        ConfigError: A dimension does not divide.
    """
    rows = []
    for row in spec.rows:
        dim = division.dims[row.name]
        if dim is not None:
            num = row.shape[dim]
            is_vocabulary = row.kind in {"embedding", "head"}
            if (num % parallel.size and not is_vocabulary) or parallel.range_of(num)[1] == 0:
                kind = "columns" if dim else "rows"
                raise _refusal(f"{row.name} has {num:,} {kind}, which {parallel.size} ranks cannot divide")
            shape = (*row.shape[:dim], parallel.range_of(num)[1], *row.shape[dim + 1 :])
            row = replace(row, shape=shape)
        rows.append(row)
    return replace(spec, rows=tuple(rows))


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        what, where=_SIZE, hint="set parallel.tensor_parallel_size=1 and use data_parallel_size and fsdp_size"
    )
