"""Several processes as one run: joining them, the rows that each reads, and arrays that none of them has whole.

Every process runs the same program over the same mesh; ``jax.distributed`` joins them and its key-value store carries
what they tell each other on the host. A mesh is filled process by process, so the rows of a batch that a process needs
are consecutive.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding

from vorox.core.batch import DataShard
from vorox.core.distributed_context import FOUND_BY_BACKEND, DistributedContext, membership
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig


@functools.cache
def _joined() -> DistributedContext:
    """This process among its peers; a process joins once."""
    found = membership()
    if found is None:
        return DistributedContext()
    try:
        if found.coordinator == FOUND_BY_BACKEND:
            jax.distributed.initialize()
        else:
            jax.distributed.initialize(found.coordinator, found.process_count, found.process_index)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the processes of the run did not find each other: {str(error).splitlines()[0]}",
            where="VOROX_COORDINATOR", hint="the first process must be reachable at that address from all others",
        ) from error  # fmt: skip
    # The key-value store has no public name; Orbax takes it from here too.
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None or jax.process_count() == 1:
        return DistributedContext()
    return DistributedContext(jax.process_index(), jax.process_count(), _KeyValueStore(client))


def connect(config: RunConfig) -> DistributedContext:
    """Join the processes that the environment names, before any device is touched.

    Raises:
        ConfigError: The environment contradicts itself, or the others cannot be reached.
    """
    found = membership()
    if found is not None and found.process_count is not None and config.runtime.device in {"auto", "cpu"}:
        # Host devices are made on request; on an accelerator the setting is without effect.
        with contextlib.suppress(RuntimeError):  # a backend is up already: what is there is counted against the mesh
            jax.config.update("jax_num_cpu_devices", max(1, config.parallel.num_devices // found.process_count))
    return _joined()


class _KeyValueStore:
    """``core.distributed_context.Channel`` over the coordination service."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, key: str, value: bytes) -> None:
        try:
            self._client.key_value_set_bytes(key, value)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise

    def get(self, key: str, timeout_seconds: float) -> bytes | None:
        try:
            if timeout_seconds <= 0:
                return self._client.key_value_try_get_bytes(key)
            return self._client.blocking_key_value_get_bytes(key, int(timeout_seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error) or "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def remove(self, key: str) -> None:
        self._client.key_value_delete(key)


def data_shard(mesh: Mesh) -> DataShard:
    """The part of every batch that the devices of this process train on.

    Raises:
        ConfigError: A process has no device of the mesh, or its devices share rows with only some of another's.
    """
    if jax.process_count() == 1:
        return DataShard()
    devices, size = mesh.devices.reshape(-1), mesh.shape["tensor"]
    mine = [place for place, device in enumerate(devices) if device.process_index == jax.process_index()]
    if not mine or mesh.size != jax.device_count():
        raise ConfigError(
            f"the {jax.process_count()} processes have {jax.device_count()} devices together, and data x fsdp x tensor "
            f"is {mesh.size}",
            where="parallel", hint=f"make the product {jax.device_count()}",
        )  # fmt: skip
    if len(mine) % size and size % len(mine):
        raise ConfigError(
            f"tensor_parallel_size = {size} and {len(mine)} devices a process do not divide each other",
            where="parallel.tensor_parallel_size", hint=f"choose a divisor or a multiple of {len(mine)}",
        )  # fmt: skip
    parts = sorted({place // size for place in mine})
    return DataShard(parts[0], mesh.size // size, len(parts))


def placed(array: npt.NDArray[Any], sharding: Sharding) -> jax.Array:
    """An array that every process has whole, spread over the devices: each process gives its own devices their part."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def placed_part(rows_ABT: npt.NDArray[np.int32], sharding: NamedSharding, num_rows: int, shard: DataShard) -> jax.Array:
    """Rows on the devices, ``[A, num_rows, T]``, of which this process has those that ``shard`` says."""
    if shard.is_whole:
        return placed(rows_ABT, sharding)
    count, _, length = rows_ABT.shape
    return jax.make_array_from_process_local_data(sharding, rows_ABT, (count, num_rows, length))


def gathered(tree: Any) -> Any:
    """A tree of arrays in the host memory of the first process; the others take part and keep only its scalars."""

    def kept(array: jax.Array) -> npt.NDArray[np.float32]:
        found = whole(array)
        return found if found.ndim == 0 or jax.process_index() == 0 else found[:0]

    return jax.tree.map(kept, tree)


def whole(array: jax.Array | npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """An array on the host of every process. Where others have parts of it, all of them must ask at the same time."""
    if not isinstance(array, jax.Array):
        return array
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(jax.device_get(array))
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
