"""Snapshots of the state, from which checkpoints are written while training goes on; and reading Orbax's arrays back.

A step gives its state's memory to the next one, so what is to outlive it is copied into host memory. Of every part of
an array each process copies one replica, if it has any: nothing is gathered, and further replicas cost no memory. On
disk, arrays have canonical names whatever the layout, so any mesh and either engine reads them.

Invariant: a copy has the bits of its original, and no later step changes one.
"""

from __future__ import annotations

import errno
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from vorox.backends.jax_engine.parameters import ParameterLayout, Tree
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.installation import install_command
from vorox.core.staged_directory import StagedDirectory
from vorox.models import engine_state
from vorox.models.engine_state import EngineState, Snapshot
from vorox.models.orbax_arrays import FOLDER, WEIGHTS, Index, OrbaxArrays
from vorox.models.spec import ModelSpec

HOST_MEMORY = "pinned_host"


def require_orbax() -> None:
    """Refuse ``checkpoint.format=orbax`` before step 1 where it cannot be honoured.

    Raises:
        ConfigError: Orbax is not installed.
    """
    if importlib.util.find_spec("orbax") is None:
        raise ConfigError(
            "format = orbax needs orbax-checkpoint, which is not installed", where="checkpoint.format",
            hint=f"{install_command('jax')}, or set checkpoint.format=safetensors",
        )  # fmt: skip


def host_copies(tree: Any) -> Any:
    """The same tree of arrays in host memory, one replica a process, when all of it has arrived there."""
    return jax.block_until_ready(jax.tree.map(partial(_one_replica, detached=True), tree))


@dataclass(frozen=True, slots=True)
class OrbaxSnapshot:
    """See ``core.engine.EngineSnapshot``. In several processes, each has the parts that its devices hold.

    Attributes:
        spec: The model.
        trees: ``weights`` and kinds of moments: canonical name to array, one replica a process.
        counters: The scalars.
        known_fingerprint: Of the whole state, where this process has only parts of it.
    """

    spec: ModelSpec
    trees: Mapping[str, Tree]
    counters: Mapping[str, float]
    known_fingerprint: str | None = None

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        layout: ParameterLayout,
        trees: Mapping[str, Tree],
        counters: Mapping[str, float],
        *,
        detached: bool,
        fingerprint: str | None = None,
    ) -> OrbaxSnapshot:
        """Of the engine's trees as they are now."""
        canonical = {kind: _canonical(layout, tree, detached=detached) for kind, tree in trees.items()}
        return cls(spec, jax.block_until_ready(canonical), counters, fingerprint)

    @property
    def size_bytes(self) -> int:
        """Bytes of its arrays over all processes: the least that a disk must have room for."""
        return sum(array.nbytes for tree in self.trees.values() for array in tree.values())

    def nonfinite_array(self) -> str:
        """Name of the first array of this process that holds NaN or infinity; empty if none does."""
        return engine_state.first_nonfinite(
            (name if kind == WEIGHTS else f"{kind}.{name}", np.asarray(shard.data))
            for kind, tree in sorted(self.trees.items(), reverse=True)
            for name, array in tree.items()
            for shard in array.addressable_shards
        )

    def write(self, directory: StagedDirectory) -> None:
        """Write all of it; in several processes, use ``write_parts`` in each, then ``describe`` in the main one."""
        self.write_parts(directory.path)
        self.describe(directory)

    def write_parts(self, directory: Path) -> None:
        """Write the parts that this process has, below a directory that every process names."""
        import orbax.checkpoint as ocp
        from etils import epath

        place = epath.Path(directory / FOLDER)
        with _errors_of_orbax(directory / FOLDER):
            place.mkdir(parents=True, exist_ok=True)
            ocp.PyTreeCheckpointHandler(use_compression=False).save(place, args=ocp.args.PyTreeSave(dict(self.trees)))

    def describe(self, directory: StagedDirectory) -> None:
        """Join what every process has written, and take it in. Once, when all have written."""
        import orbax.checkpoint as ocp
        from etils import epath

        with _errors_of_orbax(directory.path / FOLDER):
            ocp.PyTreeCheckpointHandler(use_compression=False).finalize(epath.Path(directory.path / FOLDER))
        directory.adopt(FOLDER)
        kinds = sorted(kind for kind in self.trees if kind != WEIGHTS)
        engine_state.write_description(directory, self.spec, kinds, self.counters, arrays="orbax")

    def fingerprint(self) -> str:
        """What ``Engine.fingerprint`` said at that moment."""
        if self.known_fingerprint is not None:
            return self.known_fingerprint
        state = EngineState(
            weights=partial(_on_host, self.trees[WEIGHTS]),
            moments={kind: partial(_on_host, tree) for kind, tree in self.trees.items() if kind != WEIGHTS},
            moment_names={},
            counters=self.counters,
        )
        return Snapshot(self.spec, state).fingerprint()


