"""Multi-process runs: process group, data shards, and arrays that span processes.

Every process runs the same program over the same mesh. ``jax.distributed`` connects them, and its key-value store
carries their host-side messages. Devices of one process are adjacent in the mesh, so the rows of a batch that a process
needs are consecutive.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding

from vorox.core.batch import DataShard
from vorox.core.errors import ConfigError
from vorox.core.ranks.distributed_context import (
    FOUND_BY_BACKEND,
    DistributedContext,
    Membership,
    SealedChannel,
    membership,
)
from vorox.core.ranks.rendezvous import is_loopback, loopback_interface
from vorox.core.schema import RunConfig

_START_SECONDS = 300
"""Time that the ranks have to connect after they have met."""


def join(member: Membership, timeout_seconds: float) -> DistributedContext:
    """Join a process group without a run, with one device per rank.

    Args:
        member: The rank of this process.
        timeout_seconds: Time that the ranks have to connect.

    Raises:
        ConfigError: The environment is inconsistent, or the other processes cannot be reached.
    """
    assert member.world_size is not None, "the ranks have met"
    with contextlib.suppress(RuntimeError):  # JAX is already initialised
        jax.config.update("jax_num_cpu_devices", 1)
    return _joined(local_gpus(member, member.world_size, len(_listed_gpus())), round(timeout_seconds))


@functools.cache
def _joined(device_ids: tuple[int, ...] | None, timeout_seconds: int = _START_SECONDS) -> DistributedContext:
    """Join the process group, once per process."""
    found = membership()
    if found is None:
        return DistributedContext()
    try:
        if found.coordinator == FOUND_BY_BACKEND:
            jax.distributed.initialize()  # the cluster gives the devices too
        else:
            host, _, port = found.free_address.rpartition(":")
            bound = None
            if is_loopback(host):
                bound = f"{'[::1]' if ':' in host else '127.0.0.1'}:{port}"
                _collect_on_loopback()
            jax.distributed.initialize(
                found.free_address, found.world_size, found.rank, device_ids,
                initialization_timeout=timeout_seconds, coordinator_bind_address=bound,
            )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"The processes of the run cannot connect to each other: {str(error).splitlines()[0]}",
            where=found.free_address, hint="rank 0 must be able to listen at this address, and the other ranks to "
            "reach it; VOROX_COORDINATOR=HOST:PORT names another",
        ) from error  # fmt: skip
    # The key-value store has no public API; Orbax imports it from here too.
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None or jax.process_count() == 1:
        return DistributedContext()
    channel = SealedChannel(_KeyValueStore(client))
    return DistributedContext(jax.process_index(), jax.process_count(), channel, found.local_rank or 0)


def _collect_on_loopback() -> None:
    """Let gloo, which JAX uses for collectives on CPUs, listen on loopback only; JAX has no setting for it."""
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    make = getattr(_jax, "make_gloo_tcp_collectives", None)
    if make is not None and not isinstance(make, functools.partial):
        _jax.make_gloo_tcp_collectives = functools.partial(make, interface=loopback_interface())


def connect(config: RunConfig) -> DistributedContext:
    """Join the process group that the environment describes, before JAX initialises its devices.

    Raises:
        ConfigError: The environment is inconsistent, or the other processes cannot be reached.
    """
    found = membership()
    if found is not None and found.world_size is not None and config.runtime.device in {"auto", "cpu"}:
        # Sets the number of host devices; without effect on accelerators.
        with contextlib.suppress(RuntimeError):  # JAX is already initialised; the mesh checks its number of devices
            jax.config.update("jax_num_cpu_devices", max(1, config.parallel.num_devices // found.world_size))
    if found is None:
        return _joined(None)
    return _joined(local_gpus(found, config.parallel.num_devices, len(_listed_gpus())))


def _listed_gpus() -> list[str]:
    return [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()]


def local_gpus(member: Membership, num_devices: int, num_listed: int) -> tuple[int, ...] | None:
    """Return the GPUs of this rank, as indices into the visible ones of its machine; ``None`` for all of them.

    Args:
        member: This rank.
        num_devices: Devices of the run.
        num_listed: Devices in ``CUDA_VISIBLE_DEVICES``; 0 if it is not set. A cluster may list only those of this rank.

    Raises:
        ConfigError: The listed devices cannot be divided evenly among the ranks of the machine.
    """
    if member.world_size is None or member.local_rank is None or (member.local_world_size or 1) == 1:
        return None
    size = member.local_world_size or 1
    share = max(1, num_devices // member.world_size)
    if num_listed == share:
        return None
    if num_listed % size:
        raise ConfigError(
            f"Cannot divide {num_listed} visible GPUs evenly among the {size} ranks of this machine",
            where="CUDA_VISIBLE_DEVICES", hint=f"list a multiple of {size} GPUs",
        )  # fmt: skip
    share = num_listed // size or share
    return tuple(range(member.local_rank * share, (member.local_rank + 1) * share))


class _KeyValueStore:
    """``core.ranks.distributed_context.Channel`` over JAX's coordination service."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, key: str, value: bytes) -> None:
        try:
            self._client.key_value_set_bytes(key, value)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise

    def replace(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def get(self, key: str, timeout_seconds: float) -> bytes | None:
        try:
            if timeout_seconds <= 0:
                return self._client.key_value_try_get_bytes(key)
            return self._client.blocking_key_value_get_bytes(key, int(timeout_seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error) or "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def get_all(self, folder: str, names: Sequence[str], timeout_seconds: float) -> list[bytes] | None:
        if len(names) == 1:
            value = self.get(f"{folder}/{names[0]}", timeout_seconds)
            return None if value is None else [value]
        ends_at = time.monotonic() + timeout_seconds
        while True:
            found = dict(self._client.key_value_dir_get_bytes(f"{folder}/"))
            missing = next((f"{folder}/{name}" for name in names if f"{folder}/{name}" not in found), None)
            if missing is None:
                return [found[f"{folder}/{name}"] for name in names]
            if self.get(missing, max(0.001, ends_at - time.monotonic())) is None:
                return None

    def remove(self, key: str) -> None:
        self._client.key_value_delete(key)


def data_shard(mesh: Mesh) -> DataShard:
    """Return the part of every batch that the devices of this process train on.

    Raises:
        ConfigError: A process has no device in the mesh, or tensor-parallel groups cross processes unevenly.
    """
    if jax.process_count() == 1:
        return DataShard()
    devices, size = mesh.devices.reshape(-1), mesh.shape["tensor"]
    mine = [place for place, device in enumerate(devices) if device.process_index == jax.process_index()]
    if not mine or mesh.size != jax.device_count():
        raise ConfigError(
            f"The {jax.process_count()} processes have {jax.device_count()} devices in total, but data x fsdp x tensor "
            f"is {mesh.size}",
            where="parallel", hint=f"make the product {jax.device_count()}",
        )  # fmt: skip
    if len(mine) % size and size % len(mine):
        raise ConfigError(
            f"tensor_parallel_size = {size} is neither a divisor nor a multiple of {len(mine)} devices per process",
            where="parallel.tensor_parallel_size", hint=f"choose a divisor or a multiple of {len(mine)}",
        )  # fmt: skip
    parts = sorted({place // size for place in mine})
    return DataShard(parts[0], mesh.size // size, len(parts))


def to_devices(array: npt.NDArray[Any], sharding: Sharding) -> jax.Array:
    """Shard an array over the devices; every process holds all of it and fills its own devices."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def rows_to_devices(
    rows_ABT: npt.NDArray[np.int32], sharding: NamedSharding, num_rows: int, shard: DataShard
) -> jax.Array:
    """Shard rows over the devices as ``[A, num_rows, T]``; this process holds the rows of ``shard``."""
    if shard.is_whole:
        return to_devices(rows_ABT, sharding)
    count, _, length = rows_ABT.shape
    return jax.make_array_from_process_local_data(sharding, rows_ABT, (count, num_rows, length))


def gather_to_main(tree: Any) -> Any:
    """Gather a tree of arrays into the host memory of rank 0; the other ranks take part and keep only scalars."""

    def gather(array: jax.Array) -> npt.NDArray[np.float32]:
        found = to_host(array)
        return found if found.ndim == 0 or jax.process_index() == 0 else found[:0]

    return jax.tree.map(gather, tree)


def to_host(array: jax.Array | npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return an array on the host of every rank. A collective if the array spans processes."""
    if not isinstance(array, jax.Array):
        return array
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(jax.device_get(array))
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
