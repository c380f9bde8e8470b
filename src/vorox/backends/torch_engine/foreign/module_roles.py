"""The role of every weight of an ``nn.Module``, and how the weight divides into matrices: by shape and place.

Embeddings and head are known by identity. Linear layers, Conv1D (GPT-2) and modules with stacked experts say how they
store their matrices; what they do not say follows from shapes: the dimension that equals the width of the residual
stream is the input of a projection into the block, and the output of one out of it. Fused projections are known by the
names that transformers gives them, if their outputs add up. Everything else follows from name and shape
(``models/parameter_roles.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from vorox.models.huggingface.spec import EXPERT_COUNTS
from vorox.models.matrix_layout import PLAIN_MATRIX, MatrixLayout
from vorox.models.parameter_roles import role
from vorox.models.spec import Kind

_ROUTED = re.compile(r"(.+)\.experts\.\d+\.")
_OUT = re.compile(r"(^|_)(down|w2|out|output|o|c_proj|fc2|dense_4h_to_h)(_|$)")
"""Names of projections out of a block, into the residual stream."""
_ROUTER = re.compile(r"^(gate|.*router|wg)$")
_HALVES = frozenset({"gate_up_proj", "input_linear", "Wi"})
"""Gate and up, one after another or interleaved."""
_HEADS = frozenset({"c_attn", "qkv_proj", "Wqkv", "qkv", "query_key_value", "in_proj_weight"})
"""Query, key and value: of all heads one after another, or of a group of heads, then of the next."""
_GROUPED = frozenset({"query_key_value"})
_GROUPED_IN = {"MiniMaxLightningAttention": 0, "GPTBigCodeAttention": 0, "CodeGenAttention": 4}
"""Modules that divide another name into groups, with their number; 0 for one group of each head of keys."""


@dataclass(frozen=True, slots=True)
class Widths:
    """The widths of a model that tell how its weights are stored; 0 if not known.

    Attributes:
        hidden_size: Width of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Heads of keys and values.
        head_dim: Width of a head.
    """

    hidden_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0


@dataclass(frozen=True, slots=True)
class Role:
    """See ``ParameterSpec``."""

    kind: Kind
    layout: MatrixLayout = PLAIN_MATRIX
    is_routed: bool = False


@dataclass
class ModuleRoles:
    """The roles of the weights of a module.

    Args:
        module: The model.
        head: The layer whose outputs are the logits.
        widths: Its widths, where its configuration states them.
    """

    module: nn.Module
    head: nn.Module | None
    widths: Widths = Widths()
    _owners: dict[str, nn.Module] = field(init=False)
    _embeddings: set[int] = field(init=False)
    _mixtures: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self._owners = dict(self.module.named_modules())
        embeddings = [child for child in self.module.modules() if isinstance(child, nn.Embedding)]
        self._embeddings = {id(child.weight) for child in embeddings}
        self._mixtures = set(self._find_mixtures())

    def of(self, name: str, tensor: Tensor) -> Role:
        """Return the role of a parameter or persistent buffer."""
        if id(tensor) in self._embeddings:
            return Role("embedding")
        if self.head is not None and tensor is self.head.weight:
            return Role("head")
        path, _, leaf = name.rpartition(".")
        owner = self._owners[path]
        shape, kind = tuple(tensor.shape), role(name, tuple(tensor.shape))
        if isinstance(owner, nn.modules.conv._ConvNd):  # pyright: ignore[reportPrivateUsage]
            return Role("bias" if leaf == "bias" else "tensor")
        if kind in ("bias", "state") or (not _is_linear(owner, leaf) and (kind == "norm" or _is_norm(owner, path))):
            return Role("norm" if kind in ("matrix", "tensor") else kind)
        is_routed = self._is_routed(name)
        if self._is_of_router(name) or (_is_linear(owner, leaf) and shape[0] == 1):
            return Role("router" if len(shape) == 2 else kind)
        if _is_linear(owner, leaf):
            layout = MatrixLayout(is_transposed=_is_transposed_layer(owner))
            return Role("matrix", self._fused(name, owner, layout, shape), is_routed)
        if (count := self._stack_size(name, owner, shape)) is not None:
            layout = MatrixLayout(count, self._is_transposed_stack(path, owner, count))
            return Role("matrix", self._fused(name, owner, layout, shape), is_routed)
        if kind == "matrix" and not re.search(r"\.\d+\.", name):
            return Role("tensor")  # outside the blocks: not known to be a projection
        layout = self._fused(name, owner, PLAIN_MATRIX, shape) if kind == "matrix" else PLAIN_MATRIX
        return Role(kind, layout, is_routed)

    # -- experts ------------------------------------------------------------------------------------------------------

    def _find_mixtures(self) -> Iterator[str]:
        """Yield the paths of the modules that have both experts and their router."""
        for name, parameter in self.module.named_parameters():
            if (match := _ROUTED.match(name)) is not None:
                yield match[1]
            path = name.rpartition(".")[0]
            if _num_experts(self._owners[path]) and parameter.ndim == 3:
                yield path.rpartition(".")[0]

    def _mixture(self, name: str) -> str | None:
        """Return the innermost mixture of experts that has a parameter."""
        inside = [path for path in self._mixtures if name.startswith(f"{path}.")]
        return max(inside, key=len, default=None)

    def _is_routed(self, name: str) -> bool:
        path = self._mixture(name)
        if path is None or self._is_of_router(name):
            return False
        first, _, _ = name.removeprefix(f"{path}.").partition(".")
        owner = self._owners[name.rpartition(".")[0]]
        return "shared" not in first and (_ROUTED.match(name) is not None or bool(_num_experts(owner)))

    def _is_of_router(self, name: str) -> bool:
        path = self._mixture(name)
        return path is not None and _ROUTER.search(name.removeprefix(f"{path}.").split(".")[0]) is not None

    def _stack_size(self, name: str, owner: nn.Module, shape: tuple[int, ...]) -> int | None:
        """Return the number of matrices in a weight that is a stack of them."""
        experts = _num_experts(owner)
        is_of_experts = bool(experts) or "expert" in name.rpartition(".")[0]
        if len(shape) == 3 and (is_of_experts or shape[1] == shape[2] > 1):
            return shape[0]
        if len(shape) == 2 and experts > 1 and shape[0] % experts == 0 and shape[0] > experts:
            return experts
        return None

    def _is_transposed_stack(self, path: str, owner: nn.Module, count: int) -> bool:
        """Whether the matrices of a module with stacks are ``[in, out]``: it says so, or its shapes do."""
        declared = getattr(owner, "is_transposed", None)
        if isinstance(declared, bool):
            return declared
        width = self.widths.hidden_size
        for leaf, parameter in owner.named_parameters(recurse=False):
            rows, columns = (parameter.numel() // count // parameter.shape[-1], parameter.shape[-1])
            if parameter.ndim < 2 or (rows == width) == (columns == width):
                continue
            is_out = _OUT.search(leaf if leaf != "weight" else path.rpartition(".")[2]) is not None
            return (columns == width) == is_out
        return False

    # -- fused projections --------------------------------------------------------------------------------------------

    def _fused(self, name: str, owner: nn.Module, layout: MatrixLayout, shape: tuple[int, ...]) -> MatrixLayout:
        """Return the layout with the outputs of each fused projection, if they add up to the shape."""
        outputs, inputs = layout.shapes(shape)[0]
        path, _, leaf = name.rpartition(".")
        if leaf == "weight":  # the projection has the name of its layer
            path, _, leaf = path.rpartition(".")
        parts = self._parts(leaf, path, owner, outputs, inputs)
        if not parts or outputs % sum(parts):
            return layout
        return MatrixLayout(layout.count, layout.is_transposed, parts)

    def _parts(self, leaf: str, path: str, owner: nn.Module, outputs: int, inputs: int) -> tuple[int, ...]:
        if leaf in _HALVES and outputs % 2 == 0 and "att" not in path:
            return (1, 1) if getattr(owner, "is_concatenated", True) is False else (outputs // 2, outputs // 2)
        if leaf in _HEADS:
            return self._head_parts(leaf, type(self._owners[path]).__name__, outputs, inputs)
        return _recurrent_parts(self._owners[path], outputs) if leaf == "in_proj" else ()

    def _head_parts(self, leaf: str, parent: str, outputs: int, inputs: int) -> tuple[int, ...]:
        queries, head_dim = self.widths.num_heads * self.widths.head_dim, self.widths.head_dim
        counts = (self.widths.num_kv_heads, self.widths.num_heads, 1)  # a layer may have others than the setting says
        num_kv_heads = next((count for count in counts if outputs == queries + 2 * count * head_dim), 0)
        keys = num_kv_heads * head_dim
        if not queries or not keys:
            return (inputs,) * 3 if outputs == 3 * inputs and leaf not in _GROUPED else ()
        is_grouped = leaf in _GROUPED or parent in _GROUPED_IN
        num_groups = (_GROUPED_IN.get(parent) or num_kv_heads) if is_grouped else 1
        return (queries // num_groups, keys // num_groups, keys // num_groups)


def _recurrent_parts(mixer: Any, outputs: int) -> tuple[int, ...]:
    """Return gate, x, B, C and dt of a Mamba-2 mixer, or x and gate of a Mamba-1 mixer."""
    names = ("intermediate_size", "n_groups", "ssm_state_size", "num_heads")
    inner, groups, size, heads = (int(getattr(mixer, name, 0) or 0) for name in names)
    if inner and size and outputs == 2 * inner:
        return (inner, inner)
    parts = (inner, inner, groups * size, groups * size, heads)
    return parts if inner and heads and sum(parts) == outputs else ()


def _num_experts(owner: nn.Module) -> int:
    found = (getattr(owner, name, None) for name in EXPERT_COUNTS)
    return next((value for value in found if isinstance(value, int) and value > 0), 0)


def _is_linear(owner: nn.Module, leaf: str) -> bool:
    return leaf == "weight" and (isinstance(owner, nn.Linear) or _is_transposed_layer(owner))


def _is_transposed_layer(owner: nn.Module) -> bool:
    """Whether a layer computes ``x @ weight``: Conv1D of transformers, which has ``nf`` outputs."""
    weight = getattr(owner, "weight", None)
    return (
        not isinstance(owner, nn.Linear) and isinstance(weight, Tensor) and weight.ndim == 2
        and getattr(owner, "nf", None) == weight.shape[1]
    )  # fmt: skip


def _is_norm(owner: nn.Module, path: str) -> bool:
    return "norm" in type(owner).__name__.lower() or "norm" in path.rpartition(".")[2].lower()
