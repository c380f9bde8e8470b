"""Multi-process runs: process group, device mesh, sums over ranks, host-side channel.

Every rank runs the same program on its own device. Ranks are laid out as ``data x fsdp``: replicas of the model, each
sharded over ``fsdp`` ranks. Tensors on GPUs travel by NCCL, everything else by gloo.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from vorox.core.batch import DataShard
from vorox.core.distributed_context import FOUND_BY_BACKEND, DistributedContext, Membership, membership
from vorox.core.errors import ConfigError, StalledError
from vorox.core.schema import RunConfig

TIMEOUT = timedelta(minutes=10)
"""A collective that takes longer has lost a rank."""


def connect(config: RunConfig) -> DistributedContext:
    """Join the process group that the environment describes.

    Raises:
        ConfigError: The environment is inconsistent, or the other ranks cannot be reached.
        StalledError: A rank did not connect in time.
    """
    found = membership()
    start_timeout = timedelta(seconds=config.parallel.start_timeout_seconds)
    return DistributedContext() if found is None else _joined(found, start_timeout)


@functools.cache
def _joined(found: Membership, start_timeout: timedelta) -> DistributedContext:
    """Join the process group, once per process."""
    if found.coordinator == FOUND_BY_BACKEND:
        raise ConfigError(
            "The torch engine needs the rank of every process", where="VOROX_COORDINATOR",
            hint="start the processes with torchrun, srun with RANK and WORLD_SIZE, or vorox train --nproc N",
        )  # fmt: skip
    if torch.cuda.is_available():
        torch.cuda.set_device((found.local_rank or 0) % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, rank, world_size = next(_rendezvous(found, start_timeout))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=start_timeout)
        cast("Any", dist).distributed_c10d._set_pg_timeout(TIMEOUT)  # has no public name
    except dist.DistStoreError as error:
        raise StalledError(
            f"A rank did not connect within {start_timeout.total_seconds():g} s: {str(error).splitlines()[0]}",
            where=found.coordinator, hint="see the output of the rank that ended first; "
            "parallel.start_timeout_seconds sets the time",
        ) from error  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"The processes of the run cannot connect to each other: {str(error).splitlines()[0]}",
            where=found.coordinator, hint="rank 0 must be reachable at that address from all other ranks",
        ) from error  # fmt: skip
    channel = StoreChannel(PrefixStore("vorox", store))
    return DistributedContext(rank, world_size, channel, found.local_rank or 0)


def _rendezvous(found: Membership, timeout: timedelta) -> Iterator[tuple[Store, int, int]]:
    url = f"tcp://{found.coordinator}?rank={found.rank}&world_size={found.world_size}"
    return cast("Iterator[tuple[Store, int, int]]", rendezvous(url, timeout=timeout))


class StoreChannel:
    """``core.distributed_context.Channel`` over a store of PyTorch.

    A client of the store serves one call at a time, so every thread has its own.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._clients = threading.local()

    @property
    def _client(self) -> Store:
        if not hasattr(self._clients, "store"):
            self._clients.store = cast("Any", self._store).clone()  # missing in the type stubs
        return cast("Store", self._clients.store)

    def put(self, key: str, value: bytes) -> None:
        self._client.set(key, value.decode())

    def get(self, key: str, timeout_seconds: float) -> bytes | None:
        client = self._client
        try:
            if timeout_seconds <= 0:
                return client.get(key) if client.check([key]) else None
            client.wait([key], timedelta(seconds=timeout_seconds))
        except dist.DistStoreError:
            return None
        return client.get(key)

    def get_all(self, folder: str, names: Sequence[str], timeout_seconds: float) -> list[bytes] | None:
        client, keys = self._client, [f"{folder}/{name}" for name in names]
        try:
            client.wait(keys, timedelta(seconds=timeout_seconds))
        except dist.DistStoreError:
            return None
        return client.multi_get(keys)

    def remove(self, key: str) -> None:
        self._client.delete_key(key)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a run, as the engine sees them.

    Attributes:
        shard: The part of each global batch that this rank trains on.
        data_parallel_size: Replicas of the model.
        fsdp_size: Ranks that share one replica.
        mesh: Mesh with the axes ``data`` and ``fsdp``; ``None`` for a single process.
        is_exact: Whether no bit of a sum may depend on the number of ranks.
    """

    shard: DataShard = field(default_factory=DataShard)
    data_parallel_size: int = 1
    fsdp_size: int = 1
    mesh: DeviceMesh | None = None
    is_exact: bool = False

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.fsdp_size

    @property
    def replica(self) -> int:
        """Index of the replica that this rank belongs to."""
        return 0 if self.mesh is None else self.mesh.get_local_rank("data")

    @property
    def shard_index(self) -> int:
        """Index of this rank's shard within its replica."""
        return 0 if self.mesh is None else self.mesh.get_local_rank("fsdp")

    def sum(self, *tensors: Tensor) -> None:
        """Add the tensors of all ranks, in place."""
        if self.mesh is not None:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def sum_micro_batches(self, parts_XA: Tensor) -> Tensor:
        """Return sums over the A micro-batches of all ranks; exact sums add them in the order of the global batch."""
        if self.is_exact and self.mesh is not None:
            by_rank = [torch.empty_like(parts_XA) for _ in range(self.world_size)]
            dist.all_gather(by_rank, parts_XA)
            return torch.stack(by_rank, dim=-1).flatten(-2).sum(-1)
        total_X = parts_XA.sum(-1)
        self.sum(total_X)
        return total_X

    def maximum(self, tensor: Tensor) -> None:
        """Take the maximum over all ranks, in place."""
        if self.mesh is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def sum_over_shards(self, tensor: Tensor) -> None:
        """Add the tensors of the ranks that share one replica, in place."""
        if self.mesh is not None:
            dist.all_reduce(tensor, group=self.mesh.get_group("fsdp"))

    def facts(self) -> dict[str, str | int | bool]:
        """Return what affects the bits of sums over ranks; nothing for a single process."""
        if self.mesh is None or self.is_exact:
            return {}
        return {"num_devices": self.world_size, "num_processes": self.world_size, "fsdp_size": self.fsdp_size}

    def sum_counts(self, *counts: float) -> list[float]:
        """Return sums of numbers on the host over all ranks. Waits for the ranks, not for their devices."""
        if self.mesh is None:
            return list(counts)
        total = torch.tensor(counts, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()


def ranks(config: RunConfig, context: DistributedContext, device: torch.device) -> Ranks:
    """Return the layout of the ranks.

    Raises:
        ConfigError: ``data x fsdp`` is not the number of ranks.
    """
    data, fsdp = config.parallel.data_parallel_size_on(context.world_size), config.parallel.fsdp_size
    if data * fsdp != context.world_size:
        raise ConfigError(
            f"data_parallel_size x fsdp_size = {data} x {fsdp} = {data * fsdp}, but the run has "
            f"{context.world_size} {'process' if context.world_size == 1 else 'processes'}",
            where="parallel",
            hint=f"make the product {context.world_size}, or start {data * fsdp} processes "
            f"(vorox train --nproc {data * fsdp})",
        )
    is_exact = config.runtime.determinism == "bitwise-any-world"
    if context.world_size == 1:
        return Ranks(is_exact=is_exact)
    mesh = init_device_mesh(device.type, (data, fsdp), mesh_dim_names=("data", "fsdp"))
    return Ranks(DataShard(context.rank, context.world_size), data, fsdp, mesh, is_exact)
