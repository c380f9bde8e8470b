"""Layout of the canonical parameters in the engine's pytree.

A leaf is one canonical parameter or, with scanned layers, the same parameter of all blocks stacked on a leading axis:
``blocks.3.mlp.up.weight`` is then row 3 of the leaf ``blocks.mlp.up.weight``. The matrices of all experts of a block
are stacked likewise, behind the axis of layers. Optimizer state has the same leaves.
Everything outside the engine (checkpoints, fingerprints, exports) uses canonical names.

Invariant: packing and unpacking preserve every bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from vorox.backends.jax_engine.ranks.distributed import to_host
from vorox.core.engine import NamedArray
from vorox.core.errors import CheckpointError
from vorox.core.schema import OptimizerConfig
from vorox.models.decoder.experts import split_expert
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.optimizer_groups import Group, common_group, optimizer_groups
from vorox.models.spec import ParameterSpec

Tree = dict[str, jax.Array]


class ParameterLayout:
    """The leaves of one model.

    Args:
        spec: The model.
        scanned: Whether the blocks are stacked.

    Attributes:
        leaves: Leaf name to its canonical parameters: one, or one per layer and expert, in this order.
    """

    def __init__(self, spec: DecoderSpec, *, scanned: bool) -> None:
        self.spec, self.scanned = spec, scanned
        self.leaves: dict[str, tuple[ParameterSpec, ...]] = {}
        for parameter in spec.parameters:
            leaf = self.leaf_of(parameter.name)
            self.leaves[leaf] = (*self.leaves.get(leaf, ()), parameter)

    def leaf_of(self, name: str) -> str:
        """Return the leaf that holds a canonical parameter."""
        split = split_expert(name)
        if split is not None:
            name = split[0]
        parts = name.split(".")
        return ".".join(["blocks", *parts[2:]]) if self.scanned and parts[0] == "blocks" else name

    def stack_shape(self, leaf: str) -> tuple[int, ...]:
        """Return the sizes of the leading axes over which canonical parameters are stacked."""
        parameters = self.leaves[leaf]
        has_experts = split_expert(parameters[0].name) is not None
        num_layers = self.spec.num_layers if self.scanned and leaf.startswith("blocks.") else 1
        layers = (num_layers,) if self.scanned and leaf.startswith("blocks.") else ()
        return (*layers, len(parameters) // num_layers) if has_experts else layers

    def names(self, leaves: Iterable[str]) -> tuple[str, ...]:
        """Return the canonical names of the parameters in some leaves, in table order."""
        chosen = set(leaves)
        return tuple(row.name for row in self.spec.parameters if self.leaf_of(row.name) in chosen)

    def axes(self, leaf: str) -> tuple[str, ...]:
        """Return the logical axis of each dimension of a leaf, for sharding."""
        parameter = self.leaves[leaf][0]
        stacked = ("layers", "experts") if split_expert(parameter.name) is not None else ("layers",)
        num_stacked = len(self.stack_shape(leaf))
        return (*stacked[len(stacked) - num_stacked :], *parameter.axes) if num_stacked else parameter.axes

    def groups(self, config: OptimizerConfig) -> dict[str, Group]:
        """Return the optimizer group of every leaf.

        Raises:
            ConfigError: Parameters of one leaf have different groups (see also ``optimizer_groups``).
        """
        groups = optimizer_groups(self.spec, config)
        hint = "set runtime.scan_layers=false, and let one pattern match all experts of a block"
        return {
            leaf: common_group([parameter.name for parameter in parameters], groups, hint=hint)
            for leaf, parameters in self.leaves.items()
        }

    def pack(self, weights: Iterable[NamedArray]) -> dict[str, npt.NDArray[np.float32]]:
        """Pack canonical arrays into leaves.

        Raises:
            CheckpointError: A parameter is missing, unknown, duplicated or has the wrong shape.
        """
        shapes = {parameter.name: parameter.shape for parameter in self.spec.parameters}
        found: dict[str, npt.NDArray[np.float32]] = {}
        for name, array in weights:
            if name not in shapes or name in found:
                raise CheckpointError(f"Parameter {name} is unknown or duplicated")
            if shapes[name] != array.shape:
                raise CheckpointError(f"Parameter {name} has shape {array.shape}; the model needs {shapes[name]}")
            found[name] = np.asarray(array, np.float32)
        return self.pack_group(found)

    def pack_group(self, found: Mapping[str, npt.NDArray[np.float32]], leaves: Iterable[str] | None = None) -> Any:
        """Pack canonical arrays of the right shapes into some leaves, or all."""
        packed: dict[str, npt.NDArray[np.float32]] = {}
        for leaf in self.leaves if leaves is None else leaves:
            names = [parameter.name for parameter in self.leaves[leaf]]
            missing = [name for name in names if name not in found]
            if missing:
                raise CheckpointError(f"Parameter {missing[0]} is missing")
            arrays = [found[name] for name in names]
            stack = self.stack_shape(leaf)
            packed[leaf] = np.stack(arrays).reshape(*stack, *arrays[0].shape) if stack else arrays[0]
        return packed

    def unpack(self, tree: Mapping[str, jax.Array]) -> Iterator[NamedArray]:
        """Yield the canonical arrays of a tree on the host, in table order, fetching leaf by leaf."""
        fetched: dict[str, Iterator[npt.NDArray[np.float32]]] = {}
        for parameter in self.spec.parameters:
            leaf = self.leaf_of(parameter.name)
            if leaf not in tree:
                continue
            if leaf not in fetched:
                array = to_host(tree[leaf])  # empty on ranks that do not write
                fetched[leaf] = iter(array.reshape(-1, *parameter.shape)) if array.size else itertools.repeat(array)
            yield parameter.name, next(fetched[leaf])
            if parameter is self.leaves[leaf][-1]:
                del fetched[leaf]
