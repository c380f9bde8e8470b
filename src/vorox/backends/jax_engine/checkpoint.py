"""Snapshots of the training state in host memory, and writing and restoring sharded arrays with Orbax.

A step donates its state's buffers to the next step, so a state that must outlive the step is copied into host memory.
Each process copies one replica of every shard that it holds: nothing is gathered, and further replicas cost no memory.
On disk, arrays have canonical names in any layout, so any mesh and either engine can read them.

Invariant: a copy equals its original bit for bit, and no later step changes it.
"""

from __future__ import annotations

import errno
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from vorox.backends.jax_engine.parameters import ParameterLayout, Tree
from vorox.core.engine import PartReport
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files.staged_directory import StagedDirectory, StagedPart
from vorox.core.platform.installation import install_command
from vorox.models.arrays.array_reader import WEIGHTS, ArrayReader, Index
from vorox.models.arrays.orbax_arrays import FOLDER
from vorox.models.spec import ModelSpec
from vorox.models.stored import engine_state
from vorox.models.stored.engine_state import EngineState, Snapshot

HOST_MEMORY = "pinned_host"


def require_orbax() -> None:
    """Check before step 1 that ``checkpoint.format=orbax`` is possible.

    Raises:
        ConfigError: Orbax is not installed.
    """
    if importlib.util.find_spec("orbax") is None:
        raise ConfigError(
            "checkpoint.format=orbax needs orbax-checkpoint, which is not installed", where="checkpoint.format",
            hint=f"{install_command('jax')}, or set checkpoint.format=safetensors",
        )  # fmt: skip


def copy_to_host(tree: Any) -> Any:
    """Copy a tree of arrays into host memory, one replica per process, and wait for the copies."""
    return jax.block_until_ready(jax.tree.map(partial(_single_replica, detached=True), tree))


