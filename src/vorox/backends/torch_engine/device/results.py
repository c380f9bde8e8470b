"""Asynchronous step results: metrics on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from vorox.core.engine import StepValues


class TorchStepResult:
    """The result of a step that may still be running. Starts one copy to the host; ``fetch`` waits for it.

    Args:
        measured: loss, grad_norm and finite.
        extras: Further metrics by name.
        statistics: Names and stacked values of activation statistics.
        gradient_bits: Checksum of the gradients, if it is computed.
    """

    def __init__(
        self,
        measured: Mapping[str, Tensor],
        extras: Mapping[str, Tensor],
        statistics: tuple[list[str], Tensor | None] | None,
        gradient_bits: Tensor | None = None,
    ) -> None:
        scalars = [*measured.values(), *extras.values()]
        device = scalars[0].device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        values = torch.stack([_on(device, scalar.detach().to(dtype)) for scalar in scalars])
        self._extra_names = list(extras)
        if statistics is not None and statistics[1] is not None:
            self._extra_names += statistics[0]
            values = torch.cat([values, _on(device, statistics[1].to(dtype))])
        self._num_bits = 0 if gradient_bits is None else len(gradient_bits)
        if gradient_bits is not None:
            values = torch.cat([values, _on(device, gradient_bits.to(dtype))])
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            host = torch.empty(values.shape, dtype=dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
            values = host
        self._values = values
        self._fetched: StepValues | None = None

    def fetch(self) -> StepValues:
        """Wait for the step and return its values."""
        if self._fetched is None:
            if self._done is not None:
                self._done.synchronize()
            loss, grad_norm, finite, *others = self._values.tolist()
            extras = dict(zip(self._extra_names, others[: len(others) - self._num_bits], strict=True))
            bits = tuple(others[len(others) - self._num_bits :])
            self._fetched = StepValues(loss, grad_norm, bool(finite), extras, bits)
        return self._fetched


def _on(device: torch.device, values: Tensor) -> Tensor:
    """Return values on the device of the loss; with ``parallel.fsdp_offload``, those of gradients are on the host."""
    return values if values.device == device else values.to(device)


@torch.no_grad()
def gradient_bits(gradients: Iterable[Tensor]) -> Tensor:
    """Return the sum over the bits of fp32 tensors modulo 2^64, as four numbers of 16 bits, exact in any float."""
    sums = torch.stack([gradient.view(torch.int32).sum(dtype=torch.int64) for gradient in gradients])
    total = (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()
    return torch.stack([(total >> shift) & 0xFFFF for shift in (0, 16, 32, 48)])
