"""Layout of the canonical parameters in the engine's pytree.

A leaf is one canonical parameter or, with scanned layers, the same parameter of all blocks stacked on a leading axis:
``blocks.3.mlp.up.weight`` is then row 3 of the leaf ``blocks.mlp.up.weight``. Optimizer state has the same leaves.
Everything outside the engine (checkpoints, fingerprints, exports) uses canonical names.

Invariant: packing and unpacking preserve every bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from vorox.backends.jax_engine.distributed import to_host
from vorox.core.engine import NamedArray
from vorox.core.errors import CheckpointError
from vorox.core.schema import OptimizerConfig
from vorox.models.decoder_spec import DecoderSpec
from vorox.models.optimizer_groups import Group, common_group, optimizer_groups
from vorox.models.spec import ParameterSpec

Tree = dict[str, jax.Array]


class ParameterLayout:
    """The leaves of one model.

    Args:
        spec: The model.
        scanned: Whether the blocks are stacked.

    Attributes:
        leaves: Leaf name to its canonical parameters: one, or one per layer.
    """

    def __init__(self, spec: DecoderSpec, *, scanned: bool) -> None:
        self.spec, self.scanned = spec, scanned
        self.leaves: dict[str, tuple[ParameterSpec, ...]] = {}
        for parameter in spec.parameters:
            leaf = self.leaf_of(parameter.name)
            self.leaves[leaf] = (*self.leaves.get(leaf, ()), parameter)

    def leaf_of(self, name: str) -> str:
        """Return the leaf that holds a canonical parameter."""
        parts = name.split(".")
        return ".".join(["blocks", *parts[2:]]) if self.scanned and parts[0] == "blocks" else name

    def is_stacked(self, leaf: str) -> bool:
        return self.scanned and leaf.startswith("blocks.")

    def names(self, leaves: Iterable[str]) -> tuple[str, ...]:
        """Return the canonical names of the parameters in some leaves, in table order."""
        chosen = set(leaves)
        return tuple(row.name for row in self.spec.parameters if self.leaf_of(row.name) in chosen)

    def axes(self, leaf: str) -> tuple[str, ...]:
        """Return the logical axis of each dimension of a leaf, for sharding."""
        parameter = self.leaves[leaf][0]
        return ("layers", *parameter.axes) if self.is_stacked(leaf) else parameter.axes

    def groups(self, config: OptimizerConfig) -> dict[str, Group]:
        """Return the optimizer group of every leaf.

        Raises:
            ConfigError: Parameters of one leaf have different groups (see also ``optimizer_groups``).
        """
        groups, hint = optimizer_groups(self.spec, config), "set runtime.scan_layers=false"
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
            packed[leaf] = np.stack(arrays) if self.is_stacked(leaf) else arrays[0]
        return packed

    def unpack(self, tree: Mapping[str, jax.Array]) -> Iterator[NamedArray]:
        """Yield the canonical arrays of a tree on the host, in table order, fetching leaf by leaf."""
        fetched: dict[str, npt.NDArray[np.float32]] = {}
        for parameter in self.spec.parameters:
            leaf = self.leaf_of(parameter.name)
            if leaf not in tree:
                continue
            if leaf not in fetched:
                fetched[leaf] = to_host(tree[leaf])
            if self.is_stacked(leaf):
                yield parameter.name, fetched[leaf][int(parameter.name.split(".")[1])]
            else:
                yield parameter.name, fetched.pop(leaf)