@dataclass(frozen=True, slots=True)
class OrbaxSnapshot:
    """A snapshot that Orbax writes (``core.engine.EngineSnapshot``). Each process holds the shards of its devices.

    Attributes:
        spec: The model.
        trees: ``weights`` and the optimizer moments: canonical name to array, one replica per process.
        counters: Scalars of the optimizer.
        known_fingerprint: Fingerprint of the whole state, if this process holds only part of it.
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
        """Take a snapshot of the engine's current trees."""
        canonical = {kind: _by_canonical_name(layout, tree, detached=detached) for kind, tree in trees.items()}
        return cls(spec, jax.block_until_ready(canonical), counters, fingerprint)

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays over all processes: a lower bound of the disk space needed."""
        return sum(array.nbytes for tree in self.trees.values() for array in tree.values())

    def nonfinite_array(self) -> str:
        """Return the name of the first array of this process with NaN or infinity, or an empty string."""
        return engine_state.first_nonfinite(
            (name if kind == WEIGHTS else f"{kind}.{name}", np.asarray(shard.data))
            for kind, tree in sorted(self.trees.items(), reverse=True)
            for name, array in tree.items()
            for shard in array.addressable_shards
        )

    def write_part(self, directory: StagedPart) -> PartReport:
        """Write the shards of this process below a directory that all processes share."""
        import orbax.checkpoint as ocp
        from etils import epath

        place = epath.Path(directory.path / FOLDER)
        with _translate_orbax_errors(directory.path / FOLDER):
            place.mkdir(parents=True, exist_ok=True)
            ocp.PyTreeCheckpointHandler(use_compression=False).save(place, args=ocp.args.PyTreeSave(dict(self.trees)))
        return {}

    def write_metadata(self, directory: StagedDirectory, parts: Sequence[PartReport] = ()) -> None:
        """Merge the shards of all processes and write the files that are not shards; called on rank 0."""
        del parts
        import orbax.checkpoint as ocp
        from etils import epath

        with _translate_orbax_errors(directory.path / FOLDER):
            ocp.PyTreeCheckpointHandler(use_compression=False).finalize(epath.Path(directory.path / FOLDER))
        directory.adopt(FOLDER)
        kinds = sorted(kind for kind in self.trees if kind != WEIGHTS)
        engine_state.write_description(directory, self.spec, kinds, self.counters, arrays="orbax")

    def fingerprint(self, parts: Sequence[PartReport] = ()) -> str:
        """Return what ``Engine.fingerprint`` returned at the time of the snapshot."""
        del parts
        if self.known_fingerprint is not None:
            return self.known_fingerprint
        state = EngineState(
            weights=partial(_on_host, self.trees[WEIGHTS]),
            moments={kind: partial(_on_host, tree) for kind, tree in self.trees.items() if kind != WEIGHTS},
            moment_names={},
            counters=self.counters,
        )
        return Snapshot(self.spec, state).fingerprint()


def restore_trees(stored: ArrayReader, layout: ParameterLayout, trees: Mapping[str, Tree]) -> dict[str, Tree]:
    """Read stored values into trees of the same shapes and shardings; each process reads the shards of its devices."""
    return {
        kind: {leaf: _restore_leaf(stored, layout, kind, leaf, array) for leaf, array in tree.items()}
        for kind, tree in trees.items()
    }


def _restore_leaf(stored: ArrayReader, layout: ParameterLayout, kind: str, leaf: str, like: jax.Array) -> jax.Array:
    names = [f"{kind}.{parameter.name}" for parameter in layout.leaves[leaf]]
    known: dict[str, npt.NDArray[np.float32]] = {}

    def read_shard(index: Index | None) -> npt.NDArray[np.float32]:
        where = tuple(slice(None) for _ in like.shape) if index is None or index is ... else tuple(index)
        if str(where) not in known:  # replicas read the same slice
            stack = layout.stack_shape(leaf)
            chosen = np.array(names).reshape(stack)[where[: len(stack)]]
            parts = [stored.read(str(name), where[len(stack) :]) for name in chosen.flat]
            known[str(where)] = np.stack(parts).reshape(*chosen.shape, *parts[0].shape)
        return known[str(where)]

    return jax.make_array_from_callback(like.shape, like.sharding, read_shard)


def _by_canonical_name(layout: ParameterLayout, tree: Tree, *, detached: bool) -> Tree:
    found: Tree = {}
    for leaf, array in tree.items():
        places = np.ndindex(layout.stack_shape(leaf))
        for place, parameter in zip(places, layout.leaves[leaf], strict=True):
            found[parameter.name] = _single_replica(array, detached=detached, place=place)
    return {name: found[name] for name in layout.names(tree)}


def _single_replica(array: jax.Array, *, detached: bool, place: tuple[int, ...] = ()) -> jax.Array:
    """Return an array, or its part at a place in the leading axes, with one replica per process.

    It is copied into host memory if ``detached``.
    """
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    axes, shape = sharding.spec[len(place) :], array.shape[len(place) :]
    memory = HOST_MEMORY if detached else None
    target = NamedSharding(_replica_devices(sharding), PartitionSpec(*axes), memory_kind=memory)
    parts: list[jax.Array] = []
    for shard in array.addressable_shards:
        if shard.device in target.device_set:
            part = shard.data[place] if place else shard.data
            if detached:
                host = SingleDeviceSharding(shard.device, memory_kind=HOST_MEMORY)
                part = jax.device_put(part, host, may_alias=False)
            parts.append(part)
    return jax.make_array_from_single_device_arrays(shape, target, parts, dtype=array.dtype)


def _replica_devices(sharding: NamedSharding) -> Mesh:
    """Return all devices along the axes that an array is sharded over; along other axes, one device per process.

    Every process then holds at most one replica, and an array held by several processes stays a global array, as Orbax
    requires: it writes the first replica.
    """
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    sharded = {name for axes in sharding.spec for name in (axes if isinstance(axes, tuple) else (axes,))}
    devices = mesh.devices
    for axis, name in enumerate(mesh.axis_names):
        if name not in sharded:
            line = devices[tuple(slice(None) if other == axis else 0 for other in range(devices.ndim))]
            owners = [device.process_index for device in line]
            devices = devices.take([owners.index(owner) for owner in sorted(set(owners))], axis=axis)
    return Mesh(devices, mesh.axis_names)


def _on_host(tree: Tree) -> Any:
    return ((name, np.asarray(array)) for name, array in tree.items())


class _translate_orbax_errors:
    """Translate exceptions of Orbax and tensorstore into ``CheckpointError``, or ``OSError`` for a full disk."""

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
        what = f"Orbax failed to write the arrays: {type(error).__name__}: {str(error).splitlines()[0]}"
        raise CheckpointError(what, where=str(self._path), hint="fix the cause and resume") from error
