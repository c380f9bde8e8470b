"""Multi-process runs: process group, device mesh, sums over ranks, host-side channel.

Every rank runs the same program on its own device. Ranks are laid out as ``pp x data x fsdp x tp``: replicas of
the model, each divided into the stages of a pipeline; ``fsdp`` ranks shard a stage, and ``tp`` ranks share its matrix
products. Ranks that differ only in ``pp`` or ``tp`` read the same rows. So do ranks that divide the positions of rows,
which are among those of ``data``, or with FSDP among those of ``fsdp``.
Tensors on GPUs travel by NCCL, everything else by gloo.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from vorox.backends.torch_engine.device.inputs import WHOLE, PositionPart
from vorox.backends.torch_engine.ranks.store_channel import StoreChannel
from vorox.core.batch import DataShard
from vorox.core.errors import ConfigError, StalledError
from vorox.core.ranks.distributed_context import (
    FOUND_BY_BACKEND,
    DistributedContext,
    Membership,
    SealedChannel,
    membership,
)
from vorox.core.ranks.rendezvous import is_loopback, listen, loopback_interface
from vorox.core.schema import RunConfig
from vorox.core.schema.runtime import ParallelConfig

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


def join(found: Membership, start_timeout: timedelta, timeout: timedelta) -> DistributedContext:
    """Join a process group without a run.

    Args:
        found: The rank of this process.
        start_timeout: Time that the ranks have to connect.
        timeout: Time that a collective has.

    Raises:
        ConfigError: The environment is inconsistent, or the other ranks cannot be reached.
        StalledError: A rank did not connect in time.
    """
    return _joined(found, start_timeout, timeout)


@functools.cache
def _joined(found: Membership, start_timeout: timedelta, timeout: timedelta = TIMEOUT) -> DistributedContext:
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
        store = _open_store(found, start_timeout)
        assert found.rank is not None, "not found by the backend"
        dist.init_process_group(
            backend, store=store, rank=found.rank, world_size=found.world_size or 1, timeout=start_timeout
        )
        cast("Any", dist).distributed_c10d._set_pg_timeout(timeout)  # has no public name
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
    channel = SealedChannel(StoreChannel(PrefixStore("vorox", store)))
    return DistributedContext(found.rank, found.world_size or 1, channel, found.local_rank or 0)


def _open_store(found: Membership, timeout: timedelta) -> Store:
    """Open the key-value store of the ranks, served by rank 0 or by torchrun's agent.

    On one machine, the store and the sockets of gloo and NCCL listen on loopback only.
    """
    host, _, port = found.coordinator.rpartition(":")
    serves = found.rank == 0 and not found.agent_store
    if is_loopback(host):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, loopback_interface())
    listening = listen(host, int(port), backlog=found.world_size or 1) if serves else None
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host.strip("[]"), int(port), found.world_size, serves, timeout,
        multi_tenant=serves, master_listen_fd=None if listening is None else listening.detach(),
    )  # fmt: skip


@dataclass(slots=True)
class CollectiveTime:
    """Host time spent in collectives, including waits for other ranks. GPU collectives are not counted."""

    seconds: float = 0.0

    @contextlib.contextmanager
    def measured(self) -> Generator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a run, as the engine sees them.

    Attributes:
        shard: The part of each global batch that this rank trains on.
        num_replicas: Replicas of the model, counted as parameters are held: ranks that divide positions are among them
            (without FSDP2), those that divide experts are not.
        num_fsdp_shards: Shards of one replica by FSDP2, with the ranks that divide positions.
        mesh: Mesh with the axes ``data`` and ``fsdp``, and ``pp`` and ``tp`` if the positions, layers or products of a
            replica are divided; ``None`` for a single process.
        is_exact: Whether no bit of a sum may depend on the number of ranks.
        tensor_parallel_size: Ranks that share every matrix product.
        row_group: The ranks that together train on each position of each row once; ``None`` for all ranks.
        value_group: The ranks whose values add up to those of all rows: of a pipeline, one stage has a value and the
            others have 0; ``None`` for all ranks.
        replica_group: The ranks of one replica; ``None`` for those of the axis ``fsdp``.
        pipeline_parallel_size: Ranks of a replica that each hold some of its blocks.
        pipeline_group: Those ranks, which read the same rows; ``None`` without a pipeline.
        context_parallel_size: Ranks that each compute a part of the positions of the same rows.
        position_part: The positions of each row that this rank trains and evaluates.
        context_group: Those ranks; ``None`` without context parallelism.
        context_parallel_kind: How they compute attention (``parallel.context_parallel_kind``).
        collective_time: Time spent in the sums below.
        expert_parallel_size: Ranks that divide the experts of a replica and train on different rows. They are
            ``replica_group``, and the axis ``ep`` of the mesh.
    """

    shard: DataShard = field(default_factory=DataShard)
    num_replicas: int = 1
    num_fsdp_shards: int = 1
    mesh: DeviceMesh | None = None
    is_exact: bool = False
    tensor_parallel_size: int = 1
    row_group: ProcessGroup | None = None
    value_group: ProcessGroup | None = None
    replica_group: ProcessGroup | None = None
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    position_part: PositionPart = WHOLE
    context_group: ProcessGroup | None = None
    context_parallel_kind: str = "ulysses"
    collective_time: CollectiveTime = field(default_factory=CollectiveTime, compare=False)
    expert_parallel_size: int = 1
    pipeline_group: ProcessGroup | None = None

    @property
    def world_size(self) -> int:
        return self.num_replicas * self.num_shards

    @property
    def num_shards(self) -> int:
        """Ranks that share one replica."""
        size = self.num_fsdp_shards * self.tensor_parallel_size * self.pipeline_parallel_size
        return size * self.expert_parallel_size

    @property
    def replica(self) -> int:
        """Index of the replica that this rank belongs to."""
        return 0 if self.mesh is None else self.mesh.get_local_rank("data")

    @property
    def fsdp_index(self) -> int:
        """Index of this rank among those that share the rows of parameters."""
        return 0 if self.mesh is None else self.mesh.get_local_rank("fsdp")

    @property
    def shard_index(self) -> int:
        """Index of this rank's shard within its replica."""
        if self.expert_parallel_size > 1:
            return self.expert_index
        part = self.pipeline_index * self.num_fsdp_shards + self.fsdp_index
        return part * self.tensor_parallel_size + self.tensor_index

    @property
    def pipeline_index(self) -> int:
        """Index of this rank in its pipeline."""
        return 0 if self.mesh is None or self.pipeline_parallel_size == 1 else self.mesh.get_local_rank("pp")

    @property
    def expert_index(self) -> int:
        """Index of this rank among those that divide the experts."""
        return 0 if self.mesh is None or self.expert_parallel_size == 1 else self.mesh.get_local_rank("ep")

    @property
    def tensor_index(self) -> int:
        """Index of this rank among those that share every matrix product."""
        return 0 if self.mesh is None or self.tensor_parallel_size == 1 else self.mesh.get_local_rank("tp")

    def sum(self, *tensors: Tensor) -> None:
        """Add the tensors of all ranks that train on different rows, in place."""
        if self.mesh is not None:
            with self.collective_time.measured():
                for tensor in tensors:
                    dist.all_reduce(tensor, group=self.row_group)

    def start_sum(self, tensor: Tensor) -> dist.Work:
        """Start to add the tensors of all ranks that train on different rows, in place."""
        work = dist.all_reduce(tensor, group=self.row_group, async_op=True)
        assert work is not None
        return work

    def sum_over_replicas(self, *tensors: Tensor) -> None:
        """Add the tensors of the ranks that have the same part of a replica, in place."""
        if self.mesh is not None and self.num_replicas > 1:
            with self.collective_time.measured():
                for tensor in tensors:
                    dist.all_reduce(tensor, group=self.mesh.get_group("data"))

    def sum_micro_batches(self, parts_XA: Tensor) -> Tensor:
        """Return sums over the A micro-batches of all ranks; exact sums add them in the order of the global batch.

        The stages of a pipeline that do not have a value pass 0.
        """
        if self.is_exact and self.mesh is not None:
            by_rank = [torch.empty_like(parts_XA) for _ in range(self.world_size)]
            with self.collective_time.measured():
                dist.all_gather(by_rank, parts_XA)
            return torch.stack(by_rank, dim=-1).flatten(-2).sum(-1)
        total_X = parts_XA.sum(-1)
        if self.mesh is not None:
            with self.collective_time.measured():
                dist.all_reduce(total_X, group=self.value_group)
        return total_X

    def maximum(self, tensor: Tensor) -> None:
        """Take the maximum over all ranks, in place."""
        if self.mesh is not None:
            with self.collective_time.measured():
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def maximum_count(self, count: int) -> int:
        """Return the maximum of a number on the host over all ranks. Waits for the ranks, not for their devices."""
        largest = torch.tensor(count)
        self.maximum(largest)
        return int(largest)

    def are_equal(self, number: int) -> bool:
        """Return whether all ranks have the same number on the host. Waits for the ranks, not for their devices."""
        largest = torch.tensor([number, -number])
        self.maximum(largest)
        return int(largest.sum()) == 0

    def sum_over_shards(self, tensor: Tensor) -> None:
        """Add the tensors of the ranks that share one replica, in place."""
        if self.mesh is not None:
            with self.collective_time.measured():
                dist.all_reduce(tensor, group=self.replica_group or self.mesh.get_group("fsdp"))

    def gather_from_shards(self, report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return a report of each rank that shares one replica, on all of them."""
        if self.mesh is None:
            return [report]
        group = self.replica_group or self.mesh.get_group("fsdp")
        reports: list[Mapping[str, Any]] = [{}] * dist.get_world_size(group)
        with self.collective_time.measured():
            dist.all_gather_object(reports, report, group=group)
        return reports

    def facts(self) -> dict[str, str | int | bool]:
        """Return what affects the bits of sums over ranks; nothing for a single process."""
        if self.mesh is None or self.is_exact:
            return {}
        sizes = {
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "context_parallel_size": self.context_parallel_size,
            "expert_parallel_size": self.expert_parallel_size,
        }
        others: dict[str, str | int | bool] = {name: size for name, size in sizes.items() if size > 1}
        if self.context_parallel_kind != "ulysses":
            others["context_parallel_kind"] = self.context_parallel_kind
        fsdp_size = self.num_fsdp_shards // self.context_parallel_size if self.num_fsdp_shards > 1 else 1
        return {"num_devices": self.world_size, "num_processes": self.world_size, "fsdp_size": fsdp_size, **others}

    def sum_counts(self, *counts: float) -> list[float]:
        """Return sums of numbers on the host over all rows. Waits for the ranks, not for their devices."""
        return self._sum_on_host(counts, self.row_group)

    def sum_values(self, *values: float) -> list[float]:
        """Return sums as ``sum_counts``; the stages of a pipeline that do not have a value pass 0."""
        return self._sum_on_host(values, self.value_group)

    def _sum_on_host(self, numbers: Sequence[float], group: ProcessGroup | None) -> list[float]:
        if self.mesh is None:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        with self.collective_time.measured():
            dist.all_reduce(total, group=group)
        return total.tolist()


def ranks(config: RunConfig, context: DistributedContext, device: torch.device) -> Ranks:
    """Return the layout of the ranks.

    Raises:
        ConfigError: ``data x fsdp x tp x pp x cp`` is not the number of ranks.
    """
    parallel, world_size = config.parallel, context.world_size
    sizes = {"data_parallel_size": parallel.data_parallel_size_on(world_size), "fsdp_size": parallel.fsdp_size}
    if parallel.kind == "deepspeed" and sizes["data_parallel_size"] == world_size:
        sizes = {"data_parallel_size": 1, "fsdp_size": world_size}  # ZeRO shards over all ranks, and so do checkpoints
    tensor = parallel.tensor_parallel_size
    if tensor > 1:
        sizes["tensor_parallel_size"] = tensor
    pipeline = parallel.pipeline_parallel_size
    if pipeline > 1:
        sizes["pipeline_parallel_size"] = pipeline
    positions = parallel.context_parallel_size
    if positions > 1:
        sizes["context_parallel_size"] = positions
    product = prod(sizes.values())
    if product != world_size:
        raise ConfigError(
            f"{' x '.join(sizes)} = {' x '.join(map(str, sizes.values()))} = {product}, but the run has "
            f"{world_size} {'process' if world_size == 1 else 'processes'}",
            where="parallel",
            hint=f"make the product {world_size}, or start {product} processes (--nproc {product})",
        )
    is_exact = config.runtime.determinism == "bitwise-any-world"
    if world_size == 1 and parallel.expert_parallel_size == 1:
        return Ranks(is_exact=is_exact)
    data, fsdp = sizes["data_parallel_size"], sizes["fsdp_size"]
    if pipeline > 1 or tensor > 1 or positions > 1:
        return _divided_replicas(parallel, data * fsdp, context.rank, device)
    num_expert_parts = parallel.expert_parallel_size
    if data % num_expert_parts:
        raise ConfigError(
            f"{data} replicas cannot be divided into groups of expert_parallel_size = {num_expert_parts}",
            where="parallel.expert_parallel_size", hint=f"start a multiple of {num_expert_parts} processes",
        )  # fmt: skip
    if num_expert_parts > 1:
        return _expert_groups(data, num_expert_parts, context.rank, device)
    mesh = init_device_mesh(device.type, (data, fsdp), mesh_dim_names=("data", "fsdp"))
    return Ranks(DataShard(context.rank, world_size), data, fsdp, mesh, is_exact)


def _divided_replicas(parallel: ParallelConfig, num_row_parts: int, rank: int, device: torch.device) -> Ranks:
    """Return the layout of replicas whose matrix products, positions or layers are divided.

    Ranks that share every matrix product are adjacent, because they communicate most. Those that divide the positions
    of a row follow; parameters treat them as replicas, or with FSDP as shards. Those of one stage come next: they
    exchange gradients of all parameters, stages only activations.

    Shape legend: P stages, D replicas, F shards, T ranks of a matrix product.
    """
    tensor, pipeline, positions = (
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.context_parallel_size
    )  # fmt: skip
    fsdp = parallel.fsdp_size * positions if parallel.fsdp_size > 1 else 1
    data = num_row_parts * positions // fsdp
    shape, names = (pipeline, data, fsdp, tensor), ("pp", "data", "fsdp", "tp")
    mesh, ranks_PDFT = init_device_mesh(device.type, shape, mesh_dim_names=names), torch.arange(prod(shape)).view(shape)

    def group_along(*axes: str) -> ProcessGroup:
        """Return the ranks that differ from this one in these axes only."""
        dims = [names.index(axis) for axis in axes]
        others = [dim for dim in range(len(names)) if dim not in dims]
        members = ranks_PDFT.permute(*others, *dims).flatten(len(others)).flatten(0, -2)
        return _subgroup(members.tolist())

    row_group, context_group, part = group_along("data", "fsdp"), None, WHOLE
    if positions > 1:
        context_group = _subgroup(ranks_PDFT.view(-1, positions, tensor).transpose(1, 2).flatten(0, 1).tolist())
        part = PositionPart(dist.get_rank(context_group), positions, parallel.position_chunks_per_device)
    return Ranks(
        DataShard(rank // (tensor * positions) % num_row_parts, num_row_parts), data, fsdp, mesh,
        tensor_parallel_size=tensor,
        row_group=row_group, value_group=row_group if pipeline == 1 else group_along("pp", "data", "fsdp"),
        replica_group=group_along("pp", "fsdp", "tp"), pipeline_parallel_size=pipeline,
        pipeline_group=None if pipeline == 1 else group_along("pp"), context_parallel_size=positions,
        position_part=part, context_group=context_group, context_parallel_kind=parallel.context_parallel_kind,
    )  # fmt: skip


def _expert_groups(data: int, size: int, rank: int, device: torch.device) -> Ranks:
    """Return the layout of ``data`` ranks with different rows, of which ``size`` adjacent ones divide the experts."""
    mesh = init_device_mesh(device.type, (data // size, size, 1), mesh_dim_names=("data", "ep", "fsdp"))
    return Ranks(
        DataShard(rank, data), data // size, 1, mesh, replica_group=mesh.get_group("ep"), expert_parallel_size=size
    )


def _subgroup(members: list[list[int]]) -> ProcessGroup:
    """Create process groups; return the one of this rank."""
    found, _ = dist.new_subgroups_by_enumeration(members, timeout=TIMEOUT)
    assert isinstance(found, ProcessGroup)
    return found