def restored(stored: OrbaxArrays, layout: ParameterLayout, trees: Mapping[str, Tree]) -> dict[str, Tree]:
    """Trees with the shapes and shardings of these and the stored values; each process reads what its devices hold."""
    return {
        kind: {leaf: _restored_leaf(stored, layout, kind, leaf, array) for leaf, array in tree.items()}
        for kind, tree in trees.items()
    }


def _restored_leaf(stored: OrbaxArrays, layout: ParameterLayout, kind: str, leaf: str, like: jax.Array) -> jax.Array:
    names = [f"{kind}.{parameter.name}" for parameter in layout.leaves[leaf]]
    known: dict[str, npt.NDArray[np.float32]] = {}

    def part(index: Index | None) -> npt.NDArray[np.float32]:
        where = tuple(slice(None) for _ in like.shape) if index is None or index is ... else tuple(index)
        if str(where) not in known:  # replicas ask for the same
            if layout.is_stacked(leaf):
                known[str(where)] = np.stack([stored.read(name, where[1:]) for name in names[where[0]]])
            else:
                known[str(where)] = stored.read(names[0], where)
        return known[str(where)]

    return jax.make_array_from_callback(like.shape, like.sharding, part)


def _canonical(layout: ParameterLayout, tree: Tree, *, detached: bool) -> Tree:
    found: Tree = {}
    for leaf, array in tree.items():
        for row, parameter in enumerate(layout.leaves[leaf]):
            found[parameter.name] = _one_replica(array, detached=detached, row=row if layout.is_stacked(leaf) else None)
    return {name: found[name] for name in layout.names(tree)}


def _one_replica(array: jax.Array, *, detached: bool, row: int | None = None) -> jax.Array:
    """An array, or one row of it, with one replica a process; in host memory if it is to be detached."""
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    axes, shape = (sharding.spec, array.shape) if row is None else (sharding.spec[1:], array.shape[1:])
    memory = HOST_MEMORY if detached else None
    target = NamedSharding(_replica_devices(sharding), PartitionSpec(*axes), memory_kind=memory)
    parts: list[jax.Array] = []
    for shard in array.addressable_shards:
        if shard.device in target.device_set:
            part = shard.data if row is None else shard.data[row]
            if detached:
                host = SingleDeviceSharding(shard.device, memory_kind=HOST_MEMORY)
                part = jax.device_put(part, host, may_alias=False)
            parts.append(part)
    return jax.make_array_from_single_device_arrays(shape, target, parts, dtype=array.dtype)


def _replica_devices(sharding: NamedSharding) -> Mesh:
    """All devices of the axes that an array is spread over; of the other axes, the first device of each process.

    So every process has one replica at most, and an array that several processes have stays one of all of them, which
    Orbax asks for: it writes the first replica.
    """
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    spread = {name for axes in sharding.spec for name in (axes if isinstance(axes, tuple) else (axes,))}
    devices = mesh.devices
    for axis, name in enumerate(mesh.axis_names):
        if name not in spread:
            line = devices[tuple(slice(None) if other == axis else 0 for other in range(devices.ndim))]
            owners = [device.process_index for device in line]
            devices = devices.take([owners.index(owner) for owner in sorted(set(owners))], axis=axis)
    return Mesh(devices, mesh.axis_names)


def _on_host(tree: Tree) -> Any:
    return ((name, np.asarray(array)) for name, array in tree.items())


class _errors_of_orbax:
    """Turns what Orbax and tensorstore raise into what a checkpoint raises; a full disk stays a full disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, OSError):
            return
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            if os.strerror(number) in str(error):
                raise OSError(number, os.strerror(number), str(self._path)) from error
        what = f"Orbax cannot write the arrays: {type(error).__name__}: {str(error).splitlines()[0]}"
        raise CheckpointError(what, where=str(self._path), hint="repair and resume") from error
