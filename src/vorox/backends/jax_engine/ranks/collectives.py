"""All-reduces between ranks without a run, for vorox doctor --nodes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vorox.backends.jax_engine.ranks import distributed
from vorox.core.ranks.distributed_context import DistributedContext, Membership

_FLOAT_BYTES = 4


def join(member: Membership, timeout_seconds: float) -> tuple[DistributedContext, JaxCollectives]:
    """Connect the ranks that the environment describes.

    Args:
        member: The rank of this process.
        timeout_seconds: Time that the ranks have to connect.

    Raises:
        VoroxError: The ranks cannot connect.
    """
    context, collectives = distributed.join(member, timeout_seconds), JaxCollectives()
    with _native_output_on_stderr():
        collectives.sum(np.zeros(1, np.float32))
    return context, collectives


@contextlib.contextmanager
def _native_output_on_stderr() -> Generator[None]:
    """Send output of C++ to standard error: gloo prints a line when it connects, which would precede the JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


class JaxCollectives:
    """The collectives of JAX over one device of each process, as ``runtime.collective_timing.Collectives``."""

    def __init__(self) -> None:
        first = {device.process_index: device for device in reversed(jax.devices())}
        mesh = Mesh(np.array([first[process] for process in sorted(first)]), ("rank",))
        self._by_rank, self._everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("rank",), ()))
        device = jax.local_devices()[0]
        self.is_on_host = device.platform == "cpu"
        self.transport = "JAX on CPU" if self.is_on_host else f"JAX on {device.device_kind}"
        self._total = jax.jit(lambda values_RX: jnp.sum(values_RX, axis=0), out_shardings=self._everywhere)

    def sum(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.asarray(jax.device_get(self._total(self._sharded(array))))

    def all_reduce(self, num_bytes: int) -> Callable[[], None]:
        values_RX = self._sharded(np.zeros(num_bytes // _FLOAT_BYTES, np.float32))

        def run() -> None:
            self._total(values_RX).block_until_ready()

        return run

    def exchange(self, peer: int, num_bytes: int) -> None:
        """Return ``None``: JAX has no messages between two ranks."""
        del peer, num_bytes

    def _sharded(self, array: npt.NDArray[Any]) -> jax.Array:
        """Return an array whose row R is the array of rank R."""
        shape = (jax.process_count(), *array.shape)
        return jax.make_array_from_process_local_data(self._by_rank, array[None], shape)
