"""AdamW with moments of 8 bits (``optimizer.name=adamw_8bit``).

Moments are quantised in blocks of 256 elements to the nearest value of a dynamic table, times the largest magnitude of
the block (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861). Two differences: the root
of the second moment is quantised, so that it underflows no earlier than the first; and both tables hold plus and minus
1, so that quantising a dequantised block returns the same bits. Checkpoints therefore store fp32 moments, as AdamW
does, without loss. Norms, biases and other parameters without weight decay keep fp32 moments.

Shape legend: N elements of a tensor, K blocks of a piece, E elements of a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vorox.backends.torch_engine.layouts.parameters import Buffers
from vorox.backends.torch_engine.optimizers.optimizer import Optimizer
from vorox.models.optimizer_groups import DECAYED, PLAIN, Group

BLOCK_ELEMENTS = 256
PIECE_ELEMENTS = 1 << 20
"""Elements that are dequantised at a time; a multiple of a block."""
SMALLEST_SCALE = 1e-12
"""Blocks below it are zero: far below the epsilon of AdamW, and far above the smallest normal number."""


def dynamic_table(*, signed: bool) -> Tensor:
    """Return the values of all codes, ascending from -1 or 0 to 1: each decade has twice those of the decade below."""
    positive: list[float] = []
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1, dtype=torch.float64)
        positive += ((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (exponent - 6)).tolist()
    if not signed:
        return torch.tensor([0.0, *positive, 1.0])
    positive[-1] = 1.0
    return torch.tensor([*(-value for value in reversed(positive)), 0.0, *positive])


class QuantizedTensor:
    """A tensor of N elements, as codes ``[K, E]`` and scales ``[K]``; initially zero."""

    def __init__(self, num_elements: int, device: torch.device, *, signed: bool) -> None:
        num_blocks = -(-num_elements // BLOCK_ELEMENTS)
        self._num_elements = num_elements
        self._table = dynamic_table(signed=signed).to(device)
        self._bounds = (self._table[:-1] + self._table[1:]) / 2
        zero = int((self._table == 0).nonzero())
        self.codes_KE = torch.full((num_blocks, BLOCK_ELEMENTS), zero, dtype=torch.uint8, device=device)
        self.scales_K = torch.zeros(num_blocks, device=device)

    def read(self, start: int, end: int) -> Tensor:
        """Return elements in fp32; ``start`` is a multiple of a block."""
        blocks = slice(start // BLOCK_ELEMENTS, -(-end // BLOCK_ELEMENTS))
        values_KE = self._table[self.codes_KE[blocks].int()] * self.scales_K[blocks, None]
        return values_KE.view(-1)[: end - start]

    def write(self, start: int, values: Tensor) -> None:
        """Quantise elements; ``start`` is a multiple of a block, and so is the end, except at that of the tensor."""
        padded_KE = F.pad(values, (0, -len(values) % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)
        largest_K = padded_KE.abs().amax(dim=1)
        scales_K = torch.where(largest_K < SMALLEST_SCALE, 0.0, largest_K)
        unit_KE = padded_KE / torch.where(scales_K > 0, scales_K, 1.0)[:, None]
        blocks = slice(start // BLOCK_ELEMENTS, start // BLOCK_ELEMENTS + len(scales_K))
        self.codes_KE[blocks] = torch.bucketize(unit_KE, self._bounds, out_int32=True).to(torch.uint8)
        self.scales_K[blocks] = scales_K

    def to(self, device: torch.device) -> Tensor:
        """Return all elements in fp32 on a device; dequantised there."""
        values_KE = self._table.to(device)[self.codes_KE.to(device).int()] * self.scales_K.to(device)[:, None]
        return values_KE.view(-1)[: self._num_elements]


class QuantizedAdamW(Optimizer):
    """See ``Optimizer``; the moments of the decayed groups are quantised."""

    _exact_rules = (PLAIN.rule,)

    def reset(self) -> None:
        super().reset()
        self._first, self._root_second = self._quantized(signed=True), self._quantized(signed=False)

    def _quantized(self, *, signed: bool) -> dict[Group, list[QuantizedTensor]]:
        return {
            group: [QuantizedTensor(value.numel(), value.device, signed=signed) for value in values]
            for group, values in self._parameters.values.items()
            if group.rule == DECAYED.rule
        }

    @property
    def moments(self) -> Mapping[str, Buffers]:
        """The moments in fp32, in host memory unless ranks gather them: a save takes no memory of the device."""
        device = torch.device("cpu") if self._ranks.num_shards == 1 else self._device
        values = self._parameters.values

        def exact(quantized: Mapping[Group, Sequence[QuantizedTensor]]) -> dict[Group, list[Tensor]]:
            return {
                group: [one.to(device).view(value.shape) for one, value in zip(ones, values[group], strict=True)]
                for group, ones in quantized.items()
            }

        second = exact(self._root_second)
        for tensor in itertools.chain.from_iterable(second.values()):
            tensor.square_()
        return {"exp_avg": exact(self._first) | self.exp_avg, "exp_avg_sq": second | self.exp_avg_sq}

    def restore(self, buffers: Mapping[str, Buffers], counters: Mapping[str, float]) -> None:
        super().restore(buffers, counters)
        for quantized, kind in ((self._first, "exp_avg"), (self._root_second, "exp_avg_sq")):
            pairs = [pair for group, ones in quantized.items() for pair in zip(ones, buffers[kind][group], strict=True)]
            for target, values in pairs:
                flat = values.reshape(-1)
                for start in range(0, len(flat), PIECE_ELEMENTS):
                    piece = flat[start : start + PIECE_ELEMENTS].to(self._device)
                    target.write(start, piece.sqrt() if kind == "exp_avg_sq" else piece)

    def _update_group(
        self,
        group: Group,
        gradients: Sequence[Tensor],
        divisor: Tensor,
        applied: Tensor,
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        if group.rule != DECAYED.rule:
            super()._update_group(group, gradients, divisor, applied, lr=lr, weight_decay=weight_decay)
            return
        values = self._parameters.values[group]
        moments = self._first[group], self._root_second[group]
        for value, gradient, first, root in zip(values, gradients, *moments, strict=True):
            flat, flat_gradient = value.view(-1), gradient.view(-1)
            for start in range(0, len(flat), PIECE_ELEMENTS):
                end = min(start + PIECE_ELEMENTS, len(flat))
                exp_avg, exp_avg_sq = first.read(start, end), root.read(start, end).square_()
                self._adamw_tensors(
                    [flat[start:end]], [flat_gradient[start:end]], [exp_avg], [exp_avg_sq], divisor, applied,
                    lr=lr, weight_decay=weight_decay,
                )  # fmt: skip
                first.write(start, exp_avg)
                root.write(start, exp_avg_sq.sqrt_())
