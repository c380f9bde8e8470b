"""All-reduces and exchanges between ranks without a run, for vorox doctor --nodes (gloo, NCCL)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist

from vorox.backends.torch_engine.ranks import distributed
from vorox.core.ranks.distributed_context import DistributedContext, Membership

_FLOAT_BYTES = 4


def join(member: Membership, timeout_seconds: float) -> tuple[DistributedContext, TorchCollectives]:
    """Connect the ranks that the environment describes.

    Args:
        member: The rank of this process.
        timeout_seconds: Time that the ranks have to connect, and that each collective has.

    Raises:
        VoroxError: The ranks cannot connect.
    """
    timeout = timedelta(seconds=timeout_seconds)
    context = distributed.join(member, timeout, timeout)
    return context, TorchCollectives(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


class TorchCollectives:
    """The collectives of PyTorch on one device, as ``runtime.collective_timing.Collectives``.

    Args:
        device: The device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_on_host = device.type == "cpu"
        self.transport = "gloo on CPU" if self.is_on_host else f"NCCL on {torch.cuda.get_device_name(device)}"

    def sum(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        total = torch.from_numpy(array.copy()).to(self._device)
        dist.all_reduce(total)
        return total.cpu().numpy()

    def all_reduce(self, num_bytes: int) -> Callable[[], None]:
        values = torch.zeros(num_bytes // _FLOAT_BYTES, device=self._device)

        def run() -> None:
            dist.all_reduce(values)
            self._wait()

        return run

    def exchange(self, peer: int, num_bytes: int) -> Callable[[], None]:
        sent = torch.zeros(num_bytes // _FLOAT_BYTES, device=self._device)
        received = torch.empty_like(sent)

        def run() -> None:
            operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            self._wait()

        return run

    def _wait(self) -> None:
        if not self.is_on_host:
            torch.cuda.synchronize(self._device)
